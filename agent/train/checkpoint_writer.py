"""The thread that writes checkpoints, so that training does not wait for the disk."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gshare.agent.errors import GshareError
from gshare.agent.train.checkpoint import Snapshot, write_best, write_checkpoint, write_final
from gshare.agent.train.files import disk_errors, remove_leftovers

log = logging.getLogger(__name__)

Kind = Literal["step", "best", "final"]


@dataclass(frozen=True)
class SaveResult:
    """One finished save; `error` is None when `path` stands, complete and flushed."""

    job: str
    step: int
    kind: Kind
    path: Path
    error: GshareError | None


@dataclass(frozen=True)
class _Save:
    snapshot: Snapshot
    output_dir: Path
    kind: Kind
    adapter_config: Mapping[str, Any]
    save_total_limit: int


class CheckpointWriter:
    """Writes snapshots in the order submitted; every one is kept, none supersedes another.

    At most `max_pending` snapshots wait (and one is being written): `submit` blocks then, so host memory
    stays bounded when the disk is slower than training. One save's failure does not touch the others.
    """

    def __init__(self, max_pending: int = 4) -> None:
        self._queue: queue.Queue[_Save | None] = queue.Queue(max_pending)
        self._results: queue.SimpleQueue[SaveResult] = queue.SimpleQueue()
        self._tidied: set[Path] = set()
        self._closed = False
        # A daemon: an interpreter that goes down without `close` must not hang on a dead disk.
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

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
        killed writer left there. Blocks while the queue is full.
        """
        assert not self._closed, "submit after close"
        self._queue.put(_Save(snapshot, output_dir, kind, adapter_config, save_total_limit))

    def results(self) -> list[SaveResult]:
        """The saves finished since the last call, in order. From one thread."""
        finished: list[SaveResult] = []
        while not self._results.empty():
            finished.append(self._results.get())
        return finished

    def flush(self) -> None:
        """Wait until everything submitted is written or has failed."""
        self._queue.join()

    def close(self) -> None:
        """Flush and end the thread. Again is harmless."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            save = self._queue.get()
            try:
                if save is None:
                    return
                self._results.put(self._write(save))
            finally:
                self._queue.task_done()

    def _write(self, save: _Save) -> SaveResult:
        snapshot, path, error = save.snapshot, save.output_dir, None
        try:
            if save.output_dir not in self._tidied:
                with disk_errors("clearing up", save.output_dir):
                    remove_leftovers(save.output_dir)
                self._tidied.add(save.output_dir)
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
        return SaveResult(snapshot.job, snapshot.step, save.kind, path, error)
