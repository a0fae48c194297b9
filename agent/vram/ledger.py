"""The ledger's operations: lock, read, decide, write. The decision itself is `machine.decide`.

Every operation looks at the devices first, then takes the host-wide lock for about a millisecond. A driver
that hangs therefore holds up its caller and nobody else; what was read is older than the decision by the
wait for the lock, which matters only for programs outside the ledger, who could allocate a moment later
just as well.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.jobs.names import plain
from gshare.agent.trace import DISABLED, Tracer
from gshare.agent.vram.clock import Now, holder, now
from gshare.agent.vram.devices import ComputeMode, Device, DeviceReading, DeviceSource
from gshare.agent.vram.grants import Grant, NeverFits, Place, Queued, Wanted
from gshare.agent.vram.machine import (
    Admit,
    Decision,
    DeviceState,
    Never,
    Request,
    Wait,
    available_mb,
    best_decision,
    decide,
    next_ticket,
)
from gshare.agent.vram.owners import Owners, outside_mb
from gshare.agent.vram.paths import ledger_directory
from gshare.agent.vram.rows import Row, Waiter, encode
from gshare.agent.vram.settings import config_file, configured_factor, reserve_factor
from gshare.agent.vram.sources import open_devices
from gshare.agent.vram.store import (
    LOCK_SECONDS,
    Store,
    is_same,
    locked,
    note_look,
    release_lock,
    stamp,
)
from gshare.agent.vram.view import View, read_passes, read_view


class Ledger:
    """This host's ledger, as seen by one process. Cheap to make; holds nothing open between operations."""

    def __init__(
        self,
        *,
        directory: Path | None = None,
        source: DeviceSource | None = None,
        tracer: Tracer = DISABLED,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.tracer = tracer
        with tracer.span("VramQuery"), tracer.phase("vram_qry"):
            self.directory = directory if directory is not None else ledger_directory(environ)
            self.source = source if source is not None else open_devices(environ)
            self._factor = configured_factor(config_file(environ))

    def factor(self, device: Device) -> float:
        """The part of the device that may be reserved."""
        return reserve_factor(device, self._factor)

    def reserve(
        self,
        wanted: Wanted,
        *,
        place: Place | None = None,
        join_s: float | None = None,
        patience_s: float = LOCK_SECONDS,
    ) -> Grant | Queued:
        """Reserve now, or say why not. With `join_s` a request that must wait joins the queue for so long.

        NeverFits when it is too large; GshareError when a device is in trouble, or the lock cannot be had
        within `patience_s`.
        """
        with self.tracer.span("LedgerReserve", budget_mb=wanted.mb, task=wanted.task):
            if place is not None:
                with self.tracer.phase("wait_poll"):
                    note_look(place.life, now().boot_s)
            readings = self.read_devices(wanted.devices)
            with locked(self.directory, self.tracer, patience_s) as store:
                at = now()
                view = self.view(store, at, readings)
                uuid, decision = self._decide(view, wanted, place, readings)
                if isinstance(decision, Never):
                    raise NeverFits(decision.reason) if decision.usage else GshareError(decision.reason)
                device = next(device for device in wanted.devices if device.uuid == uuid)
                with self.tracer.phase("ledger_wr"):
                    if isinstance(decision, Admit):
                        # First: when it cannot be counted, nothing is taken.
                        self._count_passes(store, view, decision.passes)
                        grant = self._grant(store, wanted, device, at)
                        if place is not None:
                            _leave(store, place)
                        return grant
                    if place is None and join_s is not None:
                        place = self._join(store, view, wanted, at, join_s)
                    elif place is not None and place.waiter not in view.waiters:
                        _rejoin(store, place, at)
                return Queued(decision=decision, gpu_uuid=uuid, place=place)

    def leave(self, place: Place) -> None:
        """Give a place in the queue up. Giving back the flock alone would do: the next operation cleans."""
        with self.tracer.span("LedgerRelease", task=place.waiter.task):
            try:
                with locked(self.directory, self.tracer) as store, self.tracer.phase("ledger_wr"):
                    _leave(store, place)
            except GshareError:
                with self.tracer.phase("lock_rel"):
                    _give_up(place)

    def change(
        self,
        grant: Grant,
        change: Callable[[Row], Row],
        *,
        ask_mb: int = 0,
        patience_s: float = LOCK_SECONDS,
    ) -> None:
        """Rewrite the holder's row as `change` makes it, and keep the result in `grant`.

        With `ask_mb` > 0 the change is admitted like a request for so much more. When that does not fit now,
        nothing changes and RetryLater is raised; GshareError when it never can. A row or proof of life that
        somebody removed is put back.
        """
        with self.tracer.span("LedgerReserve", budget_mb=ask_mb, task=grant.row.task):
            readings = self.read_devices((grant.device,)) if ask_mb else {}
            with locked(self.directory, self.tracer, patience_s) as store:
                if ask_mb:
                    view = self.view(store, now(), readings)
                    decision = decide(
                        view.claims, view.queue, self.state(grant.device, view, readings), Request(mb=ask_mb)
                    )
                    if not isinstance(decision, Admit):
                        text = f"reservation {grant.row.id} cannot grow: {decision.reason}"
                        raise RetryLater(text) if isinstance(decision, Wait) else GshareError(text)
                    with self.tracer.phase("ledger_wr"):
                        self._count_passes(store, view, decision.passes)
                row = change(grant.row)
                with self.tracer.phase("ledger_wr"):
                    _write_row(store, grant, row)

    def stands(self, grant: Grant) -> bool:
        """Whether row and proof of life are still the files that this process wrote: no lock, three stats.

        True, unlooked at, for a grant whose row this process does not look after.
        """
        if grant.written is None or grant.life is None:
            return True
        with self.tracer.span("LedgerCleanup"), self.tracer.phase("ledger_rd"):
            life = self.directory / f"row-{grant.row.id}.life"
            return stamp(self.directory / _file_of(grant.row)) == grant.written and is_same(life, grant.life)

    def release(self, grant: Grant) -> None:
        """Remove the row. Whatever happens the flock is given back, so at worst the next operation cleans."""
        with self.tracer.span("LedgerRelease", task=grant.row.task):
            try:
                with locked(self.directory, self.tracer) as store, self.tracer.phase("ledger_wr"):
                    store.remove(_file_of(grant.row))
                    if grant.life is not None:
                        store.remove(f"row-{grant.row.id}.life")
            finally:
                if grant.life is not None:
                    with self.tracer.phase("lock_rel"):
                        release_lock(grant.life)
                    grant.life = None

    def look(self) -> tuple[View, dict[str, DeviceReading]]:
        """Everything that stands in the ledger, cleaned, and a reading of every device."""
        readings = self.read_devices(self.list_devices())
        with self.tracer.span("LedgerCleanup"), locked(self.directory, self.tracer) as store:
            return self.view(store, now(), readings), readings

    def find(self, view: View, prefix: str) -> Row:
        """The one row whose id begins with `prefix`. UsageError when there is none or more than one."""
        found = [row for row in view.rows if prefix and row.id.startswith(prefix)]
        if len(found) != 1:
            what = "no reservation" if not found else "more than one reservation"
            raise UsageError(f"{what} begins with {prefix!r}: gshare gpu status lists them")
        return found[0]

    def end_lease(self, prefix: str, *, only_own: bool = False) -> Row:
        """Remove a `hold`. GshareError when a living process holds the row, or it is another user's.

        `only_own`: another user's is refused for root too, who asks for somebody that cannot be seen here.
        """
        with self.tracer.span("LedgerRelease"), locked(self.directory, self.tracer) as store:
            row = self.find(self.view(store, now(), {}), prefix)
            if row.lease_until_boot_s is None:
                raise GshareError(
                    f"reservation {row.id} is held by process {row.pid} ({plain(row.task)}); "
                    "it goes when that ends"
                )
            gone = False
            if row.uid == os.geteuid() or not only_own:
                with self.tracer.phase("ledger_wr"):
                    gone = store.remove(_file_of(row))
            if not gone:
                raise GshareError(
                    f"reservation {row.id} belongs to uid {row.uid}; they or root can release it"
                )
            return row

    def renew_lease(self, prefix: str, seconds: float) -> Row:
        """Let a `hold` run `seconds` from now. Same errors as `end_lease`."""
        with self.tracer.span("LedgerReserve"), locked(self.directory, self.tracer) as store:
            at = now()
            row = self.find(self.view(store, at, {}), prefix)
            if row.lease_until_boot_s is None:
                raise GshareError(f"reservation {row.id} has no lease; its process {row.pid} holds it")
            row = msgspec.structs.replace(row, lease_until_boot_s=at.boot_s + seconds)
            try:
                with self.tracer.phase("ledger_wr"):
                    store.write(_file_of(row), encode(row))
            except PermissionError:
                text = f"reservation {row.id} belongs to uid {row.uid}; only they can renew it"
                raise GshareError(text) from None
            return row

    def list_devices(self) -> tuple[Device, ...]:
        """Every device of this host."""
        with self.tracer.span("VramQuery"), self.tracer.phase("vram_qry"):
            return self.source.devices()

    def read_devices(self, devices: Sequence[Device]) -> dict[str, DeviceReading]:
        """One look at each device, by UUID; takes no lock."""
        with self.tracer.span("VramQuery", devices=len(devices)), self.tracer.phase("vram_qry"):
            return {device.uuid: self.source.read(device) for device in devices}

    def compute_mode(self, device: Device) -> ComputeMode | None:
        """Who may have a context on the device; None when the driver does not say. Takes no lock."""
        with self.tracer.span("VramQuery"), self.tracer.phase("vram_qry"):
            return self.source.compute_mode(device)

    def view(self, store: Store, at: Now, readings: Mapping[str, DeviceReading]) -> View:
        """Read and clean under the lock. A device not asked about is read only for a dead row on it."""

        def reading(uuid: str) -> DeviceReading | None:
            if uuid in readings:
                return readings[uuid]
            device = next((device for device in self.source.devices() if device.uuid == uuid), None)
            return self.source.read(device) if device is not None else None

        with self.tracer.span("LedgerCleanup"), self.tracer.phase("ledger_rd"):
            return read_view(store, at, reading)

    def state(self, device: Device, view: View, readings: Mapping[str, DeviceReading]) -> DeviceState:
        """The device as a decision sees it, given one look."""
        reading = readings[device.uuid]
        rows = [row for row in view.rows if row.gpu_uuid == device.uuid]
        with self.tracer.span("VramQuery"):
            outside = outside_mb(reading, rows, Owners(rows))
        return DeviceState(
            uuid=device.uuid,
            total_mb=reading.total_mb,
            outside_mb=outside,
            reserve_factor=self.factor(device),
            problem=reading.problem,
        )

    def _decide(
        self, view: View, wanted: Wanted, place: Place | None, readings: Mapping[str, DeviceReading]
    ) -> tuple[str, Decision]:
        """The emptiest device that admits it; else the shortest wait."""
        claims, queue = view.claims, view.queue
        request = Request(mb=wanted.mb, waiter=place.waiter.id if place is not None else None)
        states = [self.state(device, view, readings) for device in wanted.devices]
        states.sort(key=lambda state: -(available_mb(claims, state) or 0))
        return best_decision([(state.uuid, decide(claims, queue, state, request)) for state in states])

    def _grant(self, store: Store, wanted: Wanted, device: Device, at: Now) -> Grant:
        lease = wanted.lease_s is not None
        pid = wanted.pid or (0 if lease else os.getpid())
        who = holder(pid) if pid else None
        row = Row(
            id=secrets.token_hex(6),
            gpu_uuid=device.uuid,
            budget_mb=wanted.mb,
            task=wanted.task,
            kind=wanted.kind,
            pid=pid,
            uid=os.geteuid(),
            created=time.time(),
            clients=wanted.clients,
            boot_id=at.boot_id,
            created_boot_s=at.boot_s,
            pid_start=who.start if who else 0,
            pid_ns=who.namespace if who else 0,
            lease_until_boot_s=at.boot_s + wanted.lease_s if wanted.lease_s is not None else None,
        )
        life = None if lease else store.create_life(f"row-{row.id}.life")
        try:
            written = store.write(_file_of(row), encode(row))
        except BaseException:
            if life is not None:
                store.remove(f"row-{row.id}.life")
                release_lock(life)
            raise
        return Grant(row=row, device=device, life=life, written=None if lease else written)

    def _count_passes(self, store: Store, view: View, passes: Sequence[str]) -> None:
        """One more for each waiter that is overtaken, in this user's own file: others' we cannot replace."""
        if not passes:
            return
        name = f"passes-{os.geteuid()}.json"
        waiting = {waiter.id for waiter in view.waiters}
        counts = {waiter: count for waiter, count in read_passes(store, name).items() if waiter in waiting}
        for waiter in passes:
            counts[waiter] = counts.get(waiter, 0) + 1
        data = msgspec.json.encode(counts)
        try:
            store.write(name, data)
        except IsADirectoryError:
            store.set_aside(name)
            store.write(name, data)
        except PermissionError:
            text = f"{store.path / name} belongs to another user, who or root must remove it"
            raise GshareError(text) from None

    def _join(self, store: Store, view: View, wanted: Wanted, at: Now, seconds: float) -> Place:
        waiter = Waiter(
            id=secrets.token_hex(6),
            gpu_uuids=tuple(device.uuid for device in wanted.devices),
            request_mb=wanted.mb,
            ticket=next_ticket(view.queue),
            task=wanted.task,
            pid=os.getpid(),
            uid=os.geteuid(),
            created=time.time(),
            deadline_boot_s=at.boot_s + seconds,
            boot_id=at.boot_id,
            created_boot_s=at.boot_s,
        )
        life = store.create_life(f"wait-{waiter.id}.life")
        note_look(life, at.boot_s)
        try:
            store.write(f"wait-{waiter.id}.json", encode(waiter))
        except BaseException:
            store.remove(f"wait-{waiter.id}.life")
            release_lock(life)
            raise
        return Place(waiter=waiter, life=life)


def _file_of(row: Row) -> str:
    return f"{'lease' if row.lease_until_boot_s is not None else 'row'}-{row.id}.json"


def _write_row(store: Store, grant: Grant, row: Row) -> None:
    """Replace the row; where its life file is gone (somebody emptied the directory) make a new one first."""
    life = f"row-{row.id}.life"
    if grant.life is not None and not store.is_same(life, grant.life):
        store.remove(life)
        new = store.create_life(life)
        release_lock(grant.life)
        grant.life = new
    written = store.write(_file_of(row), encode(row))
    grant.row = row
    if grant.written is not None:
        grant.written = written


def _leave(store: Store, place: Place) -> None:
    store.remove(f"wait-{place.waiter.id}.json")
    store.remove(f"wait-{place.waiter.id}.life")
    _give_up(place)


def _give_up(place: Place) -> None:
    if place.life >= 0:
        release_lock(place.life)
        place.life = -1


def _rejoin(store: Store, place: Place, at: Now) -> None:
    """Write a damaged, changed or removed waiter again, with the ticket it had."""
    life = f"wait-{place.waiter.id}.life"
    if not store.is_same(life, place.life):
        store.remove(life)
        new = store.create_life(life)
        release_lock(place.life)
        place.life = new
        note_look(new, at.boot_s)
    store.write(f"wait-{place.waiter.id}.json", encode(place.waiter))
