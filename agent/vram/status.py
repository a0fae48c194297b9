"""What `gshare gpu status` shows, as plain data: one look at the ledger and at every device."""

from __future__ import annotations

import pwd
from collections.abc import Mapping

import msgspec
from gshare.agent.jobs.names import plain
from gshare.agent.vram.clock import Now, now
from gshare.agent.vram.devices import Device, DeviceReading, MemoryType, ReadingState
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.machine import Admit, DeviceState, Request, available_mb, decide, waiters_in_front
from gshare.agent.vram.rows import Client, Row, Waiter
from gshare.agent.vram.view import View


class ReservationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One row. `age_s` None: made before a reboot. `lingering`: dead, but the driver still lists it."""

    id: str
    pid: int
    user: str
    kind: str
    task: str
    budget_mb: int
    peak_mb: int
    used_mb: int
    age_s: float | None
    lease_left_s: float | None
    clients: tuple[Client, ...]
    lingering: bool


class WaiterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One queued request on one device."""

    position: int
    pid: int
    user: str
    task: str
    request_mb: int
    reason: str
    passed: int
    waited_s: float


class DeviceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One device. None: the driver, or something unreadable in the ledger, does not allow a number."""

    uuid: str
    name: str
    index: int
    memory_type: MemoryType
    mig: bool
    state: ReadingState
    problem: str
    reserve_factor: float
    total_mb: int | None
    used_mb: int | None
    outside_mb: int | None
    processes: int | None
    reservations: tuple[ReservationStatus, ...]
    queue: tuple[WaiterStatus, ...]
    available_ledger_mb: int | None
    available_driver_mb: int | None


class DamagedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One file that should be a row; `counted_mb` None: unknown, blocks every request."""

    name: str
    reason: str
    gpu_uuid: str | None
    counted_mb: int | None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The whole host. `note` says why there is no GPU, when there is none."""

    ledger: str
    note: str
    devices: tuple[DeviceStatus, ...]
    damaged: tuple[DamagedStatus, ...]
    orphans: tuple[ReservationStatus, ...]  # rows on devices that are not here (any more)


def status(ledger: Ledger) -> Status:
    """One look, cleaned as every operation does. GshareError when the ledger cannot be used."""
    with ledger.tracer.span("LedgerCleanup"):
        view, readings = ledger.look()
        return _status(ledger, view, readings, now())


def _status(ledger: Ledger, view: View, readings: Mapping[str, DeviceReading], at: Now) -> Status:
    devices = [device for device in ledger.list_devices() if device.uuid in readings]
    known = {device.uuid for device in devices}
    shown = tuple(_device(ledger, device, view, readings[device.uuid], at) for device in devices)
    return Status(
        ledger=str(ledger.directory),
        note=plain(ledger.source.note),
        devices=shown,
        damaged=tuple(
            DamagedStatus(
                name=plain(d.name), reason=plain(d.reason), gpu_uuid=d.claim.gpu_uuid, counted_mb=d.claim.mb
            )
            for d in view.damaged
        ),
        orphans=tuple(_reservation(row, view, at) for row in view.rows if row.gpu_uuid not in known),
    )


def _device(ledger: Ledger, device: Device, view: View, reading: DeviceReading, at: Now) -> DeviceStatus:
    state = ledger.state(device, view, {device.uuid: reading})
    rows = [row for row in view.rows if row.gpu_uuid == device.uuid]
    listed = reading.processes
    free = None
    if reading.total_mb is not None and reading.used_mb is not None:
        free = reading.total_mb - reading.used_mb
    return DeviceStatus(
        uuid=device.uuid,
        name=device.name,
        index=device.index,
        memory_type=device.memory_type,
        mig=device.mig,
        state=reading.state,
        problem=reading.problem,
        reserve_factor=state.reserve_factor,
        total_mb=reading.total_mb,
        used_mb=reading.used_mb,
        outside_mb=state.outside_mb,
        processes=len(listed) if listed is not None else None,
        reservations=tuple(_reservation(row, view, at) for row in rows),
        queue=_queue(view, state, at),
        available_ledger_mb=available_mb(view.claims, state),
        available_driver_mb=free,
    )


def _reservation(row: Row, view: View, at: Now) -> ReservationStatus:
    same_boot = row.boot_id == at.boot_id
    lease = row.lease_until_boot_s
    return ReservationStatus(
        id=row.id,
        pid=row.pid,
        user=user_name(row.uid),
        kind=row.kind,
        task=plain(row.task),
        budget_mb=row.budget_mb,
        peak_mb=row.peak_mb,
        used_mb=row.used_mb,
        age_s=round(at.boot_s - row.created_boot_s, 3) if same_boot else None,
        lease_left_s=round(lease - at.boot_s, 3) if lease is not None else None,
        clients=tuple(Client(name=plain(c.name), budget_mb=c.budget_mb) for c in row.clients),
        lingering=row.id in view.lingering,
    )


def _queue(view: View, state: DeviceState, at: Now) -> tuple[WaiterStatus, ...]:
    found = []
    for waiter in view.waiters:
        if state.uuid not in waiter.gpu_uuids:
            continue
        found.append(
            WaiterStatus(
                position=len(waiters_in_front(view.queue, state.uuid, waiter.id)) + 1,
                pid=waiter.pid,
                user=user_name(waiter.uid),
                task=plain(waiter.task),
                request_mb=waiter.request_mb,
                reason=_reason(view, state, waiter),
                passed=view.passed.get(waiter.id, 0),
                waited_s=round(at.boot_s - waiter.created_boot_s, 3),
            )
        )
    return tuple(sorted(found, key=lambda waiter: waiter.position))


def _reason(view: View, state: DeviceState, waiter: Waiter) -> str:
    if waiter.id in view.absent:
        return "has not looked for a while (is it stopped?); others may pass it"
    decision = decide(view.claims, view.queue, state, Request(mb=waiter.request_mb, waiter=waiter.id))
    return "fits now, about to start" if isinstance(decision, Admit) else decision.reason


def user_name(uid: int) -> str:
    """The login name, or the number where there is none (containers)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)
