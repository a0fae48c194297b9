"""Choose one of a list."""

from __future__ import annotations

from typing import ClassVar

from gshare.tui.show import clean
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.screen import ModalScreen
from textual.widgets import OptionList
from textual.widgets.option_list import Option


class Pick(ModalScreen[str | None]):
    DEFAULT_CSS = """
    Pick { align: center middle; }
    Pick #box { width: 44; max-width: 90%; height: auto; max-height: 80%; border: round $accent;
                background: $surface; border-title-color: $accent; }
    Pick OptionList { height: auto; max-height: 100%; background: $surface; }
    Pick OptionList, Pick OptionList:focus { border: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "leave", "Back")]

    def __init__(self, title: str, choices: list[tuple[str, str]], present: str) -> None:
        """`choices`: (name, what is shown)."""
        super().__init__()
        self._title, self._choices, self._present = title, choices, present

    def compose(self) -> ComposeResult:
        with Container(id="box") as box:
            box.border_title = Text(self._title)  # type: ignore[assignment]
            yield OptionList(*(Option(Text(clean(text))) for _, text in self._choices))

    def on_mount(self) -> None:
        names = [name for name, _ in self._choices]
        if self._present in names:
            self.query_one(OptionList).highlighted = names.index(self._present)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.dismiss(self._choices[event.option_index][0])

    def action_leave(self) -> None:
        self.dismiss(None)
