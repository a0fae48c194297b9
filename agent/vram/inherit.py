"""The reservation that this process already runs under: `gshare gpu run --vram 8 -- gshare finetune …`.

    reservation = inherit(ledger, row_id, devices=devices, budget_mb=8192)      # NotInherited: reserve anew

`gpu run` names its row in GSHARE_RESERVATION. The name alone proves nothing: anybody may set the variable,
and it outlives the row in shells and detached programs. It is believed when the row stands, is a `gpu run`'s,
is ours by its uid and by its file's owner, when its holder's flock is held and its holder is an ancestor of
this process. A `hold` has no process that could be an ancestor, so it is never used in this way.

One gshare at a time uses such a row, by a flock of its own (`use-ID.life`): two would each cap themselves at
the whole of it. The row's file stays `gpu run`'s, which also writes down what is used: what the driver lists,
or what the gshare inside has written into that file, where it is more (a simulated device lists nothing).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from gshare.agent.errors import GshareError
from gshare.agent.vram.clock import Holder, holder, now, parent
from gshare.agent.vram.devices import Device, DeviceReading
from gshare.agent.vram.guard import KEEP_LOCK_S, Reservation
from gshare.agent.vram.ledger import Grant, Ledger
from gshare.agent.vram.owners import Owners, used_by_row
from gshare.agent.vram.rows import Row
from gshare.agent.vram.store import Store, is_same, locked, release_lock
from gshare.agent.vram.uses import note_mb, use_file

#: A deeper chain of parents is a loop in what we read.
_MAX_DEPTH = 64


class NotInherited(GshareError):
    """The named reservation is not this process's to use; the text says why."""


class Inheritable(NamedTuple):
    """A row that may be used, and its device."""

    row: Row
    device: Device


class Inherited(Reservation):
    """A part in `gpu run`'s row: capped like a reservation of one's own, but the row is not written."""

    #: What `gpu run` has reserved, of which `budget_mb` is what is used here.
    whole_mb = 0

    @property
    def raised_by(self) -> str:
        return "--vram" if self.budget_mb < self.whole_mb else "the --vram of `gshare gpu run`"

    def listed_mb(self, reading: DeviceReading) -> int:
        """Of this process alone: others of the program are in the row too, and are no part of our context."""
        with self.tracer.span("VramQuery"):
            me = holder(os.getpid())
            row = msgspec.structs.replace(self.row, pid=me.pid, pid_start=me.start, pid_ns=me.namespace)
            return used_by_row(reading, self.id, Owners([row]).holder) or 0

    def grow(self, mb: int) -> None:
        """GshareError: the row is another process's."""
        raise GshareError(f"reservation {self.id} cannot grow by {mb} MiB from here; raise {self.raised_by}")

    def keep(self) -> None:
        """Put the proof of use back when something removed it; said once. Two stats else.

        Without it another gshare takes the row for unused. GshareError when one has, or it cannot be.
        """
        with self._lock:
            life, name = self._grant.life, use_file(self.id)
            with self.tracer.span("LedgerCleanup"), self.tracer.phase("ledger_rd"):
                stands = life is None or is_same(self._ledger.directory / name, life)
            if not self._open or stands:
                return
            self._put_back(name)
            self._tell_put_back()

    def _put_back(self, name: str) -> None:
        life = self._grant.life
        assert life is not None
        with (
            self.tracer.span("LedgerReserve"),
            locked(self._ledger.directory, self.tracer, min(self.lock_s, KEEP_LOCK_S)) as store,
            self.tracer.phase("ledger_wr"),
        ):
            if store.life(name) in ("held", "unreadable"):
                raise GshareError(f"{name} was removed; another gshare uses reservation {self.id} too now")
            store.remove(name)
            self._grant.life = store.create_life(name)
            release_lock(life)
            self._note()

    def _change(self, change: Callable[[Row], Row], *, ask_mb: int = 0) -> None:
        """Kept here for the warnings, and noted for `gpu run`, which writes the row."""
        assert ask_mb == 0
        self._grant.row = change(self._grant.row)
        with self.tracer.span("LedgerReserve"), self.tracer.phase("ledger_wr"):
            self._note()

    def _note(self) -> None:
        if self._grant.life is not None:
            note_mb(self._grant.life, self.row.used_mb)

    def _give_back(self) -> None:
        """Let the next one use the row, which stays."""
        life, self._grant.life = self._grant.life, None
        if life is None:
            return
        with self.tracer.span("LedgerRelease", task=self.row.task):
            try:
                with locked(self._ledger.directory, self.tracer) as store, self.tracer.phase("ledger_wr"):
                    if store.is_same(use_file(self.id), life):
                        store.remove(use_file(self.id))
            finally:
                with self.tracer.phase("lock_rel"):
                    release_lock(life)


