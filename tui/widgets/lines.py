"""Scrollable lines of spans: a log, a page of facts. Renders the visible ones only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from gshare.tui.show import Span
from gshare.tui.themes import MONO, Palette
from rich.cells import cell_len
from rich.segment import Segment
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

TextLine = Sequence[Span]


class Lines(ScrollView, can_focus=True):
    DEFAULT_CSS = """
    Lines { height: 1fr; scrollbar-size: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll_up", "Up", show=False),
        Binding("down,j", "scroll_down", "Down", show=False),
        Binding("home,g", "scroll_home", "First", show=False),
        Binding("end,G", "scroll_end", "Last", show=False),
    ]

    def __init__(self, *, id: str, follow: bool = False) -> None:
        """`follow`: stays at the end as lines come, unless one has scrolled away from it."""
        super().__init__(id=id)
        self.palette: Palette = MONO
        self._lines: Sequence[TextLine] = []
        self._follow = follow

    @property
    def text(self) -> str:
        return "\n".join("".join(part for part, _ in line) for line in self._lines)

    def show(self, lines: Sequence[TextLine], palette: Palette) -> None:
        at_end = self.scroll_y >= self.max_scroll_y - 1
        was, self._lines = self._lines, lines
        new_palette, self.palette = palette is not self.palette, palette
        width = max((sum(cell_len(part) for part, _ in line) for line in lines), default=0)
        size = Size(width, len(lines))
        if size != self.virtual_size:
            self.virtual_size = size
            if self._follow and at_end:
                self.scroll_end(animate=False, immediate=True)
            self.refresh()
            return
        if new_palette:
            self.refresh()
            return
        top = round(self.scroll_y)
        for y in range(min(self.size.height, len(lines) - top)):
            if lines[top + y] != was[top + y]:
                self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        width, background = self.size.width, self.rich_style
        index = round(self.scroll_y) + y
        if index >= len(self._lines):
            return Strip.blank(width, background)
        strip = Strip([Segment(text, background + self.palette[role]) for text, role in self._lines[index]])
        x = round(self.scroll_x)
        return strip.crop(x, x + width).adjust_cell_length(width, background)
