"""The queue with real processes: order, bounded bypass, timeouts, and that nothing is left."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.vram import clock, queue
from gshare.agent.vram.ledger import Ledger, Queued
from gshare.agent.vram.machine import MAX_BYPASS, Wait
from gshare.agent.vram.queue import Announcer, wait_for
from gshare.agent.vram.status import status
from gshare.agent.vram.store import LOCK_SECONDS, locked
from gshare.agent.vram.view import ABSENT_S

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import (
    Child,
    Say,
    WaitFor,
    device,
    files,
    make_ledger,
    rows,
    stopped,
    take,
    until,
    wanted,
    write_devices,
)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path)


@pytest.fixture
def never_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine or disk keeps a waiter from looking."""
    monkeypatch.setattr("gshare.agent.vram.view.ABSENT_S", math.inf)


# Case 11, and the queue


def waiter_of(ledger: Ledger, mb: int) -> Child:
    def work(say: Say, wait: WaitFor) -> None:
        def told(queued: Queued) -> None:
            say(f"waits {queued.decision.position}")

        grant = wait_for(ledger, wanted(ledger, mb), timeout_s=60, on_wait=told)
        say("has")
        wait()
        ledger.release(grant)

    return Child(work)


@pytest.mark.usefixtures("never_absent")
def test_a_big_waiter_is_passed_by_a_bounded_number_of_small_ones(ledger: Ledger) -> None:
    first = take(ledger, 4000)
    big = waiter_of(ledger, 8000)
    try:
        assert big.line() == "waits 1"
        for _ in range(MAX_BYPASS):
            take(ledger, 100).release()
        with pytest.raises(RetryLater, match="passed often enough"):
            take(ledger, 100)
        first.release()
        until_has(big)
        take(ledger, 100).release()  # nobody waits any more
    finally:
        big.kill()


@pytest.mark.usefixtures("never_absent")
def test_waiters_are_served_in_the_order_they_came(ledger: Ledger) -> None:
    block = take(ledger, 8000)
    line: list[Child] = []
    try:
        for place in range(1, 4):
            line.append(waiter_of(ledger, 5000))
            assert line[-1].line() == f"waits {place}"
        block.release()
        for place, one in enumerate(line):
            until_has(one)
            assert all(other.code is None for other in line[place:])
            one.go_on()
            assert one.wait() == 0
    finally:
        for one in line:
            one.kill()
    assert rows(ledger) == {}
    assert [name for name in files(ledger) if not name.startswith("passes-")] == []


def until_has(one: Child) -> None:
    while (line := one.line()) != "has":
        assert line.startswith("waits ")


def test_a_killed_waiter_leaves_the_queue(ledger: Ledger) -> None:
    with take(ledger, 8000):
        big = waiter_of(ledger, 8000)
        assert big.line() == "waits 1"
        big.kill()
        view, _ = ledger.look()
        assert view.waiters == []
        assert not [name for name in files(ledger) if name.startswith("wait-")]


