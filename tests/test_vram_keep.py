"""A live holder's files that something removed or damaged come back, however steady its use is."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gshare.agent.errors import GshareError, RetryLater
from gshare.agent.vram import store
from gshare.agent.vram.guard import reserve
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.watch import run_program

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import (
    Say,
    WaitFor,
    child,
    device,
    files,
    make_ledger,
    rows,
    take,
    until,
    write_devices,
)

Damage = Callable[[Path, str], None]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path)


def remove_row(directory: Path, row_id: str) -> None:
    (directory / f"row-{row_id}.json").unlink()


def remove_life(directory: Path, row_id: str) -> None:
    (directory / f"row-{row_id}.life").unlink()


def remove_both(directory: Path, row_id: str) -> None:
    remove_row(directory, row_id)
    remove_life(directory, row_id)


def remove_directory(directory: Path, row_id: str) -> None:
    gone = directory.with_name("gone")
    directory.rename(gone)  # at once: its holder may be writing
    shutil.rmtree(gone, ignore_errors=True)


def cut(directory: Path, row_id: str) -> None:
    os.truncate(directory / f"row-{row_id}.json", 20)


def overwrite_in_place(directory: Path, row_id: str) -> None:
    """Same inode, same size, and the time of modification set back."""
    path = directory / f"row-{row_id}.json"
    before = path.stat()
    path.write_bytes(b"x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_row(directory: Path, row_id: str) -> None:
    remove_row(directory, row_id)
    (directory / f"row-{row_id}.json").write_text("{}", encoding="utf-8")


def replace_life(directory: Path, row_id: str) -> None:
    """A row whose flock can be taken is a dead one."""
    remove_life(directory, row_id)
    (directory / f"row-{row_id}.life").touch()


EVERY = (
    remove_row,
    remove_life,
    remove_both,
    remove_directory,
    cut,
    overwrite_in_place,
    replace_row,
    replace_life,
)


@pytest.mark.parametrize("damage", EVERY)
@pytest.mark.parametrize("look", ["keep", "record_use"])
def test_what_was_removed_or_damaged_is_put_back_at_the_next_look(
    ledger: Ledger, damage: Damage, look: str
) -> None:
    def work(say: Say, wait: WaitFor) -> None:
        devices = ledger.source.devices()
        with reserve(5000, task="t", devices=devices, ledger=ledger, on_warning=say) as reservation:
            reservation.record_use("step", 300)
            say(reservation.id)
            for _ in range(2):
                wait()
                if look == "keep":
                    reservation.keep()
                else:
                    reservation.record_use("step", 300)  # as before: no news
                say("looked")
            wait()

    with child(work) as holder:
        row_id = holder.line()
        damage(ledger.directory, row_id)
        holder.go_on()
        assert f"reservation {row_id}: something removed or damaged its files in" in holder.line()
        assert holder.line() == "looked"
        assert rows(ledger) == {row_id: 5000}
        assert ledger.look()[0].damaged == []
        with pytest.raises(RetryLater, match="5000 reserved"):
            take(ledger, 5000)
        damage(ledger.directory, row_id)
        holder.go_on()
        assert holder.line() == "looked"  # put back again, and not said again
        assert rows(ledger) == {row_id: 5000}
        holder.go_on()
        assert holder.wait() == 0
    assert files(ledger) == []


def test_without_a_look_it_stays_lost(ledger: Ledger) -> None:
    """The control: nothing else puts it back."""
    with take(ledger, 5000) as reservation:
        remove_both(ledger.directory, reservation.id)
        assert rows(ledger) == {}
        take(ledger, 8000).release()


def test_a_row_that_stands_is_not_written_again(ledger: Ledger) -> None:
    with take(ledger, 5000) as reservation:
        reservation.record_use("step", 300)
        row = ledger.directory / f"row-{reservation.id}.json"
        before = (row.stat().st_ino, row.stat().st_ctime_ns)
        reservation.keep()
        reservation.record_use("step", 300)
        assert (row.stat().st_ino, row.stat().st_ctime_ns) == before
        reservation.grow(100)
        after = row.stat().st_ino
        assert after != before[0]
        reservation.keep()  # its own change is no damage
        assert row.stat().st_ino == after


@pytest.mark.parametrize("damage", [damage for damage in EVERY if damage is not overwrite_in_place])
def test_what_is_damaged_while_it_is_written_is_put_back_too(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    """Between the renaming and the look at what came of it, which must not take the damage for its own.

    Not found is who keeps the size and sets the time back in that moment: no accident does.
    """
    with take(ledger, 5000) as reservation:
        rename = os.rename

        def and_damage(*names: str, **keys: int) -> None:
            rename(*names, **keys)
            time.sleep(0.02)  # the kernel's file times are some milliseconds apart
            damage(ledger.directory, reservation.id)

        with monkeypatch.context() as patch, contextlib.suppress(GshareError):
            patch.setattr(os, "rename", and_damage)
            reservation.record_use("load", 300)
        reservation.keep()
        assert rows(ledger) == {reservation.id: 5000}
        assert ledger.look()[0].damaged == []


def test_what_another_process_looks_after_is_left_alone(ledger: Ledger) -> None:
    """A grant that was not written here, and one that was given back."""
    with take(ledger, 5000) as reservation:
        grant = reservation._grant
        written, grant.written = grant.written, None
        remove_both(ledger.directory, reservation.id)
        reservation.keep()
        assert rows(ledger) == {}
        grant.written = written
        reservation.keep()
        assert rows(ledger) == {reservation.id: 5000}
    reservation.keep()
    assert files(ledger) == []


@pytest.mark.parametrize("damage", EVERY)
@pytest.mark.parametrize("state", ["ok", "lost"])
def test_gpu_run_puts_its_row_back_while_the_program_runs(
    ledger: Ledger, tmp_path: Path, damage: Damage, state: str
) -> None:
    """Also while the driver does not say what the program uses, so that there is nothing to write down."""
    up, done = tmp_path / "up", tmp_path / "done"

    def work(say: Say, wait: WaitFor) -> None:
        with take(ledger, 5000) as reservation:
            say(reservation.id)
            program = ["sh", "-c", f"touch {up}; while [ ! -e {done} ]; do sleep 0.02; done; exit 7"]
            code = run_program(reservation, program, strict=False, notify=lambda _: None, poll_s=0.02)
        say(f"code {code}")

    with child(work) as watcher:
        row_id = watcher.line()
        until(up.exists)
        write_devices(tmp_path / "devices.toml", device(state=f'"{state}"'))
        damage(ledger.directory, row_id)
        until(lambda: rows(ledger) == {row_id: 5000} and ledger.look()[0].damaged == [])
        done.touch()
        assert watcher.line() == "code 7"
    assert files(ledger) == []


def test_a_row_that_is_changed_before_its_writer_can_look_is_written_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the moment between the renaming and the look at the file's times."""
    real = store.stamp

    def late(path: str | Path, directory: int | None = None) -> store.Stamp | None:
        monkeypatch.setattr(store, "stamp", real)
        overwrite_in_place(ledger.directory, str(path).removeprefix("row-").removesuffix(".json"))
        return real(path, directory)

    monkeypatch.setattr(store, "stamp", late)
    with take(ledger, 5000) as reservation:
        assert rows(ledger) != {reservation.id: 5000}
        reservation.keep()
        assert rows(ledger) == {reservation.id: 5000}


def test_a_look_asks_for_the_lock_for_a_second_at_most(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One comes with every training step, and a stopped process may hold the lock for ever."""
    asked: list[float] = []

    def note(self: Ledger, *arguments: object, patience_s: float, **keys: object) -> None:
        asked.append(patience_s)

    with take(ledger, 5000) as reservation:
        remove_row(ledger.directory, reservation.id)
        monkeypatch.setattr(Ledger, "change", note)
        reservation.keep()
        reservation.lock_s = 0.2
        reservation.keep()
        assert asked == [1.0, 0.2]
