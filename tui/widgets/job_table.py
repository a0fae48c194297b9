"""The leaderboard: jobs in order, filtered, marked, acted on."""

from __future__ import annotations

import math
import time
from typing import ClassVar, cast

from gshare.tui.actions import DONE, can_be
from gshare.tui.board import MAX_MARKED, Board
from gshare.tui.columns import (
    FIELDS,
    differing,
    find_field,
    job_cells,
    ordered,
    table_columns,
)
from gshare.tui.filters import BadFilter, JobTest, job_filter
from gshare.tui.messages import Act, Copy, Find, OpenJob
from gshare.tui.rows import Job
from gshare.tui.show import clean, joined
from gshare.tui.source import ActionName
from gshare.tui.widgets.grid import Grid, Key, Row
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.message import Message

#: How long rows keep their places.
ORDER_SECONDS = 3.0


class JobTable(Grid):
    BORDER_TITLE = "Leaderboard"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "find", "Filter"),
        Binding("s", "pick_sort", "Sort"),
        Binding("S", "turn", "Turn the order around", show=False),
        Binding("m,space", "mark", "Mark"),
        Binding("M", "unmark", "Unmark all", show=False),
        Binding("c", "compare", "Compare marked", show=False),
        Binding("x", "act('stop')", "Stop job"),
        Binding("z", "act('pause')", "Pause job", show=False),
        Binding("u", "act('resume')", "Resume job", show=False),
        Binding("y", "copy", "Copy name", show=False),
    ]

    class PickSort(Message):
        """The user wants to choose a column to sort by."""

    class Compare(Message):
        """Show the marked jobs in one plot."""

    def __init__(self, board: Board, *, id: str) -> None:
        super().__init__(table_columns([]), self._row, id=id)
        self._board = board
        self._ranks: dict[str, int | None] = {}
        self._test: JobTest | None = None
        self._tested: object = None  # what the test was made of
        self.problem = ""  # of the filter
        self._asked: object = None  # what the present order was made for
        self._ordered = 0.0  # when, monotonic s
        self._by = ""  # what it is sorted by
        self._title = ""

    def show(self) -> None:
        """Takes the board's present state in. Rows keep their places for `ORDER_SECONDS`, unless the user
        or a job that came or went asks for another order: rows that jump cannot be read, and each that does
        is a line to the terminal."""
        board, settings = self._board, self._board.settings
        state = board.shown
        if board.palette is not self.palette:
            self.repaint(board.palette)
        self.empty = "no adapter fits the filter; Esc clears it" if state.jobs else self._nothing()
        asked = (settings.sort, settings.descending, board.filter, id(state), frozenset(state.jobs))
        now = time.monotonic()
        if asked == self._asked and now - self._ordered < ORDER_SECONDS:
            self.set_rows(self.keys)
            self._entitle(len(self.keys), len(state.jobs))
            return
        self._asked, self._ordered = asked, now
        jobs = state.ranked()
        self._ranks = {job.job: rank if _has_rank(job) else None for rank, job in enumerate(jobs, start=1)}
        hypers = differing(jobs)
        self.set_columns(table_columns(hypers))
        self._make_test(jobs, hypers)
        chosen = jobs if self._test is None else [job for job in jobs if self._test(job)]
        field = find_field(settings.sort, jobs) or FIELDS[3]
        self._by = field.title
        column = field.column.key if field.column is not None else field.name
        if self.sorted_by != (column, settings.descending):
            self.sorted_by = (column, settings.descending)
            self.refresh()
        if not (field.name == "val" and not settings.descending):
            chosen = ordered(chosen, field, settings.descending)
        self.set_rows([job.job for job in chosen])
        self._entitle(len(chosen), len(jobs))

    def _nothing(self) -> str:
        return "no adapters yet" if self._board.state.is_live else "nothing is known yet"

    def _make_test(self, jobs: list[Job], hypers: list[str]) -> None:
        made_of = (self._board.filter, tuple(hypers))
        if made_of == self._tested:
            return
        self._tested = made_of
        try:
            self._test = job_filter(made_of[0], jobs) if made_of[0].strip() else None
            self.problem = ""
        except BadFilter as error:
            self.problem = str(error)  # the last good one goes on

    def _entitle(self, shown: int, known: int) -> None:
        settings = self._board.settings
        parts = [f"Leaderboard · {known}" if shown == known else f"Leaderboard · {shown} of {known}"]
        if self._board.filter:
            parts.append(f"filter: {clean(self._board.filter)}")
        if self._board.marked:
            parts.append(f"{len(self._board.marked)} marked")
        parts.append(f"by {clean(self._by)} {'▼' if settings.descending else '▲'}")
        title = "  ".join(parts)
        if title != self._title:
            self._title = title
            self.border_title = Text(title)  # type: ignore[assignment]

    def _row(self, key: Key) -> Row:
        job = self._board.shown.jobs.get(cast(str, key))
        if job is None:
            return Row({})
        cells = job_cells(job, self._board, self._ranks.get(job.job))
        # Without a loss the reason is all there is to say; else it has a column where there is room.
        tail = (
            ("val", cells["why"]) if job.reason and job.best_val_loss is None and job.step is None else None
        )
        if job.state in ("diverged", "failed") and job.reason and job.best_val_loss is None:
            tail = ("val", cells["why"])
        return Row(cells, self._board.is_old(job), tail)

    def present(self) -> Job | None:
        """The job under the cursor."""
        return self._board.shown.jobs.get(cast(str, self.cursor_key)) if self.cursor_key else None

    # --- keys

    def action_choose(self) -> None:
        if (job := self.present()) is not None:
            self.post_message(OpenJob(job.job))

    def action_find(self) -> None:
        self.post_message(Find())

    def action_pick_sort(self) -> None:
        self.post_message(self.PickSort())

    def action_turn(self) -> None:
        self._board.settings.descending = not self._board.settings.descending
        self.show()

    def sort_by(self, name: str) -> None:
        """That column; again: the other way round."""
        settings = self._board.settings
        settings.descending = not settings.descending if settings.sort == name else False
        settings.sort = name
        self.show()

    def on_grid_titled(self, event: Grid.Titled) -> None:
        event.stop()
        name = event.column.removeprefix("hyper.")
        if find_field(name, self._board.shown.jobs.values()) is not None:
            self.sort_by(name)

    def action_mark(self) -> None:
        if (job := self.present()) is None:
            return
        if not self._board.toggle_mark(job.job):
            self.app.notify(
                f"{MAX_MARKED} are marked already; M unmarks all", severity="warning", markup=False
            )
        self.action_move(1)
        self.show()

    def action_unmark(self) -> None:
        self._board.marked.clear()
        self.show()

    def action_compare(self) -> None:
        self.post_message(self.Compare())

    def action_act(self, action: ActionName) -> None:
        """On the marked ones, else on the one under the cursor."""
        jobs = self._board.marked_jobs() or [job for job in (self.present(),) if job is not None]
        jobs = [job for job in jobs if can_be(action, job.state)]
        if not jobs:
            self.app.notify(f"nothing here can be {DONE[action]}", severity="warning", markup=False)
            return
        self.post_message(Act(action, [job.job for job in jobs], [job.name for job in jobs]))

    def action_copy(self) -> None:
        if (job := self.present()) is not None:
            self.post_message(Copy(job.name))

    def row_text(self, key: str) -> str:
        """The cells that are shown, for tests and copies."""
        row = self._row(key)
        return " ".join(joined(row.cells.get(column.key, ())).strip() for column, _ in self._columns)


def _has_rank(job: Job) -> bool:
    return job.best_val_loss is not None and math.isfinite(job.best_val_loss)
