"""A clone under the ledger, on a simulated device: its part is added to the trainer's row, and given back."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest
from gshare.agent.service import registry
from gshare.agent.vram.ledger import Ledger

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from joining_clients import wait_for  # noqa: E402
from straw_runs import LONG, flags, gshare, own_ledger, read_until, start  # noqa: E402


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> Ledger:
    monkeypatch.setenv("STRAW_BASE", str(tiny_checkpoint))
    return own_ledger(tmp_path, monkeypatch)


@pytest.fixture
def parent(ledger: Ledger) -> Iterator[Popen[str]]:
    process = start(*flags("a", LONG, "--vram", "4"))
    read_until(process, "step 1 of")
    yield process
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def parts(ledger: Ledger) -> list[int]:
    """How many clients have a part, of each row."""
    return [len(row.clients) for row in ledger.look()[0].rows]


def test_a_clone_has_a_part_of_its_own_and_gives_it_back(parent: Popen[str], ledger: Ledger) -> None:
    (trainer,) = registry.live_trainers()
    Path("b.jsonl").write_text(LONG)
    clone = start("jobs", "clone", "a", "--warm", "--set", "data=b.jsonl", "--name", "b")
    seen = read_until(clone, "b: step 1 of")
    assert f"joins trainer {trainer.name} of job a" in seen
    assert parts(ledger) == [2]
    clone.send_signal(signal.SIGINT)
    clone.communicate(timeout=60)
    wait_for(lambda: parts(ledger) == [1])


def test_where_another_ledger_is_used_a_clone_is_refused_and_starts_no_trainer(
    parent: Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSHARE_LEDGER_DIR", str(Path("elsewhere").absolute()))
    code, _, err = gshare("jobs", "clone", "a", "--warm")
    assert code == 2
    assert "cannot be joined from here: its gshare, ledger or number of threads is another" in err
    assert os.listdir("out") == ["a"]
    assert len(registry.live_trainers()) == 1
