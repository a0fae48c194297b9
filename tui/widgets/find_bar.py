"""The line in which a filter is typed. It works as one types; Enter keeps it, Esc takes it away."""

from __future__ import annotations

from typing import ClassVar

from gshare.tui.themes import Palette
from gshare.tui.widgets.line import Line
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.widgets import Input

HINT = "words   column:text   val<1.3   -state:stopped"


class FindBar(Horizontal):
    DEFAULT_CSS = """
    FindBar { height: 1; display: none; background: $panel; }
    FindBar.-open { display: block; }
    FindBar Input { width: 1fr; height: 1; border: none; padding: 0; background: $panel; }
    FindBar Line { width: 1fr; }
    FindBar #slash { width: 9; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "clear", "Clear the filter")]

    class Changed(Message):
        """`done`: the bar closes."""

        def __init__(self, text: str, done: bool) -> None:
            super().__init__()
            self.text, self.done = text, done

    def compose(self) -> ComposeResult:
        yield Line(id="slash")
        yield Input(compact=True)
        yield Line(id="problem")

    @property
    def is_open(self) -> bool:
        return self.has_class("-open")

    def open(self, text: str, palette: Palette) -> None:
        self.query_one("#slash", Line).show(((" filter: ", "key"),), palette=palette)
        self.tell("", palette)
        self.add_class("-open")
        field = self.query_one(Input)
        field.value = text
        field.focus()

    def tell(self, problem: str, palette: Palette) -> None:
        shown = ((f" {problem}", "bad"),) if problem else ((f" {HINT}", "dim"),)
        self.query_one("#problem", Line).show(shown, palette=palette)

    def close(self) -> None:
        self.remove_class("-open")

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.is_open:
            self.post_message(self.Changed(event.value, False))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.post_message(self.Changed(event.value, True))

    def action_clear(self) -> None:
        self.post_message(self.Changed("", True))