def test_a_stopped_waiter_keeps_memory_from_nobody_and_has_its_place_when_it_goes_on(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = take(ledger, 8000)
    waiter = waiter_of(ledger, 6000)
    try:
        assert waiter.line() == "waits 1"
        with locked(ledger.directory, ledger.tracer):  # so that it is not stopped with the lock
            os.kill(waiter.pid, signal.SIGSTOP)
            until(lambda: (clock.stat_fields(waiter.pid) or ["?"])[0] == "T")
        (life,) = ledger.directory.glob("wait-*.life")
        with monkeypatch.context() as at_rest:
            at = clock.now()
            at_rest.setattr("gshare.agent.vram.ledger.now", lambda: at)
            looked(life, at.boot_s)  # just now, however long the stopping took
            first.release()
            with pytest.raises(RetryLater, match="6000 kept for requests in front"):
                take(ledger, 8000)  # it may be about to look
            looked(life, at.boot_s - ABSENT_S - 0.5)  # as if it had been stopped for so long
            (queued,) = status(ledger).devices[0].queue
            assert "has not looked for a while" in queued.reason
            for _ in range(MAX_BYPASS + 1):
                take(ledger, 8000).release()
            assert not list(ledger.directory.glob("passes-*"))  # nothing was counted
        os.kill(waiter.pid, signal.SIGCONT)
        until_has(waiter)
        assert list(rows(ledger).values()) == [6000]
    finally:
        os.kill(waiter.pid, signal.SIGCONT)
        waiter.kill()


def looked(life: Path, boot_s: float) -> None:
    os.utime(life, ns=(int(boot_s * 1e9),) * 2)


def test_a_waiter_that_looks_is_not_absent_however_long_it_waits(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = clock.now()
    monkeypatch.setattr("gshare.agent.vram.ledger.now", lambda: at)
    with take(ledger, 8000):
        queued = ledger.reserve(wanted(ledger, 8000), join_s=60)
        assert isinstance(queued, Queued)
        assert queued.place is not None
        joined_s = os.fstat(queued.place.life).st_mtime
        assert joined_s == pytest.approx(at.boot_s, abs=1e-3, rel=0)  # joining is looking
        os.utime(queued.place.life, ns=(0, 0))
        assert ledger.look()[0].absent == {queued.place.waiter.id}
        before = os.stat(ledger.directory).st_mtime_ns
        ledger.reserve(wanted(ledger, 8000), place=queued.place)
        assert ledger.look()[0].absent == set()
        assert os.stat(ledger.directory).st_mtime_ns == before  # its looking wakes no other waiter
        os.utime(queued.place.life)  # the wall clock's time, as an older gshare leaves it
        assert ledger.look()[0].absent == set()
        ledger.leave(queued.place)


def test_waiting_ends_at_the_timeout_and_leaves_nothing(ledger: Ledger) -> None:
    with take(ledger, 8000):
        with pytest.raises(RetryLater, match=r"waited 0 s .*place 1: 1000 MiB asked, 500 of 8500") as error:
            wait_for(ledger, wanted(ledger, 1000), timeout_s=0.1)
        assert error.value.exit_code == 75
        assert not [name for name in files(ledger) if name.startswith("wait-")]


def test_a_waiter_that_cannot_write_when_it_leaves_is_out_of_the_queue(ledger: Ledger) -> None:
    with take(ledger, 8000):
        queued = ledger.reserve(wanted(ledger, 1000), join_s=60)
        assert isinstance(queued, Queued)
        assert queued.place is not None
        assert len(ledger.look()[0].waiters) == 1
        away = ledger.directory.with_name("away")
        ledger.directory.rename(away)
        ledger.directory.write_text("in the way", encoding="utf-8")
        ledger.leave(queued.place)
        ledger.directory.unlink()
        away.rename(ledger.directory)
        assert ledger.look()[0].waiters == []


def test_a_request_that_never_fits_does_not_wait(ledger: Ledger) -> None:
    with pytest.raises(UsageError, match="8501 MiB can never fit on GPU-aaaa-1"):
        wait_for(ledger, wanted(ledger, 8501), timeout_s=60)
    assert files(ledger) == []


def test_a_waiter_takes_whichever_device_comes_free(tmp_path: Path) -> None:
    ledger = make_ledger(tmp_path, device("GPU-aaaa-1"), device("GPU-bbbb-2"))
    first = take(ledger, 8000)
    second = take(ledger, 8000)
    assert {first.device.uuid, second.device.uuid} == {"GPU-aaaa-1", "GPU-bbbb-2"}
    one = waiter_of(ledger, 6000)
    try:
        assert one.line() == "waits 1"
        second.release()
        until_has(one)
        view, _ = ledger.look()
        assert {row.gpu_uuid for row in view.rows if row.budget_mb == 6000} == {second.device.uuid}
    finally:
        one.kill()
        first.release()


# Passing trouble


def waits_for_a_device(ledger: Ledger, in_trouble: Callable[[], None] = lambda: None) -> Child:
    """A waiter for 1000 MiB that tells every reason, and does `in_trouble` when it has told of trouble."""

    def work(say: Say, wait: WaitFor) -> None:
        def told(queued: Queued) -> None:
            say(f"{'trouble' if queued.trouble else 'waits'}: {queued.decision.reason}")
            if queued.trouble:
                in_trouble()

        grant = wait_for(ledger, wanted(ledger, 1000), timeout_s=60, on_wait=told)
        say("has")
        wait()
        ledger.release(grant)

    return Child(work)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full looks come every 0.1 s: a device's recovery moves nothing in the ledger."""
    monkeypatch.setattr(queue, "FULL_LOOK_S", 0.1)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("failed", "Simulated GPU: failed (simulated)"),
        ("lost", "Simulated GPU: lost (simulated)"),
        ("no file", "No such file or directory"),
        ("lock", "has been held too long"),
        ("directory", "cannot use"),
    ],
)
def test_trouble_that_passes_while_it_waits_is_waited_out(
    ledger: Ledger, tmp_path: Path, trouble: str, reason: str
) -> None:
    path = tmp_path / "devices.toml"
    block = take(ledger, 8000)
    waiter = waits_for_a_device(ledger)
    away = ledger.directory.with_name("away")
    try:
        assert waiter.line().startswith("waits: 1000 MiB asked")
        lock = os.open(ledger.directory / "lock", os.O_RDONLY)
        if trouble == "no file":
            path.unlink()
        elif trouble == "lock":
            fcntl.flock(lock, fcntl.LOCK_EX)
        elif trouble == "directory":
            with stopped(waiter.pid):  # it would make the directory anew, and a file could not take its place
                ledger.directory.rename(away)
                ledger.directory.write_text("in the way", encoding="utf-8")
        else:
            write_devices(path, device(state=f'"{trouble}"'))
        line = waiter.line()
        assert line.startswith("trouble: ")
        assert reason in line
        os.close(lock)
        if trouble == "directory":
            with stopped(waiter.pid):
                ledger.directory.unlink()
                away.rename(ledger.directory)
        write_devices(path, device())
        assert waiter.line().startswith("waits: 1000 MiB asked")
        block.release()
        while (line := waiter.line()) != "has":
            assert "has been held too long" in line  # by our release: here a look waits for 0.1 s alone
    finally:
        waiter.kill()
        block.release()
    assert rows(ledger) == {}
    assert not [name for name in files(ledger) if name.startswith("wait-")]


