"""What all five screens share: the top line, tabs, banner, filter line and key line."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from gshare.tui.board import Board
from gshare.tui.messages import Find
from gshare.tui.status import banner, status
from gshare.tui.widgets.find_bar import FindBar
from gshare.tui.widgets.line import Line
from gshare.tui.widgets.tabs import Tabs
from textual import events
from textual.app import ComposeResult
from textual.containers import Container
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer

if TYPE_CHECKING:
    from gshare.tui.app import Dashboard

#: Below this nothing is shown but a word about it.
LEAST = (40, 10)


class View(Screen[None]):
    """A screen reads `board`, and only while it is the one that is shown."""

    view: ClassVar[str] = ""
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-normal"), (150, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-low"), (30, "-tall")]  # noqa: RUF012
    DEFAULT_CSS = """
    View { background: $background; color: $foreground; }
    View #status { background: $panel; }
    View #banner { background: $surface; display: none; }
    View #banner.-told { display: block; }
    View #body { height: 1fr; }
    View #small { display: none; height: 1fr; }
    View.-small #body, View.-small Footer, View.-small Tabs, View.-small #banner { display: none; }
    View.-small #small { display: block; }
    View Grid, View Lines, View Chart { background: $background; }
    View .panel { border: round $border-blurred; border-title-color: $accent; padding: 0; }
    View .panel:focus { border: round $accent; border-title-style: bold; }
    View Footer { background: $panel; }
    """

    def __init__(self, board: Board) -> None:
        super().__init__(id=self.view)
        self.board = board
        self.about = ""  # what of it is shown: a node's name, a job's key
        self._finding: Widget | None = None
        self._composed = False

    @property
    def dashboard(self) -> Dashboard:
        return cast("Dashboard", self.app)

    def compose(self) -> ComposeResult:
        yield Line(id="status")
        yield Tabs(id="tabs")
        yield Line(id="banner")
        yield Line(id="small")
        with Container(id="body"):
            yield from self.body()
        yield FindBar()
        yield Footer(compact=True, show_command_palette=False)

    def body(self) -> ComposeResult:
        raise NotImplementedError

    def show(self) -> None:
        """Takes the board's present state into the body."""
        raise NotImplementedError

    def crumb(self) -> str:
        """What of it is shown, for people."""
        return self.about

    def show_all(self) -> None:
        """Everything of the screen."""
        if not self._composed or self.dashboard.is_leaving:  # then the widgets go before the screen
            return
        board, palette = self.board, self.board.palette
        source = self.dashboard.source
        small = self.size.width < LEAST[0] or self.size.height < LEAST[1]
        self.set_class(small, "-small")
        if small:
            least = f"{LEAST[0]}×{LEAST[1]}"
            text = f" {self.size.width}×{self.size.height} is too small; {least} or more"
            self.query_one("#small", Line).show(((text, "warn"),), palette=palette)
            return
        left, right = status(board, source)
        self.query_one("#status", Line).show(left, right, palette)
        self.query_one(Tabs).trail(self.dashboard.crumbs(), palette)
        told = banner(board, source, self.dashboard.problems(), (self.size.width, self.size.height))
        line = self.query_one("#banner", Line)
        line.set_class(bool(told), "-told")
        line.show(told, palette=palette)
        self.show()

    def on_mount(self) -> None:
        self._composed = True
        self.show_all()

    def on_resize(self, _: events.Resize) -> None:
        self.call_after_refresh(self.show_all)

    def on_screen_resume(self) -> None:
        self.show_all()

    # --- filter

    def filter_text(self) -> str:
        return ""

    def set_filter(self, text: str) -> str:
        """Returns what is wrong with it."""
        return ""

    def on_find(self, event: Find) -> None:
        event.stop()
        self.begin_find()

    def begin_find(self) -> None:
        """Opens the line in which a filter is typed."""
        self._finding = self.focused
        self.query_one(FindBar).open(self.filter_text(), self.board.palette)

    def on_find_bar_changed(self, event: FindBar.Changed) -> None:
        event.stop()
        problem = self.set_filter(event.text)
        bar = self.query_one(FindBar)
        bar.tell(problem, self.board.palette)
        if event.done and not problem:
            bar.close()
            if self._finding is not None:
                self._finding.focus()
        self.show_all()
