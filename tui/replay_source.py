"""A recording as a source: the same frames at their distances, faster or slower, with pause and seek."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from gshare.agent.errors import UsageError
from gshare.tui.frames import Found, Frame, Reset, SourceState
from gshare.tui.recording import Recording
from gshare.tui.source import Emit, SourceBase
from msgspec import structs

#: Beyond this the screen could not show what happens in between anyway; a day passes in 1.5 minutes.
MAX_SPEED = 1000.0
#: Waits are cut so that a changed speed is felt at once.
STEP_SECONDS = 0.25
#: Frames emitted before others get their turn: a few milliseconds.
BURST = 200


class ReplaySource(SourceBase):
    """Frames keep their times: what shows ages takes `position` for now."""

    kind = "replay"
    can = frozenset({"seek"})

    def __init__(
        self, path: Path, *, speed: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`speed`: recorded seconds a second. UsageError: no recording, or no speed."""
        if not 0 < speed <= MAX_SPEED:
            raise UsageError(f"--speed {speed:g}: must be above 0 and at most {MAX_SPEED:g}")
        self._recording = Recording(path)
        self.speed = speed
        self.start, self.end = self._recording.start, self._recording.end
        header = self._recording.header
        self.title = f"replay of {path.name}"
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(header.started))
        self.detail = f"{header.title}, {made}, gshare {header.gshare}".lstrip(", ")
        # Told once: a recording whose writer was killed is shown up to there.
        self.note = f"{path.name} {self._recording.note}" if self._recording.note else ""
        self._clock = clock
        self._position = self.start
        self._paused = False
        self._wake = asyncio.Event()
        self._goal: float | None = None  # a seek that was asked for

    @property
    def position(self) -> float:
        return self._position

    @property
    def paused(self) -> bool:
        return self._paused

    def pause(self, on: bool) -> None:
        self._paused = on
        self._wake.set()

    def seek(self, to: float) -> None:
        self._goal = min(max(to, self.start), self.end)
        self._wake.set()

    async def run(self, emit: Emit) -> None:
        try:
            goal: float | None = None
            while True:
                self._goal = None
                await self._play(emit, goal)
                while self._goal is None:  # at the end: a seek goes back
                    await self._wake.wait()
                    self._wake.clear()
                goal = self._goal
        finally:
            self._recording.close()

    async def _play(self, emit: Emit, goal: float | None) -> None:
        """From the beginning, or from the state at `goal`, to the end or to the next seek."""
        first = 0
        if goal is not None:
            emit(Reset(time=goal, received=goal))
            first, self._position = self._recording.before(goal), goal
        burst = 0
        for frame in self._recording.read(first):
            if frame.received > self._position:
                await self._until(frame.received)
                burst = 0
            if self._goal is not None:
                return
            # The title is what was recorded; what could be done then cannot be done now.
            emit(structs.replace(frame, can=tuple(self.can)) if isinstance(frame, Found) else frame)
            burst += 1
            if burst == BURST:
                burst = 0
                await asyncio.sleep(0)
        emit(self._ended())

    async def _until(self, moment: float) -> None:
        """Returns when the position is there, or a seek was asked for."""
        before = self._clock()
        while self._goal is None and self._position < moment:
            left = (moment - self._position) / self.speed
            wait = None if self._paused else min(left, STEP_SECONDS)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), wait)
            self._wake.clear()
            now = self._clock()
            if wait is not None:
                self._position = min(moment, self._position + (now - before) * self.speed)
            before = now

    def _ended(self) -> Frame:
        return SourceState(
            time=self.end,
            received=self.end,
            state="ended",
            text="the recording is at its end",
            since=self.end,
        )
