"""The five views, the one that is shown, and how one came here. A click goes there."""

from __future__ import annotations

from gshare.tui.show import clean
from gshare.tui.themes import Palette
from gshare.tui.widgets.line import Line
from rich.cells import cell_len
from textual import events
from textual.message import Message

VIEWS = ("overview", "leaderboard", "node", "adapter", "events")


class Tabs(Line):
    class Picked(Message):
        def __init__(self, view: str) -> None:
            super().__init__()
            self.view = view

    _present = VIEWS[0]

    def trail(self, crumbs: list[tuple[str, str]], palette: Palette) -> None:
        """`crumbs`: (view, what it shows, "" for none), the present one last."""
        present = self._present = crumbs[-1][0]
        tabs = tuple(
            (label, "cursor" if view == present else "dim")
            for label, view in zip(self._labels(present), VIEWS, strict=True)
        )
        path = " › ".join(clean(about) or view for view, about in crumbs)
        room = self.size.width - sum(cell_len(text) for text, _ in tabs) - 2
        if cell_len(path) > room:  # where one is matters more than where one came from
            path = "…" + path[len(path) - max(0, room - 1) :]
        told = room > 2 and (len(crumbs) > 1 or crumbs[-1][1])
        self.show(tabs, ((f"{path} ", "dim"),) if told else (), palette)

    def _labels(self, present: str) -> list[str]:
        """Of each view; numbers alone for those that are not shown where there is no room for all names."""
        labels = [f" {i} {view} " for i, view in enumerate(VIEWS, 1)]
        if sum(map(len, labels)) <= self.size.width:
            return labels
        return [f" {i} {view} " if view == present else f" {i} " for i, view in enumerate(VIEWS, 1)]

    def on_click(self, event: events.Click) -> None:
        x = 0
        for label, view in zip(self._labels(self._present), VIEWS, strict=True):
            width = len(label)
            if x <= event.x < x + width:
                self.post_message(self.Picked(view))
            x += width
