"""Who lives: zombies, PID namespaces, clocks, reboots, forks. With real processes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from gshare.agent.errors import GshareError, RetryLater
from gshare.agent.vram import clock, store
from gshare.agent.vram.ledger import Grant, Ledger

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import (
    ANOTHER_BOOT,
    USABLE_MB,
    Child,
    Say,
    WaitFor,
    child,
    device,
    files,
    holder,
    make_ledger,
    plant,
    rows,
    take,
    until,
    wanted,
    write_devices,
)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path)


# Case 5


def test_a_zombie_is_kept_while_the_driver_lists_it(ledger: Ledger, tmp_path: Path) -> None:
    with holder(ledger, 900) as one:
        row_id = one.line()
        listed = f"[{{ pid = {one.pid}, used_mb = 800 }}]"
        write_devices(tmp_path / "devices.toml", device(processes=listed))
        os.kill(one.pid, signal.SIGKILL)
        until(lambda: (clock.stat_fields(one.pid) or ["?"])[0] == "Z")
        view, _ = ledger.look()
        assert [row.id for row in view.rows] == [row_id]
        assert view.lingering == {row_id}
        with pytest.raises(RetryLater, match="900 reserved, 0 used outside"):
            take(ledger, USABLE_MB - 899)
        write_devices(tmp_path / "devices.toml", device())
        assert rows(ledger) == {}


def test_a_dead_row_is_not_kept_for_another_process_of_its_pid(ledger: Ledger, tmp_path: Path) -> None:
    plant(ledger, pid_start=1)
    write_devices(tmp_path / "devices.toml", device(processes=f"[{{ pid = {os.getpid()}, used_mb = 800 }}]"))
    view, _ = ledger.look()
    assert view.rows == []


# Case 6


def test_a_holder_in_another_pid_namespace_is_held_by_its_flock_alone(ledger: Ledger) -> None:
    new_pid_namespace = 0x20000000  # CLONE_NEWPID, linux/sched.h
    libc = ctypes.CDLL(None, use_errno=True)

    def work(say: Say, wait: WaitFor) -> None:
        if libc.unshare(new_pid_namespace) != 0:
            say("refused")
            return
        inner = os.fork()  # the first process of the new namespace: PID 1 there
        if inner == 0:
            with take(ledger, 600) as reservation:
                say(f"{reservation.id} {reservation.row.pid}")
                wait()
            os._exit(0)
        os.waitpid(inner, 0)

    with child(work) as outer:
        answer = outer.line()
        if answer == "refused":
            pytest.skip("no new PID namespace here")
        row_id, pid = answer.split()
        assert pid == "1"
        assert rows(ledger) == {row_id: 600}
        outer.go_on()
        outer.wait()
    assert rows(ledger) == {}


# Case 7


def test_a_wall_clock_step_ends_nothing_and_the_boot_clock_ends_a_lease(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = ledger.reserve(wanted(ledger, 300, kind="hold", lease_s=3600.0))
    assert isinstance(lease, Grant)
    with holder(ledger, 400) as one:
        both = {one.line(): 400, lease.row.id: 300}
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + 25 * 3600)
        assert rows(ledger) == both
        boot = clock.now()
        monkeypatch.setattr(
            "gshare.agent.vram.ledger.now", lambda: clock.Now(boot.boot_s + 3601, boot.boot_id)
        )
        del both[lease.row.id]
        assert rows(ledger) == both
    assert rows(ledger) == {}
    assert files(ledger) == []


def test_after_a_reboot_leases_and_rows_are_stale(ledger: Ledger) -> None:
    until_s = clock.now().boot_s + 3600
    plant(ledger, id="00000000000c", boot_id=ANOTHER_BOOT, lease_until_boot_s=until_s, kind="hold")
    plant(ledger, id="00000000000d", boot_id=ANOTHER_BOOT)
    assert rows(ledger) == {}
    plant(ledger, id="00000000000e", lease_until_boot_s=until_s, kind="hold")
    assert rows(ledger) == {"00000000000e": 700}


# Case 8


def test_a_child_forked_while_the_lock_is_held_does_not_keep_it(ledger: Ledger) -> None:
    with store.locked(ledger.directory, ledger.tracer):
        inheritor = Child(lambda say, wait: (say("up"), wait())[0])
        assert inheritor.line() == "up"
    try:
        with store.locked(ledger.directory, ledger.tracer, timeout_s=0.5):
            pass  # the child still has the descriptor, but no lock
        held = os.open(ledger.directory / "lock", os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        with (
            pytest.raises(GshareError, match="held too long"),
            store.locked(ledger.directory, ledger.tracer, timeout_s=0.2),
        ):
            pass
        os.close(held)
    finally:
        inheritor.kill()


def test_a_forked_child_of_a_holder_does_not_keep_the_row(ledger: Ledger) -> None:
    def work(say: Say, wait: WaitFor) -> None:
        reservation = take(ledger, 500)
        if os.fork() == 0:
            reservation.release()  # not its own: does nothing
            say(f"{reservation.id} {os.getpid()}")  # by itself: its copy of the descriptor is closed by now
            time.sleep(60)
        wait()

    with child(work) as parent:
        row_id, grandchild = parent.line().split()
        try:
            assert rows(ledger) == {row_id: 500}
            parent.kill()
            os.kill(int(grandchild), 0)  # it lives on
            assert rows(ledger) == {}
        finally:
            os.kill(int(grandchild), signal.SIGKILL)
