"""Rows on disk: round trip, older and newer schemas, damage and what can be saved of it."""

from __future__ import annotations

import json

import pytest
from gshare.agent.vram.budget import MAX_MB
from gshare.agent.vram.machine import Claim
from gshare.agent.vram.rows import (
    BOOT_ID,
    NO_BOOT,
    SCHEMA,
    BadRow,
    Client,
    Row,
    Waiter,
    decode_row,
    decode_waiter,
    encode,
    salvage,
)
from hypothesis import given
from hypothesis import strategies as st

#: Exactly the fields of the architecture page, which is schema 1.
SCHEMA_1 = {
    "id": "0123456789ab",
    "gpu_uuid": "GPU-a",
    "budget_mb": 8192,
    "peak_mb": 9000,
    "task": "finetune",
    "kind": "trainer",
    "pid": 4711,
    "uid": 1000,
    "created": 1.5e9,
    "clients": [{"name": "alice", "budget_mb": 900}],
}


def row(**keys: object) -> Row:
    return decode_row(json.dumps({**SCHEMA_1, **keys}).encode())


#: What a number may be that nobody wrote: JSON has no NaN and no Infinity, but Python reads them.
ABSURD = ("NaN", "Infinity", "-Infinity", "1e400", "-1", "9" * 400, "null", '"8"', "true", "0.5")

WAITER = Waiter(
    id="0123456789ab",
    gpu_uuids=("GPU-a", "GPU-b"),
    request_mb=100,
    ticket=3,
    task="t",
    pid=5,
    uid=6,
    created=1.5e9,
    deadline_boot_s=50.5,
    boot_id=NO_BOOT,
    created_boot_s=40.25,
)


def with_field(item: Row | Waiter, key: str, value: str) -> bytes:
    """The item's JSON with one field's text replaced."""
    table = json.loads(encode(item))
    assert key in table
    table[key] = "@"
    return json.dumps(table).replace('"@"', value).encode()


def test_a_row_comes_back_as_it_was() -> None:
    made = row(clients=[{"name": "a", "budget_mb": 5}], uses={"load": 3}, schema=SCHEMA, used_mb=7)
    assert decode_row(encode(made)) == made
    assert encode(made).endswith(b"}\n")


def test_a_row_of_schema_1_is_read() -> None:
    old = row()
    assert old.schema == SCHEMA
    assert old.clients == (Client(name="alice", budget_mb=900),)
    assert old.counted_mb == 9000
    assert old.lease_until_boot_s is None


def test_a_hold_of_schema_1_has_run_out_and_is_not_endless() -> None:
    old = row(kind="hold")
    assert (old.lease_until_boot_s, old.boot_id) == (0.0, NO_BOOT)
    assert BOOT_ID.match(NO_BOOT)


@pytest.mark.parametrize("key", ["lease_until_boot_s", "boot_id"])
def test_a_newer_row_that_lost_its_schema_is_not_taken_for_one_of_schema_1(key: str) -> None:
    """Else the step from schema 1 would end its lease."""
    with pytest.raises(BadRow, match="schema 1 beside fields of schema 2"):
        row(**{"kind": "hold", key: None})


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize(
    "key", ["budget_mb", "peak_mb", "used_mb", "pid", "uid", "pid_start", "pid_ns", "schema"]
)
def test_absurd_numbers_in_a_row_are_damage(key: str, value: str) -> None:
    with pytest.raises(BadRow) as error:
        decode_row(with_field(row(), key, value))
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    "value",
    [v for v in ABSURD if v not in ("null", "0.5")] + ["1e300", "-0.5"],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("key", ["lease_until_boot_s", "created_boot_s"])
def test_absurd_times_in_a_row_are_damage(key: str, value: str) -> None:
    with pytest.raises(BadRow):
        decode_row(with_field(row(), key, value))
    assert decode_row(with_field(row(), key, "0.5"))


@pytest.mark.parametrize(
    "keys",
    [
        {"budget_mb": MAX_MB + 1},
        {"peak_mb": MAX_MB + 1},
        {"used_mb": MAX_MB + 1},
        {"uses": {"load": -1}},
        {"uses": {"load": MAX_MB + 1}},
        {"clients": [{"name": "a", "budget_mb": -1}]},
        {"clients": [{"name": "a", "budget_mb": MAX_MB + 1}]},
        {"gpu_uuid": ""},
        {"gpu_uuid": "GPU-\x1b[2J"},
        {"gpu_uuid": "GPU-\ud800"},
        {"gpu_uuid": "G" * 201},
        {"created": float("nan")},
    ],
)
def test_what_no_ledger_writes_is_damage(keys: dict[str, object]) -> None:
    with pytest.raises(BadRow):
        row(**keys)


