"""Without a flag: the nearest thing that runs, and what is nearer once it does.

Who opens the dashboard first and submits afterwards sees the cluster without starting it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gshare.tui.frames import Message, Reset
from gshare.tui.source import ActionName, Emit, FileRow, Source, SourceBase

LOOK_SECONDS = 1.0


class NearestSource(SourceBase):
    """`nearer`: a source that is to be shown instead of the present one, by its `kind`; None: there is none.

    Goes to what is nearer only: one that is lost later is waited for.
    """

    def __init__(self, first: Source, nearer: Callable[[str], Source | None]) -> None:
        self._source = first
        self._nearer = nearer

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self._source.kind

    @property
    def title(self) -> str:  # type: ignore[override]
        return self._source.title

    @property
    def detail(self) -> str:  # type: ignore[override]
        return self._source.detail

    @property
    def can(self) -> frozenset[str]:  # type: ignore[override]
        return self._source.can

    async def run(self, emit: Emit) -> None:
        while True:
            running = asyncio.create_task(self._source.run(emit))
            looking = asyncio.create_task(self._look())
            try:
                await asyncio.wait({running, looking}, return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    return running.result()
                before, after = self._source, looking.result()
            finally:
                for task in (running, looking):
                    task.cancel()
                await asyncio.gather(running, looking, return_exceptions=True)
            now = time.time()
            emit(Reset(time=now, received=now))
            text = f"{after.title} runs here now and is shown instead of {before.title}"
            emit(Message(time=now, received=now, level="info", kind="source", text=text))
            self._source = after

    async def _look(self) -> Source:
        while True:
            if (found := self._nearer(self.kind)) is not None:
                return found
            await asyncio.sleep(LOOK_SECONDS)

    # --- requests of the app

    async def act(self, action: ActionName, targets: list[str]) -> dict[str, str]:
        return await self._source.act(action, targets)

    async def read_log(self, job: str = "", node: str = "", max_bytes: int = 65536) -> str:
        return await self._source.read_log(job, node, max_bytes)

    async def ask_history(self, job: str) -> None:
        await self._source.ask_history(job)

    async def list_files(self, job: str) -> list[FileRow]:
        return await self._source.list_files(job)
