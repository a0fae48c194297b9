"""A log as lines for the screen. Pure."""

from __future__ import annotations

import re

from gshare.tui.filters import line_filter
from gshare.tui.show import Span, clean

#: Colours and cursor movements that programs write into their logs.
_CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
_BAD = ("error", "traceback", "critical", "non-finite")
_WARN = ("warning",)


def log_lines(text: str, find: str = "") -> list[list[Span]]:
    """One list of spans a line; of a line that was overwritten (progress bars) what it was last. With `find`
    the lines in which all of its words occur."""
    fits = line_filter(find)
    found: list[list[Span]] = []
    for raw in text.split("\n"):
        line = clean(_CONTROL.sub("", raw.rstrip("\r").rpartition("\r")[2]).expandtabs(4))
        if find and not fits(line):
            continue
        low = line.lower()
        bad, warn = any(word in low for word in _BAD), any(word in low for word in _WARN)
        found.append([(line, "bad" if bad else "warn" if warn else "")])
    while found and not found[-1][0][0]:
        found.pop()
    return found
