"""The ledger with real processes: contention, death at every call, damage, what counts, leases."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.vram import clock, store
from gshare.agent.vram.ledger import Grant, Ledger
from gshare.agent.vram.repair import repair
from gshare.agent.vram.rows import decode_row
from gshare.agent.vram.simulated import SimulatedDevices

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import (
    NO_CONFIG,
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
    wanted,
    write_devices,
)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path)


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
        kept = sum(int(one.line(300)) for one in children)  # up to 400 rows, each synced to the disk twice
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


# Devices, leases, factor


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
