"""Checkpoints that are about to be taken in, read by threads while the first ones are.

After a warm-up the survivors of a sweep come back all at once; reading and hashing their checkpoints one
after the other took 7 s on an H200, in which it stood still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from gshare.agent.train.checkpoint import Snapshot, load_checkpoint

#: Beside the one that is being taken in: no more checkpoints are in memory than while they are written.
AHEAD = 3


class ReadAhead:
    """To be closed; what was read and not taken goes then."""

    def __init__(self, paths: Iterable[Path] = ()) -> None:
        """In the order in which they will be taken."""
        self._next = deque(paths)
        self._reading: dict[Path, Future[Snapshot]] = {}
        # One is read no sooner by another thread.
        self._pool = ThreadPoolExecutor(AHEAD, "read-ahead") if len(self._next) > 1 else None
        self._read()

    def take(self, path: Path) -> Snapshot:
        """The checkpoint at `path`, expected or not; errors as of `load_checkpoint`."""
        found = self._reading.pop(path, None)
        if found is None and path in self._next:  # out of turn
            self._next.remove(path)
        self._read()
        return found.result() if found is not None else load_checkpoint(path)

    def _read(self) -> None:
        while self._pool is not None and self._next and len(self._reading) < AHEAD:
            path = self._next.popleft()
            if path in self._reading:
                continue
            try:
                self._reading[path] = self._pool.submit(load_checkpoint, path)
            except RuntimeError:  # no thread can be started here: `take` reads by itself
                self._next.clear()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._next.clear()
        self._reading.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