def test_the_largest_that_is_written_is_read() -> None:
    assert row(budget_mb=MAX_MB, gpu_uuid="G" * 200).counted_mb == MAX_MB


def test_a_waiter_comes_back_as_it_was() -> None:
    assert decode_waiter(encode(WAITER)) == WAITER


@pytest.mark.parametrize("value", [*ABSURD, "0"], ids=lambda value: str(value)[:40])
def test_a_waiter_for_an_absurd_amount_is_none(value: str) -> None:
    """A negative one would give memory away, a 0 broke the decision of those who looked at it."""
    with pytest.raises(BadRow):
        decode_waiter(with_field(WAITER, "request_mb", value))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("request_mb", str(MAX_MB + 1)),
        ("ticket", "-1"),
        ("ticket", str(2**63 - 1)),
        ("deadline_boot_s", "Infinity"),
        ("deadline_boot_s", "NaN"),
        ("deadline_boot_s", "1e300"),
        ("created_boot_s", "-Infinity"),
        ("pid", "-7"),
        ("uid", "9" * 30),
        ("id", '"../../etc"'),
        ("gpu_uuids", "[]"),
        ("gpu_uuids", '[""]'),
        ("gpu_uuids", '["GPU-a", "\\u001b"]'),
    ],
)
def test_what_no_queue_writes_is_no_waiter(key: str, value: str) -> None:
    with pytest.raises(BadRow):
        decode_waiter(with_field(WAITER, key, value))


def test_a_row_of_a_newer_schema_counts_by_the_fields_that_never_change() -> None:
    newer = row(schema=SCHEMA + 1, kind="something new", task=["a", "list"], clients="text", pid=None)
    assert newer.claim == Claim(id="0123456789ab", gpu_uuid="GPU-a", mb=9000)
    assert newer.schema == SCHEMA + 1
    assert newer.kind == "trainer"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps({**SCHEMA_1, "budget_mb": 0}).encode(),
        json.dumps({**SCHEMA_1, "budget_mb": -5}).encode(),
        json.dumps({**SCHEMA_1, "budget_mb": "8"}).encode(),
        json.dumps({**SCHEMA_1, "peak_mb": -1}).encode(),
        json.dumps({**SCHEMA_1, "budget_mb": float("nan")}).encode(),
        json.dumps({**SCHEMA_1, "id": "../../etc"}).encode(),
        json.dumps({**SCHEMA_1, "kind": "odd"}).encode(),
        json.dumps({**SCHEMA_1, "schema": 0}).encode(),
        json.dumps({**SCHEMA_1, "schema": True}).encode(),
        json.dumps({**SCHEMA_1, "schema": "2"}).encode(),
        json.dumps({**SCHEMA_1, "schema": SCHEMA + 1, "budget_mb": None}).encode(),
        json.dumps({key: value for key, value in SCHEMA_1.items() if key != "gpu_uuid"}).encode(),
    ],
)
def test_what_is_no_row_is_never_taken_for_one(data: bytes) -> None:
    with pytest.raises(BadRow):
        decode_row(data)


def test_every_cut_of_a_row_is_damage_and_never_counts_for_less_than_it_says() -> None:
    whole = encode(row())
    for length in range(len(whole) - 2):
        with pytest.raises(BadRow):
            decode_row(whole[:length])
        claim = salvage("x", whole[:length])
        assert claim.gpu_uuid in (None, "GPU-a")
        assert claim.mb in (None, 8192, 9000)


def test_salvage_trusts_only_whole_values_before_the_clients() -> None:
    assert salvage("x", b'{"gpu_uuid":"GPU-a","budget_mb":80') == Claim(id="x", gpu_uuid="GPU-a", mb=None)
    assert salvage("x", b'{"gpu_uuid":"GPU-a","budget_mb":80,"peak_mb":95,').mb == 95
    assert salvage("x", b'{"gpu_uuid":"GPU-a","peak_mb":95,').mb is None
    assert salvage("x", b'{"budget_mb":0,').mb is None
    assert salvage("x", b'{"clients":[{"name":"a","budget_mb":80}],').mb is None
    assert salvage("x", b'{"budget_mb":99999999,').mb is None  # more than any device has
    assert salvage("x", b'{"gpu_uuid":"GPU-\x1b[2J","budget_mb":80,').gpu_uuid is None
    assert salvage("\x1b[2J", b"").id == "?[2J"
    assert salvage("x", b"") == Claim(id="x", gpu_uuid=None, mb=None)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_row_or_damage(data: bytes) -> None:
    try:
        assert decode_row(data).budget_mb > 0
    except BadRow:
        assert salvage("x", data).id == "x"
