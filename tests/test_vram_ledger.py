"""The ledger with real processes: contention, death at every step, damage, clocks, forks, symlinks, users."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.vram import clock, paths, store
from gshare.agent.vram.ledger import Grant, Ledger, Queued, Wanted
from gshare.agent.vram.machine import MAX_BYPASS
from gshare.agent.vram.queue import wait_for
from gshare.agent.vram.repair import repair
from gshare.agent.vram.rows import Row, decode_row, encode
from gshare.agent.vram.simulated import SimulatedDevices

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import (
    NO_CONFIG,
    USABLE_MB,
    Child,
    child,
    device,
    files,
    holder,
    make_ledger,
    rows,
    take,
    until,
    write_devices,
)

Say = Callable[[str], None]
WaitFor = Callable[[], str]
OTHER_UID = 54321

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path)


@pytest.fixture
def open_ledger() -> Iterator[Ledger]:
    """One that other users can reach: pytest's own directories are 0700."""
    with tempfile.TemporaryDirectory(prefix="gshare-test-") as folder:
        os.chmod(folder, 0o755)
        yield make_ledger(Path(folder))


def wanted(ledger: Ledger, mb: int, **keys: object) -> Wanted:
    return msgspec.structs.replace(Wanted(mb=mb, devices=ledger.source.devices(), task="test"), **keys)


# Case 1


