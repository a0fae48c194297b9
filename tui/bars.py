"""Bars and sparklines as spans. Pure; shapes differ as well as colours."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gshare.agent.node.protocol import GpuInfo
from gshare.tui.show import Spans

PEAK, RESERVED, OUTSIDE, FREE, DARK = "█", "▒", "░", "·", "?"
#: What the parts of a bar mean, for the line above it.
LEGEND: Spans = (
    (PEAK, "bar.peak"),
    (" peak ", "dim"),
    (RESERVED, "bar.reserved"),
    (" reserved ", "dim"),
    (OUTSIDE, "bar.outside"),
    (" outside ", "dim"),
    (FREE, "dim"),
    (" free", "dim"),
)
#: Of a marked adapter, in the table and at its validation points: told apart without colour.
MARKERS = "●▲■◆✚○"
_BLOCKS = "▁▂▃▄▅▆▇█"
_NOT_FINITE = "×"


def vram_bar(gpu: GpuInfo, width: int) -> Spans:
    """A GPU's memory: the peak of what is reserved, the rest of it, what others use, free; `?` is unknown.

    >>> gpu = GpuInfo(uuid="", name="", memory_type="discrete", total_mb=100, reserved_mb=50, peak_mb=30,
    ...               outside_mb=20)
    >>> "".join(text for text, _ in vram_bar(gpu, 10))
    '███▒▒░░···'
    """
    if not gpu.total_mb:
        return ((DARK * width, "dim"),)
    if gpu.reserved_mb is None:
        used = _cells(gpu.used_mb, gpu.total_mb, width)
        return ((OUTSIDE * used, "bar.outside"), (DARK * (width - used), "dim"))
    edges = [
        _cells(min(gpu.peak_mb or 0, gpu.reserved_mb), gpu.total_mb, width),
        _cells(gpu.reserved_mb, gpu.total_mb, width),
        _cells(gpu.reserved_mb + (gpu.outside_mb or 0), gpu.total_mb, width),
    ]
    rest = DARK if gpu.outside_mb is None and gpu.free_mb is None else FREE
    return (
        (PEAK * edges[0], "bar.peak"),
        (RESERVED * (edges[1] - edges[0]), "bar.reserved"),
        (OUTSIDE * (edges[2] - edges[1]), "bar.outside"),
        (rest * (width - edges[2]), "dim"),
    )


def use_bar(used: float | None, total: float | None, width: int) -> Spans:
    """One part of a whole, such as RAM."""
    if used is None or not total:
        return ((DARK * width, "dim"),)
    full = _cells(used, total, width)
    return ((PEAK * full, "bar.reserved"), (FREE * (width - full), "dim"))


def _cells(part: float | None, total: float, width: int) -> int:
    """Anything at all is at least one cell, and what does not fill the whole is not shown as full."""
    if not part or part <= 0:
        return 0
    return min(width, max(1, round(width * part / total)))


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest `width` values, lowest to highest; what is no number is `×`. Empty: no values."""
    values = values[-width:]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return _NOT_FINITE * len(values)
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(
        _BLOCKS[round(top * (value - low) / span)] if math.isfinite(value) else _NOT_FINITE
        for value in values
    )
