"""Do the turns of a conversation alternate, and what to do when they do not.

Right order: system turns first, then user and assistant in turn; an assistant turn with tool calls is
followed by tool turns, then by the assistant. A leading assistant turn (a greeting) is allowed; the
chat template has the last word on that.
"""

from __future__ import annotations

from dataclasses import replace

from gshare.agent.data.formats import Conversation, Message

_SYSTEM = ("system", "developer")


def bad_turn(conversation: Conversation) -> str | None:
    """What breaks the order, as a phrase that names the turn (from 1), or None when all is well."""
    before: Message | None = None
    for index, message in enumerate(conversation.messages, start=1):
        role = message.role
        last = before.role if before is not None else "system"
        if role in _SYSTEM and last not in _SYSTEM:
            return f"turn {index} is a {role} turn after the conversation has begun"
        if role == "user" and last == "user":
            return f"turns {index - 1} and {index} are both user turns"
        if role == "user" and before is not None and before.tool_calls:
            return f"turn {index} is a user turn, but turn {index - 1} calls a tool that has not answered"
        if role == "assistant" and last == "assistant":
            return f"turns {index - 1} and {index} are both assistant turns"
        if role == "tool" and last != "tool" and not (before is not None and before.tool_calls):
            return f"turn {index} is a tool turn, but turn {index - 1} calls no tool"
        before = message
    return None


def merge_turns(conversation: Conversation) -> Conversation:
    """Join neighbours of one role with a blank line between them.

    Only what can be joined without changing what is trained: equal `trained` flags, and no turn
    follows an assistant turn's tool calls but the tools' answers. `bad_turn` says whether that mended it.
    """
    merged: list[Message] = []
    for message in conversation.messages:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.role == message.role
            and message.role in ("user", "assistant")
            and last.trained == message.trained
            and not last.tool_calls
        ):
            joined = "\n\n".join(part for part in (last.content, message.content) if part)
            merged[-1] = replace(last, content=joined, tool_calls=message.tool_calls)
        else:
            merged.append(message)
    return replace(conversation, messages=tuple(merged))
