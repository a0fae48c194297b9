"""Waiting for memory: first come, first served, woken by a release, never longer than the timeout.

No inotify and no daemon: every change of the ledger makes, renames or removes a file, so the directory's
own modification time is the wake-up. A waiter looks at it every `LOOK_S` (one `stat`), and takes the lock
only when it moved, or after `FULL_LOOK_S` in any case: memory of programs outside the ledger comes free,
and leases run out, without a change here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import msgspec
from gshare.agent.errors import GshareError, RetryLater
from gshare.agent.vram.grants import Grant, NeverFits, Place, Queued, Wanted
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.machine import Wait
from gshare.agent.vram.store import LOCK_SECONDS

LOOK_S = 0.05
FULL_LOOK_S = 2.0

#: Told when the request starts to wait and whenever its position or reason changes.
OnWait = Callable[[Queued], None]
#: Called every `LOOK_S` of a wait; what it raises ends the wait.
OnLook = Callable[[], None]


#: A waiting request says again where it stands after this many seconds, when only the reason changed.
SAY_AGAIN_S = 30.0


def place_line(queued: Queued) -> str:
    """Where a request stands, in one line."""
    decision = queued.decision
    return f"waiting for {queued.gpu_uuid}, place {decision.position}: {decision.reason}"


class Announcer:
    """An `OnWait` for people: a line when the place changes or trouble begins or ends, and now and then when
    only the reason changes."""

    def __init__(
        self,
        say: Callable[[str], None],
        every_s: float = SAY_AGAIN_S,
        line: Callable[[Queued], str] = place_line,
    ) -> None:
        self._say, self._every_s, self._line = say, every_s, line
        self._news, self._at = (0, False), 0.0

    def __call__(self, queued: Queued) -> None:
        news = (queued.decision.position, queued.trouble)
        now = time.monotonic()
        if news != self._news or now - self._at >= self._every_s:
            self._news, self._at = news, now
            self._say(self._line(queued))


def wait_for(
    ledger: Ledger,
    wanted: Wanted,
    *,
    timeout_s: float,
    on_wait: OnWait | None = None,
    on_look: OnLook | None = None,
) -> Grant:
    """Reserve, waiting at most `timeout_s` seconds; 0 does not wait at all.

    RetryLater (exit 75) when the time is over; the queue is left however this ends. Once in the queue, a
    device, a driver or a lock in trouble is waited out like memory. NeverFits, errors of the first look and
    those of the two callbacks pass through.
    """
    deadline = time.monotonic() + timeout_s
    join_s = timeout_s if timeout_s > 0 else None
    place: Place | None = None
    queued: Queued | None = None  # the last answer
    told: tuple[int, str] | None = None
    try:
        while True:
            with ledger.tracer.span("WaitPoll"), ledger.tracer.phase("wait_poll"):
                stamp = _stamp(ledger)
            try:
                # In the queue the lock is asked for no longer than a full look may be late, and then again.
                patience_s = LOCK_SECONDS if place is None else FULL_LOOK_S
                answer = ledger.reserve(wanted, place=place, join_s=join_s, patience_s=patience_s)
            except GshareError as error:
                if place is None or queued is None or isinstance(error, NeverFits):
                    raise
                decision = Wait(queued.decision.position, str(error))
                answer = msgspec.structs.replace(queued, decision=decision, trouble=True)
            if isinstance(answer, Grant):
                place = None
                return answer
            queued = answer
            if place is None and answer.place is not None:
                place = answer.place
                stamp = None  # our own joining moved it: what happened meanwhile is seen by the next look
            if time.monotonic() >= deadline:
                raise RetryLater(_too_late(answer, wanted, timeout_s))
            news = (answer.decision.position, answer.decision.reason)
            if on_wait is not None and news != told:
                told = news
                on_wait(answer)
            _sleep(ledger, stamp, deadline, on_look)
    finally:
        if place is not None:
            ledger.leave(place)


def _sleep(ledger: Ledger, stamp: int | None, deadline: float, on_look: OnLook | None) -> None:
    """Until the directory changes, a full look is due, or the time is over."""
    with ledger.tracer.span("WaitPoll"), ledger.tracer.phase("wait_poll"):
        until = min(deadline, time.monotonic() + FULL_LOOK_S)
        while True:
            if on_look is not None:
                on_look()
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(LOOK_S, left))
            if stamp is None or _stamp(ledger) != stamp:
                return


def _stamp(ledger: Ledger) -> int:
    """The directory's modification time in ns; 0 when it is gone, so that a new one is a change."""
    try:
        return os.stat(ledger.directory).st_mtime_ns
    except OSError:
        return 0


def _too_late(answer: Queued, wanted: Wanted, timeout_s: float) -> str:
    reason = f"{answer.decision.reason}, on {answer.gpu_uuid}"
    if timeout_s <= 0:
        return f"no memory now for {wanted.task}: {reason}; wait for it with --wait-gpu"
    return (
        f"waited {timeout_s:.0f} s for memory for {wanted.task}, place {answer.decision.position}: {reason}"
    )
