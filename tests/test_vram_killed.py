"""A process killed before any one of its system calls leaves nothing that the next operation does not remove.

Every call of `os` and `fcntl` that a module of the ledger makes is a place to die at, in every operation;
the probe of a new directory and the makers of the directory, the lock and the quarantine included. What may
stay: the lock, the counts of who passed whom (one file a user), and what `repair` set aside.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from gshare.agent.vram import inherit, ledger, mps, paths, queue, repair, store, turns
from gshare.agent.vram.grants import Queued
from gshare.agent.vram.inherit import inherit as use_row
from gshare.agent.vram.ledger import Grant, Ledger
from gshare.agent.vram.repair import repair as repair_ledger

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import USABLE_MB, Say, WaitFor, child, holder, make_ledger, rows, take, wanted

MODULES = (inherit, ledger, mps, paths, queue, repair, store, turns)
#: What says nothing of where a process dies: no system calls, or calls that change nothing and hold nothing.
HARMLESS = ("fsdecode", "fsencode", "fspath", "getpid", "geteuid", "minor", "major", "stat_result")


class Killing:
    """`os` and `fcntl` in a child: the process dies just before its n-th system call."""

    def __init__(self, calls_left: int) -> None:
        self.left = calls_left

    def of(self, module: ModuleType) -> object:
        killing = self

        class Module:
            def __getattr__(self, name: str) -> object:
                value = getattr(module, name)
                if not callable(value) or name in HARMLESS or isinstance(value, type):
                    return value

                def call(*arguments: object, **keys: object) -> object:
                    if killing.left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    killing.left -= 1
                    return value(*arguments, **keys)

                return call

        return Module()

    def begin(self) -> None:
        """From here on every call counts."""
        for module in MODULES:
            for name, real in (("os", os), ("fcntl", fcntl)):
                if getattr(module, name, None) is real:
                    setattr(module, name, self.of(real))


#: What the victim does first, unharmed, and gives to what it may die in.
Operation = Callable[[Ledger, Callable[[], None]], None]


def first_use(ledger: Ledger, begin: Callable[[], None]) -> None:
    paths._checked.clear()  # a new process probes the directory
    begin()
    ledger.reserve(wanted(ledger, 1000))


def no_lock(ledger: Ledger, begin: Callable[[], None]) -> None:
    rows(ledger)
    (ledger.directory / "lock").unlink()
    begin()
    ledger.reserve(wanted(ledger, 1000))


def change(ledger: Ledger, begin: Callable[[], None]) -> None:
    reservation = take(ledger, 1000)
    begin()
    reservation.record_use("load", 900)


def put_back(ledger: Ledger, begin: Callable[[], None]) -> None:
    reservation = take(ledger, 1000)
    for name in os.listdir(ledger.directory):
        if reservation.id in name:
            (ledger.directory / name).unlink()
    begin()
    reservation.keep()


def release(ledger: Ledger, begin: Callable[[], None]) -> None:
    reservation = take(ledger, 1000)
    begin()
    reservation.release()


def wait_and_leave(ledger: Ledger, begin: Callable[[], None]) -> None:
    begin()
    answer = ledger.reserve(wanted(ledger, USABLE_MB), join_s=60)
    assert isinstance(answer, Queued)
    assert answer.place is not None
    ledger.leave(answer.place)


def wait_and_get(ledger: Ledger, begin: Callable[[], None]) -> None:
    """In the queue behind the neighbour and a waiter that is passed."""
    large = ledger.reserve(wanted(ledger, USABLE_MB), join_s=60)
    answer = ledger.reserve(wanted(ledger, 8001), join_s=60)
    assert isinstance(large, Queued)
    assert isinstance(answer, Queued)
    begin()
    small = ledger.reserve(wanted(ledger, 1000))
    assert isinstance(small, Grant)
    ledger.release(small)


def clean_up(ledger: Ledger, begin: Callable[[], None]) -> None:
    """Of two that died, one of them while it waited."""

    def work(say: Say, wait: WaitFor) -> None:
        ledger.reserve(wanted(ledger, 500))
        ledger.reserve(wanted(ledger, USABLE_MB), join_s=60)
        os._exit(0)

    with child(work) as dead:
        dead.wait()
    (ledger.directory / ".tmp-0123456789ab").touch()
    begin()
    ledger.look()


def take_out(ledger: Ledger, begin: Callable[[], None]) -> None:
    (ledger.directory / "row-00000000dead.json").write_bytes(b"{")
    begin()
    repair_ledger(ledger)


def nested(ledger: Ledger, begin: Callable[[], None]) -> None:
    """A gshare inside `gpu run`, whose process is killed with it."""
    answer = ledger.reserve(wanted(ledger, 1000, kind="run"))
    assert isinstance(answer, Grant)

    def work(say: Say, wait: WaitFor) -> None:
        begin()
        use_row(ledger, answer.row.id, devices=ledger.source.devices(), budget_mb=500).release()

    with child(work) as inner:
        code = inner.wait()
    if code == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)


OPERATIONS: tuple[Operation, ...] = (
    *(
        first_use,
        no_lock,
        change,
        put_back,
        release,
        wait_and_leave,
        wait_and_get,
        clean_up,
        take_out,
        nested,
    ),
)


def victim(operation: Operation, ledger: Ledger, step: int) -> int:
    """Exit code of a process that does it and dies before its `step`-th call."""

    def work(say: Say, wait: WaitFor) -> None:
        operation(ledger, Killing(step).begin)
        os._exit(0)

    with child(work) as one:
        return one.wait()


def left_over(ledger: Ledger) -> list[str]:
    """What lies there after one operation and belongs to nobody; beside the directory too."""
    ledger.look()
    here = [name for name in os.listdir(ledger.directory) if not name.startswith("passes-")]
    beside = ledger.directory.parent.glob(f".{ledger.directory.name}-*")
    return sorted([name for name in here if name not in ("lock", "quarantine")] + [p.name for p in beside])


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_whatever_call_it_dies_before_the_next_operation_cleans(tmp_path: Path, operation: Operation) -> None:
    ledger = make_ledger(tmp_path)
    with holder(ledger, 500) as neighbour:
        row_id = neighbour.line()
        own = [f"row-{row_id}.json", f"row-{row_id}.life"]
        for step in range(300):
            code = victim(operation, ledger, step)
            assert code in (0, -signal.SIGKILL), step
            if operation is take_out:
                repair_ledger(ledger)  # a damaged row stays until somebody asks for its repair
            assert left_over(ledger) == own, step
            if code == 0:
                break
        assert 10 < step < 299


def test_whatever_call_the_maker_of_the_directory_dies_before_the_next_one_cleans(tmp_path: Path) -> None:
    for step in range(100):
        ledger = make_ledger(tmp_path)
        ledger = Ledger(directory=tmp_path / f"ledger-{step}", source=ledger.source, environ={})
        code = victim(first_use, ledger, step)
        assert left_over(ledger) == [], step
        if code == 0:
            break
    assert 10 < step < 99


class Meddling:
    """`os` for `paths`: after each of its first `times` calls of `name`, `act` gets the first argument."""

    def __init__(self, name: str, times: int, act: Callable[[str], None]) -> None:
        self.name, self.left, self.act = name, times, act

    def __getattr__(self, name: str) -> object:
        value = getattr(os, name)
        if name != self.name:
            return value

        def call(what: str, *arguments: object, **keys: object) -> object:
            answer = value(what, *arguments, **keys)
            if self.left:
                self.left -= 1
                self.act(what)
            return answer

        return call


def meddle(monkeypatch: pytest.MonkeyPatch, name: str, times: int, act: Callable[[str], None]) -> None:
    monkeypatch.setattr(paths, "os", Meddling(name, times, act))


@pytest.mark.parametrize("times", [1, paths._ATTEMPTS])
def test_a_probe_that_somebody_takes_for_a_dead_ones_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    meddle(monkeypatch, "open", times, lambda name: (tmp_path / name).unlink())
    fault = paths.flock_fault(directory)
    assert fault == (None if times == 1 else "new files disappear at once")
    assert os.listdir(tmp_path) == []
    os.close(directory)


def test_a_directory_that_somebody_takes_for_a_dead_makers_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meddle(monkeypatch, "mkdir", 1, os.rmdir)
    paths._make(tmp_path / "ledger")
    assert os.listdir(tmp_path) == ["ledger"]
    assert os.listdir(tmp_path / "ledger") == ["lock"]


def test_a_directory_that_is_just_being_removed_is_left_to_who_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def hold(made: str) -> None:
        opened.append(os.open(made, os.O_RDONLY))
        fcntl.flock(opened[0], fcntl.LOCK_EX)

    meddle(monkeypatch, "mkdir", 1, hold)
    paths._make(tmp_path / "ledger")
    assert os.listdir(tmp_path / "ledger") == ["lock"]
    (theirs,) = tmp_path.glob(".ledger-*")
    assert os.listdir(theirs) == []  # nothing was put into it
    os.close(opened[0])


def test_what_a_living_maker_makes_is_not_swept(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    unfinished, others = tmp_path / ".ledger-0123456789ab", tmp_path / ".ledger-notes"
    unfinished.mkdir()
    (unfinished / "lock").touch()
    others.mkdir()
    maker = os.open(unfinished, os.O_RDONLY)
    fcntl.flock(maker, fcntl.LOCK_EX)
    paths._sweep(ledger)
    assert (unfinished / "lock").exists()
    os.close(maker)
    paths._sweep(ledger)
    assert os.listdir(tmp_path) == [others.name]


def test_a_directory_that_became_the_ledgers_meanwhile_is_not_swept(tmp_path: Path) -> None:
    ledger, unfinished = tmp_path / "ledger", tmp_path / ".ledger-0123456789ab"
    unfinished.mkdir()
    (unfinished / "lock").touch()
    seen = os.open(unfinished, os.O_RDONLY)
    unfinished.rename(ledger)
    unfinished.mkdir()  # even with another of its name in its place
    paths._remove_unfinished(seen, unfinished)
    os.close(seen)
    assert (ledger / "lock").exists()
    assert unfinished.exists()
