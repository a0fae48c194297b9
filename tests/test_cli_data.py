"""`gshare data preview`: rows come out on stdout with the trained tokens marked; faults are one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("base") / "tiny", max_position_embeddings=2048)


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    file = tmp_path / "chat.jsonl"
    rows = [
        [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i}"}]
        for i in range(5)
    ]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    return file


def test_trained_tokens_are_marked(chat: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "preview", str(chat), "--model", str(model), "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert "⟦answer 0<|im_end|>⟧" in out
    assert "⟦question" not in out
    assert "answer 1" in out
    assert "answer 2" not in out


def test_train_on_prompt(chat: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Negative control of the mask: with the flag the question is inside the mark."""
    assert main(["data", "preview", str(chat), "--model", str(model), "--train-on-prompt"]) == 0
    marked = capsys.readouterr().out.split("⟦")[1].split("⟧")[0]
    assert "question 0" in marked


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["{chat}", "--model", "./nowhere"], "nowhere"),
        (["missing.jsonl", "--model", "{model}"], "missing.jsonl"),
        (["{chat}", "--model", "{model}", "--rows", "0"], "--rows 0"),
        (["{chat}", "--model", "{model}", "--data-format", "chat"], "messages"),
        (["{chat}"], "--model"),
    ],
)
def test_faults(
    chat: Path, model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    filled = [argument.format(chat=chat, model=model) for argument in arguments]
    assert main(["data", "preview", *filled]) == 2
    captured = capsys.readouterr()
    assert part in captured.err
    assert captured.err.startswith("gshare: ")
    assert captured.out == ""
