"""The ledger as it stands, read under its lock, with the dead taken out.

Dead is: a row whose flock can be taken, a lease that says of itself that it ran out or is of another boot, a
waiter whose flock can be taken or whose time is over. Kept in doubt: a row whose proof of life cannot be
looked at, a dead process that the driver still lists (a zombie holds its memory), a lease that does not say
when it ends, anything that cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from gshare.agent.jobs.names import plain, shorten
from gshare.agent.vram.clock import Now
from gshare.agent.vram.devices import DeviceReading
from gshare.agent.vram.machine import MAX_BYPASS, Claim, Waiting
from gshare.agent.vram.owners import still_listed
from gshare.agent.vram.paths import TEMPORARY
from gshare.agent.vram.rows import BOOT_ID, BadRow, Damaged, Row, Waiter, decode_row, decode_waiter, salvage
from gshare.agent.vram.store import Store, Unreadable

#: A waiter gives up by itself at its deadline; a stopped one is dropped from the queue this much later.
WAITER_GRACE_S = 10.0
#: A waiter looks every 2 s at the latest. One that has not for this long is stopped, or its driver hangs:
#: what it would get is not kept for it.
ABSENT_S = 5.0

#: KIND-ID.life goes when no such KIND-ID.json is there and nobody holds it.
_LIFE_OF = {"row": "row", "use": "row", "wait": "wait"}

Readings = Callable[[str], DeviceReading | None]


class View(msgspec.Struct, kw_only=True):
    """What counts now. `passed`: waiter's id → how often later requests were served before it.

    `absent`: waiters that have not looked for `ABSENT_S`.
    """

    rows: list[Row]
    damaged: list[Damaged]
    waiters: list[Waiter]
    passed: dict[str, int]
    lingering: set[str]  # rows of dead processes that the driver still lists
    absent: set[str]

    @property
    def claims(self) -> list[Claim]:
        return [row.claim for row in self.rows] + [damaged.claim for damaged in self.damaged]

    @property
    def queue(self) -> list[Waiting]:
        return [
            Waiting(
                id=waiter.id,
                ticket=waiter.ticket,
                request_mb=waiter.request_mb,
                gpu_uuids=waiter.gpu_uuids,
                passed=self.passed.get(waiter.id, 0),
                absent=waiter.id in self.absent,
            )
            for waiter in self.waiters
        ]


def read_view(store: Store, now: Now, readings: Readings) -> View:
    """Read everything and remove what is dead, as far as it is ours to remove.

    `readings` gives a device's reading by UUID, None where there is none; asked only for dead rows.
    """
    view = View(rows=[], damaged=[], waiters=[], passed={}, lingering=set(), absent=set())
    names = store.names()
    for name in names:
        kind, stem, suffix = _parts(name)
        if suffix == "json" and kind == "row":
            _take_row(view, store, stem, readings)
        elif suffix == "json" and kind == "lease":
            _take_lease(view, store, stem, now)
        elif suffix == "json" and kind == "wait":
            _take_waiter(view, store, stem, now)
    _remove_remains(store)
    waiting = {waiter.id for waiter in view.waiters}
    if waiting:
        for name in names:
            if name.startswith("passes-"):
                for waiter, count in read_passes(store, name).items():
                    if waiter in waiting:
                        view.passed[waiter] = view.passed.get(waiter, 0) + count
    return view


def _parts(name: str) -> tuple[str, str, str]:
    """KIND, STEM and SUFFIX of KIND-STEM.SUFFIX."""
    kind, _, rest = name.partition("-")
    stem, _, suffix = rest.partition(".")
    return kind, stem, suffix


def _remove_remains(store: Store) -> None:
    """What belongs to a row or waiter that is gone, just now or before; what was never whole."""
    names = store.names()
    present = set(names)
    for name in names:
        kind, stem, suffix = _parts(name)
        if name.startswith(TEMPORARY):
            store.remove(name)  # what is written is written under our lock, so this one's writer died
        elif suffix == "life" and kind in _LIFE_OF and f"{_LIFE_OF[kind]}-{stem}.json" not in present:
            if store.life(name) == "free":
                store.remove(name)
        elif kind == "mps" and f"row-{stem}.json" not in present:
            store.remove(name)  # the share of a reservation that is gone


def read_passes(store: Store, name: str) -> dict[str, int]:
    """One user's counts, by waiter. Damaged ones are dropped: they only bound how long one waits."""
    try:
        return decode_passes(store.read(name))
    except (Unreadable, BadRow):
        return {}


