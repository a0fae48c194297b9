"""A line plot of text: braille dots in cells, axes with round numbers, linear or logarithmic. Pure.

y labels │ ⠉⠒⠤⣀   ●
         └┬───────┬──────
          0      500    steps
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gshare.tui.show import Span

#: Bit of the dot at (column, row) of a braille cell, 2×4 dots.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800
Point = tuple[float, float]
#: No loss is larger. Powers and differences of what is smaller stay finite, also on a logarithmic scale.
_LARGEST = 1e100


@dataclass(frozen=True)
class Series:
    """`marker`: drawn at each point (few points: validation); empty: a line only. `best`: ringed."""

    points: Sequence[tuple[int, float]]
    role: str
    marker: str = ""
    best: tuple[int, float] | None = None


def plot(series: Sequence[Series], width: int, height: int, *, log: bool = False) -> list[list[Span]]:
    """Lines of spans, `width` × `height` cells with axes. Points that are no finite number, or beyond
    1e100, leave a gap; with `log` those not above 0 as well. Empty when there is nothing to draw or no
    room."""
    shown = [(one, [(float(x), y) for x, y in one.points if _drawable(y, log)]) for one in series]
    every = [point for _, points in shown for point in points]
    if not every or width < 16 or height < 4:
        return []
    scale = math.log10 if log else float
    low, high = _span([scale(y) for _, y in every])
    ticks = _log_ticks(low, high, height // 3) if log else _ticks(low, high, max(2, height // 3))
    left = max([len(_label(10**tick if log else tick)) for tick in ticks] + [4]) + 1
    canvas = Canvas(width - left - 1, height - 2)
    x0, x1 = min(x for x, _ in every), max(x for x, _ in every)
    x1 = x1 if x1 > x0 else x0 + 1

    def dot(x: float, y: float) -> tuple[int, int]:
        column = round((x - x0) / (x1 - x0) * (canvas.columns * 2 - 1))
        row = round((high - scale(y)) / (high - low) * (canvas.rows * 4 - 1))
        return column, row

    for one, points in shown:
        _draw(canvas, one, points, dot)
    for one, points in shown:
        for x, y in points if one.marker else ():
            canvas.put(*dot(x, y), one.marker, one.role)
        # It may lie outside: its points were cut, or a file says so. Far outside it is no dot's number.
        if (
            one.best is not None
            and _drawable(one.best[1], log)
            and x0 <= one.best[0] <= x1
            and abs(scale(one.best[1]) - low) <= 2 * (high - low)
        ):
            canvas.put(*dot(float(one.best[0]), one.best[1]), "★", "best")
    return _with_axes(canvas, ticks, left, (low, high), (x0, x1), log)


def _drawable(value: float, log: bool) -> bool:
    return abs(value) <= _LARGEST and (value > 0 or not log)


def _draw(
    canvas: Canvas, one: Series, points: list[Point], dot: Callable[[float, float], tuple[int, int]]
) -> None:
    before: tuple[int, int] | None = None
    for x, y in points:
        here = dot(x, y)
        if before is None:
            canvas.dot(*here, one.role)
        else:
            canvas.line(*before, *here, one.role)
        before = here


class Canvas:
    """`columns` × `rows` cells of 2×4 dots; the last one drawn gives a cell its role."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._bits = [[0] * columns for _ in range(rows)]
        self._marks: list[list[str]] = [[""] * columns for _ in range(rows)]
        self._roles: list[list[str]] = [[""] * columns for _ in range(rows)]

    def dot(self, x: int, y: int, role: str) -> None:
        row, column = y // 4, x // 2
        if 0 <= row < self.rows and 0 <= column < self.columns:
            self._bits[row][column] |= _DOTS[x % 2][y % 4]
            self._roles[row][column] = role

    def put(self, x: int, y: int, mark: str, role: str) -> None:
        """A character in the cell of that dot."""
        row, column = y // 4, x // 2
        if 0 <= row < self.rows and 0 <= column < self.columns:
            self._marks[row][column], self._roles[row][column] = mark, role

    def line(self, x0: int, y0: int, x1: int, y1: int, role: str) -> None:
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(steps + 1):
            self.dot(x0 + round((x1 - x0) * i / steps), y0 + round((y1 - y0) * i / steps), role)

    def row(self, index: int) -> list[Span]:
        """One line, neighbours of one role as one span."""
        found: list[Span] = []
        for bits, mark, role in zip(self._bits[index], self._marks[index], self._roles[index], strict=True):
            text = mark or (chr(_BRAILLE + bits) if bits else " ")
            if found and found[-1][1] == role:
                found[-1] = (found[-1][0] + text, role)
            else:
                found.append((text, role))
        return found


def _span(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high == low:
        pad = abs(high) * 0.05 or 0.5
        return low - pad, high + pad
    pad = (high - low) * 0.03
    return low - pad, high + pad


def _ticks(low: float, high: float, wanted: int) -> list[float]:
    """Round numbers in [low, high], about `wanted`: steps of 1, 2 or 5 × 10ⁿ. None where the two
    are as good as one (below the smallest number of full precision, 2e-308)."""
    rough = (high - low) / max(1, wanted)
    if rough < 1e-300:
        return []
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, first + wanted + 2) if i * step <= high + step * 1e-9]


def _log_ticks(low: float, high: float, wanted: int) -> list[float]:
    """log10 of 1, 2, 5 × 10ⁿ in [low, high]; within a narrow span those of a linear scale."""
    found = [
        exponent + math.log10(factor)
        for exponent in range(math.floor(low), math.ceil(high) + 1)
        for factor in (1, 2, 5)
        if low <= exponent + math.log10(factor) <= high
    ]
    if len(found) < 2:
        found = [math.log10(tick) for tick in _ticks(10**low, 10**high, max(2, wanted)) if tick > 0]
    return found


def _label(value: float) -> str:
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.0e}"
    return f"{value:.4g}"


def _with_axes(
    canvas: Canvas,
    ticks: list[float],
    left: int,
    y_span: tuple[float, float],
    x_span: tuple[float, float],
    log: bool,
) -> list[list[Span]]:
    low, high = y_span
    labels: dict[int, str] = {}
    for tick in ticks:
        row = round((high - tick) / (high - low) * (canvas.rows * 4 - 1)) // 4
        if 0 <= row < canvas.rows:
            labels.setdefault(row, _label(10**tick if log else tick))
    lines: list[list[Span]] = []
    for row in range(canvas.rows):
        label = labels.get(row, "")
        edge = "┤" if label else "│"
        lines.append([(f"{label:>{left - 1}} {edge}", "dim"), *canvas.row(row)])
    axis, names = _x_axis(canvas.columns, *x_span)
    lines.append([(" " * left + "└" + axis, "dim")])
    lines.append([(" " * (left + 1) + names, "dim")])
    return lines


def _x_axis(columns: int, x0: float, x1: float) -> tuple[str, str]:
    axis, names = ["─"] * columns, [" "] * columns
    end = " step"
    free = 0  # the first column that no label takes
    for tick in _ticks(x0, x1, max(2, columns // 10)):
        column = round((tick - x0) / (x1 - x0) * (columns - 1))
        label = f"{tick:.0f}" if tick < 1e6 else f"{tick:.2g}"
        start = max(0, column - len(label) // 2)
        if start < free or start + len(label) > columns - len(end) or not 0 <= column < columns:
            continue
        axis[column] = "┬"
        names[start : start + len(label)] = label
        free = start + len(label) + 1
    names[columns - len(end) :] = end
    return "".join(axis), "".join(names)
