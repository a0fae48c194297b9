"""Nodes and their GPUs above, the leaderboard below."""

from __future__ import annotations

from gshare.tui.screens.leaderboard import LeaderboardView
from gshare.tui.widgets.job_table import JobTable
from gshare.tui.widgets.node_table import NodeTable
from textual.app import ComposeResult


class Overview(LeaderboardView):
    view = "overview"
    AUTO_FOCUS = "#jobs"

    def body(self) -> ComposeResult:
        yield NodeTable(self.board, id="nodes").add_class("panel")
        yield JobTable(self.board, id="jobs").add_class("panel")

    def show(self) -> None:
        nodes = self.query_one(NodeTable)
        nodes.show()
        # The nodes get what they need, up to two fifths of the screen.
        height = min(max(4, nodes.lines), max(4, self.size.height * 2 // 5))
        if nodes.styles.height is None or nodes.styles.height.value != height:
            nodes.styles.height = height
        super().show()
