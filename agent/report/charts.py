"""Charts as SVG text: axes, lines and points in their own coordinates. Every text is escaped. What has no
place on an axis (not a number, or beyond any sense) is left out, and the caller says so.

Marks carry classes and `data-run`; colours and hovering are the page's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from gshare.agent.jobs.names import plain

WIDTH, HEIGHT = 760.0, 380.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 16.0, 12.0, 44.0
#: Highest ÷ lowest loss above which the axis is logarithmic: one diverged run would flatten the others.
LOG_FROM = 20.0
#: Points of one line; more do not show on 680 units.
MAX_POINTS = 240
#: A loss beyond it has no place on an axis.
_BEYOND = 1e200

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One run's curve, `kind` train or val. `end` is the mark at its last point: a pattern or a state."""

    run: int
    name: str
    kind: str
    points: Sequence[Point]
    css: str
    end: str = ""


@dataclass(frozen=True)
class Dot:
    run: int
    name: str
    at: Point
    css: str
    end: str


@dataclass
class Axis:
    """Values to units of the drawing. `low` < `high`; both above 0 when `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    ticks: list[float] = field(default_factory=list)

    @classmethod
    def over(cls, values: Iterable[float], start: float, end: float, *, zero: bool = False) -> Axis:
        """Over finite `values`, with ticks; `zero`: from 0 on, never logarithmic."""
        finite = [value for value in values if abs(value) < _BEYOND]  # NaN is not
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        log = not zero and low > 0 and high / low > LOG_FROM
        if zero:
            low = min(0.0, low)
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            spread = max(abs(low) * 0.1, 1e-6)
            low, high = (low if zero else low - spread), high + spread
        axis = cls(low, high, start, end, log)
        axis.ticks = _powers(low, high) if log else _rounds(low, high)
        if not log and not zero:
            axis.low, axis.high = low - 0.04 * (high - low), high + 0.04 * (high - low)
        return axis

    def place(self, value: float) -> float:
        if self.log:
            share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def holds(self, value: float) -> bool:
        return abs(value) < _BEYOND and (not self.log or value > 0)


def curves(lines: Sequence[Line], x_title: str, y_title: str) -> str:
    x = Axis.over((p[0] for line in lines for p in line.points), LEFT, WIDTH - RIGHT, zero=True)
    y = Axis.over((p[1] for line in lines for p in line.points), HEIGHT - BOTTOM, TOP)
    marks = []
    for line in lines:
        whole = [point for point in line.points if x.holds(point[0]) and y.holds(point[1])]
        kept = thin(whole)
        if not kept:
            continue
        path = " ".join(f"{x.place(a):.1f},{y.place(b):.1f}" for a, b in kept)
        marks.append(
            f'<g class="line {line.kind} {line.css}" data-run="{line.run}"><title>{_text(line.name)}</title>'
            f'<polyline points="{path}"/>{_mark(line.end, x.place(kept[-1][0]), y.place(kept[-1][1]))}</g>'
        )
    return _svg(x, y, x_title, y_title, "".join(marks))


def scatter(dots: Sequence[Dot], front: Sequence[Point], x_title: str, y_title: str) -> str:
    """Points, and the staircase of the `front` (cheapest first): the lowest loss to be had for each cost."""
    x = Axis.over((dot.at[0] for dot in dots), LEFT, WIDTH - RIGHT, zero=True)
    y = Axis.over((dot.at[1] for dot in dots), HEIGHT - BOTTOM, TOP)
    steps: list[str] = []
    for index, (a, b) in enumerate(front):
        if index:
            steps.append(f"{x.place(a):.1f},{y.place(front[index - 1][1]):.1f}")
        steps.append(f"{x.place(a):.1f},{y.place(b):.1f}")
    if front:
        steps.append(f"{x.end:.1f},{y.place(front[-1][1]):.1f}")
    marks = f'<polyline class="front" points="{" ".join(steps)}"/>' if steps else ""
    for dot in dots:
        marks += (
            f'<g class="dot {dot.css}" data-run="{dot.run}"><title>{_text(dot.name)}</title>'
            f"{_mark(dot.end, x.place(dot.at[0]), y.place(dot.at[1]))}</g>"
        )
    return _svg(x, y, x_title, y_title, marks)


def bars(rows: Sequence[tuple[str, float]], total: float) -> str:
    """Horizontal bars of `rows` (label, value) out of `total`; each row is 26 units high."""
    height = 26.0 * len(rows) + 4
    parts = []
    for index, (label, value) in enumerate(rows):
        y = 26.0 * index
        width = 520.0 * min(1.0, value / total) if total > 0 else 0.0
        parts.append(
            f'<text x="150" y="{y + 18:.0f}" text-anchor="end">{_text(label)}</text>'
            f'<rect class="ground" x="160" y="{y + 4:.0f}" width="520" height="18"/>'
            f'<rect class="bar" x="160" y="{y + 4:.0f}" width="{width:.1f}" height="18"/>'
        )
    return f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img">{"".join(parts)}</svg>'


def symbol(end: str) -> str:
    """A mark by itself, for a legend."""
    return f'<svg class="symbol" viewBox="-8 -8 16 16" aria-hidden="true">{_mark(end, 0, 0)}</svg>'


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points: means of equal parts, but the first and the last as they are."""
    if len(points) <= limit:
        return list(points)
    inner, parts = points[1:-1], limit - 2
    kept = [points[0]]
    for part in range(parts):
        chunk = inner[part * len(inner) // parts : (part + 1) * len(inner) // parts]
        kept.append((sum(a for a, _ in chunk) / len(chunk), sum(b for _, b in chunk) / len(chunk)))
    return [*kept, points[-1]]


def _mark(end: str, x: float, y: float) -> str:
    """A shape by how a run ended: colours alone are not for everybody."""
    place = f'class="mark" transform="translate({x:.1f} {y:.1f})"'
    shapes = {
        "divergence": '<path d="M-5-5L5 5M5-5L-5 5"/>',
        "non-finite": '<path d="M-5-5L5 5M5-5L-5 5M-6 0H6M0-6V6"/>',
        "overfitting": '<path d="M0-6L6 5H-6Z"/>',
        "underperformance": '<path d="M0 6L6-5H-6Z"/>',
        "user": '<path d="M-5-5H5V5H-5Z"/>',
        "completed": '<circle r="4"/>',
    }
    shape = shapes.get(end, '<circle class="open" r="4"/>')
    return f"<g {place}>{shape}</g>"


def _svg(x: Axis, y: Axis, x_title: str, y_title: str, marks: str) -> str:
    grid = []
    for tick in y.ticks:
        at = y.place(tick)
        grid.append(f'<path class="grid" d="M{x.start:.1f} {at:.1f}H{x.end:.1f}"/>')
        grid.append(f'<text x="{x.start - 8:.1f}" y="{at + 4:.1f}" text-anchor="end">{_label(tick)}</text>')
    for tick in x.ticks:
        at = x.place(tick)
        grid.append(f'<path class="grid" d="M{at:.1f} {y.end:.1f}V{y.start:.1f}"/>')
        grid.append(f'<text x="{at:.1f}" y="{y.start + 18:.1f}" text-anchor="middle">{_label(tick)}</text>')
    middle_x, middle_y = (x.start + x.end) / 2, (y.start + y.end) / 2
    titles = (
        f'<text x="{middle_x:.0f}" y="{HEIGHT - 8:.0f}" text-anchor="middle">{_text(x_title)}</text>'
        f'<text transform="translate(14 {middle_y:.0f}) rotate(-90)" text-anchor="middle">'
        f"{_text(y_title)}{' (log)' if y.log else ''}</text>"
    )
    box = f'viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}"'
    return f'<svg class="chart" {box} role="img">{"".join(grid)}{titles}{marks}</svg>'


def _text(value: str) -> str:
    return escape(plain(value), quote=True)


def _label(value: float) -> str:
    """A tick's number, short."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e12:
            return f"{value / (1e3 if unit == 'k' else size):g}{unit}"
    return f"{value:.6g}"


def _rounds(low: float, high: float) -> list[float]:
    """About five round numbers from `low` to `high`."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, or the powers alone where those are many."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(exponents) <= 4 else (1,)
    every = max(1, len(exponents) // 8)
    found = [factor * 10.0**e for e in exponents if e % every == 0 for factor in factors]
    return [value for value in found if low <= value <= high]
