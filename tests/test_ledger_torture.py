"""The torture of `benchmarks/ledger_torture.py` at a small size, and that it can fail."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import until

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "ledger_torture.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--only", "torture", *arguments],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_processes_that_are_killed_at_random_break_nothing() -> None:
    done = run("--processes", "12", "--operations", "30", "--kills", "20", "--repeat", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "360 operations, " in done.stdout
    assert done.stdout.count(": ok\n") == 2


def test_without_the_lock_the_same_fails() -> None:
    done = run("--processes", "24", "--operations", "40", "--kills", "0", "--no-lock")
    assert done.returncode == 1, done.stdout
    assert "FAILED" in done.stdout


def test_workers_do_not_outlive_a_killed_run() -> None:
    command = [sys.executable, str(SCRIPT), "--only", "torture", "--processes", "4", "--operations", "100000"]
    with subprocess.Popen(command, cwd="/", stdout=subprocess.DEVNULL) as run:
        me = psutil.Process(run.pid)
        until(lambda: len(me.children()) == 4)
        workers = me.children()
        run.kill()
    until(lambda: not any(map(runs, workers)))


def runs(process: psutil.Process) -> bool:
    """Whether it is there and no zombie: an orphan waits until init has time for it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_sum_of_overlapping_intervals_is_found() -> None:
    spec = importlib.util.spec_from_file_location("ledger_torture", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    torture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(torture)
    board = torture.Board(2, 2)
    board.acquired(0, 0, 500)
    board.acquired(1, 0, 300)
    board.given_back(0, 0)
    board.acquired(0, 1, 100)
    board.given_back(1, 0)
    board.given_back(0, 1)
    assert board.most_at_once() == (800, 2)
    ok = torture.Outcome(1, 0, 0, torture.CAPACITY_MB, 1, 0, 0, 0, ())
    assert ok.faults == []
    for field in ("lost_rows", "dead_rows", "errors"):
        assert len(ok._replace(**{field: 1}).faults) == 1
    assert "row-x.life" in ok._replace(leftovers=("row-x.life",)).faults[0]
    assert "over-committed" in ok._replace(most_mb=torture.CAPACITY_MB + 1).faults[0]


@pytest.mark.slow
def test_the_full_size_once() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
