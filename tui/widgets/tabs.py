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

    def trail(self, crumbs: list[tuple[str, str]], palette: Palette) -> None:
        """`crumbs`: (view, what it shows, "" for none), the present one last."""
        present = crumbs[-1][0]
        tabs = tuple(
            (f" {i} {view} ", "cursor" if view == present else "dim") for i, view in enumerate(VIEWS, 1)
        )
        path = " › ".join(clean(about) or view for view, about in crumbs)
        room = self.size.width - sum(cell_len(text) for text, _ in tabs) - 2
        if cell_len(path) > room:  # where one is matters more than where one came from
            path = "…" + path[len(path) - max(0, room - 1) :]
        told = room > 2 and (len(crumbs) > 1 or crumbs[-1][1])
        self.show(tabs, ((f"{path} ", "dim"),) if told else (), palette)

    def on_click(self, event: events.Click) -> None:
        x = 0
        for i, view in enumerate(VIEWS, 1):
            width = cell_len(f" {i} {view} ")
            if x <= event.x < x + width:
                self.post_message(self.Picked(view))
            x += width
