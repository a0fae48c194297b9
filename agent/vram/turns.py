"""Waiting for the ledger's lock: with a deadline, and so that nobody who waits starves.

A blocking flock is served in the order of asking, but has no deadline; asking again and again has one, but
no order: what comes new is as likely to find the lock free as what has waited for long. So there is a second
flock, the *turn*, on the ledger's directory, which every operation has open anyway. Who has waited for
`TURN_S` takes it where it is free; while somebody has it, those who came later do not ask for the lock.

Nothing is written, and a turn ends with the process that has it. One that is stopped meanwhile keeps it: then
everybody asks for the lock all the same after `COURTESY_S`.
"""

from __future__ import annotations

import fcntl
import random
import time
from pathlib import Path

from gshare.agent.errors import GshareError
from gshare.agent.vram.paths import LOCK

#: Seconds between asking for the lock, with jitter: a blocking flock has no timeout. Up to 1 ms costs what
#: the blocking call does (32 processes on two busy cores, p99 of reserve plus release: 16-17 ms, both); 4 ms
#: cost 40-110. While a stopped process has the lock, 32 waiters take half a core so.
_FIRST_PAUSE, _PAUSE = 0.0003, 0.001
#: Longest wait of 64 processes that take the lock all the time, 2 ms each, on two cores: 0.32 s; no turns:
#: 0.9 s, or 1.8 s where those who have waited for 1 s ask every 50 ms; 0.39 s in the kernel's own queue.
TURN_S, COURTESY_S = 0.02, 0.25


def take_lock(fd: int, directory: int, path: Path, deadline: float) -> None:
    """flock `fd` (`lock` in `path`) until `deadline` (time.monotonic); GshareError when it is held then.

    Both descriptors must be the caller's own: a flock is shared by all who have the same one.
    """
    begin = time.monotonic()
    pause = _FIRST_PAUSE
    ours = False
    try:
        while True:
            waited = time.monotonic() - begin
            if waited < TURN_S:
                may_ask = _nobodys_turn(directory)
            else:
                ours = ours or _try_flock(directory, fcntl.LOCK_EX)
                may_ask = ours or waited >= COURTESY_S
            if may_ask and _try_flock(fd, fcntl.LOCK_EX):
                return
            if begin + waited > deadline:
                raise GshareError(
                    f"{path / LOCK} has been held too long; a stopped process holds it: "
                    f"fuser -v {path / LOCK} names it"
                )
            time.sleep((_FIRST_PAUSE if ours else pause) * random.uniform(0.5, 1.5))
            pause = min(pause * 1.5, _PAUSE)
    finally:
        if ours:
            fcntl.flock(directory, fcntl.LOCK_UN)


def _nobodys_turn(directory: int) -> bool:
    """Shared, so that two who ask do not look like a turn."""
    free = _try_flock(directory, fcntl.LOCK_SH)
    if free:
        fcntl.flock(directory, fcntl.LOCK_UN)
    return free


def _try_flock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
