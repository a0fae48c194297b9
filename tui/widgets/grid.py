"""A table that renders its visible lines only, and repaints only the cells of them that have changed.

2,000 rows cost what 40 do. The owner gives keys in order and a function from a key to its cells.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from gshare.tui.show import Spans
from gshare.tui.themes import MONO, Palette
from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

GAP = 2  # columns between two cells
Key = Hashable


@dataclass(frozen=True)
class Column:
    """`width`: cells at least. `flex`: share of what is left over, up to `most`. The columns of the highest
    `rank` are left out first when there is no room; those of rank 0 stay."""

    key: str
    title: str
    width: int
    right: bool = False
    flex: int = 0
    most: int = 1000
    rank: int = 0


#: What a tail is laid out by.
LAST = Column("", "", 0)


@dataclass(frozen=True)
class Row:
    """What a line shows: spans by column key, and whether it is greyed because it is old. `tail`: spans in
    the place of a column and all that follow it: a sentence where there are no numbers."""

    cells: dict[str, Spans]
    old: bool = False
    tail: tuple[str, Spans] | None = None


class Grid(ScrollView, can_focus=True):
    DEFAULT_CSS = """
    Grid { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "edge(-1)", "First", show=False),
        Binding("end,G", "edge(1)", "Last", show=False),
        Binding("enter", "choose", "Open"),
    ]

    class Chosen(Message):
        """Enter or a second click on a row."""

        def __init__(self, grid: Grid, key: Key) -> None:
            super().__init__()
            self.grid, self.key = grid, key

        @property
        def control(self) -> Grid:
            return self.grid

    class Titled(Message):
        """A click on a column's title."""

        def __init__(self, grid: Grid, column: str) -> None:
            super().__init__()
            self.grid, self.column = grid, column

        @property
        def control(self) -> Grid:
            return self.grid

    def __init__(self, columns: Sequence[Column], row_of: Callable[[Key], Row], *, id: str) -> None:
        super().__init__(id=id)
        self.palette: Palette = MONO
        self.empty = ""  # told where there are no rows
        self.sorted_by: tuple[str, bool] | None = None  # (column, descending), shown in its title
        self._all = list(columns)
        self._row_of = row_of
        self._keys: Sequence[Key] = ()
        self._cursor = 0
        self._held: dict[Key, Row] = {}  # what the visible lines show
        self._columns: list[tuple[Column, int]] = []  # those that fit, with their widths

    # --- for the owner

    @property
    def cursor_key(self) -> Key | None:
        return self._keys[self._cursor] if self._keys else None

    @property
    def keys(self) -> Sequence[Key]:
        return self._keys

    def set_columns(self, columns: Sequence[Column]) -> None:
        if list(columns) != self._all:
            self._all = list(columns)
            self._fit()
            self.refresh()

    def set_rows(self, keys: Sequence[Key]) -> None:
        """New order, or the same with other contents: the cursor stays on its row, at the top stays there."""
        before = self.cursor_key
        moved = len(keys) != len(self._keys)
        was, self._keys = self._keys, keys
        if (
            before is not None
            and self._cursor > 0
            and not (self._cursor < len(keys) and keys[self._cursor] == before)
        ):
            with contextlib.suppress(ValueError):
                self._cursor = keys.index(before)
        self._cursor = max(0, min(self._cursor, len(keys) - 1))
        if moved:
            self.virtual_size = Size(self.size.width, len(keys) + 1)
        self._diff(was)

    def select(self, key: Key) -> None:
        """Puts the cursor there, if the row is."""
        if key in self._keys:
            self._go(list(self._keys).index(key))

    def repaint(self, palette: Palette) -> None:
        """Everything anew: another theme, other columns."""
        self.palette = palette
        self._held.clear()
        self._fit()
        self.refresh()

    # --- what changed

    def _visible(self) -> range:
        top = round(self.scroll_y)
        return range(top, min(len(self._keys), top + max(0, self.size.height - 1)))

    def _diff(self, was: Sequence[Key]) -> None:
        """Marks the cells of visible lines that show something else than before."""
        held, self._held = self._held, {}
        if not self.is_attached or not self.size:
            return
        if bool(was) != bool(self._keys):
            self.refresh()
        top = round(self.scroll_y)
        visible = self._visible()
        for index in visible:
            key = self._keys[index]
            row = self._held[key] = self._row_of(key)
            before = held.get(was[index]) if index < len(was) else None
            y = index - top + 1
            if before is None or before.old != row.old or before.tail != row.tail:
                self._mark(0, y, self.size.width)
                continue
            if before.cells == row.cells:
                continue
            x = 0
            for column, width in self._columns:
                if before.cells.get(column.key) != row.cells.get(column.key):
                    self._mark(x, y, width)
                x += width + GAP
        for index in range(visible.stop, min(len(was), top + self.size.height - 1)):
            self._mark(0, index - top + 1, self.size.width)

    def _mark(self, x: int, y: int, width: int) -> None:
        region = Region(x, y, width, 1).intersection(Region(0, 0, *self.size))
        if region:
            self.refresh(region)

    # --- layout

    def on_resize(self, _: events.Resize) -> None:
        self.virtual_size = Size(self.size.width, len(self._keys) + 1)
        self._held.clear()
        self._fit()
        self._keep_visible()
        self.refresh()

    def _fit(self) -> None:
        """Which columns fit, and how wide each is."""
        room = self.size.width - 1  # one column of air at the right
        chosen = list(self._all)

        def needed() -> int:
            return sum(column.width for column in chosen) + GAP * max(0, len(chosen) - 1)

        while needed() > room and (out := max((column.rank for column in chosen), default=0)) > 0:
            chosen.remove(next(column for column in reversed(chosen) if column.rank == out))
        widths = {column.key: column.width for column in chosen}
        left = room - needed()
        while left > 0 and (open_ := [c for c in chosen if c.flex and widths[c.key] < c.most]):
            shares = sum(column.flex for column in open_)
            given = 0
            for column in open_:
                more = min(
                    max(1, left * column.flex // shares), column.most - widths[column.key], left - given
                )
                widths[column.key] += more
                given += more
            if not given:
                break
            left -= given
        self._columns = [(column, widths[column.key]) for column in chosen]

    # --- painting

    def render_line(self, y: int) -> Strip:
        background = self.rich_style
        width = self.size.width
        if y == 0:
            return self._title_line(width, background)
        index = round(self.scroll_y) + y - 1
        if index >= len(self._keys):
            text = self.empty if not self._keys and y == 1 else ""
            style = background + self.palette["dim"]
            return Strip([Segment(set_cell_size(f" {text}" if text else "", width), style)], width)
        key = self._keys[index]
        row = self._held.get(key)
        if row is None:
            row = self._held[key] = self._row_of(key)
        cursor = index == self._cursor and self.has_focus
        style = background + self.palette["cursor"] if cursor else background
        segments: list[Segment] = []
        for column, cells in self._columns:
            if row.tail is not None and row.tail[0] == column.key:
                left = width - sum(segment.cell_length for segment in segments)
                segments.extend(self._cell(row.tail[1], LAST, left, style, row.old))
                break
            segments.extend(self._cell(row.cells.get(column.key, ()), column, cells, style, row.old))
            segments.append(Segment(" " * GAP, style))
        return Strip(segments).adjust_cell_length(width, style)

    def _title_line(self, width: int, background: Style) -> Strip:
        segments: list[Segment] = []
        for column, cells in self._columns:
            title, role = column.title, "dim"
            if self.sorted_by is not None and column.key == self.sorted_by[0]:
                title, role = f"{title}{'▼' if self.sorted_by[1] else '▲'}", "head"
            text = set_cell_size(title, cells) if cell_len(title) > cells else title
            text = text.rjust(cells) if column.right else text.ljust(cells)
            segments.append(Segment(text, background + self.palette[role]))
            segments.append(Segment(" " * GAP, background))
        return Strip(segments).adjust_cell_length(width, background)

    def _cell(self, spans: Spans, column: Column, width: int, style: Style, old: bool) -> list[Segment]:
        """`width` cells of it, the end cut with an ellipsis. Greyed where old."""
        used = 0
        found: list[Segment] = []
        for text, role in spans:
            length = len(text) if text.isascii() else cell_len(text)
            left = width - used
            painted = style + self.palette["stale" if old else role]
            if length > left:
                if left > 0:
                    found.append(Segment(set_cell_size(text, left - 1) + "…", painted))
                    used = width
                break
            if length < width and len(spans) == 1:  # one segment with its padding: half the bytes
                text_padded = " " * (width - length) + text if column.right else text + " " * (width - length)
                return [Segment(text_padded, painted)]
            found.append(Segment(text, painted))
            used += length
        if used < width:
            pad = Segment(" " * (width - used), style)
            return [pad, *found] if column.right else [*found, pad]
        return found

    # --- the cursor

    def _go(self, index: int) -> None:
        if not self._keys:
            return
        before, self._cursor = self._cursor, max(0, min(index, len(self._keys) - 1))
        if before == self._cursor:
            return
        top = round(self.scroll_y)
        for one in (before, self._cursor):
            self._mark(0, one - top + 1, self.size.width)
        self._keep_visible()

    def _keep_visible(self) -> None:
        top, lines = round(self.scroll_y), max(1, self.size.height - 1)
        if self._cursor < top:
            self.scroll_to(y=self._cursor, animate=False)
        elif self._cursor >= top + lines:
            self.scroll_to(y=self._cursor - lines + 1, animate=False)

    def on_focus(self) -> None:
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()

    def action_move(self, by: int) -> None:
        self._go(self._cursor + by)

    def action_page(self, by: int) -> None:
        self._go(self._cursor + by * max(1, self.size.height - 2))

    def action_edge(self, where: int) -> None:
        self._go(0 if where < 0 else len(self._keys) - 1)

    def action_choose(self) -> None:
        if (key := self.cursor_key) is not None:
            self.post_message(self.Chosen(self, key))

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None:
            return
        if offset.y == 0:
            x = 0
            for column, width in self._columns:
                if x <= offset.x < x + width + GAP:
                    self.post_message(self.Titled(self, column.key))
                x += width + GAP
            return
        index = round(self.scroll_y) + offset.y - 1
        if index >= len(self._keys):
            return
        again = index == self._cursor
        self._go(index)
        if again and event.chain > 1:
            self.action_choose()
