"""Themes, and what each role of a cell looks like in them.

Colour is never the only sign: states have marks, bars have shapes, curves have markers. With NO_COLOR every
theme shows the roles of `MONO`: bold, dim, underline and reverse alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.style import Style
from textual.theme import Theme

DEFAULT = "gshare-dark"


@dataclass(frozen=True)
class Palette:
    """Role → rich style. The role "" is plain text."""

    styles: dict[str, Style]

    def __getitem__(self, role: str) -> Style:
        return self.styles[role]


ROLES = (
    *(
        "",
        "title",
        "dim",
        "stale",
        "ok",
        "run",
        "wait",
        "warn",
        "bad",
        "best",
        "mark",
        "key",
        "head",
        "cursor",
    ),
    *("bar.peak", "bar.reserved", "bar.outside", "find"),
    *("s0", "s1", "s2", "s3", "s4", "s5"),
)


def _palette(text: str, dim: str, cursor: str, **colors: str) -> Palette:
    c = colors
    series = c["series"].split()
    found = {
        "": text,
        "title": f"bold {c['accent']}",
        "dim": dim,
        "stale": f"italic {dim}",
        "ok": c["ok"],
        "run": c["ok"],
        "wait": c["wait"],
        "warn": f"bold {c['wait']}",
        "bad": f"bold {c['bad']}",
        "best": f"bold {text}",
        "mark": f"bold {c['accent']}",
        "key": f"bold {c['accent']}",
        "head": f"bold {c['accent']}",
        "cursor": f"on {cursor}",
        "bar.peak": c["peak"],
        "bar.reserved": c["reserved"],
        "bar.outside": c["outside"],
        "find": f"bold underline {c['accent']}",
        **{f"s{i}": series[i] for i in range(6)},
    }
    return Palette({role: Style.parse(found[role]) for role in ROLES})


PALETTES = {
    DEFAULT: _palette(
        "#d8dee9",
        "#8792a8",
        "#2f3b54",
        accent="#7fc8f8",
        ok="#8fd694",
        wait="#f2c46d",
        bad="#ff7a85",
        peak="#4f9de0",
        reserved="#7fb7e8",
        outside="#e0a35c",
        series="#7fc8f8 #f2c46d #8fd694 #ff8f9b #c7a6ff #6fd8d0",
    ),
    "gshare-light": _palette(
        "#1f2733",
        "#5c6675",
        "#cfe0f5",
        accent="#0b5cad",
        ok="#1c6e2f",
        wait="#8a5300",
        bad="#b3172b",
        peak="#1f6fbf",
        reserved="#3d7fc0",
        outside="#a65a00",
        series="#0b5cad #8a5300 #1c6e2f #b3172b #6a35b1 #006d6d",
    ),
    # Okabe and Ito's colours, which people with any colour vision tell apart.
    "gshare-safe": _palette(
        "#e6e6e6",
        "#9a9a9a",
        "#3a3a3a",
        accent="#56b4e9",
        ok="#56b4e9",
        wait="#f0e442",
        bad="#e8803a",
        peak="#2f9ae0",
        reserved="#56b4e9",
        outside="#e69f00",
        series="#56b4e9 #e69f00 #16b88c #f0e442 #d78fb7 #e8803a",
    ),
}
_MONO = {
    **dict.fromkeys(ROLES, "none"),
    **dict.fromkeys(("title", "warn", "bad", "best", "mark", "key", "head", "s0", "s2", "s4"), "bold"),
    **dict.fromkeys(("dim", "stale"), "dim"),
    "find": "bold underline",
    "cursor": "reverse",
}
MONO = Palette({role: Style.parse(style) for role, style in _MONO.items()})
PALETTES["gshare-mono"] = MONO

THEMES = (
    Theme(
        name=DEFAULT,
        primary="#7fc8f8",
        secondary="#4f9de0",
        accent="#7fc8f8",
        warning="#f2c46d",
        error="#ff7a85",
        success="#8fd694",
        foreground="#d8dee9",
        background="#10141d",
        surface="#171d29",
        panel="#1f2736",
        variables={"border-blurred": "#3b4660", "footer-key-foreground": "#7fc8f8"},
    ),
    Theme(
        name="gshare-light",
        primary="#0b5cad",
        secondary="#3d7fc0",
        accent="#0b5cad",
        warning="#8a5300",
        error="#b3172b",
        success="#1c6e2f",
        foreground="#1f2733",
        background="#fbfcfe",
        surface="#eef2f8",
        panel="#e1e8f2",
        dark=False,
        variables={"border-blurred": "#9aa9bd", "footer-key-foreground": "#0b5cad"},
    ),
    Theme(
        name="gshare-safe",
        primary="#56b4e9",
        secondary="#2f9ae0",
        accent="#56b4e9",
        warning="#f0e442",
        error="#e8803a",
        success="#56b4e9",
        foreground="#e6e6e6",
        background="#121212",
        surface="#1b1b1b",
        panel="#262626",
        variables={"border-blurred": "#5a5a5a", "footer-key-foreground": "#56b4e9"},
    ),
    Theme(
        name="gshare-mono",
        primary="#ffffff",
        secondary="#d0d0d0",
        accent="#ffffff",
        warning="#ffffff",
        error="#ffffff",
        success="#ffffff",
        foreground="#e4e4e4",
        background="#000000",
        surface="#101010",
        panel="#1c1c1c",
        variables={"border-blurred": "#767676", "footer-key-foreground": "#ffffff"},
    ),
)
NAMES = tuple(theme.name for theme in THEMES)


def palette_of(theme: str, no_color: bool) -> Palette:
    """Of a theme by name; another's (of the command palette) takes the default's."""
    return MONO if no_color else PALETTES.get(theme, PALETTES[DEFAULT])
