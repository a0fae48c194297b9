"""A reservation in its process's hands: growing, clients, measuring, the allocator's cap, how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.vram.guard import Cap, Reservation, allocator_cap, candidates, reserve
from gshare.agent.vram.ledger import Ledger, Queued
from gshare.agent.vram.machine import Wait
from gshare.agent.vram.queue import Announcer
from gshare.agent.vram.rows import Client, decode_row

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import TOTAL_MB, child, device, files, make_ledger, rows, take, write_devices


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path)


def on_disk(ledger: Ledger, reservation: Reservation) -> object:
    return decode_row((ledger.directory / f"row-{reservation.id}.json").read_bytes())


def test_the_row_says_whose_it_is(ledger: Ledger) -> None:
    with take(ledger, 500, task="finetune support") as reservation:
        row = reservation.row
        assert (row.pid, row.uid, row.task, row.budget_mb) == (
            os.getpid(),
            os.geteuid(),
            "finetune support",
            500,
        )
        assert row.pid_start > 0
        assert row == on_disk(ledger, reservation)
    assert files(ledger) == []


def test_it_is_given_back_when_the_block_fails(ledger: Ledger) -> None:
    with pytest.raises(ZeroDivisionError), take(ledger, 500):
        raise ZeroDivisionError
    assert rows(ledger) == {}


def test_grow_is_admitted_like_a_request_and_shrink_gives_back(ledger: Ledger) -> None:
    with take(ledger, 500) as one, take(ledger, 7000) as other:
        one.grow(1000)
        assert rows(ledger) == {one.id: 1500, other.id: 7000}
        with pytest.raises(RetryLater, match=f"reservation {one.id} cannot grow: 1 MiB asked, 0 of 8500"):
            one.grow(1)
        assert rows(ledger) == {one.id: 1500, other.id: 7000}
        one.shrink(600)
        assert rows(ledger)[one.id] == 900
        with pytest.raises(UsageError, match="900 MiB less leaves 0"):
            one.shrink(900)
        assert on_disk(ledger, one) == one.row


def test_growing_into_a_peak_that_already_counts_asks_for_nothing_more(ledger: Ledger) -> None:
    with take(ledger, 500) as one, take(ledger, 7000):
        one.record_use("load", 1500)
        one.grow(1000)  # 8500 are counted: 1500 for the peak
        assert rows(ledger)[one.id] == 1500


def test_shrinking_does_not_undo_what_was_once_used(ledger: Ledger) -> None:
    with take(ledger, 5000) as one:
        one.record_use("save", 4800)
        one.shrink(4000)
        assert rows(ledger)[one.id] == 4800


def test_a_shared_trainer_has_a_part_a_client_and_measures_anew_when_one_leaves(ledger: Ledger) -> None:
    with take(ledger, 3000) as trainer:
        trainer.set_client("alice", 1000)
        trainer.set_client("bob", 2000)
        assert trainer.budget_mb == 6000
        trainer.set_client("alice", 1500)
        assert trainer.row.clients == (
            Client(name="bob", budget_mb=2000),
            Client(name="alice", budget_mb=1500),
        )
        assert trainer.budget_mb == 6500
        trainer.record_use("eval", 7000)
        with pytest.raises(RetryLater, match="cannot grow"):
            trainer.set_client("carol", 5000)
        assert len(trainer.row.clients) == 2
        trainer.set_client("bob", None)
        assert trainer.budget_mb == 4500
        assert rows(ledger)[trainer.id] == 7000  # not before it is measured: its memory may still be taken
        trainer.record_use("after", 4000)
        assert rows(ledger)[trainer.id] == 4500
        trainer.record_use("later", 4600)
        assert rows(ledger)[trainer.id] == 4600
        with pytest.raises(UsageError, match="clients have 1500"):
            trainer.shrink(3001)
        assert on_disk(ledger, trainer) == trainer.row


def test_use_is_recorded_by_phase_and_small_changes_are_not_written(ledger: Ledger) -> None:
    with take(ledger, 5000) as one:
        one.record_use("load", 3000)
        one.record_use("step", 2990)
        before = (ledger.directory / f"row-{one.id}.json").stat().st_ino
        one.record_use("step", 2960)
        assert (ledger.directory / f"row-{one.id}.json").stat().st_ino == before
        one.record_use("step", 2000)
        assert (ledger.directory / f"row-{one.id}.json").stat().st_ino != before
        assert one.row.uses == {"load": 3000, "step": 2990}
        assert (one.row.peak_mb, one.row.used_mb) == (3000, 2000)


def test_more_than_20_percent_over_the_budget_is_warned_about_once_a_phase(ledger: Ledger) -> None:
    said: list[str] = []
    devices = ledger.source.devices()
    with reserve(1000, task="t", devices=devices, ledger=ledger, on_warning=said.append) as one:
        one.record_use("load", 1200)
        assert said == []
        one.record_use("save", 1250)
        one.record_use("save", 1300)
        assert len(said) == 1
        assert "1250 MiB used after save, 25% more than the 1000 MiB reserved" in said[0]
        one.record_use("eval", 1300)
        assert len(said) == 2


def test_the_allocator_gets_the_budget_without_the_context() -> None:
    assert allocator_cap(8000, 500, 10_000) == Cap(7500, 0.75)
    assert allocator_cap(20_000, 500, 10_000).fraction == 1.0
    for context in (8000, 9000):
        with pytest.raises(GshareError, match="reserve more"):
            allocator_cap(8000, context, 10_000)


def test_the_cap_is_that_of_the_reservation_as_it_is_now(ledger: Ledger) -> None:
    with take(ledger, 1000) as one:
        assert one.cap(200, TOTAL_MB).mb == 800
        one.grow(1000)
        assert one.cap(200, TOTAL_MB).mb == 1800


def test_after_release_nothing_is_done(ledger: Ledger) -> None:
    one = take(ledger, 500)
    one.release()
    one.release()
    one.record_use("load", 400)
    one.grow(100)
    assert not one.is_open
    assert files(ledger) == []


def test_threads_may_share_a_reservation(ledger: Ledger) -> None:
    with take(ledger, 100) as one:
        threads = [threading.Thread(target=one.grow, args=(10,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rows(ledger) == {one.id: 180}


def test_a_forked_child_can_neither_change_nor_release_it(ledger: Ledger) -> None:
    with take(ledger, 500) as one:

        def work(say: Callable[[str], None], wait: Callable[[], str]) -> None:
            one.grow(100)
            one.release()
            say(str(one.is_open))

        with child(work) as forked:
            assert forked.line() == "False"
            assert forked.wait() == 0
        assert rows(ledger) == {one.id: 500}
        one.grow(100)
        assert rows(ledger) == {one.id: 600}


END = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {support!r})
from ledger_children import make_ledger, take
reservation = take(make_ledger(Path({folder!r})), 500)
print(reservation.id, flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("end", "cleaned"),
    [
        ("", True),  # the interpreter ends: atexit
        ("sys.exit(3)", True),
        ("raise KeyboardInterrupt", True),
        ("os._exit(0)", False),
        ("os.kill(os.getpid(), signal.SIGTERM)", False),
        ("os.kill(os.getpid(), signal.SIGKILL)", False),
    ],
)
def test_however_the_process_ends_the_next_operation_finds_no_row(
    ledger: Ledger, tmp_path: Path, end: str, cleaned: bool
) -> None:
    code = END.format(support=str(Path(__file__).parent / "support"), folder=str(tmp_path), end=end)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    row_id = done.stdout.strip()
    assert len(row_id) == 12, done.stderr
    assert (f"row-{row_id}.json" not in files(ledger)) is cleaned
    assert rows(ledger) == {}
    assert files(ledger) == []


def test_a_release_that_cannot_write_warns_and_the_row_is_dead(ledger: Ledger, tmp_path: Path) -> None:
    said: list[str] = []
    one = reserve(500, task="t", devices=ledger.source.devices(), ledger=ledger, on_warning=said.append)
    away = tmp_path / "away"
    ledger.directory.rename(away)
    ledger.directory.write_text("in the way", encoding="utf-8")
    one.release()
    assert f"reservation {one.id} goes with the next operation: cannot use" in said[0]
    ledger.directory.unlink()
    away.rename(ledger.directory)
    assert rows(ledger) == {}


def test_a_waiting_request_says_where_it_stands_when_that_changes(ledger: Ledger) -> None:
    said: list[str] = []

    def at(position: int, reason: str) -> Queued:
        return Queued(decision=Wait(position, reason), gpu_uuid="GPU-a", place=None)

    announce = Announcer(said.append)
    for queued in (at(2, "x"), at(2, "y"), at(1, "y")):
        announce(queued)
    assert said == ["waiting for GPU-a, place 2: x", "waiting for GPU-a, place 1: y"]
    talkative = Announcer(said.append, every_s=0)
    talkative(at(1, "y"))
    talkative(at(1, "z"))
    assert len(said) == 4


def test_no_signal_handler_is_installed(ledger: Ledger) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    with take(ledger, 500):
        assert [signal.getsignal(number) for number in numbers] == before


def test_cuda_visible_devices_limits_where_it_may_go(ledger: Ledger, tmp_path: Path, monkeypatch) -> None:
    write_devices(tmp_path / "devices.toml", device("GPU-aaaa-1"), device("GPU-bbbb-2"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbbb")
    with reserve(100, task="t", ledger=ledger) as one:
        assert one.device.uuid == "GPU-bbbb-2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="leaves no device"):
        candidates(ledger, None)
