"""All adapters in one table."""

from __future__ import annotations

from gshare.tui.columns import fields_of
from gshare.tui.screens.pick import Pick
from gshare.tui.screens.view import View
from gshare.tui.widgets.job_table import JobTable
from textual.app import ComposeResult


class LeaderboardView(View):
    view = "leaderboard"
    AUTO_FOCUS = "#jobs"

    def body(self) -> ComposeResult:
        yield JobTable(self.board, id="jobs").add_class("panel")

    def show(self) -> None:
        self.query_one(JobTable).show()

    def filter_text(self) -> str:
        return self.board.filter

    def set_filter(self, text: str) -> str:
        self.board.filter = text
        table = self.query_one(JobTable)
        table.show()
        return table.problem

    def on_job_table_pick_sort(self, event: JobTable.PickSort) -> None:
        event.stop()
        fields = fields_of(self.board.shown.jobs.values())
        choices = [
            (field.name, field.title if field.title == field.name else f"{field.title}  ({field.name})")
            for field in fields
        ]

        def sort(name: str | None) -> None:
            if name is not None:
                self.query_one(JobTable).sort_by(name)

        self.app.push_screen(Pick("Sort by", choices, self.board.settings.sort), sort)

    def on_job_table_compare(self, event: JobTable.Compare) -> None:
        event.stop()
        if len(self.board.marked_jobs()) < 2:
            self.notify(
                "mark two to six adapters with m, then compare them", severity="warning", markup=False
            )
            return
        self.dashboard.go("adapter")