@pytest.mark.parametrize(("mb", "expected"), [(10, 400), (40, USABLE_MB // 40)])
def test_8_processes_of_50_reserves_each_keep_all_that_fit_and_nothing_more(
    ledger: Ledger, mb: int, expected: int
) -> None:
    def work(say: Say, wait: WaitFor) -> None:
        grants = [ledger.reserve(wanted(ledger, mb)) for _ in range(50)]
        say(str(sum(isinstance(grant, Grant) for grant in grants)))
        wait()

    children = [Child(work) for _ in range(8)]
    try:
        kept = sum(int(one.line(60)) for one in children)
        standing = rows(ledger)
        assert kept == len(standing) == expected
        assert sum(standing.values()) == expected * mb <= USABLE_MB
    finally:
        for one in children:
            one.kill()
    assert rows(ledger) == {}
    assert files(ledger) == []


# Case 2


class KillingOs:
    """The `os` of the store in a child: the process dies just before its n-th call that changes something."""

    CALLS = ("open", "fchmod", "write", "fsync", "rename", "unlink", "close")

    def __init__(self, calls_left: int) -> None:
        self.left = calls_left

    def __getattr__(self, name: str) -> object:
        value = getattr(os, name)
        if name not in self.CALLS:
            return value

        def call(*args: object, **keys: object) -> object:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
            return value(*args, **keys)

        return call


@pytest.mark.parametrize("operation", ["reserve", "change", "release"])
def test_sigkill_before_every_call_leaves_old_or_new_and_cleans_up(ledger: Ledger, operation: str) -> None:
    def work(step: int) -> Callable[[Say, WaitFor], None]:
        def run(say: Say, wait: WaitFor) -> None:
            grant = None
            if operation != "reserve":
                grant = ledger.reserve(wanted(ledger, 1000))
                assert isinstance(grant, Grant)
                say(grant.row.id)
            store.os = KillingOs(step)  # pyright: ignore[reportAttributeAccessIssue]
            if grant is None:
                ledger.reserve(wanted(ledger, 1000))
            elif operation == "change":
                ledger.change(grant, lambda row: msgspec.structs.replace(row, budget_mb=2000))
            else:
                ledger.release(grant)
            os._exit(0)

        return run

    with holder(ledger, 500) as neighbour:
        kept = neighbour.line()
        step, died = 0, 0
        while True:
            with child(work(step)) as victim:
                own = victim.line() if operation != "reserve" else ""
                code = victim.wait()
            path = ledger.directory / f"row-{own}.json"
            if operation == "change":
                assert decode_row(path.read_bytes()).budget_mb in (1000, 2000)
            assert decode_row((ledger.directory / f"row-{kept}.json").read_bytes()).budget_mb == 500
            assert rows(ledger) == {kept: 500}
            assert files(ledger) == [f"row-{kept}.json", f"row-{kept}.life"]
            if code == 0:
                break
            assert code == -signal.SIGKILL
            step, died = step + 1, died + 1
        # Lock, life, temp, fchmod, write, fsync, rename, …: it did die at many places.
        assert died >= (5 if operation == "release" else 8)


# Case 3


def damage(ledger: Ledger, row_id: str, data: bytes) -> None:
    (ledger.directory / f"row-{row_id}.json").write_bytes(data)


def test_a_truncated_row_blocks_is_kept_and_goes_only_by_repair(ledger: Ledger) -> None:
    with holder(ledger, 500) as dead:
        row_id = dead.line()
        whole = (ledger.directory / f"row-{row_id}.json").read_bytes()
        dead.kill()
    damage(ledger, row_id, whole[:20])
    with pytest.raises(RetryLater, match=rf"row {row_id} cannot be read.*gshare gpu repair"):
        take(ledger, 100)
    assert (ledger.directory / f"row-{row_id}.json").read_bytes() == whole[:20]
    (done,) = repair(ledger)
    assert done.outcome == "taken out"
    assert Path(done.kept).read_bytes() == whole[:20]
    with take(ledger, 100):
        pass
    assert repair(ledger) == []


def test_a_damaged_row_counts_at_its_readable_budget(ledger: Ledger) -> None:
    with holder(ledger, 500) as dead:
        row_id = dead.line()
        dead.kill()
    damage(ledger, row_id, b'{"gpu_uuid":"GPU-aaaa-1","budget_mb":8000,"task":"cut of')
    with take(ledger, 500):
        pass
    with pytest.raises(RetryLater, match="8000 reserved"):
        take(ledger, 501)


def test_repair_leaves_a_damaged_row_whose_holder_lives_and_the_holder_mends_it(ledger: Ledger) -> None:
    def work(say: Say, wait: WaitFor) -> None:
        with take(ledger, 500) as reservation:
            say(reservation.id)
            wait()
            reservation.record_use("load", 300)
            say("mended")
            wait()

    with child(work) as alive:
        row_id = alive.line()
        damage(ledger, row_id, b"")
        (found,) = repair(ledger)
        assert found.kept == ""
        assert "its process is alive" in found.outcome
        with pytest.raises(RetryLater):
            take(ledger, 100)
        alive.go_on()
        assert alive.line() == "mended"
        assert rows(ledger) == {row_id: 500}


def test_a_symlink_in_a_rows_place_blocks_and_is_not_followed(ledger: Ledger, tmp_path: Path) -> None:
    rows(ledger)
    target = tmp_path / "target"
    target.write_text("{}", encoding="utf-8")
    (ledger.directory / "row-00000000000a.json").symlink_to(target)
    with pytest.raises(RetryLater, match="00000000000a cannot be read"):
        take(ledger, 100)
    (done,) = repair(ledger)
    assert done.reason == "is a symlink"
    assert target.read_text(encoding="utf-8") == "{}"
    assert rows(ledger) == {}


# Case 4


def plant(ledger: Ledger, **keys: object) -> Row:
    """A row file without a living holder, in the name of this process."""
    rows(ledger)
    base = Row(
        id="0123456789ab",
        gpu_uuid="GPU-aaaa-1",
        budget_mb=700,
        task="planted",
        kind="trainer",
        pid=os.getpid(),
        uid=os.geteuid(),
        created=time.time(),
        boot_id=clock.now().boot_id,
        pid_start=clock.start_ticks(os.getpid()) or 0,
        pid_ns=clock.pid_namespace(os.getpid()) or 0,
    )
    row = msgspec.structs.replace(base, **keys)
    kind = "lease" if row.lease_until_boot_s is not None else "row"
    (ledger.directory / f"{kind}-{row.id}.json").write_bytes(encode(row))
    if kind == "row":
        (ledger.directory / f"row-{row.id}.life").touch()
    return row


def test_a_row_whose_pid_was_reused_is_stale(ledger: Ledger) -> None:
    plant(ledger, pid_start=1)
    assert rows(ledger) == {}
    assert files(ledger) == []


def test_a_row_whose_proof_of_life_cannot_be_looked_at_is_held(ledger: Ledger) -> None:
    row = plant(ledger)
    (ledger.directory / f"row-{row.id}.life").unlink()
    os.mkfifo(ledger.directory / f"row-{row.id}.life")
    assert rows(ledger) == {row.id: 700}


def test_a_row_without_proof_of_life_is_damage_and_counts(ledger: Ledger) -> None:
    row = plant(ledger)
    (ledger.directory / f"row-{row.id}.life").unlink()
    view, _ = ledger.look()
    assert [d.reason for d in view.damaged] == ["its proof of life is gone"]
    with pytest.raises(RetryLater, match="700 reserved"):
        take(ledger, USABLE_MB - 699)
    (found,) = repair(ledger)
    assert "is alive" in found.outcome  # the PID and its start time are this process's own
    assert len(ledger.look()[0].damaged) == 1


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
    plant(ledger, id="00000000000c", boot_id="another boot", lease_until_boot_s=until_s, kind="hold")
    plant(ledger, id="00000000000d", boot_id="another boot")
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
        pid = os.fork()
        if pid == 0:
            reservation.release()  # not its own: does nothing
            time.sleep(60)
        say(f"{reservation.id} {pid}")
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


# Case 9


@pytest.mark.parametrize("place", ["lock", "directory"])
def test_a_symlink_at_the_lock_or_the_directory_is_an_error_and_its_target_untouched(
    tmp_path: Path, place: str
) -> None:
    ledger = make_ledger(tmp_path)
    target = tmp_path / "target"
    if place == "lock":
        target.write_text("precious", encoding="utf-8")
        ledger.directory.mkdir(mode=0o1777)
        (ledger.directory / "lock").symlink_to(target)
    else:
        target.mkdir()
        ledger.directory.symlink_to(target)
    with pytest.raises(GshareError, match="is a symlink; remove it"):
        take(ledger, 100)
    if place == "lock":
        assert target.read_text(encoding="utf-8") == "precious"
    else:
        assert list(target.iterdir()) == []


# Case 10


def test_others_see_the_peak_or_the_budget_and_outside_memory_counts(ledger: Ledger, tmp_path: Path) -> None:
    with take(ledger, 8000) as big:
        big.record_use("load", 5000)
        big.record_use("save", 7900)
        big.record_use("eval", 5100)
        assert rows(ledger) == {big.id: 8000}
        with pytest.raises(RetryLater, match="500 of 8500 MiB free"):
            take(ledger, 501)
        big.record_use("save", 8200)  # a peak above the budget counts
        assert rows(ledger) == {big.id: 8200}
        with pytest.raises(RetryLater, match="300 of 8500 MiB free"):
            take(ledger, 301)
        write_devices(tmp_path / "devices.toml", device(used_by_others_mb=250))
        with pytest.raises(RetryLater, match="250 used outside"):
            take(ledger, 51)
        take(ledger, 50).release()
        mine = f"[{{ pid = {os.getpid()}, used_mb = 8200 }}]"
        write_devices(tmp_path / "devices.toml", device(processes=mine))
        take(ledger, 300).release()  # what a row's own process uses is not outside


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


# Where it lies


def test_the_directory_is_sticky_and_open_to_all_whatever_the_umask(ledger: Ledger) -> None:
    def work(say: Say, wait: WaitFor) -> None:
        os.umask(0o077)
        with take(ledger, 100) as reservation:
            say(reservation.id)
            wait()

    with child(work) as one:
        row_id = one.line()
        assert stat.S_IMODE(ledger.directory.stat().st_mode) == 0o1777
        for name in ("lock", f"row-{row_id}.json", f"row-{row_id}.life"):
            assert stat.S_IMODE((ledger.directory / name).stat().st_mode) == 0o644


@as_root
def test_two_users_share_one_ledger(open_ledger: Ledger) -> None:
    ledger = open_ledger

    def stranger(say: Say, wait: WaitFor) -> None:
        os.setgid(OTHER_UID)
        os.setuid(OTHER_UID)
        say(json.dumps(rows(ledger)))
        say(str(take(ledger, 1000).row.uid))
        with pytest.raises(RetryLater):
            take(ledger, 7001)
        os.kill(os.getpid(), signal.SIGKILL)

    def successor(say: Say, wait: WaitFor) -> None:
        os.setgid(OTHER_UID + 1)
        os.setuid(OTHER_UID + 1)
        say(json.dumps(rows(ledger)))
        say(str(len([name for name in files(ledger) if name.endswith(".life")])))
        take(ledger, 8000).release()

    with take(ledger, 500) as mine:
        with child(stranger) as other:
            assert json.loads(other.line()) == {mine.id: 500}
            assert other.line() == str(OTHER_UID)
            assert other.wait() == -signal.SIGKILL
        with child(successor) as third:
            assert json.loads(third.line()) == {mine.id: 500}  # the dead row of another user counts nothing,
            assert third.line() == "2"  # though only its owner or root can remove it
            assert third.wait() == 0
        assert rows(ledger) == {mine.id: 500}
        assert files(ledger) == [f"row-{mine.id}.json", f"row-{mine.id}.life"]


@as_root
def test_permission_denied_is_one_line(open_ledger: Ledger) -> None:
    ledger = open_ledger
    rows(ledger)
    ledger.directory.chmod(0o755)

    def stranger(say: Say, wait: WaitFor) -> None:
        os.setuid(OTHER_UID)
        take(ledger, 100)

    with child(stranger) as other:
        line = other.line()
    assert line.startswith("GshareError: ")
    assert "mode 0755) is not writable for you" in line


def test_a_directory_where_others_could_delete_our_rows_is_refused(ledger: Ledger) -> None:
    ledger.directory.mkdir()
    ledger.directory.chmod(0o777)
    with pytest.raises(GshareError, match=r"chmod \+t"):
        take(ledger, 100)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_filesystem_that_hosts_may_share_is_refused(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(paths, "filesystem_of", lambda path: kind)
    with pytest.raises(GshareError, match=f"is on {kind}, where locks may not hold"):
        take(ledger, 100)


def test_the_probe_finds_a_flock_that_does_not_exclude(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths.fcntl, "flock", lambda fd, how: None)
    with pytest.raises(GshareError, match="flock does not exclude"):
        take(ledger, 100)


def test_the_filesystem_is_that_of_the_last_mount_over_the_longest_point(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 0:2 / /home rw shared:1 - nfs4 server:/home rw\n"
        "3 1 0:3 / /home\\040x rw - xfs /dev/b rw\n"
        "4 2 0:4 / /home/local rw - tmpfs tmpfs rw\n"
        "5 2 0:5 / /home/local rw - overlay overlay rw\n",
        encoding="utf-8",
    )
    found = [
        paths.filesystem_of(Path(p), mounts) for p in ("/x", "/home/u", "/home x", "/home/local/d", "/homes")
    ]
    assert found == ["ext4", "nfs4", "xfs", "overlay", "ext4"]
    assert paths.filesystem_of(Path("/x"), tmp_path / "none") == ""


def test_where_the_ledger_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "ADMINISTRATOR", tmp_path / "run")
    monkeypatch.setattr(paths, "SHARED_MEMORY", tmp_path / "shm")
    assert paths.ledger_directory({}) == Path("/tmp/gshare")
    (tmp_path / "shm").mkdir()
    assert paths.ledger_directory({}) == tmp_path / "shm" / "gshare"
    (tmp_path / "run").mkdir()
    assert paths.ledger_directory({}) == tmp_path / "run"
    assert paths.ledger_directory({"GSHARE_LEDGER_DIR": "/else"}) == Path("/else")
    with pytest.raises(UsageError, match="must be an absolute path"):
        paths.ledger_directory({"GSHARE_LEDGER_DIR": "else"})


# Faults


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_full_disk_is_one_line_and_the_ledger_is_as_before(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*args: object, **keys: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with take(ledger, 500) as one:
        before = (ledger.directory / f"row-{one.id}.json").read_bytes()
        monkeypatch.setattr(store.os, call, full)
        with pytest.raises(GshareError, match="cannot be changed: No space left on device"):
            ledger.reserve(wanted(ledger, 100))
        with pytest.raises(GshareError, match="No space left"):
            one.record_use("load", 400)
        monkeypatch.undo()
        assert files(ledger) == [f"row-{one.id}.json", f"row-{one.id}.life"]
        assert (ledger.directory / f"row-{one.id}.json").read_bytes() == before
        one.record_use("load", 401)


def test_the_holder_puts_its_row_back_when_somebody_emptied_the_directory(ledger: Ledger) -> None:
    def work(say: Say, wait: WaitFor) -> None:
        with take(ledger, 500) as reservation:
            say(reservation.id)
            wait()
            reservation.record_use("load", 300)
            say("back")
            wait()

    with child(work) as one:
        row_id = one.line()
        for name in os.listdir(ledger.directory):
            (ledger.directory / name).unlink()
        ledger.directory.rmdir()
        assert rows(ledger) == {}
        one.go_on()
        assert one.line() == "back"
        assert rows(ledger) == {row_id: 500}
    assert rows(ledger) == {}


def test_a_lock_file_that_was_replaced_is_noticed(ledger: Ledger) -> None:
    rows(ledger)
    old = os.open(ledger.directory / "lock", os.O_RDONLY)
    fcntl.flock(old, fcntl.LOCK_EX)

    def work(say: Say, wait: WaitFor) -> None:
        say("tries")
        say(str(len(rows(ledger))))

    with child(work) as one:
        assert one.line() == "tries"
        time.sleep(0.1)  # it waits for the old lock now
        (ledger.directory / "lock").unlink()
        (ledger.directory / "lock").touch(mode=0o644)
        fcntl.flock(old, fcntl.LOCK_UN)
        with store.locked(ledger.directory, ledger.tracer):
            assert not store._is_current(old, os.open(ledger.directory, os.O_RDONLY), ledger.directory)
        assert one.line() == "0"
    os.close(old)


def test_a_device_in_trouble_fails_at_once_and_another_is_taken(tmp_path: Path) -> None:
    ledger = make_ledger(tmp_path, device(state='"lost"'), device("GPU-bbbb-2"))
    with take(ledger, 100) as reservation:
        assert reservation.device.uuid == "GPU-bbbb-2"
    sick = make_ledger(tmp_path, device(state='"lost"'))
    with pytest.raises(GshareError, match="lost") as error:
        take(sick, 100)
    assert error.value.exit_code == 1


def test_a_lease_is_released_and_renewed_by_id_and_a_living_holder_is_not(ledger: Ledger) -> None:
    lease = ledger.reserve(wanted(ledger, 300, kind="hold", lease_s=60.0))
    assert isinstance(lease, Grant)
    renewed = ledger.renew_lease(lease.row.id[:6], 7200.0)
    assert renewed.lease_until_boot_s is not None
    assert renewed.lease_until_boot_s > clock.now().boot_s + 7000
    with holder(ledger, 400) as one:
        row_id = one.line()
        with pytest.raises(GshareError, match=f"is held by process {one.pid}"):
            ledger.end_lease(row_id)
        with pytest.raises(GshareError, match="has no lease"):
            ledger.renew_lease(row_id, 60)
        assert ledger.end_lease(lease.row.id).id == lease.row.id
        assert rows(ledger) == {row_id: 400}
    for prefix in ("", "zzz", lease.row.id):
        with pytest.raises(UsageError, match="no reservation begins with"):
            ledger.end_lease(prefix)


def test_the_users_reserve_factor_is_used(tmp_path: Path) -> None:
    config = tmp_path / "gshare" / "config.toml"
    config.parent.mkdir()
    config.write_text("[gpu]\nreserve_factor = 0.5\n", encoding="utf-8")
    path = write_devices(tmp_path / "devices.toml", device())
    own = Ledger(
        directory=tmp_path / "ledger",
        source=SimulatedDevices(path),
        environ={"XDG_CONFIG_HOME": str(tmp_path)},
    )
    with pytest.raises(UsageError, match="5000 MiB may be reserved"):
        take(own, 5001)
    plain = Ledger(directory=tmp_path / "ledger", source=SimulatedDevices(path), environ=NO_CONFIG)
    take(plain, 5001).release()
