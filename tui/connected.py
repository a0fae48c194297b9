"""What sources with a connection have in common: they come back, and say how they are.

             ┌────────── heard again ──────────┐
connecting ──► live ──── quiet for a while ──► stale
    ▲           └───── connection ended ─────►  │
    └── after the backoff, or `retry` ── lost ◄─┘
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from abc import abstractmethod
from collections.abc import Coroutine
from typing import Any

from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.names import plain
from gshare.coordinator.reconnect import Backoff
from gshare.tui.coalesce import SAMPLE_SECONDS, Coalescer
from gshare.tui.frames import Found, Frame, SourceState, SourceStateName
from gshare.tui.source import ActionName, Emit, SourceBase

#: Somebody is watching: the first try comes soon, the last ones often enough.
FIRST_SECONDS, MOST_SECONDS = 0.5, 15.0
#: To a socket of this machine a try costs nothing, and who starts the other side wants to see it.
MOST_LOCAL_SECONDS = 2.0
TICK_SECONDS = 0.25


class Hopeless(GshareError):
    """No retry mends it: another protocol version, a refused key."""


class ConnectedSource(SourceBase):
    """Subclasses implement `session`: connect, call `say("live")`, return or raise when it has ended."""

    #: Seconds without a word after which what is shown is called stale: a bit over two beats.
    stale_seconds = 10.0

    def __init__(self, rng: random.Random | None = None, *, is_local: bool = True) -> None:
        """`is_local`: trying again costs nothing."""
        self.coalescer = Coalescer()
        most = MOST_LOCAL_SECONDS if is_local else MOST_SECONDS
        self._backoff = Backoff(rng or random.Random(), FIRST_SECONDS, most)
        self._retry = asyncio.Event()
        self._emit: Emit | None = None
        self._said: SourceStateName | None = None
        self._since = 0.0  # Unix s: since when it is live, or is not
        self.was_live = False  # at any time

    @abstractmethod
    async def session(self) -> None:
        """One connection, to its end. GshareError: why it ended or could not be made."""

    @abstractmethod
    def last_heard(self) -> float | None:
        """Monotonic s of the last word over the present connection; None: there is none."""

    async def run(self, emit: Emit) -> None:
        self._emit = emit
        self.tell_found()
        self.say("connecting", self.detail)
        ticking = asyncio.create_task(self._tick())
        try:
            while True:
                began = time.monotonic()
                reason = "the connection ended"
                try:
                    await self.session()
                except Hopeless as error:
                    self.say("lost", plain(str(error)))
                    raise
                except GshareError as error:
                    reason = plain(str(error))
                self._backoff.connected(time.monotonic() - began)
                await self._wait(reason)
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)

    async def act(self, action: ActionName, targets: list[str]) -> dict[str, str]:
        if action == "retry":
            self._retry.set()
            return {}
        raise UsageError(f"{self.title} cannot {action} anything from here")

    # --- for subclasses

    def emit(self, frame: Frame) -> None:
        if self._emit is not None:
            self._emit(frame)

    def tell_found(self) -> None:
        """Says what the source is; again when it has learnt more of it."""
        self.emit(Found(**self.now(), kind=self.kind, title=self.title, detail=self.detail, can=self._can()))

    def say(self, state: SourceStateName, text: str = "", retry_in: float | None = None) -> None:
        moment = self.now()
        # Tries in between end nothing: how long nothing was heard is what counts.
        away = ("connecting", "lost")
        if not (state in away and self._said in away):
            self._since = moment["received"]
        self._said = state
        self.was_live |= state == "live"
        self.emit(SourceState(**moment, state=state, text=text, since=self._since, retry_in=retry_in))

    def now(self, at: float | None = None) -> dict[str, Any]:
        """`time` and `received` of a frame; `at`: the source's clock, when its message told it."""
        received = time.time()
        return {"time": at or received, "received": received}

    def flush(self, job: str) -> None:
        """The metrics held back of a job, before what comes after them."""
        moment = self.now()
        samples = self.coalescer.take_one(job, moment["time"], moment["received"])
        if samples is not None:
            self.emit(samples)

    def _can(self) -> tuple[str, ...]:
        return tuple(sorted(self.can))

    async def _wait(self, reason: str) -> None:
        delay = self._backoff.next_delay()
        # What was never there is not lost.
        self.say("lost" if self.was_live else "connecting", reason, retry_in=delay)
        self._retry.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._retry.wait(), delay)
        self.say("connecting", reason)

    async def _tick(self) -> None:
        flushed = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            if now - flushed >= SAMPLE_SECONDS:
                flushed = now
                moment = self.now()
                samples = self.coalescer.take(moment["time"], moment["received"])
                if samples is not None:
                    self.emit(samples)
            heard = self.last_heard()
            if heard is None:
                continue
            quiet = now - heard
            if self._said == "live" and quiet > self.stale_seconds:
                self.say("stale", f"nothing heard for {quiet:.0f} s")
            elif self._said == "stale" and quiet <= self.stale_seconds:
                self.say("live")


async def until_gone(gone: Coroutine[Any, Any, str], *work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` until the connection ends (`gone` says why: GshareError) or one of it fails."""
    ending = asyncio.ensure_future(gone)
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        done, _ = await asyncio.wait({ending, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {ending}:
            task.result()  # raises what ended it
        raise GshareError(await ending)
    finally:
        for task in (ending, *tasks):
            task.cancel()
        await asyncio.gather(ending, *tasks, return_exceptions=True)
