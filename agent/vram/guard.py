"""A reservation in the hands of the process that uses it: taken before the first allocation, kept honest.

    with reserve(8192, task="finetune support") as reservation:
        cap = reservation.cap(context_mb=measured)      # for the allocator: budget minus context
        reservation.record_use("load", 5300)
        reservation.set_client("alice", 900)

Ends with the block, at exit, or by proof of death; never by a signal handler. A forked child has no part
in it: it closes its copy of the descriptor, so a parent that dies frees the reservation although children
live on. Fragmentation is not seen: a budget is a sum, and an allocator that needs one large piece may fail
below it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import msgspec
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.trace import Tracer
from gshare.agent.vram.devices import Device, DeviceReading
from gshare.agent.vram.identify import visible_devices
from gshare.agent.vram.ledger import Grant, Ledger, Wanted
from gshare.agent.vram.owners import Owners, used_by_row
from gshare.agent.vram.queue import OnLook, OnWait, wait_for
from gshare.agent.vram.rows import Client, Row, RowKind
from gshare.agent.vram.store import LOCK_SECONDS

#: An hour: the default time that a request waits for memory.
WAIT_SECONDS = 3600.0

#: A peak above the budget by this much is warned about.
OVERRUN = 1.20

#: A rewrite of the row costs a millisecond: smaller changes of the use than this (MiB) are not written.
_WRITE_STEP_MB = 64

#: `keep` comes with every training step: a lock that a stopped process holds must not stop training too.
_KEEP_LOCK_S = 1.0

_held: weakref.WeakSet[Reservation] = weakref.WeakSet()


class Cap(NamedTuple):
    """What the allocator may use. `fraction` is for `torch.cuda.set_per_process_memory_fraction`."""

    mb: int
    fraction: float


def allocator_cap(budget_mb: int, context_mb: int, total_mb: int) -> Cap:
    """Budget minus the measured context, in MiB and as a fraction of the device, never rounded up.

    GshareError when the context alone takes the budget.
    """
    if context_mb >= budget_mb:
        raise GshareError(
            f"the CUDA context takes {context_mb} MiB, all of the reserved {budget_mb} MiB; reserve more"
        )
    cap = budget_mb - context_mb
    return Cap(cap, min(1.0, cap / total_mb))


class Reservation:
    """One standing row. Methods are safe from several threads; after `release` they do nothing."""

    def __init__(self, ledger: Ledger, grant: Grant, on_warning: Callable[[str], None] | None) -> None:
        self._ledger = ledger
        self._grant = grant
        self._on_warning = on_warning if on_warning is not None else _warn
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._measure_anew = False
        self._warned: set[str] = set()
        self._told_put_back = False
        self._open = True
        #: Told after the budget has become another: what caps an allocator under it.
        self.on_budget: Callable[[], None] = lambda: None
        #: How long a change waits for the ledger's lock, seconds; whoever has to look at something else
        #: meanwhile sets less.
        self.lock_s = LOCK_SECONDS
        _held.add(self)

    @property
    def id(self) -> str:
        return self._grant.row.id

    @property
    def device(self) -> Device:
        return self._grant.device

    @property
    def row(self) -> Row:
        """The row as last written."""
        return self._grant.row

    @property
    def budget_mb(self) -> int:
        return self._grant.row.budget_mb

    @property
    def raised_by(self) -> str:
        """What the user has to set higher for more memory."""
        return "--vram"

    @property
    def tracer(self) -> Tracer:
        """The ledger's: what watches the reservation's use is a cost of sharing too."""
        return self._ledger.tracer

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def life(self) -> int:
        """The descriptor that proves the holder's life; a child that inherits it keeps the row alive."""
        assert self._grant.life is not None
        return self._grant.life

    def read_device(self) -> DeviceReading:
        """What the driver says of the device now."""
        return self._ledger.read_devices((self.device,))[self.device.uuid]

    def listed_mb(self, reading: DeviceReading) -> int:
        """MiB that the driver says this reservation's processes use; 0 when it does not say."""
        with self.tracer.span("VramQuery"):
            return used_by_row(reading, self.id, Owners([self.row])) or 0

    def cap(self, context_mb: int, total_mb: int) -> Cap:
        """The allocator's cap under this reservation: see `allocator_cap`."""
        return allocator_cap(self.budget_mb, context_mb, total_mb)

    def grow(self, mb: int) -> None:
        """Reserve `mb` more. RetryLater, and no change, when that does not fit now."""
        assert mb > 0
        with self._lock:
            self._change(lambda row: _with_budget(row, row.budget_mb + mb), ask_mb=self._beyond(mb))

    def shrink(self, mb: int) -> None:
        """Give `mb` back. What was once used stays counted until a client leaves."""
        assert mb > 0
        with self._lock:
            left = self.budget_mb - mb
            parts = sum(client.budget_mb for client in self.row.clients)
            if left < max(1, parts):
                raise UsageError(f"reservation {self.id}: {mb} MiB less leaves {left}, clients have {parts}")
            self._change(lambda row: _with_budget(row, left))

    def set_client(self, name: str, budget_mb: int | None, *, inside_mb: int = 0) -> None:
        """Add, change or (None) remove the part of one client; the row's budget follows.

        `inside_mb` of the change are in the row's budget whoever's they are: so much less is asked for when
        a part comes, and so much stays when it goes. When a client leaves, the peak is measured anew from the
        next `record_use` on. RetryLater, and no change, when a larger part does not fit now.
        """
        assert budget_mb is None or budget_mb > 0
        with self._lock:
            old = next((client.budget_mb for client in self.row.clients if client.name == name), 0)
            delta = (budget_mb or 0) - old
            assert 0 <= inside_mb <= abs(delta)
            delta += inside_mb if delta < 0 else -inside_mb
            others = tuple(client for client in self.row.clients if client.name != name)
            added = () if budget_mb is None else (Client(name=name, budget_mb=budget_mb),)

            def change(row: Row) -> Row:
                row = _with_budget(row, max(1, row.budget_mb + delta))
                return msgspec.structs.replace(row, clients=others + added)

            self._change(change, ask_mb=self._beyond(delta) if delta > 0 else 0)
            if budget_mb is None and old:
                self._measure_anew = True
            if delta:
                self.on_budget()

    def record_use(self, phase: str, mb: int) -> None:
        """Write down that `mb` MiB are in use after `phase` (load, first_step, eval, save, …).

        The highest use is what others see from then on. Warns once a phase when it is more than 20 % over
        the budget. Also does what `keep` does.
        """
        self.keep()
        with self._lock:
            row = self.row
            peak = mb if self._measure_anew else max(row.peak_mb, mb)
            uses = {**row.uses, phase: max(row.uses.get(phase, 0), mb)}
            news = peak != row.peak_mb or phase not in row.uses or abs(mb - row.used_mb) >= _WRITE_STEP_MB
            if news:
                self._change(lambda row: msgspec.structs.replace(row, peak_mb=peak, used_mb=mb, uses=uses))
                self._measure_anew = False
            if self._open and mb > OVERRUN * row.budget_mb and phase not in self._warned:
                self._warned.add(phase)
                over = mb / row.budget_mb - 1
                self._on_warning(
                    f"reservation {self.id} ({row.task}): {mb} MiB used after {phase}, {over:.0%} more than "
                    f"the {row.budget_mb} MiB reserved"
                )

    def keep(self) -> None:
        """Put row and proof of life back when something removed or damaged them; said once. Three stats else.

        To be called again and again by whoever holds memory: a row that is gone is memory that others are
        given, and a damaged one may block the whole host. GshareError when it cannot be put back.
        """
        with self._lock:
            if not self._open or self._ledger.stands(self._grant):
                return
            self._ledger.change(self._grant, lambda row: row, patience_s=min(self.lock_s, _KEEP_LOCK_S))
            if not self._told_put_back:
                self._told_put_back = True
                self._on_warning(
                    f"reservation {self.id}: something removed or damaged its files in "
                    f"{self._ledger.directory}; they have been put back"
                )

    def release(self) -> None:
        """Give everything back; a second call does nothing, nor does one in a forked child.

        A ledger that cannot be written is only warned about: the flock is given back in any case, which makes
        the row a dead one.
        """
        if os.getpid() != self._pid:
            return  # before the lock: another thread may have held it when this child was forked
        with self._lock:
            if not self._open:
                return
            self._open = False
            _held.discard(self)
            try:
                self._give_back()
            except GshareError as error:
                self._on_warning(f"reservation {self.id} goes with the next operation: {error}")

    def forget(self) -> None:
        """Close the descriptor without touching the ledger: what a forked child does with its copy."""
        self._open = False
        if self._grant.life is not None:
            with contextlib.suppress(OSError):
                os.close(self._grant.life)
            self._grant.life = None

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _give_back(self) -> None:
        self._ledger.release(self._grant)

    def _beyond(self, mb: int) -> int:
        """How much of `mb` more is not counted yet: a peak above the budget already is."""
        row = self.row
        return max(0, row.budget_mb + mb - row.counted_mb)

    def _change(self, change: Callable[[Row], Row], *, ask_mb: int = 0) -> None:
        if self._open:
            self._ledger.change(self._grant, change, ask_mb=ask_mb, patience_s=self.lock_s)


