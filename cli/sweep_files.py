"""How much a sweep's adapters and checkpoints may take on the disk, and whether there is so much.

A configuration that is left behind keeps `best/` and its checkpoints up to the end of its warm-up; one that
goes on keeps those up to its last step, and its adapter. Logs and losses are small beside them.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gshare.agent.jobs.memory import ModelShape, saved_bytes
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.jobs.sweep import Trial


@dataclass(frozen=True)
class Files:
    """`most`: bytes in `directory` when all is done, at most; `room`: what there is for them, those that are
    there already counted in; None: it cannot be looked at."""

    directory: Path
    most: int
    room: int | None

    def told(self) -> str:
        free = f", where {_gb(self.room)} are free" if self.room is not None else ""
        return f"files: up to {_gb(self.most)} in {self.directory}{free}"

    def warning(self) -> str:
        """ "" where there is room."""
        if self.room is None or self.most <= self.room:
            return ""
        return (
            f"{self.directory}: the adapters and checkpoints may take up to {_gb(self.most)}, and "
            f"{_gb(self.room)} are free; a smaller save_total_limit keeps fewer checkpoints of each"
        )


def files_of(
    directory: Path,
    shape: ModelShape,
    trials: Sequence[Trial],
    specs: Mapping[str, AdapterSpec],
    *,
    places: int,
    count: int,
) -> Files:
    """Of `count` configurations, of which `places` go on: `trials`, and others as large as the largest."""
    left = [_bytes(shape, specs[one.name], one.boundary or one.total_steps, one) for one in trials]
    whole = [_bytes(shape, specs[one.name], one.total_steps, one) for one in trials]
    left += [max(left)] * (count - len(left))
    whole += [max(whole)] * (count - len(whole))
    more = sorted((to - at for at, to in zip(left, whole, strict=True)), reverse=True)
    return Files(directory, sum(left) + sum(more[:places]), _room(directory))


def _bytes(shape: ModelShape, spec: AdapterSpec, step: int, trial: Trial) -> int:
    """Of one that has come to `step`; evaluated, so with `best/`."""
    every = spec.save_steps
    also = {trial.boundary, trial.total_steps} - {0}
    saves = step // every if every else 0
    saves += sum(one <= step and not (every and one % every == 0) for one in also)
    kept = min(saves, spec.save_total_limit)
    adapters = 1 + (step == trial.total_steps)
    return adapters * saved_bytes(shape, spec) + kept * saved_bytes(shape, spec, moments=True)


def _room(directory: Path) -> int | None:
    """None where it may not be read: who makes the directory says so."""
    where = directory
    try:
        while not where.exists() and where != where.parent:
            where = where.parent
        room = shutil.disk_usage(where).free
    except OSError:
        return None
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # a sweep that runs publishes its files by renaming
            room += path.lstat().st_size if path.is_file() else 0
    return room


def _gb(count: int) -> str:
    """Powers of ten, as disks are sold."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
