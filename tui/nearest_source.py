"""Without a flag: this machine or its agent, and the coordinator as soon as one runs.

Who opens the dashboard first and submits afterwards sees the cluster without starting it again. An agent that
starts takes nothing's place: it does not know of what `gshare finetune` trains here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gshare.tui.frames import Message, Reset
from gshare.tui.source import ActionName, Emit, FileRow, Source, SourceBase

LOOK_SECONDS = 1.0


class NearestSource(SourceBase):
    """`first` until `look` finds a source; that one stays, and is waited for when it is lost."""

    def __init__(self, first: Source, look: Callable[[], Source | None]) -> None:
        self._source = first
        self._look = look

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
        running = asyncio.create_task(self._source.run(emit))
        looking = asyncio.create_task(self._found())
        try:
            await asyncio.wait({running, looking}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            before, self._source = self._source, looking.result()
        finally:
            for task in (running, looking):
                task.cancel()
            await asyncio.gather(running, looking, return_exceptions=True)
        now = time.time()
        emit(Reset(time=now, received=now))
        text = f"a {self.kind} runs here now and is shown instead of {before.title}"
        emit(Message(time=now, received=now, level="info", kind="source", text=text))
        await self._source.run(emit)

    async def _found(self) -> Source:
        while (found := self._look()) is None:
            await asyncio.sleep(LOOK_SECONDS)
        return found

    # --- requests of the app

    async def act(self, action: ActionName, targets: list[str]) -> dict[str, str]:
        return await self._source.act(action, targets)

    async def read_log(self, job: str = "", node: str = "", max_bytes: int = 65536) -> str:
        return await self._source.read_log(job, node, max_bytes)

    async def ask_history(self, job: str) -> None:
        await self._source.ask_history(job)

    async def list_files(self, job: str) -> list[FileRow]:
        return await self._source.list_files(job)
