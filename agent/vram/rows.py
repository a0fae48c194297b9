"""What stands in the ledger's files: rows, waiters, and how old, newer and damaged ones are read.

One JSON object a file. Schema 1 is the architecture's list of fields; schema 2 adds who the holder is
beyond its PID, the lease, the last measured use and the phases' uses. A row of a *newer* gshare is valid
and counts by the four fields that no schema changes: id, gpu_uuid, budget_mb, peak_mb.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from gshare.agent.vram.machine import Claim

SCHEMA = 2

#: `trainer`: gshare's own. `run`: a foreign program under `gpu run`. `hold`: a lease without a process.
RowKind = Literal["trainer", "run", "hold"]

ROW_ID = re.compile(r"[0-9a-f]{12}\Z")


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """One client's part of a shared trainer's row."""

    name: str
    budget_mb: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One reservation. MiB; `created` is wall time for people, `*_boot_s` is CLOCK_BOOTTIME."""

    id: str
    gpu_uuid: str
    budget_mb: int  # all of it: the clients' parts are inside
    peak_mb: int = 0  # the most that was measured since a client last left
    task: str
    kind: RowKind
    pid: int  # 0: no process (a lease)
    uid: int
    created: float
    clients: tuple[Client, ...] = ()
    schema: int = SCHEMA
    used_mb: int = 0  # last measured by the holder
    uses: dict[str, int] = {}  # phase (load, first_step, eval, save, …) → the most measured in it
    boot_id: str = ""
    created_boot_s: float = 0.0
    pid_start: int = 0  # field 22 of /proc/PID/stat, clock ticks after boot; 0: unknown
    pid_ns: int = 0  # inode of /proc/PID/ns/pid; 0: unknown
    lease_until_boot_s: float | None = None

    @property
    def counted_mb(self) -> int:
        """What admission counts: never less than was ever used, or a peak would take a neighbour's memory."""
        return max(self.budget_mb, self.peak_mb)

    @property
    def claim(self) -> Claim:
        return Claim(id=self.id, gpu_uuid=self.gpu_uuid, mb=self.counted_mb)


class Waiter(msgspec.Struct, frozen=True, kw_only=True):
    """One request in the queue; its process holds a flock as a row's does."""

    id: str
    gpu_uuids: tuple[str, ...]
    request_mb: int
    ticket: int
    task: str
    pid: int
    uid: int
    created: float
    deadline_boot_s: float
    schema: int = SCHEMA
    boot_id: str = ""
    created_boot_s: float = 0.0


class Damaged(msgspec.Struct, frozen=True, kw_only=True):
    """A file that should be a row and is not. It counts by `claim` until `gpu repair`."""

    name: str
    reason: str
    claim: Claim


class BadRow(Exception):
    """The bytes are no row; the text says why."""


def _from_1(old: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 had no lease, so a `hold` of it has none to run out: it is not carried over as endless."""
    new = {**old, "schema": 2}
    if old.get("kind") == "hold":
        new["lease_until_boot_s"] = 0.0
    return new


#: Schema → the step to the next one.
MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}

_encoder = msgspec.json.Encoder()


def encode(item: Row | Waiter) -> bytes:
    """One line of JSON."""
    return _encoder.encode(item) + b"\n"


def decode_row(data: bytes) -> Row:
    """A row of any schema. BadRow when the bytes are not one, or name impossible amounts."""
    table = _table(data)
    schema = table.get("schema", 1)
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise BadRow(f"schema {schema!r} is no number")
    if schema > SCHEMA:
        table = _only_known(table)
    while schema in MIGRATIONS:
        table = MIGRATIONS[schema](table)
        schema += 1
    try:
        row = msgspec.convert(table, Row)
    except msgspec.ValidationError as error:
        raise BadRow(str(error)) from None
    if row.budget_mb <= 0 or row.peak_mb < 0 or row.used_mb < 0:
        raise BadRow(f"budget {row.budget_mb}, peak {row.peak_mb}, used {row.used_mb} MiB")
    if not ROW_ID.match(row.id):
        raise BadRow(f"id {row.id!r}")
    return row


def decode_waiter(data: bytes) -> Waiter:
    """A waiter. BadRow when the bytes are not one."""
    try:
        return msgspec.convert(_table(data), Waiter)
    except msgspec.ValidationError as error:
        raise BadRow(str(error)) from None


def _table(data: bytes) -> dict[str, Any]:
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"not JSON: {error}") from None
    if not isinstance(table, dict):
        raise BadRow("not a JSON object")
    return table


def _only_known(table: dict[str, Any]) -> dict[str, Any]:
    """A newer row's fields as far as this version may read them; the rest takes harmless values."""
    stable = {key: table[key] for key in ("id", "gpu_uuid", "budget_mb", "peak_mb") if key in table}
    kept = {"task": "", "kind": "trainer", "pid": 0, "uid": 0, "created": 0.0, "schema": table["schema"]}
    for key, default in kept.items():
        value = table.get(key)
        kept[key] = value if type(value) is type(default) else default
    if kept["kind"] not in ("trainer", "run", "hold"):
        kept["kind"] = "trainer"
    lease = table.get("lease_until_boot_s")
    extra = {"lease_until_boot_s": lease, "boot_id": table.get("boot_id", "")} if lease is not None else {}
    return {**kept, **stable, **extra}


# Each value must be followed by a comma or a brace: a number at the end of a cut file may lack digits.
_UUID_FIELD = re.compile(rb'"gpu_uuid"\s*:\s*"([^"\\]{1,200})"\s*[,}]')
_MB_FIELD = re.compile(rb'"(budget_mb|peak_mb)"\s*:\s*(\d{1,9})\s*[,}]')


def salvage(row_id: str, data: bytes) -> Claim:
    """What a damaged row still says: device and amount where they are whole, None (unknown) where not.

    Amounts before the list of clients, whose parts have budgets too.
    """
    data = data.split(b'"clients"', 1)[0]
    uuid = _UUID_FIELD.search(data)
    amounts = {name: int(value) for name, value in _MB_FIELD.findall(data)}
    known = b"budget_mb" in amounts and amounts[b"budget_mb"] > 0
    return Claim(
        id=row_id,
        gpu_uuid=uuid[1].decode("utf-8", "replace") if uuid else None,
        mb=max(amounts.values()) if known else None,
    )
