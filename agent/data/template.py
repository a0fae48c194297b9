"""From a parsed row to token ids and the mask of trained tokens, by position and never by content.

Plain rows follow TRL: `text` and `prompt + completion`, with the tokenizer's BOS before and EOS after.

Conversations go through the tokenizer's chat template. Where the template has `{% generation %}`
markers, they say which tokens are the assistant's. Else an answer begins where the rendering of the
turns before it, with generation prompt, ends, and ends where the rendering with it ends; both must
be beginnings of the whole rendering. Templates that rewrite earlier turns (dropping old thoughts) or
open the answer differently than they store it fail that check; then the begin is found by rendering
two other answers in its place (what the three renderings share before it), the end by the first
end-of-turn token behind it. Whatever stays unclear is refused.

The end-of-turn token is trained, white space behind it is not, and tokens behind the last target are
cut off: under causal attention no loss depends on them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gshare.agent.data.formats import Completion, Conversation, Example, Text
from gshare.agent.data.spans import (
    Encoded,
    Span,
    encode_spans,
    single_start,
)
from gshare.agent.errors import UsageError

NOTE_LAST_USER = "ends in a user turn: nothing is learnt after the last assistant turn"
NOTE_EMPTY_TURN = "an assistant turn is empty: not trained"
NOTE_FOUND_BY_SUBSTITUTION = "answer's begin found by substitution: the template opens answers differently"

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class UnfitRow(Exception):
    """A row that cannot become a training row; `reason` is what the store counts it under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RowEncoder:
    """Turns examples into tokens with one tokenizer. Stateless between rows.

    `tokenizer` is a fast tokenizer of transformers; `extra_eos` are further ids that end a turn, from
    the model's generation config.
    """

    def __init__(
        self, tokenizer: Any, *, train_on_prompt: bool = False, extra_eos: tuple[int, ...] = ()
    ) -> None:
        if not tokenizer.is_fast:
            raise UsageError("the model's tokenizer has no fast form (tokenizer.json); offsets are needed")
        if tokenizer.eos_token_id is None:
            raise UsageError("the tokenizer names no eos_token; set it in tokenizer_config.json")
        self.tokenizer = tokenizer
        self.train_on_prompt = train_on_prompt
        self.eos_ids = frozenset({tokenizer.eos_token_id, *extra_eos})
        # Any special token may end a turn in a rendering's tail, whatever the config calls EOS.
        added = tokenizer.added_tokens_decoder
        self._special_ids = self.eos_ids | {i for i, token in added.items() if token.special}
        self._special = tuple(name for i in sorted(self._special_ids) if (name := self._name(i)).strip())
        # Read here, so that a template kept as a dict without a default fails once and clearly.
        self.template: str | None = None
        if tokenizer.chat_template:
            try:
                self.template = tokenizer.get_chat_template()
            except ValueError as error:
                raise UsageError(f"the tokenizer's chat template cannot be chosen: {error}") from error
        self.has_markers = self.template is not None and _GENERATION.search(self.template) is not None

    @property
    def template_hash(self) -> str:
        """sha256 of the chat template, or "" without one."""
        return hashlib.sha256(self.template.encode()).hexdigest() if self.template else ""

    def encode(self, example: Example) -> Encoded:
        """Tokens and mask of one example, not truncated.

        Raises `UnfitRow` when there is nothing to learn in it and `UsageError` (without file and row:
        the caller knows them) when template or tokenizer cannot express it.
        """
        if isinstance(example, Text):
            if not example.text.strip():
                raise UnfitRow("empty text")
            encoded = self._plain(example.text, [(0, len(example.text))])
        elif isinstance(example, Completion):
            if not example.completion.strip():
                raise UnfitRow("empty completion")
            text = example.prompt + example.completion
            start = 0 if self.train_on_prompt else len(example.prompt)
            encoded = self._plain(text, [(start, len(text))])
        else:
            encoded = self._chat(example)
        encoded = single_start(encoded, self.tokenizer.bos_token_id)
        encoded.trained[0] = False  # nothing stands before it to predict it from
        if True not in encoded.trained:
            raise UnfitRow("no token to train")
        end = len(encoded.trained) - encoded.trained[::-1].index(True)
        return Encoded(encoded.tokens[:end], encoded.trained[:end], encoded.notes)

    def _plain(self, text: str, spans: list[Span]) -> Encoded:
        encoded = encode_spans(self.tokenizer, text, spans, special=True)
        if encoded.tokens[-1] != self.tokenizer.eos_token_id:
            encoded.tokens.append(self.tokenizer.eos_token_id)
            encoded.trained.append(True)
        return encoded

    # Conversations

    def _chat(self, conversation: Conversation) -> Encoded:
        if self.template is None:
            raise UsageError(
                "the model's tokenizer has no chat template, which conversations need; use an instruct "
                "model, add chat_template.jinja to the model's directory, or write the rows as "
                "prompt/completion strings or text"
            )
        conversation, notes = self._settle(conversation)
        if not self.train_on_prompt:
            self._check_tool_calls(conversation)
        encoded = self._by_markers(conversation) if self.has_markers and not self.train_on_prompt else None
        if encoded is None:
            text = self._render(conversation)
            if self.train_on_prompt:
                spans, found = [(0, len(text.rstrip()))], ()
            else:
                spans, found = self._answer_spans(conversation, text)
            encoded = encode_spans(self.tokenizer, text, spans, special=False)
            notes += found
        encoded.notes += notes
        return encoded

    def _settle(self, conversation: Conversation) -> tuple[Conversation, tuple[str, ...]]:
        """Empty answers untrained, with the notes that this and a last user turn deserve."""
        messages = conversation.messages
        if not any(message.role == "assistant" for message in messages):
            raise UnfitRow("no assistant turn")
        empty = [m.trained and m.is_empty for m in messages]
        settled = tuple(
            replace(m, trained=False) if is_empty else m for m, is_empty in zip(messages, empty, strict=True)
        )
        if not any(message.trained for message in settled):
            raise UnfitRow("empty completion" if any(empty) else "no assistant turn to train")
        notes = ((NOTE_EMPTY_TURN,) if any(empty) else ()) + (
            (NOTE_LAST_USER,) if messages[-1].role == "user" else ()
        )
        return replace(conversation, messages=settled), notes

    def _check_tool_calls(self, conversation: Conversation) -> None:
        """A template that ignores `tool_calls` would train an empty answer instead of the call."""
        for index, message in enumerate(conversation.messages):
            if message.trained and message.tool_calls:
                before = conversation.messages[:index]
                called = self._render(replace(conversation, messages=(*before, message)))
                bare = (*before, replace(message, tool_calls=()))
                if called == self._render(replace(conversation, messages=bare)):
                    raise UsageError(f"the chat template does not write the tool calls of turn {index + 1}")

    def _by_markers(self, conversation: Conversation) -> Encoded | None:
        """By the template's own markers; None where they do not mark one run an assistant turn."""
        rendered = self._apply(
            conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens, marked = list(rendered["input_ids"]), list(rendered["assistant_masks"])
        runs = _runs(marked)
        turns = [message for message in conversation.messages if message.role == "assistant"]
        if not runs or (len(runs) != len(turns) and not all(turn.trained for turn in turns)):
            return None
        closing = self._closing(conversation, runs)
        trained = [False] * len(tokens)
        for index, (start, marked_end) in enumerate(runs):
            if len(runs) == len(turns) and not turns[index].trained:
                continue
            closed = tokens[marked_end : marked_end + len(closing)] == closing
            end = self._without_trailing_space(tokens, start, marked_end + len(closing) * closed)
            trained[start:end] = [True] * (end - start)
        return Encoded(tokens, trained)

    def _marked(self, conversation: Conversation) -> tuple[list[int], list[Span]]:
        """The template's tokens and the runs `[start, end)` of tokens inside its markers."""
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        rendered = self._apply(conversation, **options)
        return list(rendered["input_ids"]), _runs(rendered["assistant_masks"])

    def _closing(self, conversation: Conversation, runs: list[Span]) -> list[int]:
        """The end-of-turn token, where the template writes it behind the marked run.

        It is what stands behind the run when the rendering stops with that turn: up to the first special
        token, with only white space before it. Empty where it is inside the run, or there is none.
        """
        last = max(i for i, message in enumerate(conversation.messages) if message.role == "assistant")
        upto = replace(conversation, messages=conversation.messages[: last + 1])
        tokens, runs = self._marked(upto)
        tail = tokens[runs[-1][1] :] if runs else []
        for index, token in enumerate(tail):
            if token in self._special_ids:
                return tail[: index + 1]
            if self.tokenizer.decode([token]).strip():
                break
        return []

    def _without_trailing_space(self, tokens: list[int], start: int, end: int) -> int:
        """`end` moved before the white space that follows an end-of-turn token inside the run."""
        at = end
        while at > start and tokens[at - 1] not in self._special_ids:
            if self.tokenizer.decode([tokens[at - 1]]).strip():
                return end
            at -= 1
        return at if at > start else end

    def _answer_spans(self, conversation: Conversation, text: str) -> tuple[list[Span], tuple[str, ...]]:
        """Character spans of the trained turns in `text`, the whole rendering, and notes."""
        spans: list[Span] = []
        notes: tuple[str, ...] = ()
        for index, message in enumerate(conversation.messages):
            if not message.trained:
                continue
            upto = replace(conversation, messages=conversation.messages[:index])
            prompt = self._render(upto, add_generation_prompt=True) if index else ""
            start = len(prompt)
            if not text.startswith(prompt) or not index:
                start = self._start_by_substitution(conversation, index, text)
                notes = (NOTE_FOUND_BY_SUBSTITUTION,)
            turn = self._render(replace(conversation, messages=conversation.messages[: index + 1]))
            if text.startswith(turn) and len(turn) > start:
                end = self._end_of_turn(text, start, len(turn))
            else:
                end = self._first_eos(text, start)
            if end is None or start < (spans[-1][1] if spans else 0):
                raise UsageError(
                    f"the chat template has no {{% generation %}} markers, and where it writes the answer of "
                    f"turn {index + 1} cannot be told from its renderings; add the markers to the template"
                )
            spans.append((start, end))
        return spans, notes

    def _start_by_substitution(self, conversation: Conversation, index: int, text: str) -> int:
        """Where the answer of turn `index` begins in `text`: up to there, other answers render the same."""
        answers = []
        for other in ("0", "1"):
            messages = list(conversation.messages)
            messages[index] = replace(messages[index], content=other, tool_calls=())
            answers.append(self._render(replace(conversation, messages=tuple(messages))))
        start = next((i for i, (a, b) in enumerate(zip(*answers, strict=False)) if a != b), None)
        if start is None or text[:start] != answers[0][:start]:
            raise UsageError(
                f"the chat template rewrites the answer of turn {index + 1}, so it cannot be found in the "
                f"rendering; add {{% generation %}} markers to the template"
            )
        return start

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """`end` without the white space behind a closing special token."""
        body = text[start:end].rstrip()
        return start + len(body) if any(body.endswith(token) for token in self._special) else end

    def _first_eos(self, text: str, start: int) -> int | None:
        """The end of the first token that ends a turn, from `start` on."""
        names = "|".join(re.escape(self._name(i)) for i in sorted(self.eos_ids))
        found = re.compile(names).search(text, start)
        return found.end() if found else None

    def _name(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(token))

    def _render(self, conversation: Conversation, **options: Any) -> str:
        return self._apply(conversation, tokenize=False, **options)

    def _apply(self, conversation: Conversation, **options: Any) -> Any:
        from jinja2 import TemplateError

        messages = [message.for_template() for message in conversation.messages]
        tools = list(conversation.tools) or None
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, **options)
        except TemplateError as error:
            raise UsageError(f"the chat template refuses this conversation: {error}") from error
        except TypeError as error:
            raise UsageError(f"the chat template cannot render this conversation: {error}") from error


def _runs(mask: Sequence[int]) -> list[Span]:
    """`[start, end)` of every run of ones."""
    runs: list[Span] = []
    start = None
    for index, bit in enumerate([*mask, 0]):
        if bit and start is None:
            start = index
        elif not bit and start is not None:
            runs.append((start, index))
            start = None
    return runs
