"""Runs a source of the dashboard into a state until something is so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from gshare.tui.frames import Frame, SourceState
from gshare.tui.model import State
from gshare.tui.source import Source


def apply_all(state: State, frames: Iterable[Frame]) -> None:
    for frame in frames:
        state.apply(frame)


class Watched:
    """`state` is what an app would show, `frames` what it was told."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.state = State()
        self.frames: list[Frame] = []
        self.task: asyncio.Task[None]

    def emit(self, frame: Frame) -> None:
        self.frames.append(frame)
        self.state.apply(frame)

    @property
    def said(self) -> list[str]:
        """The states of the source in order."""
        return [frame.state for frame in self.frames if isinstance(frame, SourceState)]

    @property
    def live(self) -> bool:
        return self.said[-1:] == ["live"]

    async def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        async def wait() -> None:
            while not condition():
                if self.task.done():
                    self.task.result()
                    raise AssertionError("the source has ended")
                await asyncio.sleep(0.01)

        try:
            await asyncio.wait_for(wait(), seconds)
        except asyncio.TimeoutError:
            raise AssertionError(f"not so within {seconds} s; last frames: {self.frames[-10:]}") from None


@contextlib.asynccontextmanager
async def watching(source: Source) -> AsyncIterator[Watched]:
    watched = Watched(source)
    watched.task = asyncio.create_task(source.run(watched.emit))
    try:
        yield watched
    finally:
        watched.task.cancel()
        await asyncio.gather(watched.task, return_exceptions=True)
