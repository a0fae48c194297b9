"""Curves of up to six adapters, with axes. Drawn anew only when one of them or the size has changed."""

from __future__ import annotations

from collections.abc import Sequence

from gshare.tui.bars import MARKERS
from gshare.tui.board import Board
from gshare.tui.plot import Series, plot
from gshare.tui.rows import Job
from gshare.tui.show import Span, clean
from gshare.tui.widgets.line import as_text
from rich.text import Text
from textual.widget import Widget

#: Points of a training curve that are drawn; more than two a column tell nothing.
TRAIN_DRAWN = 400


class Chart(Widget):
    DEFAULT_CSS = """
    Chart { height: 1fr; }
    """

    def __init__(self, board: Board, *, id: str) -> None:
        super().__init__(id=id)
        self._board = board
        self._series: list[Series] = []
        self._legend: list[Span] = []
        self._drawn: object = None

    @property
    def text(self) -> str:
        return self.render().plain

    def show(self, jobs: Sequence[Job]) -> None:
        """One adapter: training (dim) and validation. Several: the validation curves, a training curve where
        there is no validation."""
        now = [
            (job.job, job.name, job.train.last, job.train.size, job.val.last, job.best_step) for job in jobs
        ]
        drawn = (now, self._board.settings.log_scale, id(self._board.palette), self._board.is_stale)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        self._series, self._legend = series_of(jobs, self._board.is_stale)
        self.refresh()

    def render(self) -> Text:
        width, height = self.size
        palette = self._board.palette
        log = self._board.settings.log_scale
        lines = plot(self._series, width, height - 1, log=log)
        if not lines:
            why = "no losses yet" if not self._series else "no losses that can be drawn here"
            return as_text(((f" {why}", "dim"),), palette)
        legend = [*self._legend, ("  log scale" if log else "", "dim")]
        rows = [as_text(legend, palette), *(as_text(line, palette) for line in lines)]
        for row in rows:
            row.truncate(width, overflow="ellipsis")
        return Text("\n").join(rows)


def series_of(jobs: Sequence[Job], stale: bool = False) -> tuple[list[Series], list[Span]]:
    """What is drawn of those jobs, and the legend."""
    series: list[Series] = []
    legend: list[Span] = []
    for i, job in enumerate(jobs):
        marker, role = MARKERS[i % len(MARKERS)], "stale" if stale else f"s{i % len(MARKERS)}"
        train, val = job.train.points(), job.val.points()
        best = None
        if job.best_step is not None and job.best_val_loss is not None and val:
            best = (job.best_step, job.best_val_loss)
        if train and (len(jobs) == 1 or not val):
            every = max(1, len(train) // TRAIN_DRAWN)
            series.append(Series(train[::every], "dim" if len(jobs) == 1 else role))
        if val:
            series.append(Series(val, role, marker, best))
        name = clean(job.name)
        if len(jobs) == 1:
            legend += [("⠒⠒ ", "dim"), ("train  ", "dim"), (f"{marker} ", role), ("validation  ", role)]
            legend += [("★ best", "best")] if best else []
        else:
            legend += [(f"{marker} ", role), (f"{name}  ", role)]
    return series, legend
