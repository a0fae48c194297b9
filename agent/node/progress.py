"""What an agent knows of an attempt: its status, moved on by events, found again on the disk."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
from gshare.agent.jobs.events import CheckpointSaved, Evaluated, Event, JobChanged, Stepped
from gshare.agent.node.protocol import AttemptStatus

_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})\Z")


def advance(status: AttemptStatus, event: Event) -> AttemptStatus:
    """The status after the event."""
    replace = msgspec.structs.replace
    if isinstance(event, JobChanged):
        status = replace(
            status,
            state=event.state,
            step=event.step or status.step,
            total_steps=event.total_steps or status.total_steps,
            reason=event.reason,
        )
        if event.last is not None:
            last = msgspec.structs.asdict(event.last)
            status = replace(status, **{key: value for key, value in last.items() if value is not None})
    elif isinstance(event, Stepped):
        status = replace(status, step=event.step, total_steps=event.total_steps, loss=event.loss)
    elif isinstance(event, Evaluated):
        status = replace(status, val_loss=event.val_loss)
        if event.best:
            status = replace(status, best_val_loss=event.val_loss, best_step=event.step)
    elif isinstance(event, CheckpointSaved):
        step = checkpoint_step(Path(event.path).name)
        if step is not None:
            status = replace(status, checkpoint_step=max(step, status.checkpoint_step))
    return status


def found_on_disk(status: AttemptStatus, out: Path) -> AttemptStatus:
    """The status with what a run left in its output directory: newest checkpoint, best step and loss."""
    steps = [step for step, _ in checkpoints(out)]
    status = msgspec.structs.replace(status, checkpoint_step=max(steps, default=status.checkpoint_step))
    best = read_best(out / "best" / "metadata.json")
    if best is not None:
        step, val_loss = best
        status = msgspec.structs.replace(status, best_step=step, best_val_loss=val_loss)
    return status


def checkpoints(out: Path) -> list[tuple[int, Path]]:
    """(step, directory) of what is named like a checkpoint, newest first; links are none."""
    found: list[tuple[int, Path]] = []
    if out.is_dir():
        for entry in out.iterdir():
            step = checkpoint_step(entry.name)
            if step is not None and entry.is_dir() and not entry.is_symlink():
                found.append((step, entry))
    return sorted(found, reverse=True)


def checkpoint_step(name: str) -> int | None:
    match = _CHECKPOINT.match(name)
    return int(match[1]) if match else None


def read_best(metadata: Path) -> tuple[int, float | None] | None:
    """(step, val_loss) by `best/metadata.json`; None when there is none that can be read."""
    try:
        record = json.loads(metadata.read_bytes())
        loss = record["val_loss"]
        return int(record["step"]), None if loss is None else float(loss)
    except (OSError, ValueError, TypeError, KeyError):
        return None
