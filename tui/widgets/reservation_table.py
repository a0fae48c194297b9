"""Reservations of a node's GPUs and the queue behind them: who, how much, since when, why it waits."""

from __future__ import annotations

from typing import ClassVar, cast

from gshare.agent.node.protocol import ReservationInfo
from gshare.tui.board import Board
from gshare.tui.messages import Act, Copy
from gshare.tui.rows import Node
from gshare.tui.show import UNKNOWN, Spans, cell, clean, gib, joined
from gshare.tui.widgets.grid import Column, Grid, Key, Row
from rich.text import Text
from textual.binding import Binding, BindingType

COLUMNS = (
    Column("place", "", 3, right=True),
    Column("task", "reserved for", 14, flex=3, most=40),
    Column("gpu", "GPU", 4, right=True, rank=1),
    Column("budget", "budget", 7, right=True),
    Column("peak", "peak", 7, right=True),
    Column("since", "since", 9),
    Column("holder", "holder", 16, flex=1, most=26, rank=2),
    Column("why", "clients / why it waits", 16, flex=6, most=140, rank=3),
)


class ReservationTable(Grid):
    BORDER_TITLE = "Reservations and queue"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("x", "release", "Release"),
        Binding("y", "copy", "Copy id", show=False),
    ]

    def __init__(self, board: Board, *, id: str) -> None:
        super().__init__(COLUMNS, self._row, id=id)
        self._board = board
        self._rows: dict[str, ReservationInfo] = {}
        self._node: Node | None = None

    def show(self, node: Node | None) -> None:
        if self._board.palette is not self.palette:
            self.repaint(self._board.palette)
        self._node = node
        held = node.held() if node is not None else []
        queue = node.queue() if node is not None else []
        self._rows = {row.id: row for row in (*held, *queue)}
        known = node is not None and node.info is not None
        self.empty = "nothing is reserved" if known else "nothing is known of them"
        self.border_title = Text(f"Reservations · {len(held)} held, {len(queue)} waiting  (GiB)")  # type: ignore[assignment]
        self.set_rows(list(self._rows))

    def _row(self, key: Key) -> Row:
        row, node = self._rows.get(cast(str, key)), self._node
        if row is None or node is None:
            return Row({})
        cells = reservation_cells(row, node, self._board)
        tail = ("peak", ((f"  {clean(row.user)}, {joined(cells['since'])}: ", "dim"), *cells["why"]))
        return Row(cells, self._board.is_away(node), tail if row.state == "waiting" else None)

    def _present(self) -> ReservationInfo | None:
        return self._rows.get(cast(str, self.cursor_key)) if self.cursor_key else None

    def action_release(self) -> None:
        row = self._present()
        if row is None:
            self.app.notify("no reservation is chosen", severity="warning", markup=False)
        elif row.state == "waiting":
            self.app.notify(
                "it waits and holds nothing; stop its job instead", severity="warning", markup=False
            )
        elif row.lease is False:
            self.app.notify(
                f"PID {row.pid} of {clean(row.user)} holds it and gives it back when it ends; only a "
                "`gpu hold` can be released",
                severity="warning",
                markup=False,
            )
        else:
            self.post_message(Act("release", [row.id], [f"{row.task or row.id} of {row.user}"]))

    def action_copy(self) -> None:
        if (row := self._present()) is not None:
            self.post_message(Copy(row.id))


def reservation_cells(row: ReservationInfo, node: Node, board: Board) -> dict[str, Spans]:
    uuids = [gpu.uuid for gpu in node.gpus]
    gpu = str(uuids.index(row.gpu_uuid)) if row.gpu_uuid in uuids else UNKNOWN
    waits = row.state == "waiting"
    if waits:
        why: Spans = cell(clean(row.reason) or "waits", "wait")
    else:
        clients = sorted(row.clients.items(), key=lambda one: -one[1])
        why = cell("  ".join(f"{clean(name)} {gib(mb)}" for name, mb in clients), "dim")
    over = row.peak_mb is not None and row.peak_mb > row.budget_mb
    return {
        "place": cell(str(row.position) if waits else "●", "wait" if waits else "run"),
        "task": cell(clean(row.task) or clean(row.id)),
        "gpu": cell(gpu, "dim"),
        "budget": cell(gib(row.budget_mb)),
        "peak": cell(UNKNOWN if waits else gib(row.peak_mb), "bad" if over else ""),
        "since": cell(board.moment(row.created), "dim"),
        "holder": cell(f"{clean(row.user)} {'hold' if row.lease else f'PID {row.pid}'}", "dim"),
        "why": why,
    }