def decode_passes(data: bytes | None) -> dict[str, int]:
    """The counts in a file of passes, {} for none. BadRow for any that nobody counted: below 0 or above the
    bound, so that no file lifts the bound for others or stops them for good.
    """
    try:
        counts = msgspec.json.decode(data, type=dict[str, int]) if data else {}
    except msgspec.DecodeError as error:
        raise BadRow(f"not counts: {error}") from None
    for waiter, count in counts.items():
        if not 0 <= count <= MAX_BYPASS:
            raise BadRow(f"{shorten(waiter)} passed {shorten(count)} times")
    return counts


def _read_row(store: Store, name: str, stem: str) -> Row | Damaged | None:
    try:
        data = store.read(name)
    except Unreadable as error:
        claim = Claim(id=plain(stem), gpu_uuid=None, mb=None)
        return Damaged(name=name, reason=str(error), claim=claim)
    if data is None:
        return None
    try:
        row = decode_row(data)
    except BadRow as error:
        return Damaged(name=name, reason=str(error), claim=salvage(stem, data))
    if row.id != stem:
        return Damaged(name=name, reason=f"holds the row {row.id}", claim=salvage(stem, data))
    return row


def _take_row(view: View, store: Store, stem: str, readings: Readings) -> None:
    name, life = f"row-{stem}.json", f"row-{stem}.life"
    row = _read_row(store, name, stem)
    if isinstance(row, Damaged):
        view.damaged.append(row)
    elif row is not None:
        state = store.life(life)
        if state == "missing":
            reason = "its proof of life is gone"
            view.damaged.append(Damaged(name=name, reason=reason, claim=row.claim))
        elif state != "free":
            view.rows.append(row)
        elif still_listed(readings(row.gpu_uuid), row):
            view.rows.append(row)
            view.lingering.add(row.id)
        else:
            store.remove(name)
            store.remove(life)


def _take_lease(view: View, store: Store, stem: str, now: Now) -> None:
    name = f"lease-{stem}.json"
    row = _read_row(store, name, stem)
    if isinstance(row, Damaged):
        view.damaged.append(row)
    elif row is not None:
        until, same_boot = row.lease_until_boot_s, row.boot_id == now.boot_id
        if until is None:
            reason = "does not say when its lease ends"
        elif not same_boot and not (BOOT_ID.match(row.boot_id) and BOOT_ID.match(now.boot_id)):
            reason = "does not say of which boot its lease is"
        elif same_boot and now.boot_s < until:
            view.rows.append(row)
            return
        else:
            store.remove(name)
            return
        view.damaged.append(Damaged(name=name, reason=reason, claim=row.claim))


def _take_waiter(view: View, store: Store, stem: str, now: Now) -> None:
    name, life = f"wait-{stem}.json", f"wait-{stem}.life"
    waiter: Waiter | None = None
    try:
        data = store.read(name)
        waiter = decode_waiter(data) if data is not None else None
    except (Unreadable, BadRow):
        pass  # its process writes it again when it looks next
    alive = store.life(life) in ("held", "unreadable")
    if waiter is not None and alive:
        if waiter.id == stem and now.boot_s <= waiter.deadline_boot_s + WAITER_GRACE_S:
            view.waiters.append(waiter)
            looked_s = store.looked_s(life)
            if looked_s is not None and looked_s < now.boot_s - ABSENT_S:
                view.absent.add(waiter.id)
    elif not alive:
        store.remove(name)
        store.remove(life)
