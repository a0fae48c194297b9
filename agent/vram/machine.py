"""The ledger's decision: does a request fit, wait, or never fit? Pure: no clock, no file, no process.

Admission: `Σ max(budget, peak) + request ≤ total × reserve_factor - memory used outside the ledger`.

Order: first come, first served, with bounded bypass. A request may pass a waiter in front of it only when
that waiter does not fit now, and only while the waiter has been passed fewer than `MAX_BYPASS` times. What
a waiter in front would get if it looked now is kept for it. So a big job waits for at most `MAX_BYPASS`
small ones that came later, however many keep coming. A waiter that does not look (it is stopped, or its
driver hangs) keeps nothing and stops nobody; its place is its own again as soon as it looks.

What cannot be known blocks: an unreadable row, a device that does not say what is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

#: How often later requests may pass one waiter. 8: small jobs use the gap that a big one waits for, yet
#: its turn comes after eight of them at the latest.
MAX_BYPASS = 8


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What one row of the ledger takes. None: cannot be read, so it may be any device, any amount."""

    id: str
    gpu_uuid: str | None
    mb: int | None


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """One queued request. `ticket` grows with arrival; `passed` counts later requests served before it.

    `absent`: it has not looked for so long that it would not take what came free.
    """

    id: str
    ticket: int
    request_mb: int
    gpu_uuids: tuple[str, ...]
    passed: int = 0
    absent: bool = False


class DeviceState(msgspec.Struct, frozen=True, kw_only=True):
    """A device as the decision sees it. `outside_mb` is what processes outside the ledger use.

    `problem` is the reason, in one line, why a number is None.
    """

    uuid: str
    total_mb: int | None
    outside_mb: int | None
    reserve_factor: float
    problem: str = ""

    @property
    def usable_mb(self) -> int:
        """What the ledger may hand out on the empty device; 0 when its size is unknown."""
        return int((self.total_mb or 0) * self.reserve_factor)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """`mb` more on the device. `waiter` is the request's own place in the queue, if it has one."""

    mb: int
    waiter: str | None = None


class Admit(msgspec.Struct, frozen=True):
    """It fits. `passes` names the waiters it overtakes: each must be counted as passed once more."""

    passes: tuple[str, ...] = ()


class Wait(msgspec.Struct, frozen=True):
    """Not now. `position` counts from 1: the place in the device's queue, or the one it would get."""

    position: int
    reason: str


class Never(msgspec.Struct, frozen=True):
    """Waiting does not help. `usage`: it is larger than the device; else the device is in trouble."""

    reason: str
    usage: bool


Decision = Admit | Wait | Never


def decide(
    rows: Iterable[Claim], queue: Iterable[Waiting], device: DeviceState, request: Request
) -> Decision:
    """What becomes of `request` on `device`, given every row and waiter of the ledger."""
    assert request.mb > 0
    if device.total_mb is None or device.outside_mb is None:
        return Never(device.problem or f"{device.uuid} does not say how much memory is used", usage=False)
    if request.mb > device.usable_mb:
        reason = (
            f"{request.mb} MiB can never fit on {device.uuid}: {device.usable_mb} MiB may be reserved "
            f"({device.reserve_factor:.0%} of {device.total_mb} MiB)"
        )
        return Never(reason, usage=True)

    claims = [claim for claim in rows if claim.gpu_uuid in (device.uuid, None)]
    front = waiters_in_front(queue, device.uuid, request.waiter)
    position = len(front) + 1
    unknown = [claim.id for claim in claims if claim.mb is None or claim.gpu_uuid is None]
    if unknown:
        return Wait(position, f"row {unknown[0]} cannot be read and may hold anything: gshare gpu repair")

    reserved = sum(claim.mb or 0 for claim in claims)
    free = device.usable_mb - device.outside_mb - reserved
    kept = 0
    passes: list[str] = []
    for waiter in front:
        # More than the device has fits by nobody's reserve factor: that waiter will find out by itself.
        if waiter.absent or waiter.request_mb > device.total_mb:
            continue
        if waiter.request_mb <= free - kept:
            kept += waiter.request_mb
        elif waiter.passed >= MAX_BYPASS:
            return Wait(position, f"a request for {waiter.request_mb} MiB in front was passed often enough")
        else:
            passes.append(waiter.id)
    if request.mb <= free - kept:
        return Admit(tuple(passes))
    text = f"{request.mb} MiB asked, {max(free - kept, 0)} of {device.usable_mb} MiB free"
    parts = [f"{reserved} reserved", f"{device.outside_mb} used outside the ledger"]
    if kept:
        parts.append(f"{kept} kept for requests in front")
    return Wait(position, f"{text} ({', '.join(parts)})")


def waiters_in_front(queue: Iterable[Waiting], gpu_uuid: str, waiter: str | None) -> list[Waiting]:
    """The device's waiters that came before `waiter`, in order; all of them for a new request."""
    line = sorted((w for w in queue if gpu_uuid in w.gpu_uuids), key=lambda w: (w.ticket, w.id))
    for place, other in enumerate(line):
        if other.id == waiter:
            return line[:place]
    return line


def next_ticket(queue: Iterable[Waiting]) -> int:
    """The ticket of a request that joins the queue now: behind everybody in it."""
    return max((waiter.ticket for waiter in queue), default=0) + 1


def available_mb(rows: Iterable[Claim], device: DeviceState) -> int | None:
    """What a new request could get if nobody waited; None while something unknown blocks."""
    if device.total_mb is None or device.outside_mb is None:
        return None
    claims = [claim for claim in rows if claim.gpu_uuid in (device.uuid, None)]
    if any(claim.mb is None or claim.gpu_uuid is None for claim in claims):
        return None
    return max(0, device.usable_mb - device.outside_mb - sum(claim.mb or 0 for claim in claims))


def best_decision(decisions: Sequence[tuple[str, Decision]]) -> tuple[str, Decision]:
    """Of several devices' decisions: the first that admits, else the shortest wait, else a Never.

    Among Nevers, a device in trouble comes before one that is too small: it may be mended.
    """
    assert decisions

    def rank(item: tuple[str, Decision]) -> tuple[int, int]:
        decision = item[1]
        if isinstance(decision, Admit):
            return (0, 0)
        if isinstance(decision, Wait):
            return (1, decision.position)
        return (2, int(decision.usage))

    return min(decisions, key=rank)
