"""Rows of every format to their common form, and the order of turns."""

from __future__ import annotations

from typing import Any

import pytest
from gshare.agent.data.formats import Completion, Conversation, Example, Message, RowParser, Text
from gshare.agent.data.turns import bad_turn, merge_turns
from gshare.agent.errors import UsageError

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def parse(row: dict[str, Any], data_format: str = "auto", *, has_template: bool = True) -> Example:
    return RowParser("d.jsonl", data_format, has_template=has_template).parse(1, row)


def talk(*turns: str, tool_calls: int = -1) -> Conversation:
    """A conversation of roles; `tool_calls` is the index of the turn that calls a tool."""
    return Conversation(
        tuple(
            Message(role, f"{role} {i}", role == "assistant", (CALL,) if i == tool_calls else ())
            for i, role in enumerate(turns)
        )
    )


def test_text_and_plain_prompt_completion() -> None:
    assert parse({"text": "a", "id": 3}) == Text("a")
    assert parse({"text": None}) == Text("")
    assert parse({"prompt": "p", "completion": None}) == Completion("p", "")


def test_messages_train_assistant_turns_unless_their_weight_is_zero() -> None:
    parsed = parse({"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER]})
    assert isinstance(parsed, Conversation)
    assert [m.trained for m in parsed.messages] == [False, False, False, True]


def test_prompt_completion_as_messages_trains_the_completion_only() -> None:
    parsed = parse({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]})
    assert isinstance(parsed, Conversation)
    assert [m.trained for m in parsed.messages] == [False, False, False, True]


def test_sharegpt_roles_and_its_mixture_with_messages() -> None:
    turns = [("system", "s"), ("human", "q"), ("function_call", '{"name": "f", "arguments": {"x": 1}}')]
    turns += [("observation", "o"), ("gpt", "a")]
    parsed = parse({"conversations": [{"from": role, "value": value} for role, value in turns]})
    assert parsed == Conversation(
        (
            Message("system", "s"),
            Message("user", "q"),
            Message("assistant", "", True, (CALL,)),
            Message("tool", "o"),
            Message("assistant", "a", True),
        )
    )
    mixed = parse({"conversations": [USER, ANSWER]})
    assert mixed == parse({"messages": [USER, ANSWER]})


def test_alpaca_with_and_without_a_chat_template() -> None:
    row = {"instruction": "i", "input": "x", "output": "o"}
    assert parse(row) == Conversation((Message("user", "i\n\nx"), Message("assistant", "o", True)))
    plain = Completion("### Instruction:\ni\n\n### Input:\nx\n\n### Response:\n", "o")
    assert parse(row, has_template=False) == plain
    bare = parse({"instruction": "i", "input": "", "output": "o"}, has_template=False)
    assert bare == Completion("### Instruction:\ni\n\n### Response:\n", "o")


def test_tool_calls_with_arguments_as_json_text_and_nulls_from_parquet() -> None:
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call], "name": None}
    parsed = parse({"messages": [USER, turn], "tools": '[{"type": "function"}]'})
    assert isinstance(parsed, Conversation)
    assert parsed.messages[1] == Message("assistant", "", True, (CALL,))
    assert parsed.messages[1].for_template() == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert parsed.tools == ({"type": "function"},)


def test_lists_as_json_text_for_csv_and_content_in_parts() -> None:
    parts = '{"role": "user", "content": [{"type": "text", "text": "q"}]}'
    text = f'[{parts}, {{"role": "assistant", "content": "a"}}]'
    assert parse({"messages": text}) == parse({"messages": [USER, ANSWER]})


def test_auto_takes_the_columns_that_are_not_null() -> None:
    assert parse({"text": "a", "messages": None}) == Text("a")


def test_a_named_format_ignores_other_formats_keys() -> None:
    row = {"text": "t", "instruction": "i", "output": "o"}
    assert parse(row, "text") == Text("t")
    assert isinstance(parse(row, "alpaca"), Conversation)


