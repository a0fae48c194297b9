"""Nodes, a line a GPU: its memory as a bar, load, temperature, power. A node without one shows its RAM."""

from __future__ import annotations

from typing import ClassVar, cast

from gshare.agent.node.protocol import GpuInfo
from gshare.tui.bars import LEGEND, use_bar, vram_bar
from gshare.tui.board import AWAY, Board
from gshare.tui.messages import Copy, OpenNode
from gshare.tui.rows import Node
from gshare.tui.show import UNKNOWN, Spans, age, cell, clean, gib, number
from gshare.tui.widgets.grid import Column, Grid, Key, Row
from rich.text import Text
from textual.binding import Binding, BindingType

#: Cells of a bar, by the width of the table.
BARS = ((180, 60), (130, 40), (95, 26), (0, 20))


def columns(bar: int) -> list[Column]:
    return [
        Column("node", "node", 9, flex=2, most=24),
        Column("state", "state", 12, flex=6, most=19),  # "○ unreachable 99 m"
        Column("gpu", "device", 9, flex=3, most=30, rank=1),
        Column("bar", "memory", bar),
        Column("amount", "GiB", 12, right=True),
        Column("load", "load", 5, right=True, rank=2),
        Column("heat", "temp", 5, right=True, rank=3),
        Column("power", "power", 5, right=True, rank=5),
        Column("jobs", "jobs", 4, right=True, rank=4),
        Column("why", "", 8, flex=4, most=100, rank=6),
    ]


#: State → (mark, role).
STATES = {
    "ready": ("●", "ok"),
    "busy": ("●", "run"),
    "degraded": ("◐", "warn"),
    "deploying": ("◔", "wait"),
    "new": ("◌", "dim"),
    "unreachable": ("○", "warn"),
    "lost": ("○", "bad"),
}


class NodeTable(Grid):
    BORDER_TITLE = "Nodes"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("y", "copy", "Copy name", show=False)]

    def __init__(self, board: Board, *, id: str, only: bool = False) -> None:
        """`only`: shows one node, `node`, with all of its GPUs."""
        self._bar = BARS[-1][1]
        super().__init__(columns(self._bar), self._row, id=id)
        self._board = board
        self._only = only
        self.node = ""

    def show(self) -> None:
        if self._board.palette is not self.palette:
            self.repaint(self._board.palette)
            legend = Text()
            for text, role in LEGEND:
                legend.append(text, self.palette[role])
            self.border_subtitle = legend  # type: ignore[assignment]
        self._bar = next(cells for width, cells in BARS if self.size.width >= width)
        self.set_columns(columns(self._bar))
        self.empty = "no nodes" if self._board.state.is_live else "nothing is known yet"
        nodes = [
            node for node in self._board.shown.nodes.values() if not self._only or node.node == self.node
        ]
        self.set_rows([(node.node, i) for node in nodes for i in range(max(1, len(node.gpus)))])

    @property
    def lines(self) -> int:
        """How many it would like: rows, titles and border."""
        return len(self.keys) + 3

    def _row(self, key: Key) -> Row:
        name, i = cast("tuple[str, int]", key)
        node = self._board.shown.nodes.get(name)
        if node is None:
            return Row({})
        cells = node_cells(node, i, self._board, self._bar)
        tail = ("gpu", cells["why"]) if node.info is None and node.reason else None
        return Row(cells, self._board.is_away(node), tail)

    def action_choose(self) -> None:
        if self.cursor_key is not None:
            self.post_message(OpenNode(cast("tuple[str, int]", self.cursor_key)[0]))

    def action_copy(self) -> None:
        if self.cursor_key is not None:
            self.post_message(Copy(cast("tuple[str, int]", self.cursor_key)[0]))


def node_cells(node: Node, i: int, board: Board, bar: int) -> dict[str, Spans]:
    """The line of its GPU `i`; the node's own facts stand in its first line."""
    gpus = node.gpus
    gpu = gpus[i] if i < len(gpus) else None
    found = _gpu_cells(gpu, bar) if gpu is not None else _cpu_cells(node, bar)
    if i == 0:
        mark, role = STATES.get(node.state, ("·", ""))
        since = f" {age(board.now() - node.heard)}" if node.state in AWAY and node.heard is not None else ""
        found["node"] = cell(clean(node.node), "title")
        found["state"] = cell(f"{mark} {clean(node.state) or UNKNOWN}{since}", role)
        found["jobs"] = cell(number(node.jobs))
        why = node.reason or (gpu.problem if gpu is not None else "")
        found["why"] = cell(clean(why), "warn" if node.state in AWAY or node.state == "degraded" else "dim")
    elif gpu is not None:
        found["why"] = cell(clean(gpu.problem), "warn")
    return found


def _gpu_cells(gpu: GpuInfo, bar: int) -> dict[str, Spans]:
    star = "*" if gpu.memory_type == "unified" else ""  # shared with the system
    taken = None
    if gpu.reserved_mb is not None:
        taken = gpu.reserved_mb + (gpu.outside_mb or 0)
    elif gpu.used_mb is not None:
        taken = gpu.used_mb
    return {
        "gpu": cell(clean(gpu.name.removeprefix("NVIDIA ").removeprefix("GeForce "))),
        "bar": vram_bar(gpu, bar),
        "amount": cell(f"{gib(taken)} / {gib(gpu.total_mb)}{star}"),
        "load": cell(number(gpu.load_percent, " %")),
        "heat": cell(number(gpu.temperature_c, "°C"), "warn" if (gpu.temperature_c or 0) >= 85 else ""),
        "power": cell(number(gpu.power_w, " W")),
    }


def _cpu_cells(node: Node, bar: int) -> dict[str, Spans]:
    info = node.info
    if info is None:
        return {"gpu": cell(UNKNOWN, "dim"), "bar": use_bar(None, None, bar), "amount": cell(UNKNOWN, "dim")}
    total = info.ram_mb or None
    used = None if total is None or info.ram_free_mb is None else total - info.ram_free_mb
    return {
        "gpu": cell(f"CPU {info.cpu_cores} cores, RAM" if info.cpu_cores else "CPU, RAM"),
        "bar": use_bar(used, total, bar),
        "amount": cell(f"{gib(used)} / {gib(total)}"),
        "load": cell(number(info.cpu_percent, " %")),
        "heat": cell(UNKNOWN, "dim"),
        "power": cell(UNKNOWN, "dim"),
    }
