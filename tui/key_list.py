"""The keys that work now, for the help and the command palette: made from the bindings themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from textual.binding import Binding

#: Textual's own, which work everywhere.
ALWAYS = (
    Binding("ctrl+p", "command_palette", "Command palette"),
    Binding("tab", "focus_next", "Next part of the screen"),
)


def bindings_of(
    owners: Iterable[tuple[str, object]], works: Callable[[str], bool]
) -> list[tuple[str, list[Binding]]]:
    """(title, bindings) of each owner that has any, in that order; a key counts for the first that binds it.

    `owners`: (title, widget, screen or app). `works`: whether an action, without its arguments, can be done.
    """
    groups: list[tuple[str, list[Binding]]] = []
    told: set[str] = set()
    for title, owner in owners:
        found: list[Binding] = []
        for cls in type(owner).__mro__:
            if not cls.__module__.startswith("gshare."):
                continue
            for one in cls.__dict__.get("BINDINGS", ()):
                action = one.action.partition("(")[0]
                if one.key not in told and works(action) and one.description:
                    told.add(one.key)
                    found.append(one)
        if found:
            groups.append((title, found))
    groups[-1][1].extend(ALWAYS)
    return groups
