"""What the live table and the leaderboard show: one row an adapter, kept from events; no terminal here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gshare.agent.jobs.events import ENDED, Evaluated, Event, JobChanged, Stepped

#: Speed and ETA are over the last so many steps.
WINDOW = 20


@dataclass
class Row:
    name: str
    output_dir: str = ""
    state: str = "queued"
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    reason: str = ""
    trunk_shared: float = 0.0
    #: (time, step, tokens since the first mark) at the end of the last steps
    marks: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW + 1))

    @property
    def tokens_per_second(self) -> float | None:
        return self._rate(2)

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to the last step at the present pace; None when nothing is known or it has ended."""
        pace = self._rate(1)
        if self.state in ENDED or not pace:
            return None
        return (self.total_steps - self.step) / pace

    def _rate(self, column: int) -> float | None:
        if len(self.marks) < 2 or self.state in ENDED:
            return None
        first, last = self.marks[0], self.marks[-1]
        seconds = last[0] - first[0]
        return (last[column] - first[column]) / seconds if seconds > 0 else None


class Board:
    def __init__(self, jobs: Iterable[tuple[str, str]]) -> None:
        """`jobs`: (name, output_dir), in the order in which they are shown."""
        self.rows = {name: Row(name, output_dir) for name, output_dir in jobs}

    def take(self, event: Event, now: float) -> None:
        """`now`: seconds of any clock, for the pace: rounds of other jobs lie between two steps of one."""
        row = self.rows.get(event.job)
        if row is None:
            return
        if isinstance(event, Stepped):
            if event.step <= row.step:
                row.marks.clear()  # resumed at an earlier step
            tokens = row.marks[-1][2] + event.tokens if row.marks else 0
            row.marks.append((now, event.step, tokens))
            row.step, row.total_steps, row.loss = event.step, event.total_steps, event.loss
            row.trunk_shared = event.trunk_shared
        elif isinstance(event, Evaluated):
            row.val_loss = event.val_loss
            if event.best:
                row.best_val_loss = event.val_loss
        elif isinstance(event, JobChanged):
            row.state, row.step, row.reason = event.state, event.step, event.reason
            row.total_steps = event.total_steps or row.total_steps
            if event.last is not None:
                row.loss, row.val_loss = event.last.loss, event.last.val_loss
                row.best_val_loss = event.last.best_val_loss
            row.marks.clear()

    def leaderboard(self) -> list[Row]:
        """By the last val loss, lowest first; not a number, then never evaluated, last."""
        return sorted(self.rows.values(), key=_rank)


def _rank(row: Row) -> tuple[int, float]:
    if row.val_loss is None:
        return 2, 0.0
    return (0, row.val_loss) if math.isfinite(row.val_loss) else (1, 0.0)


def number(value: float | None, digits: int = 4) -> str:
    """For a cell: "-" when there is none, "nan" when it is not a number."""
    return "-" if value is None else f"{value:.{digits}f}"


def duration(seconds: float | None) -> str:
    """h:mm:ss or m:ss; "-" when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of plain text in aligned columns: the first left, the others as they come."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return ["  ".join(line).rstrip() for line in padded]
