"""Which row a process's memory belongs to, and what is left over: used by nobody's row, or beyond it.

A process belongs to a row when it is the row's process, carries the row's id in its environment
(`GSHARE_RESERVATION`, set by `gpu run`), or descends from the row's process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from gshare.agent.vram.clock import parent, pid_namespace, start_ticks
from gshare.agent.vram.devices import DeviceReading
from gshare.agent.vram.rows import Row

RESERVATION_VARIABLE = "GSHARE_RESERVATION"

#: A deeper chain of parents is a loop in what we read.
_MAX_DEPTH = 64


class Owners:
    """Maps a PID, as the driver reports it, to the id of the row it belongs to."""

    def __init__(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self._rows = [row for row in rows if row.pid > 0]
        self._ids = {row.id for row in rows}
        self._namespace = pid_namespace(os.getpid()) or 0

    def __call__(self, pid: int) -> str | None:
        if pid <= 0 or not self._ids:
            return None
        found = self.holder(pid) or self._marked(pid)
        ancestor: int | None = pid
        for _ in range(_MAX_DEPTH):
            if found is not None:
                return found
            ancestor = parent(ancestor)
            if not ancestor or ancestor == 1:
                return None
            found = self.holder(ancestor)
        return None

    def holder(self, pid: int) -> str | None:
        """The row whose process `pid` is itself. What /proc no longer says does not speak against it."""
        for row in self._rows:
            if row.pid == pid and row.pid_ns in (self._namespace, 0):
                start = start_ticks(pid)
                if not row.pid_start or start is None or start == row.pid_start:
                    return row.id
        foreign = [row for row in self._rows if row.pid_ns not in (self._namespace, 0)]
        if not foreign:
            return None
        namespace, inner = pid_namespace(pid), _innermost_pid(pid)
        for row in foreign:
            if namespace == row.pid_ns and inner == row.pid:
                return row.id
        return None

    def _marked(self, pid: int) -> str | None:
        name = named_reservation(pid)
        return name if name in self._ids else None


def named_reservation(pid: int) -> str | None:
    """The row's id in the process's environment; unreadable, so None, for another user's process."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    prefix = f"{RESERVATION_VARIABLE}=".encode()
    for entry in entries:
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode("ascii", "replace")
    return None


def _innermost_pid(pid: int) -> int | None:
    """The process's PID in its own namespace: the last one of NSpid in /proc/PID/status."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("NSpid:"):
                    return int(line.split()[-1])
    except (OSError, ValueError):
        pass
    return None


def outside_mb(reading: DeviceReading, rows: Sequence[Row], owner: Callable[[int], str | None]) -> int | None:
    """MiB that no row on one device accounts for, whose rows are `rows`. None: unknown.

    Of a row at most what it counts is taken off: what its processes use beyond that is in no row, and would
    be handed out a second time. A holder writes such a peak down; a `hold` and a program whose watcher died
    have none.

    Without a list of processes the holders' own last measurements are taken off; a holder that has not
    measured yet then counts twice, which errs on the safe side. Memory that the driver attributes to
    nobody counts as outside.
    """
    if reading.used_mb is None:
        return None
    measured = {row.id: row.used_mb for row in rows}
    inside = dict.fromkeys(measured, 0)
    unknown = set(measured) if reading.processes is None else set[str]()
    for process in reading.processes or ():
        row_id = owner(process.pid)
        if row_id is None or row_id not in measured:
            continue
        if process.used_mb is None:
            unknown.add(row_id)
        else:
            inside[row_id] += process.used_mb
    for row_id in unknown:
        inside[row_id] += measured[row_id]
    return max(0, reading.used_mb - sum(min(inside[row.id], row.counted_mb) for row in rows))


def used_by_row(reading: DeviceReading, row_id: str, owner: Callable[[int], str | None]) -> int | None:
    """MiB that the row's processes use by the driver's list. None: the driver does not say."""
    if reading.processes is None:
        return None
    total = 0
    for process in reading.processes:
        if owner(process.pid) == row_id:
            if process.used_mb is None:
                return None
            total += process.used_mb
    return total


def still_listed(reading: DeviceReading | None, row: Row) -> bool:
    """Whether the driver still lists the row's own process: a zombie holds its memory until it is reaped.

    A process of the same PID that started at another time is somebody else.
    """
    if reading is None or reading.processes is None or row.pid <= 0:
        return False
    owner = Owners([row])
    return any(owner.holder(process.pid) for process in reading.processes)
