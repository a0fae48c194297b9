"""What is asked of the ledger, and what it answers: a grant, or a place in the queue."""

from __future__ import annotations

import msgspec
from gshare.agent.errors import UsageError
from gshare.agent.vram.devices import Device
from gshare.agent.vram.machine import Wait
from gshare.agent.vram.rows import Client, Row, RowKind, Waiter
from gshare.agent.vram.store import Stamp


class NeverFits(UsageError):
    """The request is larger than what its devices may ever hand out: no waiting helps."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for: `mb` on any one of `devices`."""

    mb: int
    devices: tuple[Device, ...]
    task: str
    kind: RowKind = "trainer"
    pid: int = 0  # 0: this process; for a hold, no process
    clients: tuple[Client, ...] = ()
    lease_s: float | None = None


class Grant(msgspec.Struct, kw_only=True):
    """A reservation that stands. `life` is the descriptor whose flock proves its holder; None for a lease.

    `written` is the row's file as this process wrote it last; None when it does not look after that file.
    """

    row: Row
    device: Device
    life: int | None
    written: Stamp | None = None


class Place(msgspec.Struct, kw_only=True):
    """A place in the queue, with its own proof of life."""

    waiter: Waiter
    life: int


class Queued(msgspec.Struct, frozen=True, kw_only=True):
    """Not now: where it stands and why; `place` None when it did not join the queue.

    `trouble`: the last look failed, and the reason is what went wrong; the request waits on.
    """

    decision: Wait
    gpu_uuid: str
    place: Place | None
    trouble: bool = False
