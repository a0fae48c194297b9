"""The threads that write checkpoints, so that training does not wait for the disk."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gshare.agent.errors import GshareError
from gshare.agent.service.environment import usable_cores
from gshare.agent.train.checkpoint import Snapshot, write_best, write_checkpoint, write_final
from gshare.agent.train.files import disk_errors, remove_leftovers
from gshare.agent.train.flat_tensors import FlatTensors
from torch import Tensor

log = logging.getLogger(__name__)

Kind = Literal["step", "best", "final"]

#: Snapshots of the largest size that wait or are being written (`agent/jobs/memory.py` reckons with them).
MAX_PENDING = 5
#: Hashing takes 1 GB/s of a core, and flushing as long again.
MAX_THREADS = 8


@dataclass(frozen=True)
class SaveResult:
    """One finished save; `error` is None when `path` stands, complete and flushed, or when the save was
    `superseded`: a newer best was there before its turn came."""

    job: str
    step: int
    kind: Kind
    path: Path
    error: GshareError | None
    superseded: bool = False


@dataclass(frozen=True, eq=False)
class _Save:
    snapshot: Snapshot
    output_dir: Path
    kind: Kind
    adapter_config: Mapping[str, Any]
    save_total_limit: int

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(tensors) for tensors in (self.snapshot.adapter, self.snapshot.optimizer))


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    if isinstance(tensors, FlatTensors):
        return tensors.nbytes
    return sum(tensor.nbytes for tensor in tensors.values())


class CheckpointWriter:
    """Writes snapshots, those of one directory in the order submitted. Different directories are written at
    once: hashing and flushing one file of a sweep's sixty is far slower than a step. A best that still waits
    when the next best of its directory comes, and nothing in between, is left out: `best/` holds one, and a
    checkpoint, which says which one, never comes before it.

    What waits or is being written takes at most the memory of `max_pending` snapshots of the largest size so
    far: `submit` blocks then, so host memory stays bounded when the disk is slower than training. One save's
    failure does not touch the others.
    """

    def __init__(self, max_pending: int = MAX_PENDING, threads: int | None = None) -> None:
        self._max_pending = max_pending
        self._largest = 0  # bytes of a snapshot
        self._changed = threading.Condition()
        self._waiting: list[_Save] = []
        self._busy: set[Path] = set()  # directories that are being written to
        self._pending_bytes = 0
        self._results: queue.SimpleQueue[SaveResult] = queue.SimpleQueue()
        self._tidied: set[Path] = set()
        self._without_best: set[Path] = set()  # directories whose newest best could not be written
        self._closed = False
        # Daemons: an interpreter that goes down without `close` must not hang on a dead disk.
        self._threads = [
            threading.Thread(target=self._run, name=f"checkpoint-writer-{number}", daemon=True)
            for number in range(threads or min(MAX_THREADS, usable_cores()))
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        snapshot: Snapshot,
        output_dir: Path,
        kind: Kind,
        *,
        adapter_config: Mapping[str, Any],
        save_total_limit: int = 0,
    ) -> None:
        """Queue a save: "step" → checkpoint-<step>/, "best" → best/, "final" → output_dir itself.

        The snapshot's tensors must not change afterwards. The first save to a directory clears up what a
        killed writer left there. Blocks while there is too much to write already.
        """
        assert not self._closed, "submit after close"
        save = _Save(snapshot, output_dir, kind, adapter_config, save_total_limit)
        with self._changed:
            self._largest = max(self._largest, save.nbytes)
            self._leave_out_older(save)
            self._changed.wait_for(lambda: self._has_room_for(save))
            self._pending_bytes += save.nbytes
            self._waiting.append(save)
            self._changed.notify_all()

    def begin(self, output_dir: Path) -> None:
        """A job begins, or goes on, with what stands in its directory: failed saves of one before it are
        past."""
        self._without_best.discard(output_dir)

    def results(self) -> list[SaveResult]:
        """The saves finished since the last call, those of one directory in order (a superseded one is told
        when it is left out). From one thread."""
        finished: list[SaveResult] = []
        while not self._results.empty():
            finished.append(self._results.get())
        return finished

    def flush(self) -> None:
        """Wait until everything submitted is written or has failed."""
        with self._changed:
            self._changed.wait_for(self._is_idle)

    def close(self) -> None:
        """Flush and end the threads. Again is harmless."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _leave_out_older(self, save: _Save) -> None:
        """The best that `save` supersedes, if it still waits."""
        before = [one for one in self._waiting if one.output_dir == save.output_dir]
        if not before or not before[-1].kind == save.kind == "best":
            return
        older = before[-1]
        self._waiting.remove(older)
        self._pending_bytes -= older.nbytes
        snapshot = older.snapshot
        self._results.put(
            SaveResult(snapshot.job, snapshot.step, "best", older.output_dir / "best", None, superseded=True)
        )

    def _is_idle(self) -> bool:
        return not self._waiting and not self._busy

    def _has_room_for(self, save: _Save) -> bool:
        return self._pending_bytes + save.nbytes <= self._max_pending * self._largest

    def _take(self) -> _Save | None:
        """The oldest save of a directory that nobody writes to; None when there will be no more."""
        found: list[_Save] = []

        def ready() -> bool:
            found.extend(one for one in self._waiting if one.output_dir not in self._busy)
            return bool(found) or (self._closed and not self._waiting)

        with self._changed:
            self._changed.wait_for(ready)
            if not found:
                return None
            self._waiting.remove(found[0])
            self._busy.add(found[0].output_dir)
            return found[0]

    def _run(self) -> None:
        while (save := self._take()) is not None:
            try:
                self._results.put(self._write(save))
            finally:
                with self._changed:
                    self._busy.discard(save.output_dir)
                    self._pending_bytes -= save.nbytes
                    self._changed.notify_all()

    def _write(self, save: _Save) -> SaveResult:
        snapshot, path, error = save.snapshot, save.output_dir, None
        try:
            snapshot.wait()
            if save.output_dir not in self._tidied:
                with disk_errors("clearing up", save.output_dir):
                    remove_leftovers(save.output_dir)
                self._tidied.add(save.output_dir)
            if save.kind == "step" and save.output_dir in self._without_best:
                # It would say which step is the best, and that one is not there.
                raise GshareError(f"{save.output_dir}: not written, since its best/ could not be")
            if save.kind == "step":
                path = write_checkpoint(snapshot, save.output_dir, save.adapter_config, save.save_total_limit)
            elif save.kind == "best":
                path = write_best(snapshot, save.output_dir, save.adapter_config)
            else:
                path = write_final(snapshot, save.output_dir, save.adapter_config)
        except GshareError as known:
            error = known
        except Exception as unforeseen:  # the thread must live: other jobs' checkpoints depend on it
            log.exception("saving %s at step %d failed", snapshot.job, snapshot.step)
            error = GshareError(f"{save.output_dir}: {type(unforeseen).__name__}: {unforeseen}")
        if save.kind == "best":
            (self._without_best.discard if error is None else self._without_best.add)(save.output_dir)
        return SaveResult(snapshot.job, snapshot.step, save.kind, path, error)
