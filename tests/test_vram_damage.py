"""Files that somebody or something damaged: leases, waiters, counts of passes, names, sizes. Real ledgers."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gshare.agent.errors import GshareError, RetryLater
from gshare.agent.vram import clock
from gshare.agent.vram.ledger import Grant, Ledger, Queued
from gshare.agent.vram.machine import MAX_BYPASS
from gshare.agent.vram.repair import repair
from gshare.agent.vram.rows import SCHEMA, Client, decode_waiter
from gshare.agent.vram.status import status
from gshare.agent.vram.store import MAX_FILE
from gshare.cli.gpu_view import lines

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import ANOTHER_BOOT, USABLE_MB, files, make_ledger, rows, take, wanted


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path)


@pytest.fixture(autouse=True)
def never_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiters here look once: a disk that takes more than 5 s from then on must not make them absent."""
    monkeypatch.setattr("gshare.agent.vram.view.ABSENT_S", math.inf)


def shown(ledger: Ledger) -> str:
    """The whole status as text: it must hold whatever lies in the ledger."""
    return "\n".join(line.plain for line in lines(status(ledger)))


def change_file(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    table = json.loads(path.read_bytes())
    change(table)
    path.write_text(json.dumps(table), encoding="utf-8")


# Leases


def hold(ledger: Ledger, mb: int = 8000) -> Path:
    lease = ledger.reserve(wanted(ledger, mb, kind="hold", lease_s=60.0))
    assert isinstance(lease, Grant)
    return ledger.directory / f"lease-{lease.row.id}.json"


LEASE_DAMAGE: dict[str, Callable[[dict[str, object]], object]] = {
    "the end is null": lambda table: table.update(lease_until_boot_s=None),
    "the end is missing": lambda table: table.pop("lease_until_boot_s"),
    "the end is NaN": lambda table: table.update(lease_until_boot_s=math.nan),
    "the end is infinite": lambda table: table.update(lease_until_boot_s=math.inf),
    "the end is text": lambda table: table.update(lease_until_boot_s="9e9"),
    "the end is negative": lambda table: table.update(lease_until_boot_s=-5),
    "the boot is missing": lambda table: table.pop("boot_id"),
    "the boot is empty": lambda table: table.update(boot_id=""),
    "the boot is no id": lambda table: table.update(boot_id=ANOTHER_BOOT[:-1]),
    "the schema is missing": lambda table: table.pop("schema"),
    "a newer schema keeps the end elsewhere": lambda table: table.update(
        schema=SCHEMA + 1, lease_until_boot_s=None, lease={"until": 9e9}
    ),
}


@pytest.mark.parametrize("what", LEASE_DAMAGE)
def test_a_damaged_lease_counts_until_repair_and_is_kept(ledger: Ledger, what: str) -> None:
    path = hold(ledger)
    change_file(path, LEASE_DAMAGE[what])
    damaged = path.read_bytes()
    with pytest.raises(RetryLater):
        take(ledger, USABLE_MB - 7999)
    assert path.read_bytes() == damaged
    assert f"damaged row {path.name}" in shown(ledger)
    (done,) = repair(ledger)
    assert (done.outcome, Path(done.kept).read_bytes()) == ("taken out", damaged)
    take(ledger, USABLE_MB).release()
    assert repair(ledger) == []


@pytest.mark.parametrize(
    ("until", "boot"), [(1.0, None), (9e9, ANOTHER_BOOT), (1.0, ANOTHER_BOOT)], ids=["over", "boot", "both"]
)
def test_a_lease_that_says_itself_that_it_is_over_is_gone(
    ledger: Ledger, until: float, boot: str | None
) -> None:
    """Negative control of the above."""
    path = hold(ledger)
    boot = boot or clock.now().boot_id
    change_file(path, lambda table: table.update(lease_until_boot_s=until, boot_id=boot))
    take(ledger, USABLE_MB).release()
    assert not path.exists()


def test_where_the_boot_cannot_be_told_no_lease_is_of_another_one(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hold(ledger)
    at = clock.now()
    monkeypatch.setattr("gshare.agent.vram.ledger.now", lambda: clock.Now(at.boot_s, ""))
    with pytest.raises(RetryLater, match="8000 reserved"):
        take(ledger, USABLE_MB - 7999)
    assert path.exists()


# Numbers


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lease_until_boot_s", "Infinity"),
        ("lease_until_boot_s", "1e400"),
        ("created_boot_s", "-Infinity"),
        ("created_boot_s", "NaN"),
        ("budget_mb", "9" * 400),
        ("peak_mb", "9" * 30),
        ("uid", "9" * 25),
        ("pid", "-7"),
        ("gpu_uuid", '""'),
        ("gpu_uuid", '"GPU-\\ud800"'),
        ("task", '"\\u001b]0;x\\u0007[/]\\ud800"'),
    ],
)
def test_no_value_in_a_row_breaks_the_status_or_escapes_repair(
    ledger: Ledger, capsys: pytest.CaptureFixture[str], key: str, value: str
) -> None:
    path = hold(ledger)
    change_file(path, lambda table: table.update({key: "@"}))
    path.write_text(path.read_text(encoding="utf-8").replace('"@"', value), encoding="utf-8")
    text = shown(ledger)
    print(text)  # a lone surrogate cannot be written
    assert all(char.isprintable() or char == "\n" for char in capsys.readouterr().out)
    if key == "gpu_uuid":
        assert "blocks on every device" in text
    with pytest.raises(RetryLater):
        take(ledger, USABLE_MB - 7999)
    if key == "task":
        assert repair(ledger) == []  # any text is a task
    else:
        assert [done.outcome for done in repair(ledger)] == ["taken out"]


