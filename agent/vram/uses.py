"""`use-ID.life`: the gshare that uses the reservation ID of the `gpu run` around it, and how much it has.

Its flock says that it lives, its one line how many MiB it uses. That is for `gpu run`: the driver does not
list a process that computes on the CPU in a simulated device's place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

_NOTE = b"%10d\n"


def use_file(row_id: str) -> str:
    """Its name in the ledger's directory."""
    return f"use-{row_id}.life"


def note_mb(life: int, mb: int) -> None:
    """Write into the open file that `mb` MiB are in use.

    Always as many bytes, so that no reader sees a part of an older number. The directory stays as it was, so
    no waiter wakes for it.
    """
    with contextlib.suppress(OSError):  # a full disk: then what the driver lists is all that counts
        os.pwrite(life, _NOTE % mb, 0)


def noted_mb(directory: Path, row_id: str) -> int:
    """MiB that the gshare inside says it uses; 0 for none. Needs no lock.

    Only of a living one of this user: what a dead one wrote is over, and others might lie.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(directory / use_file(row_id), flags)
    except OSError:
        return 0
    text = b""
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            text = os.read(fd, len(_NOTE % 0))
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BlockingIOError:
        return int(text) if text.strip().isdigit() else 0
    except OSError:
        return 0
    finally:
        os.close(fd)
    return 0
