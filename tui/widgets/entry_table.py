"""The journal, the newest on top, with find."""

from __future__ import annotations

from typing import ClassVar, cast

from gshare.tui.board import Board
from gshare.tui.filters import EntryTest, entry_filter
from gshare.tui.frames import Entry
from gshare.tui.messages import Copy, Find, OpenJob, OpenNode
from gshare.tui.show import Spans, cell, clean
from gshare.tui.widgets.grid import Column, Grid, Key, Row
from rich.text import Text
from textual.binding import Binding, BindingType

COLUMNS = (
    Column("time", "time", 11),
    Column("level", "", 1),
    Column("kind", "kind", 10, rank=1),
    Column("about", "about", 14, flex=1, most=30),
    Column("text", "what happened", 20, flex=5),
)
LEVELS = {"info": ("·", "dim"), "warning": ("!", "warn"), "error": ("✖", "bad")}


class EntryTable(Grid):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "find", "Find"),
        Binding("v", "problems", "Problems only"),
        Binding("y", "copy", "Copy line", show=False),
    ]

    def __init__(self, board: Board, *, id: str) -> None:
        super().__init__(COLUMNS, self._row, id=id)
        self._board = board
        self.filter = ""
        self.only_problems = False
        self._shown: object = None
        self._by_number: dict[int, Entry] = {}
        self._test: EntryTest = entry_filter("")

    def show(self) -> None:
        """Ages change by themselves; the rows only when there are new ones."""
        if self._board.palette is not self.palette:
            self.repaint(self._board.palette)
        state = self._board.shown
        shown = (id(state), state.last_entry, self.filter, self.only_problems)
        if shown == self._shown:
            self.set_rows(self.keys)
            return
        self._shown = shown
        self._test = entry_filter(self.filter)
        newest = reversed(state.entries)
        fits = [entry for entry in newest if self._fits(entry)]
        self._by_number = {entry.number: entry for entry in fits}
        self.empty = "nothing fits" if state.entries else "nothing has happened yet"
        self._entitle(len(fits), len(state.entries))
        self.set_rows(list(self._by_number))

    def _fits(self, entry: Entry) -> bool:
        return (not self.only_problems or entry.level != "info") and self._test(entry)

    def _entitle(self, shown: int, known: int) -> None:
        parts = [f"Events · {known}" if shown == known else f"Events · {shown} of {known}"]
        parts += ["problems only"] if self.only_problems else []
        parts += [f"find: {clean(self.filter)}"] if self.filter else []
        self.border_title = Text("  ".join(parts))  # type: ignore[assignment]

    def _row(self, key: Key) -> Row:
        entry = self._by_number.get(cast(int, key))
        return Row(entry_cells(entry, self._board) if entry is not None else {})

    def _present(self) -> Entry | None:
        return self._by_number.get(cast(int, self.cursor_key)) if self.cursor_key is not None else None

    def action_find(self) -> None:
        self.post_message(Find())

    def action_problems(self) -> None:
        self.only_problems = not self.only_problems
        self.show()

    def action_choose(self) -> None:
        """Goes to what it is about."""
        entry = self._present()
        if entry is not None and entry.job in self._board.shown.jobs:
            self.post_message(OpenJob(entry.job))
        elif entry is not None and entry.node in self._board.shown.nodes:
            self.post_message(OpenNode(entry.node))

    def action_copy(self) -> None:
        if (entry := self._present()) is not None:
            self.post_message(Copy(f"{entry.job or entry.node} {entry.text}".strip()))


def entry_cells(entry: Entry, board: Board) -> dict[str, Spans]:
    mark, role = LEVELS[entry.level]
    job = board.shown.jobs.get(entry.job)
    about = job.name if job is not None else entry.job or entry.node
    return {
        "time": cell(board.moment(entry.time), "dim"),
        "level": cell(mark, role),
        "kind": cell(entry.kind, "dim"),
        "about": cell(clean(about)),
        "text": cell(clean(entry.text), role if entry.level != "info" else ""),
    }
