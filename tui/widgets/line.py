"""One or a few lines of spans that repaint only when they change: status, banner, tabs."""

from __future__ import annotations

from collections.abc import Sequence

from gshare.tui.show import Spans
from gshare.tui.themes import MONO, Palette
from rich.text import Text
from textual.widget import Widget


class Line(Widget):
    """`parts`: left and right; what does not fit of the left is cut."""

    DEFAULT_CSS = """
    Line { height: 1; width: 1fr; }
    """

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self.palette: Palette = MONO
        self._left: Spans = ()
        self._right: Spans = ()

    @property
    def text(self) -> str:
        return "".join(text for text, _ in (*self._left, *self._right))

    def show(self, left: Spans, right: Spans = (), palette: Palette | None = None) -> None:
        if palette is not None and palette is not self.palette:
            self.palette = palette
        elif (left, right) == (self._left, self._right):
            return
        self._left, self._right = left, right
        self.refresh()

    def render(self) -> Text:
        left, right = as_text(self._left, self.palette), as_text(self._right, self.palette)
        room = self.size.width - right.cell_len
        left.truncate(max(0, room), overflow="ellipsis", pad=True)
        return left.append_text(right)


def as_text(spans: Sequence[tuple[str, str]], palette: Palette) -> Text:
    text = Text(no_wrap=True, end="")
    for part, role in spans:
        text.append(part, palette[role])
    return text
