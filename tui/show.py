"""How values look: numbers, sizes, times and names. Pure; unknown is "—", never 0."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

UNKNOWN = "—"

#: What a cell, a line or a bar is made of: (text, role). A role is a name of `themes.Palette`.
Span = tuple[str, str]
Spans = tuple[Span, ...]


def clean(text: str) -> str:
    r"""Text of others without what a terminal would obey; control characters are shown escaped.

    >>> clean("a\x1b[2Jb\n")
    'a\\x1b[2Jb\\n'
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return ascii(char)[1:-1]


def cell(text: str, role: str = "") -> Spans:
    return ((text, role),)


def joined(spans: Iterable[Span]) -> str:
    """The text alone."""
    return "".join(text for text, _ in spans)


def loss(value: float | None) -> str:
    """Four significant places; NaN and infinities are told as they are."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value != 0 and not 0.001 <= abs(value) < 1000:
        return f"{value:.2e}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"


def count(value: float | None) -> str:
    """A whole number with narrow gaps between thousands."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{round(value):,}".replace(",", " ")


def hyper(value: object) -> str:
    """A hyper-parameter."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return clean(str(value))


def duration(seconds: float | None) -> str:
    """`0:07`, `12:30`, `1:02:03`, `13h26`, `3d 4h`: at most seven places up to ten days."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        days, hours = divmod(hours, 24)
        return f"{days}d {hours}h"
    if hours >= 10:
        return f"{hours}h{minutes:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def age(seconds: float | None) -> str:
    """One unit: `4 s`, `12 m`, `3 h`, `5 d`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    seconds = max(0.0, seconds)
    for limit, size, unit in ((100, 1, "s"), (6000, 60, "m"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds / size)} {unit}"
    return f"{int(seconds / 86400)} d"


def moment(when: float | None, now: float, *, relative: bool) -> str:
    """A Unix time: `4 m ago`, or `14:02:07` with the day when it is another than today's.

    What is no time (NaN, a year that the calendar does not reach) is unknown.
    """
    if when is None:
        return UNKNOWN
    try:
        at, today = time.localtime(when), time.localtime(now)
    except (ValueError, OverflowError, OSError):
        return UNKNOWN
    if relative:
        return f"{age(now - when)} ago" if now - when >= 1 else "now"
    form = "%H:%M:%S" if at[:3] == today[:3] else "%m-%d %H:%M"
    return time.strftime(form, at)


def gib(mb: float | None, digits: int = 1) -> str:
    """MiB as GiB, without the unit."""
    return UNKNOWN if mb is None else f"{mb / 1024:.{digits}f}"


def size(bytes_: int) -> str:
    """A file's."""
    value = float(bytes_)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def number(value: float | None, unit: str = "") -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"
