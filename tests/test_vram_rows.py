"""Rows on disk: round trip, older and newer schemas, damage and what can be saved of it."""

from __future__ import annotations

import json

import pytest
from gshare.agent.vram.machine import Claim
from gshare.agent.vram.rows import SCHEMA, BadRow, Client, Row, decode_row, encode, salvage
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
    assert row(kind="hold").lease_until_boot_s == 0.0


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
    assert salvage("x", b"") == Claim(id="x", gpu_uuid=None, mb=None)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_row_or_damage(data: bytes) -> None:
    try:
        assert decode_row(data).budget_mb > 0
    except BadRow:
        assert salvage("x", data).id == "x"