def test_one_file_holds_one_format() -> None:
    parser = RowParser("d.jsonl", has_template=True)
    parser.parse(1, {"text": "a"})
    parser.parse(2, {"text": "b"})
    with pytest.raises(UsageError, match=r"d.jsonl, row 3: is messages, but row 1 is text"):
        parser.parse(3, {"messages": [USER, ANSWER]})


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"chosen": "a", "rejected": "b"}, "preference training is not supported yet"),
        ({"prompt": "p", "completion": "c", "rejected": "b"}, "is a preference pair"),
        ({"text": "t", "instruction": "i", "output": "o"}, "fits the formats text and alpaca"),
        ({"question": "q"}, "no known format has the keys 'question'"),
        ({}, "no known format has the keys none"),
        ({"text": 3}, "'text' must be a string, found int"),
        ({"messages": "hi"}, "messages is a string that is not valid JSON"),
        ({"messages": {"role": "user"}}, "'messages' must be a list, found dict"),
        ({"messages": ["hi"]}, r"messages\[0\] must be an object"),
        ({"messages": [USER, {"role": "bot", "content": "a"}]}, r"messages\[1\].role is 'bot'; known are"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] \(user\) has no 'content'"),
        ({"messages": [{"role": "user", "content": 3}]}, r"content must be a string, found int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "parts that are not text"),
        ({"messages": [ANSWER | {"weight": 0.5}]}, "weight must be 0 or 1"),
        ({"messages": [ANSWER | {"tool_calls": [{"x": 1}]}]}, "tool call 0 needs a 'name'"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "from is 'alien'; known are human"),
        ({"conversations": [{"value": "a"}]}, r"conversations\[0\] must be an object with 'from'"),
        ({"prompt": "p", "completion": [ANSWER]}, "must both be strings"),
        ({"instruction": "i", "output": "o", "history": [["a", "b"]]}, "'history' is not supported"),
    ],
)
def test_faults_name_row_and_key(row: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse(row)
    assert str(caught.value).startswith("d.jsonl, row 1: ")


def test_a_named_format_needs_its_keys_and_must_exist() -> None:
    with pytest.raises(UsageError, match=r"'alpaca' needs key 'instruction'; this row has 'text'"):
        parse({"text": "a"}, "alpaca")
    with pytest.raises(UsageError, match="data_format 'chatml' is unknown; known: auto, text"):
        parse({"text": "a"}, "chatml")


@pytest.mark.parametrize(
    ("conversation", "says"),
    [
        (talk("system", "user", "assistant", "user", "assistant"), None),
        (talk("assistant", "user", "assistant"), None),
        (talk("user", "assistant", "tool", "tool", "assistant", tool_calls=1), None),
        (talk("user", "assistant", "user"), None),
        (talk("user", "assistant", "user", "user"), "turns 3 and 4 are both user turns"),
        (talk("user", "assistant", "assistant"), "turns 2 and 3 are both assistant turns"),
        (talk("user", "system", "assistant"), "turn 2 is a system turn"),
        (talk("user", "tool", "assistant"), "turn 2 is a tool turn, but turn 1 calls no tool"),
        (talk("user", "assistant", "user", tool_calls=1), "calls a tool that has not answered"),
    ],
)
def test_bad_turn_names_the_turn(conversation: Conversation, says: str | None) -> None:
    found = bad_turn(conversation)
    assert found is None if says is None else found is not None and says in found


def test_merging_joins_equal_neighbours_only() -> None:
    merged = merge_turns(talk("user", "user", "assistant", "assistant"))
    assert [m.content for m in merged.messages] == ["user 0\n\nuser 1", "assistant 2\n\nassistant 3"]
    assert bad_turn(merged) is None
    context, answer = Message("assistant", "a", False), Message("assistant", "b", True)
    apart = Conversation((Message("user", "q"), context, answer))
    assert merge_turns(apart) == apart  # joined, what was context would be trained