def reserve(
    budget_mb: int,
    *,
    task: str,
    devices: Sequence[Device] | None = None,
    timeout_s: float = WAIT_SECONDS,
    kind: RowKind = "trainer",
    clients: Sequence[Client] = (),
    on_wait: OnWait | None = None,
    on_look: OnLook | None = None,
    on_warning: Callable[[str], None] | None = None,
    ledger: Ledger | None = None,
) -> Reservation:
    """Reserve `budget_mb` MiB on one of `devices` (default: what CUDA_VISIBLE_DEVICES leaves of all).

    Waits up to `timeout_s` seconds, 0 not at all: then RetryLater (exit 75). UsageError when it can never
    fit, GshareError when the device or the ledger is in trouble. `task` is one line for other users.
    What `on_look` raises ends the wait.
    """
    ledger = ledger if ledger is not None else Ledger()
    wanted = Wanted(
        mb=budget_mb,
        devices=candidates(ledger, devices),
        task=task,
        kind=kind,
        clients=tuple(clients),
    )
    grant = wait_for(ledger, wanted, timeout_s=timeout_s, on_wait=on_wait, on_look=on_look)
    return Reservation(ledger, grant, on_warning)


def candidates(ledger: Ledger, devices: Sequence[Device] | None) -> tuple[Device, ...]:
    """The devices that a request may go to. UsageError when CUDA_VISIBLE_DEVICES leaves none."""
    found = tuple(devices) if devices is not None else visible_devices(ledger.list_devices())
    if not found:
        raise UsageError("CUDA_VISIBLE_DEVICES leaves no device; unset it, or name one with --gpus")
    return found


def _with_budget(row: Row, budget_mb: int) -> Row:
    return msgspec.structs.replace(row, budget_mb=budget_mb)


def _warn(text: str) -> None:
    """A stderr that takes nothing must not end what holds the memory."""
    with contextlib.suppress(OSError, ValueError):
        print(f"gshare: warning: {text}", file=sys.stderr, flush=True)


def _release_all() -> None:
    for reservation in list(_held):
        with contextlib.suppress(Exception):
            reservation.release()


def _forget_all() -> None:
    for reservation in list(_held):
        reservation.forget()
    _held.clear()


atexit.register(_release_all)
os.register_at_fork(after_in_child=_forget_all)
