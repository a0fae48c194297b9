"""`metrics.jsonl`: one line a step or evaluation, null where a number was not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from gshare.agent.errors import GshareError
from gshare.agent.report.model import Point, Run

METRICS_FILE = "metrics.jsonl"


#: Up to 2⁵³, beyond which floats no longer count by ones: nothing that was trained comes near.
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class _Line(msgspec.Struct, frozen=True):
    type: str
    step: _Count
    loss: float | None = None
    val_loss: float | None = None
    total_steps: _Count = 0
    epoch: float = 0.0
    tokens: _Count = 0
    seconds: float | None = None
    adapters_in_pass: _Count = 1


_DECODER = msgspec.json.Decoder(_Line)


@dataclass
class Metrics:
    """The last line of each step counts: a run that was resumed has made some again, with the same values."""

    steps: dict[int, _Line] = field(default_factory=dict)
    evaluations: dict[int, _Line] = field(default_factory=dict)
    unreadable: int = 0

    @property
    def steps_per_epoch(self) -> int | None:
        for line in self.steps.values():
            if line.epoch > 0 and line.step > 0 and math.isfinite(steps := line.step / line.epoch):
                return round(steps)
        return None

    def fill(self, run: Run) -> None:
        """What these lines say of the run. Nothing is said of what they do not tell."""
        steps = [self.steps[step] for step in sorted(self.steps)]
        evaluations = [self.evaluations[step] for step in sorted(self.evaluations)]
        run.steps = steps[-1].step if steps else 0
        run.train = [(line.step, _number(line.loss)) for line in steps]
        run.val = [(line.step, _number(line.val_loss)) for line in evaluations]
        if steps:
            run.total_steps = steps[-1].total_steps or None
            run.loss = run.train[-1][1]
            run.tokens = sum(line.tokens for line in steps)
            run.seconds = _device_seconds(steps)
        if evaluations:
            run.val_loss = run.val[-1][1]
            run.best_step, run.best_val_loss = _best(run.val)
        if self.unreadable:
            run.notes.append(f"{self.unreadable} lines of {METRICS_FILE} cannot be read and are left out")


def read_metrics(path: Path) -> Metrics:
    """GshareError when the file cannot be read. A last line that was cut off is dropped; others that are no
    record of a step or an evaluation are counted."""
    metrics = Metrics()
    for line, last in _lines(path):
        try:
            record = _DECODER.decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):  # not UTF-8, nested too deep
            metrics.unreadable += not last
            continue
        if record.type == "step":
            metrics.steps[record.step] = record
        elif record.type == "eval":
            metrics.evaluations[record.step] = record
    return metrics


def _lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """(line, whether it is the last and has no end)."""
    try:
        with open(path, "rb") as file:
            for line in file:
                if line.strip():
                    yield line, not line.endswith(b"\n")
    except OSError as error:
        raise GshareError(f"{path}: {error.strerror}") from None


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _best(points: list[Point]) -> tuple[int | None, float | None]:
    """Step and value of the lowest finite loss, the first of equals; NaN when there were only others."""
    finite = [(value, step) for step, value in points if math.isfinite(value)]
    if not finite:
        return None, math.nan
    value, step = min(finite)
    return step, value


def _device_seconds(steps: list[_Line]) -> float | None:
    """Of each round this run's share, equal among the adapters in it. None: an engine that did not say."""
    if any(line.seconds is None for line in steps):
        return None
    return sum((line.seconds or 0.0) / max(1, line.adapters_in_pass) for line in steps)
