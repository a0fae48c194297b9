"""Where frames come from. The app knows nothing else of coordinators, agents, trainers and files.

    source = find_source(…)             # finding.py
    await source.run(emit)              # until cancelled, or at the end of a file
    failed = await source.act("stop", ["support"])

`run` never raises for a connection that ends: it says so by `SourceState`, waits (backoff with jitter) and
connects again. It raises `GshareError` for what no retry mends (another protocol, a file that is none).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec
from gshare.agent.errors import UsageError
from gshare.tui.frames import Frame

Emit = Callable[[Frame], object]
ActionName = Literal["stop", "pause", "resume", "release", "retry"]


class FileRow(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a job: its name relative to the job's directory, bytes, Unix s."""

    name: str
    size: int
    changed: float


class Source(Protocol):
    """`kind`, `title` and `detail` say what was found (also as frame `Found`).

    `can`: an `ActionName`, or "log", "history", "files", "seek" (then it is a `Replayed` too).
    """

    @property
    def kind(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def detail(self) -> str: ...

    @property
    def can(self) -> frozenset[str]: ...

    async def run(self, emit: Emit) -> None:
        """Emits frames until cancelled. `emit` is quick and is called in the loop that runs this."""
        ...

    async def act(self, action: ActionName, targets: list[str]) -> dict[str, str]:
        """Does it; returns target → why it failed. `targets`: jobs by key, or for "release" the ids of
        reservations; for "retry" none: connects now instead of after the backoff.

        Raises GshareError when nothing of it could be tried; UsageError when this source cannot do it.
        """
        ...

    async def read_log(self, job: str = "", node: str = "", max_bytes: int = 65536) -> str:
        """The end of a job's log or, with an empty job, of that node's agent. GshareError: why not."""
        ...

    async def ask_history(self, job: str) -> None:
        """Earlier points of the job's curves, as frame `History`. Quiet when the source has none."""
        ...

    async def list_files(self, job: str) -> list[FileRow]:
        """Files of the job's output directory, by name. GshareError: why not."""
        ...


class Replayed(Protocol):
    """What a source with "seek" in `can` has besides (`replay_source.ReplaySource`)."""

    start: float  # time of the first frame, Unix s
    end: float

    @property
    def position(self) -> float:
        """Where it is, Unix s of the recording."""
        ...

    @property
    def paused(self) -> bool: ...

    speed: float

    def pause(self, on: bool) -> None: ...

    def seek(self, to: float) -> None:
        """Goes to that moment (cut to [start, end]): a `Reset`, then how things were then."""
        ...


class SourceBase:
    """The answers of a source that has nothing but frames."""

    kind = ""
    title = ""
    detail = ""
    can: frozenset[str] = frozenset()

    async def act(self, action: ActionName, targets: list[str]) -> dict[str, str]:
        raise UsageError(f"{self.title or 'this source'} cannot {action} anything")

    async def read_log(self, job: str = "", node: str = "", max_bytes: int = 65536) -> str:
        raise UsageError(f"{self.title or 'this source'} has no logs")

    async def ask_history(self, job: str) -> None:
        return

    async def list_files(self, job: str) -> list[FileRow]:
        raise UsageError(f"{self.title or 'this source'} lists no files")