# Waiters


def queue_up(ledger: Ledger, mb: int) -> Queued:
    queued = ledger.reserve(wanted(ledger, mb), join_s=60)
    assert isinstance(queued, Queued)
    assert queued.place is not None
    return queued


@pytest.mark.parametrize(
    "amount", ["-1000", "0", "NaN", "1e400", "9" * 30], ids=lambda value: str(value)[:40]
)
def test_a_waiter_for_an_absurd_amount_gives_nothing_away_and_is_written_again(
    ledger: Ledger, amount: str
) -> None:
    with take(ledger, 8000):
        queued = queue_up(ledger, 600)
        assert queued.place is not None
        path = ledger.directory / f"wait-{queued.place.waiter.id}.json"
        path.write_text(
            path.read_text(encoding="utf-8").replace('"request_mb":600', f'"request_mb":{amount}'),
            encoding="utf-8",
        )
        with pytest.raises(RetryLater, match="500 of 8500 MiB free"):
            take(ledger, 501)
        assert "Available for new jobs: 500 MiB" in shown(ledger)
        again = ledger.reserve(wanted(ledger, 600), place=queued.place)
        assert isinstance(again, Queued)
        assert decode_waiter(path.read_bytes()) == queued.place.waiter
        ledger.leave(queued.place)


def test_a_waiter_that_somebody_changed_is_written_again(ledger: Ledger) -> None:
    """Another amount or ticket is no damage that a reader sees: only the waiter itself knows better."""
    with take(ledger, 8000):
        queued = queue_up(ledger, 600)
        assert queued.place is not None
        path = ledger.directory / f"wait-{queued.place.waiter.id}.json"
        change_file(path, lambda table: table.update(request_mb=5, ticket=77))
        assert isinstance(ledger.reserve(wanted(ledger, 600), place=queued.place), Queued)
        assert decode_waiter(path.read_bytes()) == queued.place.waiter
        stamp = path.stat().st_mtime_ns
        assert isinstance(ledger.reserve(wanted(ledger, 600), place=queued.place), Queued)
        assert path.stat().st_mtime_ns == stamp  # and only then: each writing wakes all the others
        ledger.leave(queued.place)


# Counts of passes


def passes_file(ledger: Ledger) -> Path:
    return ledger.directory / f"passes-{os.geteuid()}.json"


@pytest.mark.parametrize(
    "count", ["-1000", str(MAX_BYPASS + 1), "9" * 400, "null", '"1"'], ids=lambda value: str(value)[:40]
)
def test_counts_that_nobody_counted_do_not_lift_the_bound_and_are_repaired(
    ledger: Ledger, count: str
) -> None:
    with take(ledger, 8000):
        queued = queue_up(ledger, 8000)
        assert queued.place is not None
        passes_file(ledger).write_text(f'{{"{queued.place.waiter.id}":{count}}}', encoding="utf-8")
        for _ in range(MAX_BYPASS):
            take(ledger, 100).release()
        with pytest.raises(RetryLater, match="passed often enough"):
            take(ledger, 100)
        passes_file(ledger).write_text(f'{{"{queued.place.waiter.id}":{count}}}', encoding="utf-8")
        (done,) = repair(ledger)
        assert (done.name, done.outcome) == (passes_file(ledger).name, "taken out")
        ledger.leave(queued.place)


