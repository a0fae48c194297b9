"""The preview marks what is trained, with colour or without, and is safe to look at."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from gshare.agent.base.tiny import make_tiny_tokenizer
from gshare.agent.data.preview import preview
from gshare.agent.errors import UsageError
from rich.console import Console

ANSWER = [{"role": "user", "content": "who [bold]"}, {"role": "assistant", "content": "né 👍\x1b[2J"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def seen(model: Path, data: list[object], *, terminal: bool = False, **options: int) -> str:
    source = model.parent / "d.jsonl"
    source.write_text("\n".join(map(json.dumps, data)))
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=40, color_system="standard" if terminal else None
    )
    preview(source, model, console=console, **options)
    return out.getvalue()


def test_plain_markers_without_a_terminal(model: Path) -> None:
    text = seen(model, [{"messages": ANSWER}])
    assert (
        "<|im_start|>user\nwho [bold]<|im_end|>\n<|im_start|>assistant\n⟦né 👍\\x1b[2J<|im_end|>⟧\n" in text
    )
    assert "\x1b" not in text
    assert "format messages; chat template by prefix difference" in text


def test_colour_on_a_terminal(model: Path) -> None:
    text = seen(model, [{"messages": ANSWER}], terminal=True)
    assert "\x1b[1;32mné 👍\\x1b[2J<|im_end|>\x1b[0m" in text
    assert "⟦" not in text
    assert "\x1b[2J" not in text  # what the data holds does not reach the terminal


def test_only_the_first_rows_and_reasons_for_dropped_ones(model: Path) -> None:
    empty = {"messages": [ANSWER[0], {"role": "assistant", "content": ""}]}
    text = seen(model, [empty, {"messages": ANSWER}, {"messages": ANSWER}], rows=2)
    assert "row 1: dropped: empty completion" in text
    assert "row 2: " in text
    assert "row 3" not in text
    assert "note: longer than max_length" in seen(model, [{"text": "a" * 99}], max_length=20)


def test_bad_rows_are_refused_as_in_training(model: Path) -> None:
    with pytest.raises(UsageError, match=r"d.jsonl, row 2: is text, but row 1 is messages"):
        seen(model, [{"messages": ANSWER}, {"text": "a"}])
