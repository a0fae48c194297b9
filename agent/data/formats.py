"""From a raw row to one of three common forms, whatever format the file is in.

| format              | a row has                                       | becomes                      |
|---------------------|-------------------------------------------------|------------------------------|
| `text`              | `text`                                          | `Text`                       |
| `messages`          | `messages`: list of `{role, content}`           | `Conversation`               |
| `sharegpt`          | `conversations`: list of `{from, value}`        | `Conversation`               |
| `prompt_completion` | `prompt`, `completion`: both strings            | `Completion`                 |
|                     | … or both lists of messages                     | `Conversation`               |
| `alpaca`            | `instruction`, `output`; perhaps `input`,       | `Conversation`, or           |
|                     | `system`                                        | `Completion` without template|

Preference rows (`chosen`, `rejected`) are refused: there is no preference objective yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec
from gshare.agent.data.readers import Row
from gshare.agent.errors import UsageError
from gshare.agent.jobs.spec import DataFormat

#: What each format is recognised by: all these keys.
FORMAT_KEYS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Text:
    """A document; every token is trained."""

    text: str


@dataclass(frozen=True)
class Completion:
    """Plain strings around one boundary; the completion is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Message:
    """One turn. `trained` is set for assistant turns whose tokens are targets."""

    role: str
    content: str
    trained: bool = False
    tool_calls: tuple[dict[str, Any], ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)  # name, tool_call_id, …: for the template

    @property
    def is_empty(self) -> bool:
        return not self.content.strip() and not self.tool_calls

    def for_template(self) -> dict[str, Any]:
        """The dict that chat templates read."""
        message: dict[str, Any] = {"role": self.role, "content": self.content, **self.extra}
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


Example = Text | Completion | Conversation


