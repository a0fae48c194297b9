"""Asks before anything is done to a job or a reservation."""

from __future__ import annotations

from typing import ClassVar

from gshare.tui.show import clean
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal
from textual.screen import ModalScreen
from textual.widgets import Button, Static

NAMES_SHOWN = 8


class Confirm(ModalScreen[bool]):
    DEFAULT_CSS = """
    Confirm { align: center middle; }
    Confirm #box { width: 64; max-width: 95%; height: auto; max-height: 90%; border: round $warning;
                   background: $surface; padding: 1 2; border-title-color: $warning; }
    Confirm #buttons { height: 3; align-horizontal: center; margin-top: 1; }
    Confirm Button { margin: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]
    AUTO_FOCUS = "#no"

    def __init__(self, question: str, names: list[str], warning: str = "") -> None:
        super().__init__()
        self._question, self._names, self._warning = question, names, warning

    def compose(self) -> ComposeResult:
        text = Text("\n".join(f"  {clean(name)}" for name in self._names[:NAMES_SHOWN]))
        if len(self._names) > NAMES_SHOWN:
            text.append(f"\n  and {len(self._names) - NAMES_SHOWN} more")
        if self._warning:
            text.append(f"\n\n{self._warning}")
        with Container(id="box") as box:
            box.border_title = Text(self._question)  # type: ignore[assignment]
            yield Static(text, markup=False)
            with Horizontal(id="buttons"):
                yield Button("No (n)", id="no")
                yield Button("Yes (y)", id="yes", variant="warning")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)