def find_inheritable(ledger: Ledger, row_id: str, devices: Sequence[Device]) -> Inheritable:
    """The row, when this process may use it now; nothing is taken. NotInherited says why not."""
    with ledger.tracer.span("LedgerCleanup"), locked(ledger.directory, ledger.tracer) as store:
        return _verified(ledger, store, row_id, devices)


def inherit(
    ledger: Ledger,
    row_id: str,
    *,
    devices: Sequence[Device],
    budget_mb: int,
    on_warning: Callable[[str], None] | None = None,
) -> Inherited:
    """Use the row that `gpu run` has reserved for this process, `budget_mb` of it at most.

    NotInherited, and nothing changed, when it is not this process's to use, or another gshare uses it.
    """
    with (
        ledger.tracer.span("LedgerReserve", budget_mb=budget_mb),
        locked(ledger.directory, ledger.tracer) as store,
    ):
        row, device = _verified(ledger, store, row_id, devices)
        with ledger.tracer.phase("ledger_wr"):
            store.remove(use_file(row.id))  # of one that died
            life = store.create_life(use_file(row.id))
    mine = msgspec.structs.replace(
        row, budget_mb=min(row.budget_mb, budget_mb), peak_mb=0, used_mb=0, uses={}
    )
    made = Inherited(ledger, Grant(row=mine, device=device, life=life), on_warning)
    made.whole_mb = row.budget_mb
    return made


def _verified(ledger: Ledger, store: Store, row_id: str, devices: Sequence[Device]) -> Inheritable:
    view = ledger.view(store, now(), {})
    row = next((one for one in view.rows if one.id == row_id and one.id not in view.lingering), None)
    if row is None:
        raise NotInherited("there is no such reservation")
    if row.kind != "run":
        raise NotInherited(f"it is a {row.kind}'s, not of `gshare gpu run`")
    with ledger.tracer.phase("ledger_rd"):
        owner = store.owner(f"row-{row.id}.json")
        life, use = store.life(f"row-{row.id}.life"), store.life(use_file(row.id))
    us = os.geteuid()
    if row.uid != us or owner != us:
        raise NotInherited(f"it belongs to uid {row.uid}, and this is uid {us}")
    if life != "held" or not _descends_from(Holder(row.pid, row.pid_start, row.pid_ns)):
        raise NotInherited(f"its process {row.pid} is no ancestor of this one")
    device = next((one for one in devices if one.uuid == row.gpu_uuid), None)
    if device is None:
        raise NotInherited(f"it is on {row.gpu_uuid}, which is not among the devices for this run")
    if use not in ("free", "missing"):
        raise NotInherited("another gshare uses it now")
    return Inheritable(row, device)


def _descends_from(who: Holder) -> bool:
    """Whether `who`, by PID, start and namespace, is an ancestor of this process."""
    if not who.start or not who.namespace:
        return False  # a row of a newer gshare, or without /proc: not enough to tell it from another process
    pid: int | None = os.getpid()
    for _ in range(_MAX_DEPTH):
        pid = parent(pid)
        if not pid:
            return False
        if pid == who.pid:
            return holder(pid) == who
    return False
