"""What widgets tell the app."""

from __future__ import annotations

from gshare.tui.source import ActionName
from textual.message import Message


class OpenJob(Message):
    """Show that job's page. Empty: the one shown last, else the best."""

    def __init__(self, job: str) -> None:
        super().__init__()
        self.job = job


class OpenNode(Message):
    def __init__(self, node: str) -> None:
        super().__init__()
        self.node = node


class Act(Message):
    """Do that to those targets once the user has confirmed it. `names`: what the targets are called."""

    def __init__(self, action: ActionName, targets: list[str], names: list[str]) -> None:
        super().__init__()
        self.action: ActionName = action
        self.targets = targets
        self.names = names


class Copy(Message):
    """Into the clipboard."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class Find(Message):
    """The user wants to type a filter for the sender."""
