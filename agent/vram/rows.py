"""What stands in the ledger's files: rows, waiters, and how old, newer and damaged ones are read.

One JSON object a file. Schema 1 is the architecture's list of fields; schema 2 adds who the holder is
beyond its PID, the lease, the last measured use and the phases' uses. A row of a *newer* gshare is valid
and counts by the four fields that no schema changes: id, gpu_uuid, budget_mb, peak_mb.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec
from gshare.agent.jobs.names import plain, shorten
from gshare.agent.vram.budget import MAX_MB
from gshare.agent.vram.machine import Claim

SCHEMA = 2

#: `trainer`: gshare's own. `run`: a foreign program under `gpu run`. `hold`: a lease without a process.
RowKind = Literal["trainer", "run", "hold"]

ROW_ID = re.compile(r"[0-9a-f]{12}\Z")
BOOT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")
#: No boot has it: the boot of a lease that has certainly run out.
NO_BOOT = "00000000-0000-0000-0000-000000000000"

#: A driver's UUID has about 50 characters.
MAX_UUID = 200
#: Seconds, 317 years: a longer uptime is a damaged number.
_MAX_BOOT_S = 1e10
#: Larger numbers than any counter, PID, user id or inode; the encoder takes nothing above 64 bits.
_MAX_COUNT = 2**63 - 1


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
    if "lease_until_boot_s" in old or "boot_id" in old:
        raise BadRow("schema 1 beside fields of schema 2")  # the schema is what was damaged
    new = {**old, "schema": 2}
    if old.get("kind") == "hold":
        new.update(lease_until_boot_s=0.0, boot_id=NO_BOOT)
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
    if isinstance(schema, bool) or not isinstance(schema, int) or not 1 <= schema <= _MAX_COUNT:
        raise BadRow(f"schema {shorten(schema)} is no number")
    if schema > SCHEMA:
        table = _only_known(table)
    while schema in MIGRATIONS:
        table = MIGRATIONS[schema](table)
        schema += 1
    try:
        row = msgspec.convert(table, Row)
    except msgspec.ValidationError as error:
        raise BadRow(str(error)) from None
    _check_common(row, (row.gpu_uuid,))
    _check("budget_mb", row.budget_mb, 1, MAX_MB)
    _check("peak_mb", row.peak_mb, 0, MAX_MB)
    _check("used_mb", row.used_mb, 0, MAX_MB)
    for used in row.uses.values():
        _check("uses", used, 0, MAX_MB)
    for client in row.clients:
        _check("budget_mb of a client", client.budget_mb, 0, MAX_MB)
    _check("pid_start", row.pid_start, 0, _MAX_COUNT)
    _check("pid_ns", row.pid_ns, 0, _MAX_COUNT)
    if row.lease_until_boot_s is not None:
        _check("lease_until_boot_s", row.lease_until_boot_s, 0, _MAX_BOOT_S)
    return row


def decode_waiter(data: bytes) -> Waiter:
    """A waiter. BadRow when the bytes are not one, or name impossible amounts."""
    try:
        waiter = msgspec.convert(_table(data), Waiter)
    except msgspec.ValidationError as error:
        raise BadRow(str(error)) from None
    _check_common(waiter, waiter.gpu_uuids)
    if not waiter.gpu_uuids:
        raise BadRow("gpu_uuids is empty")
    _check("request_mb", waiter.request_mb, 1, MAX_MB)
    # Far below the limit of a number: tickets grow from the largest one in the queue.
    _check("ticket", waiter.ticket, 0, _MAX_COUNT // 2)
    _check("deadline_boot_s", waiter.deadline_boot_s, 0, _MAX_BOOT_S)
    return waiter


def _check_common(item: Row | Waiter, uuids: Iterable[str]) -> None:
    """What rows and waiters have in common. A UUID that cannot be printed is no driver's."""
    if not ROW_ID.match(item.id):
        raise BadRow(f"id {shorten(item.id)}")
    for uuid in uuids:
        if not 0 < len(uuid) <= MAX_UUID or not uuid.isprintable():
            raise BadRow(f"gpu_uuid {shorten(uuid)}")
    _check("pid", item.pid, 0, _MAX_COUNT)
    _check("uid", item.uid, 0, _MAX_COUNT)
    _check("created_boot_s", item.created_boot_s, 0, _MAX_BOOT_S)
    if not math.isfinite(item.created):
        raise BadRow(f"created {item.created}")


def _check(key: str, value: float, low: float, high: float) -> None:
    """BadRow unless `value` lies between the two; a NaN lies nowhere."""
    if not low <= value <= high:
        raise BadRow(f"{key} {shorten(value)}")


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
    known = amounts.get(b"budget_mb", 0) > 0 and max(amounts.values()) <= MAX_MB
    name = uuid[1].decode("utf-8", "replace") if uuid else ""
    return Claim(
        id=plain(row_id),
        gpu_uuid=name if name and name.isprintable() else None,
        mb=max(amounts.values()) if known else None,
    )
