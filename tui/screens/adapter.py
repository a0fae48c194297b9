"""One adapter, or two to six marked ones side by side: curves, parameters, states, files, log."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from gshare.agent.errors import GshareError
from gshare.tui.actions import DONE, can_be
from gshare.tui.board import Board
from gshare.tui.facts import compared_facts, job_facts
from gshare.tui.logs import log_lines
from gshare.tui.messages import Act, Copy
from gshare.tui.rows import Job
from gshare.tui.screens.node import LOG_SECONDS
from gshare.tui.screens.view import View
from gshare.tui.show import clean
from gshare.tui.source import ActionName, FileRow
from gshare.tui.widgets.chart import Chart
from gshare.tui.widgets.lines import Lines
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical


class AdapterView(View):
    """`about`: the key of a job; empty: the marked ones when there are two, else the best one."""

    view = "adapter"
    AUTO_FOCUS = "#facts"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "log_scale", "Log scale"),
        Binding("d", "details", "Details"),
        Binding("n", "next(1)", "Next"),
        Binding("N", "next(-1)", "Previous", show=False),
        Binding("m", "mark", "Mark", show=False),
        Binding("M", "unmark", "Unmark all", show=False),
        Binding("x", "act('stop')", "Stop job"),
        Binding("z", "act('pause')", "Pause job", show=False),
        Binding("u", "act('resume')", "Resume job", show=False),
        Binding("y", "copy", "Copy directory", show=False),
        Binding("slash", "find", "Find in the log", show=False),
    ]
    DEFAULT_CSS = """
    AdapterView #body { layout: horizontal; }
    AdapterView #left { width: 1fr; }
    AdapterView #facts { width: 42; height: 1fr; }
    AdapterView.-wide #facts { width: 56; }
    AdapterView #log { height: 30%; }
    AdapterView.-low #log { height: 6; }
    AdapterView.-compare #log { display: none; }
    AdapterView.-compare #facts { width: 50%; }
    AdapterView.-details #facts { display: none; }
    AdapterView.-narrow #facts { display: none; }
    AdapterView.-narrow.-details #left { display: none; }
    AdapterView.-narrow.-details #facts { display: block; width: 1fr; }
    """

    def __init__(self, board: Board) -> None:
        super().__init__(board)
        self._log = ""
        self._find = ""
        self._files: list[FileRow] | None = None
        self._files_problem = ""

    def body(self) -> ComposeResult:
        with Vertical(id="left"):
            yield Chart(self.board, id="chart").add_class("panel")
            yield Lines(id="log", follow=True).add_class("panel")
        yield Lines(id="facts").add_class("panel")

    def jobs(self) -> list[Job]:
        """Those that are shown."""
        marked = self.board.marked_jobs()
        if not self.about and len(marked) >= 2:
            return marked
        job = self.board.shown.jobs.get(self.about)
        if job is None:
            job = next(iter(marked or self.board.shown.ranked()), None)
        if job is None:
            return []
        self.about = job.job
        return [job]

    def crumb(self) -> str:
        job = self.board.shown.jobs.get(self.about)
        if job is not None:
            return job.name
        return f"{len(self.board.marked)} compared" if len(self.board.marked) >= 2 else ""

    def show(self) -> None:
        jobs, palette = self.jobs(), self.board.palette
        compares = len(jobs) > 1
        self.set_class(compares, "-compare")
        chart = self.query_one(Chart)
        chart.show(jobs)
        names = ", ".join(clean(job.name) for job in jobs)
        chart.border_title = Text(names or "no adapter")  # type: ignore[assignment]
        facts = self.query_one("#facts", Lines)
        if compares:
            facts.show(compared_facts(jobs, self.board), palette)
        elif jobs:
            facts.show(job_facts(jobs[0], self.board, self._files, self._files_problem), palette)
        else:
            facts.show([[("nothing is known of any adapter yet", "dim")]], palette)
        log = self.query_one("#log", Lines)
        log.border_title = Text(f"Log  find: {clean(self._find)}" if self._find else "Log")  # type: ignore[assignment]
        log.show(log_lines(self._log, self._find), palette)

    def on_screen_resume(self) -> None:
        super().on_screen_resume()
        self._log, self._files, self._files_problem = "", None, ""
        self.run_worker(self._read(), exclusive=True, group="log", exit_on_error=False)

    def on_screen_suspend(self) -> None:
        self.workers.cancel_group(self, "log")

    async def _read(self) -> None:
        source = self.dashboard.source
        asked: set[str] = set()
        while True:
            jobs = self.jobs()  # none yet when we came before the source had said anything
            for job in jobs if "history" in source.can else []:
                if job.job in asked:
                    continue
                try:
                    await source.ask_history(job.job)
                    asked.add(job.job)
                except GshareError as error:  # asked again with the next look
                    self._files_problem = str(error)
            if len(jobs) == 1 and self.board.paused_at is None:
                await self._read_once(jobs[0].job)
                self.show_all()
            await asyncio.sleep(LOG_SECONDS)

    async def _read_once(self, job: str) -> None:
        source = self.dashboard.source
        try:
            self._log = await source.read_log(job=job) if "log" in source.can else "this source has no logs"
        except GshareError as error:
            self._log = str(error)
        if "files" not in source.can:
            self._files_problem = "this source lists no files"
            return
        try:
            self._files, self._files_problem = await source.list_files(job), ""
        except GshareError as error:
            self._files, self._files_problem = None, str(error)

    # --- keys

    def action_log_scale(self) -> None:
        self.board.settings.log_scale = not self.board.settings.log_scale
        self.show_all()

    def action_details(self) -> None:
        self.toggle_class("-details")

    def action_next(self, by: int) -> None:
        keys = [job.job for job in self.board.shown.ranked()]
        if keys:
            at = keys.index(self.about) if self.about in keys else -by
            self.about = keys[(at + by) % len(keys)]
            self.on_screen_resume()

    def action_mark(self) -> None:
        if self.about and not self.board.toggle_mark(self.about):
            self.notify("six are marked already", severity="warning", markup=False)

    def action_unmark(self) -> None:
        """Out of a comparison: the first of it stays."""
        jobs = self.jobs()
        self.board.marked.clear()
        if jobs and not self.about:
            self.about = jobs[0].job
            self.on_screen_resume()
        else:
            self.show_all()

    def action_act(self, action: ActionName) -> None:
        jobs = [job for job in self.jobs() if can_be(action, job.state)]
        if not jobs:
            self.notify(f"nothing here can be {DONE[action]}", severity="warning", markup=False)
            return
        self.post_message(Act(action, [job.job for job in jobs], [job.name for job in jobs]))

    def action_copy(self) -> None:
        for job in self.jobs()[:1]:
            self.post_message(Copy(job.output_dir or job.name))

    def action_find(self) -> None:
        self.begin_find()

    def filter_text(self) -> str:
        return self._find

    def set_filter(self, text: str) -> str:
        self._find = text
        return ""
