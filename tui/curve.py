"""A loss over the steps in bounded memory: full resolution first, halved whenever it is full."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

TRAIN_POINTS = 2048
VAL_POINTS = 4096
#: Points whose memory every curve takes at once: a job that evaluates every 5 s fills them in 1.4 hours.
_FIRST = 1024
#: What a step has room for, 4 bytes: no run makes 2³² of them.
MAX_STEP = 2**32 - 1


class Curve:
    """Points (step, value) by growing step, 8 bytes each: uint32 step, float32 value (7 digits: a plot).

    When `limit` points are there every second one goes, and from then on only every 2nd (4th, …) new one is
    kept; the newest is always there as `last`. A step at or before the newest takes back what came after it:
    a job that goes on from a checkpoint makes steps again.

    >>> curve = Curve(4)
    >>> for step in range(1, 7): curve.add(step, 1.0 / step)
    >>> curve.steps(), curve.last[0]
    ([1, 3, 5, 6], 6)
    """

    __slots__ = ("_limit", "_skipped", "_steps", "_stride", "_values", "last", "size")

    def __init__(self, limit: int, *, reserve: bool = False) -> None:
        """`limit`: points, even. `reserve`: the memory for all of them is taken now."""
        if limit < 2 or limit % 2:
            raise ValueError(f"limit must be even and at least 2, not {limit}")
        self._limit = limit
        self._stride = 1  # one of so many points is kept
        self._skipped = 0  # since the last kept one
        self.size = 0  # points kept
        first = limit if reserve else min(_FIRST, limit)
        self._steps = array("I", bytes(4 * first))
        self._values = array("f", bytes(4 * first))
        self.last: tuple[int, float] | None = None

    def copy(self) -> Curve:
        """One that does not change with this one."""
        held = Curve(self._limit)
        held._stride, held._skipped, held.size, held.last = self._stride, self._skipped, self.size, self.last
        held._steps, held._values = self._steps[:], self._values[:]
        return held

    def add(self, step: int, value: float) -> None:
        """One more point; NaN and infinities are kept as they are. A step that is none (below 0 or above
        `MAX_STEP`: a damaged file, a foreign node) is left out."""
        if not 0 <= step <= MAX_STEP:
            return
        if self.last is not None and step <= self.last[0]:
            self.cut(step)
        self.last = step, value
        self._skipped += 1
        if self.size and self._skipped < self._stride:
            return
        self._skipped = 0
        if self.size == self._limit:
            self._halve()
        if self.size == len(self._steps):
            more = min(self.size, self._limit - self.size)
            self._steps.frombytes(bytes(4 * more))
            self._values.frombytes(bytes(4 * more))
        self._steps[self.size] = step
        self._values[self.size] = value
        self.size += 1

    def cut(self, step: int) -> None:
        """Takes back the points of `step` and later."""
        if self.last is None or step > self.last[0]:
            return
        self.size = bisect_left(self._steps, step, 0, self.size)
        self.last = (self._steps[self.size - 1], self._values[self.size - 1]) if self.size else None
        self._skipped = 0

    def merge(self, points: Iterable[tuple[int, float]]) -> None:
        """`points` (by step) in the place of what lies between the first and the last of them."""
        new = [point for point in points if 0 <= point[0] <= MAX_STEP]
        if not new:
            return
        old = self.points()
        before = [point for point in old if point[0] < new[0][0]]
        after = [point for point in old if point[0] > new[-1][0]]
        self.size, self._stride, self._skipped, self.last = 0, 1, 0, None
        for step, value in (*before, *new, *after):
            self.add(step, value)

    def steps(self) -> list[int]:
        """Of the points kept and of `last`."""
        return [step for step, _ in self.points()]

    def points(self) -> list[tuple[int, float]]:
        """The points kept, and `last`."""
        found = list(zip(self._steps[: self.size], self._values[: self.size], strict=True))
        if self.last is not None and (not found or found[-1][0] < self.last[0]):
            found.append(self.last)
        return found

    def tail(self, count: int) -> list[float]:
        """The newest `count` values kept, oldest first: a sparkline."""
        return list(self._values[max(0, self.size - count) : self.size])

    def _halve(self) -> None:
        half = (self.size + 1) // 2
        self._steps[:half] = self._steps[: self.size : 2]
        self._values[:half] = self._values[: self.size : 2]
        self.size = half
        self._stride *= 2
