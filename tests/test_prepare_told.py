"""What lasts before a run begins is told where there is no terminal; what does not is not."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gshare.agent.jobs.spec import RunSpec
from gshare.cli import prepare as preparing
from rich.console import Console


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(preparing, "SILENT_SECONDS", 0.05)
    monkeypatch.setattr(preparing, "AGAIN_SECONDS", 0.05)
    return Console(file=io.StringIO(), soft_wrap=True)


def told(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_conversion_and_the_data_s_reading_are_told_while_they_last(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_model(run: RunSpec, progress: Callable[[str, int, int], None]) -> Path:
        progress("converting m.gguf: tensors", 1, 4)
        until(lambda: "converting m.gguf: tensors: 25% (0 s)" in told(console))
        return Path("m")

    def prepare_requests(run: RunSpec, model_dir: Path, **_: object) -> list[object]:
        until(lambda: "reading the data" in told(console))
        return []

    monkeypatch.setattr(preparing, "find_model", find_model)
    monkeypatch.setattr(preparing, "prepare_requests", prepare_requests)
    run = RunSpec(model="m.gguf", adapters=())
    assert preparing.prepare(run, console, resume=False) == (Path("m"), [])
    lines = told(console)
    assert lines.index("converting m.gguf: tensors: 25%") < lines.index(
        "converting m.gguf: tensors: 25% (0 s)"
    )
    time.sleep(0.2)
    assert told(console) == lines  # nobody speaks on


def test_what_takes_no_time_is_not_told(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "SILENT_SECONDS", 600.0)
    with preparing.told_while(console, "looking for m") as tell:
        tell("hashing m.gguf: 50%")
    assert told(console) == []


def test_a_fault_ends_it(console: Console) -> None:
    with pytest.raises(ValueError, match="of the model"), preparing.told_while(console, "looking for m"):
        raise ValueError("of the model")
    before = told(console)
    time.sleep(0.2)
    assert told(console) == before
