"""The journal: what happened, the newest on top."""

from __future__ import annotations

from gshare.tui.screens.view import View
from gshare.tui.widgets.entry_table import EntryTable
from textual.app import ComposeResult


class EventsView(View):
    view = "events"
    AUTO_FOCUS = "#entries"

    def body(self) -> ComposeResult:
        yield EntryTable(self.board, id="entries").add_class("panel")

    def show(self) -> None:
        self.query_one(EntryTable).show()

    def filter_text(self) -> str:
        return self.query_one(EntryTable).filter

    def set_filter(self, text: str) -> str:
        self.query_one(EntryTable).filter = text
        return ""
