"""Time and identity that survive clock steps: CLOCK_BOOTTIME, the boot's id, who a process is.

A PID alone proves nothing: it is reused, and means another process in another namespace.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import NamedTuple


class Now(NamedTuple):
    """Seconds since boot (suspend included), and which boot: comparable only within one boot."""

    boot_s: float
    boot_id: str


def now() -> Now:
    return Now(time.clock_gettime(time.CLOCK_BOOTTIME), _boot_id())


@functools.lru_cache(maxsize=1)
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class Holder(NamedTuple):
    """One process, for good: its PID, when it started (clock ticks after boot), its PID namespace."""

    pid: int
    start: int
    namespace: int


def holder(pid: int) -> Holder:
    """Who `pid` is now; zeros for what cannot be read."""
    return Holder(pid, start_ticks(pid) or 0, pid_namespace(pid) or 0)


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, counted after the last `)`: a command's name may hold anything."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def parent(pid: int) -> int | None:
    """PID of the parent, None when it cannot be read."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else None


def stat_fields(pid: int) -> list[str] | None:
    """/proc/PID/stat from field 3 (the state) on, None when it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > 19 else None


def pid_namespace(pid: int) -> int | None:
    """Inode of the PID namespace; None when it may not be looked at."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None