class RowParser:
    """Parses the rows of one file, which must all be of one format.

    `data_format` is a name of `FORMAT_KEYS`, or "auto": then the first row decides. `has_template`
    says whether the tokenizer has a chat template; alpaca rows are written plainly without one.
    """

    def __init__(self, source: str, data_format: str = "auto", *, has_template: bool) -> None:
        if data_format not in get_args(DataFormat):
            raise UsageError(
                f"data_format {data_format!r} is unknown; known: {', '.join(get_args(DataFormat))}"
            )
        self.source = source
        self.format = data_format
        self.has_template = has_template
        self._decided_at: int | None = None  # the row that decided, in "auto"

    def parse(self, number: int, row: Row) -> Example:
        """The common form of row `number`. Raises `UsageError` naming file, row and key."""
        self._check_format(number, row)
        return _PARSERS[self.format](self, number, row)

    def fail(self, number: int, what: str) -> UsageError:
        return UsageError(f"{self.source}, row {number}: {what}")

    def _check_format(self, number: int, row: Row) -> None:
        if self.format == "auto":
            self.format = self._detect(number, row)
            self._decided_at = number
        elif self._decided_at is not None:
            if (found := self._detect(number, row)) != self.format:
                raise self.fail(
                    number,
                    f"is {found}, but row {self._decided_at} is {self.format}; one file holds one format: "
                    "split the file",
                )
        elif missing := [key for key in FORMAT_KEYS[self.format] if key not in row]:
            raise self.fail(
                number, f"data_format {self.format!r} needs key {missing[0]!r}; this row has {_names(row)}"
            )

    def _detect(self, number: int, row: Row) -> str:
        if "chosen" in row or "rejected" in row:
            raise self.fail(
                number,
                "is a preference pair (chosen/rejected); preference training is not supported yet: "
                "keep the chosen answers as `messages` or `prompt`/`completion` rows",
            )
        # Parquet has every column in every row, null where a row lacks it: nulls count only if need be.
        for keys in ({key for key, value in row.items() if value is not None}, set(row)):
            fits = [name for name, needed in FORMAT_KEYS.items() if keys.issuperset(needed)]
            if len(fits) > 1:
                raise self.fail(
                    number, f'fits the formats {" and ".join(fits)}; say which with data_format = "{fits[0]}"'
                )
            if fits:
                return fits[0]
        known = "; ".join(f"{name}: {' + '.join(keys)}" for name, keys in FORMAT_KEYS.items())
        raise self.fail(number, f"no known format has the keys {_names(row)}. Known are {known}")

    def _string(self, number: int, row: Row, key: str) -> str:
        """The string at `key`; null and a missing key are the empty string."""
        value = row.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.fail(number, f"{key!r} must be a string, found {type(value).__name__}")
        return value

    def _text(self, number: int, row: Row) -> Example:
        return Text(self._string(number, row, "text"))

    def _messages(self, number: int, row: Row) -> Example:
        return Conversation(self._turns(number, row, "messages"), self._tools(number, row))

    def _sharegpt(self, number: int, row: Row) -> Example:
        turns = self._list(number, row, "conversations")
        if all(isinstance(turn, dict) and "role" in turn for turn in turns):  # a common mixture
            return Conversation(self._turns(number, row, "conversations"), self._tools(number, row))
        messages: list[Message] = []
        if system := self._string(number, row, "system"):
            messages.append(Message("system", system))
        for index, turn in enumerate(turns):
            key = f"conversations[{index}]"
            if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
                raise self.fail(number, f"{key} must be an object with 'from' and 'value'")
            role = _SHAREGPT_ROLES.get(str(turn["from"]))
            if role is None:
                known = ", ".join(_SHAREGPT_ROLES)
                raise self.fail(number, f"{key}.from is {turn['from']!r}; known are {known}")
            value = self._string(number, turn, "value")
            if role == "function_call":
                call = self._json(number, f"{key}.value", value)
                messages.append(Message("assistant", "", True, self._tool_calls(number, key, [call])))
            else:
                messages.append(Message(role, value, trained=role == "assistant"))
        return Conversation(tuple(messages), self._tools(number, row))

    def _prompt_completion(self, number: int, row: Row) -> Example:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            context = self._turns(number, row, "prompt", trained=False)
            answer = self._turns(number, row, "completion")
            return Conversation(context + answer, self._tools(number, row))
        if isinstance(prompt, list) or isinstance(completion, list):
            raise self.fail(
                number, "'prompt' and 'completion' must both be strings or both lists of messages"
            )
        return Completion(self._string(number, row, "prompt"), self._string(number, row, "completion"))

    def _alpaca(self, number: int, row: Row) -> Example:
        instruction, given, output, system = (
            self._string(number, row, key) for key in ("instruction", "input", "output", "system")
        )
        if row.get("history"):
            raise self.fail(number, "alpaca 'history' is not supported; write the row as `messages`")
        if self.has_template:
            messages = [Message("system", system)] if system else []
            messages.append(Message("user", f"{instruction}\n\n{given}" if given else instruction))
            messages.append(Message("assistant", output, trained=True))
            return Conversation(tuple(messages))
        parts = [system] if system else []
        parts.append(f"### Instruction:\n{instruction}")
        if given:
            parts.append(f"### Input:\n{given}")
        parts.append("### Response:\n")
        return Completion("\n\n".join(parts), output)

    def _turns(self, number: int, row: Row, key: str, *, trained: bool = True) -> tuple[Message, ...]:
        turns = self._list(number, row, key)
        return tuple(self._turn(number, f"{key}[{i}]", turn, trained) for i, turn in enumerate(turns))

    def _turn(self, number: int, key: str, turn: Any, trained: bool) -> Message:
        if not isinstance(turn, dict) or "role" not in turn:
            raise self.fail(number, f"{key} must be an object with 'role' and 'content'")
        turn = _without_nulls(turn)
        role = turn.get("role")
        if role not in _ROLES:
            raise self.fail(number, f"{key}.role is {role!r}; known are {', '.join(_ROLES)}")
        calls = self._tool_calls(number, key, turn.get("tool_calls") or ())
        if "content" not in turn and role != "assistant":
            raise self.fail(number, f"{key} ({role}) has no 'content'")
        if (weight := turn.get("weight", 1)) not in (0, 1):
            raise self.fail(number, f"{key}.weight must be 0 or 1, found {weight!r}")
        extra = {k: v for k, v in turn.items() if k not in ("role", "content", "tool_calls", "weight")}
        content = self._content(number, key, turn.get("content", ""))
        return Message(role, content, trained and role == "assistant" and weight == 1, calls, extra)

    def _content(self, number: int, key: str, content: Any) -> str:
        if isinstance(content, list):
            if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
                raise self.fail(number, f"{key}.content holds parts that are not text; only text is trained")
            return "".join(part["text"] for part in content)
        if not isinstance(content, str):
            raise self.fail(number, f"{key}.content must be a string, found {type(content).__name__}")
        return content

    def _tool_calls(self, number: int, key: str, calls: Any) -> tuple[dict[str, Any], ...]:
        """Calls as templates read them: `arguments` an object, not a string of JSON."""
        parsed = []
        for index, call in enumerate(calls):
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise self.fail(number, f"{key}: tool call {index} needs a 'name' and 'arguments'")
            arguments = function.get("arguments", {})
            if isinstance(arguments, str):
                arguments = self._json(number, f"{key}: arguments of tool call {index}", arguments)
            identity = {"id": call["id"]} if "id" in call else {}
            parsed.append(
                {
                    **identity,
                    "type": "function",
                    "function": {"name": function["name"], "arguments": arguments},
                }
            )
        return tuple(parsed)

    def _tools(self, number: int, row: Row) -> tuple[dict[str, Any], ...]:
        return tuple(_without_nulls(self._list(number, row, "tools"))) if row.get("tools") else ()

    def _list(self, number: int, row: Row, key: str) -> list[Any]:
        """The list at `key`; CSV can only hold it as a string of JSON."""
        value = row[key]
        if isinstance(value, str):
            value = self._json(number, key, value)
        if not isinstance(value, list):
            raise self.fail(number, f"{key!r} must be a list, found {type(value).__name__}")
        return value

    def _json(self, number: int, key: str, text: str) -> Any:
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self.fail(number, f"{key} is a string that is not valid JSON: {error}") from error


def _without_nulls(value: Any) -> Any:
    """Without the nulls that Parquet structs put where a key is missing."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _names(row: Row) -> str:
    return ", ".join(repr(key) for key in row) or "none"


_PARSERS = {
    "text": RowParser._text,
    "messages": RowParser._messages,
    "sharegpt": RowParser._sharegpt,
    "prompt_completion": RowParser._prompt_completion,
    "alpaca": RowParser._alpaca,
}
