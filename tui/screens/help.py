"""The keys, made from the bindings of what is on the screen below, and what the signs mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from gshare.tui.bars import LEGEND
from gshare.tui.columns import STATES
from gshare.tui.show import Span
from gshare.tui.themes import Palette
from gshare.tui.widgets.lines import Lines, TextLine
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.keys import format_key
from textual.screen import ModalScreen

FILTERS = (
    ("legal", "in name, node, state, client, base or reason"),
    ("state:running", "in that column"),
    ("val<1.3 lr>=1e-4", "numbers; what is not known never fits"),
    ("-state:stopped", "a minus turns it around"),
    ("", "of several conditions all must hold"),
)


class Help(ModalScreen[None]):
    DEFAULT_CSS = """
    Help { align: center middle; }
    Help #box { width: 78; max-width: 98%; height: 90%; border: round $accent; background: $surface;
                border-title-color: $accent; padding: 0 1; }
    Help Lines { background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark", "leave", "Back")]

    def __init__(self, groups: list[tuple[str, list[Binding]]], palette: Palette) -> None:
        """`groups`: (title, bindings)."""
        super().__init__()
        self._groups, self._palette = groups, palette

    def compose(self) -> ComposeResult:
        with Container(id="box") as box:
            box.border_title = Text("Help")  # type: ignore[assignment]
            yield Lines(id="help")

    def on_mount(self) -> None:
        self.query_one(Lines).show(help_lines(self._groups), self._palette)

    def action_leave(self) -> None:
        self.dismiss(None)


def help_lines(groups: Iterable[tuple[str, list[Binding]]]) -> list[TextLine]:
    lines: list[TextLine] = []
    for title, bindings in groups:
        lines += [[], [(title, "head")]] if lines else [[(title, "head")]]
        lines += [[(f"  {keys_of(one):<18}", "key"), (one.description, "")] for one in bindings]
    lines += [[], [("Filter (/)", "head")]]
    lines += [[(f"  {text:<18}", "key"), (meaning, "")] for text, meaning in FILTERS]
    lines += [[], [("Signs", "head")]]
    memory: list[Span] = [("  memory  ", ""), *LEGEND, ("   ? not known", "dim")]
    states: list[Span] = [("  states  ", "")]
    for name, (mark, role) in STATES.items():
        states += [(f"{mark} ", role), (f"{name}  ", "dim")]
        if sum(len(text) for text, _ in states) > 58:
            lines.append(states)
            states = [("          ", "")]
    lines += [states, memory]
    lines.append([("          * after GiB: shared with the system", "dim")])
    lines.append([("  — is not known; grey is old; NaN and inf rank last", "dim")])
    return lines


def keys_of(binding: Binding) -> str:
    return " ".join(format_key(key) if len(key) > 1 else key for key in binding.key.split(","))