def test_a_directory_named_like_the_counts_stops_nobody(ledger: Ledger) -> None:
    with take(ledger, 8000) as first:
        queued = queue_up(ledger, 8000)
        assert queued.place is not None
        passes_file(ledger).mkdir()
        with take(ledger, 100) as second:
            assert rows(ledger) == {first.id: 8000, second.id: 100}
        assert json.loads(passes_file(ledger).read_bytes()) == {queued.place.waiter.id: 1}
        ledger.leave(queued.place)


def test_when_a_pass_cannot_be_counted_nothing_is_taken(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with take(ledger, 8000) as first:
        queued = queue_up(ledger, 8000)
        assert queued.place is not None

        def refuse(*arguments: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        with monkeypatch.context() as patch:
            patch.setattr("gshare.agent.vram.store.Store.write", refuse)
            with pytest.raises(GshareError, match=r"passes-\d+.json belongs to another user"):
                take(ledger, 100)
        ledger.leave(queued.place)
        assert rows(ledger) == {first.id: 8000}
        assert files(ledger) == [f"row-{first.id}.json", f"row-{first.id}.life"]


@pytest.mark.parametrize(
    "name", ["passes-7.json", "wait-0123456789ab.json", "mps-0123456789ab.json", ".tmp-1"]
)
def test_what_lies_in_the_way_is_taken_out_by_repair(ledger: Ledger, name: str) -> None:
    rows(ledger)
    (ledger.directory / name).mkdir()
    (done,) = repair(ledger)
    assert (done.name, done.reason, done.outcome) == (name, "is no regular file", "taken out")
    assert Path(done.kept).is_dir()
    assert files(ledger) == ["quarantine"]
    assert repair(ledger) == []


def test_what_is_no_file_of_the_ledger_is_left_alone(ledger: Ledger) -> None:
    rows(ledger)
    (ledger.directory / "mine").mkdir()
    with take(ledger, 100) as one:
        (ledger.directory / f"row-{one.id}.life").unlink()
        (ledger.directory / f"row-{one.id}.life").mkdir()
        assert repair(ledger) == []
        (ledger.directory / f"row-{one.id}.life").rmdir()
    assert files(ledger) == ["mine"]


# Sizes and names


def test_a_row_that_no_reader_would_take_is_refused_and_the_ledger_as_before(ledger: Ledger) -> None:
    many = tuple(Client(name=f"client-{number:060d}", budget_mb=1) for number in range(1100))
    with pytest.raises(GshareError, match=rf"would have \d+ bytes and may have {MAX_FILE}: fewer clients"):
        ledger.reserve(wanted(ledger, 1100, clients=many))
    assert files(ledger) == []
    with take(ledger, 2000) as shared:

        def add_all() -> None:
            for client in many:
                shared.set_client(client.name, client.budget_mb)

        with pytest.raises(GshareError, match="fewer clients"):
            add_all()
        added = len(shared.row.clients)
        assert 500 < added < 1100
        view, _ = ledger.look()
        assert ([len(row.clients) for row in view.rows], view.damaged) == ([added], [])


def test_a_name_of_any_length_can_be_quarantined(ledger: Ledger) -> None:
    rows(ledger)
    for name in (b"row-" + b"x" * 240 + b".json", b"lease-" + b"\xff\x1b" * 120 + b".json"):
        (ledger.directory / os.fsdecode(name)).write_text("{", encoding="utf-8")
        (done,) = repair(ledger)
        assert done.outcome == "taken out"
        assert Path(done.kept).read_text(encoding="utf-8") == "{"


def test_a_quarantine_that_cannot_take_it_is_named_and_not_blamed_on_a_user(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(ledger)
    for name in ("row-0123456789aa.json", "row-0123456789ab.json"):
        (ledger.directory / name).write_text("{", encoding="utf-8")

    def full(*arguments: object, **keys: object) -> None:
        raise OSError(28, "No space left on device")

    (ledger.directory / "quarantine").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("gshare.agent.vram.store.os.rename", full)
        assert [done.outcome for done in repair(ledger)] == ["still counted: No space left on device"] * 2
    assert [done.outcome for done in repair(ledger)] == ["taken out"] * 2


def test_a_damaged_rows_name_in_a_refusal_cannot_drive_the_terminal(ledger: Ledger) -> None:
    rows(ledger)
    (ledger.directory / "row-\x1b[2J.json").mkdir()
    with pytest.raises(RetryLater, match=r"row \?\[2J cannot be read") as error:
        take(ledger, 100)
    assert str(error.value).isprintable()