@pytest.mark.usefixtures("often")
def test_trouble_that_does_not_pass_ends_with_the_time_and_its_reason(ledger: Ledger, tmp_path: Path) -> None:
    block = take(ledger, 8000)

    def over() -> None:
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 60, sleep=time.sleep)
        queue.time = later  # pyright: ignore[reportAttributeAccessIssue]

    # Its time is over once it is in trouble, not before: however late the trouble begins.
    waiter = waits_for_a_device(ledger, in_trouble=over)
    try:
        assert waiter.line().startswith("waits: ")
        write_devices(tmp_path / "devices.toml", device(state='"failed"'))
        assert waiter.line().startswith("trouble: ")
        why = "Simulated GPU: failed (simulated), on GPU-aaaa-1"
        assert waiter.line() == f"RetryLater: waited 60 s for memory for test, place 1: {why}"
    finally:
        waiter.kill()
        block.release()
    write_devices(tmp_path / "devices.toml", device())
    assert not [name for name in files(ledger) if name.startswith("wait-")]


@pytest.mark.usefixtures("often")
def test_a_request_that_comes_to_fit_never_does_not_wait_on(ledger: Ledger, tmp_path: Path) -> None:
    """The control: no trouble that passes."""
    block = take(ledger, 8000)
    waiter = waits_for_a_device(ledger)
    try:
        assert waiter.line().startswith("waits: ")
        write_devices(tmp_path / "devices.toml", device(total_mb=1000))
        assert waiter.line().startswith("NeverFits: 1000 MiB can never fit")
    finally:
        waiter.kill()
        block.release()


@pytest.mark.usefixtures("often")
def test_in_the_queue_the_lock_is_asked_for_no_longer_than_a_look_may_be_late(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a lock that a stopped process holds would keep the waiter past its time."""
    ask, patience = ledger.reserve, []

    class Enough(Exception):
        pass

    def stop() -> None:
        if len(patience) > 3:
            raise Enough

    def reserve(*arguments: object, patience_s: float, **keys: object) -> object:
        patience.append(patience_s)
        return ask(*arguments, patience_s=patience_s, **keys)  # pyright: ignore[reportArgumentType]

    with take(ledger, 8000):
        monkeypatch.setattr(ledger, "reserve", reserve)
        with pytest.raises(Enough):
            wait_for(ledger, wanted(ledger, 1000), timeout_s=60, on_look=stop)
    assert patience[0] == LOCK_SECONDS
    assert set(patience[1:]) == {0.1}


def test_trouble_at_the_first_look_is_an_error(ledger: Ledger, tmp_path: Path) -> None:
    write_devices(tmp_path / "devices.toml", device(state='"failed"'))
    with pytest.raises(GshareError, match="failed") as error:
        wait_for(ledger, wanted(ledger, 1000), timeout_s=60)
    assert error.value.exit_code == 1


def test_people_are_told_at_once_when_trouble_begins_and_ends() -> None:
    said: list[str] = []
    announce = Announcer(said.append)
    for trouble, reason in ((False, "a"), (True, "b"), (True, "c"), (False, "d"), (False, "e")):
        decision = Wait(1, reason)
        announce(Queued(decision=decision, gpu_uuid="GPU-a", place=None, trouble=trouble))
    assert said == [f"waiting for GPU-a, place 1: {reason}" for reason in "abd"]


def test_a_pass_that_cannot_be_counted_leaves_no_row(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor would live on in the process, and the row with it."""

    def fail(*arguments: object) -> None:
        raise GshareError("the disk is full")

    monkeypatch.setattr(Ledger, "_count_passes", fail)
    with pytest.raises(GshareError, match="full"):
        take(ledger, 1000)
    assert rows(ledger) == {}
    assert files(ledger) == []
