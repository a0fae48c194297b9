"""One node: its GPUs, who has reserved what, who waits and why, and its agent's log."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from gshare.agent.errors import GshareError
from gshare.tui.board import Board
from gshare.tui.facts import node_facts
from gshare.tui.logs import log_lines
from gshare.tui.rows import Node
from gshare.tui.screens.view import View
from gshare.tui.show import clean
from gshare.tui.widgets.line import Line
from gshare.tui.widgets.lines import Lines
from gshare.tui.widgets.node_table import NodeTable
from gshare.tui.widgets.reservation_table import ReservationTable
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

#: A log is asked for again after so long.
LOG_SECONDS = 5.0


class NodeView(View):
    view = "node"
    AUTO_FOCUS = "#reservations"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "next(1)", "Next node"),
        Binding("N", "next(-1)", "Previous node", show=False),
        Binding("slash", "find", "Find in the log", show=False),
    ]
    DEFAULT_CSS = """
    NodeView #log { height: 35%; }
    NodeView.-low #log { height: 6; }
    """

    def __init__(self, board: Board) -> None:
        super().__init__(board)
        self._log = ""
        self._find = ""

    def body(self) -> ComposeResult:
        yield NodeTable(self.board, id="gpus", only=True).add_class("panel")
        yield Line(id="facts")
        yield ReservationTable(self.board, id="reservations").add_class("panel")
        yield Lines(id="log", follow=True).add_class("panel")

    def node(self) -> Node | None:
        """The one that is shown: the chosen one, else the first."""
        nodes = self.board.shown.nodes
        if self.about not in nodes:
            self.about = next(iter(nodes), "")
        return nodes.get(self.about)

    def show(self) -> None:
        node, palette = self.node(), self.board.palette
        gpus = self.query_one(NodeTable)
        gpus.node = self.about
        gpus.show()
        height = min(gpus.lines, max(4, self.size.height * 2 // 5))
        if gpus.styles.height is None or gpus.styles.height.value != height:
            gpus.styles.height = height
        gpus.border_title = Text(clean(self.about) or "no node")  # type: ignore[assignment]
        self.query_one("#facts", Line).show(
            tuple(node_facts(node, self.board)) if node is not None else (), palette=palette
        )
        self.query_one(ReservationTable).show(node)
        log = self.query_one("#log", Lines)
        log.border_title = Text(f"Log  find: {clean(self._find)}" if self._find else "Log")  # type: ignore[assignment]
        log.show(log_lines(self._log, self._find), palette)

    def on_screen_resume(self) -> None:
        super().on_screen_resume()
        self.run_worker(self._read(), exclusive=True, group="log", exit_on_error=False)

    def on_screen_suspend(self) -> None:
        self.workers.cancel_group(self, "log")

    async def _read(self) -> None:
        while True:
            if self.board.paused_at is None:
                self._log = await self._read_once()
                self.show_all()
            await asyncio.sleep(LOG_SECONDS)

    async def _read_once(self) -> str:
        source = self.dashboard.source
        if "log" not in source.can or self.node() is None:
            return "this source has no logs" if "log" not in source.can else ""
        try:
            return await source.read_log(node=self.about)
        except GshareError as error:
            return str(error)

    # --- keys

    def action_next(self, by: int) -> None:
        names = list(self.board.shown.nodes)
        if names:
            at = names.index(self.about) if self.about in names else -by
            self.about, self._log = names[(at + by) % len(names)], ""
            self.on_screen_resume()

    def action_find(self) -> None:
        self.begin_find()

    def filter_text(self) -> str:
        return self._find

    def set_filter(self, text: str) -> str:
        self._find = text
        return ""
