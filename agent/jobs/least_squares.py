"""Linear least squares over a handful of columns, in plain Python: a base install without torch can fit.

    RelativeSystem(rows, targets, known).solve((0, 2))     # over columns 0 and 2 of rows (n, p)

Errors count as shares of their target: Σ ((known + row · x − y) / y)² is smallest. A model of
memory that is 100 MiB off is as good as right at 100 GiB, and wrong at 300 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: A column whose part beyond the columns before it is less than this share of it adds nothing but noise.
_INDEPENDENT = 1e-9
#: A coefficient below zero by less than this share of the targets is a rounding error of zero.
_ZERO = 1e-7


class RelativeSystem:
    """The normal equations of all columns, from which any few of them are solved."""

    def __init__(
        self, rows: Sequence[Sequence[float]], targets: Sequence[float], known: Sequence[float]
    ) -> None:
        """`rows` (n, p) of non-negative values, `targets` (n,) above zero, what of them is `known` (n,)."""
        wanted = [(y - k) / y for y, k in zip(targets, known, strict=True)]
        weighted = [[value / y for value in row] for row, y in zip(rows, targets, strict=True)]
        columns = list(zip(*weighted, strict=True))
        # Columns are bytes, tokens and ones: each is scaled to unit length first.
        self._scales = [math.sqrt(math.fsum(v * v for v in column)) for column in columns]
        units = [
            [v / scale for v in column] if scale > 0 else None
            for column, scale in zip(columns, self._scales, strict=True)
        ]
        self._size = len(weighted)
        self._projected = [
            math.fsum(v * share for v, share in zip(unit, wanted, strict=True)) if unit is not None else 0.0
            for unit in units
        ]
        self._products = [
            [
                math.fsum(x * y for x, y in zip(left, right, strict=True))
                if left is not None and right is not None
                else 0.0
                for right in units
            ]
            for left in units
        ]

    def solve(self, chosen: Sequence[int]) -> tuple[float, ...] | None:
        """Coefficients of the columns `chosen`; None when these rows cannot tell them apart."""
        if len(chosen) > self._size or any(self._scales[i] == 0 for i in chosen):
            return None
        factor: list[list[float]] = []  # Cholesky's lower triangle
        for i, column in enumerate(chosen):
            line: list[float] = []
            for j in range(i):
                inner = math.fsum(line[k] * factor[j][k] for k in range(j))
                line.append((self._products[column][chosen[j]] - inner) / factor[j][j])
            rest = 1.0 - math.fsum(value * value for value in line)
            if rest < _INDEPENDENT:
                return None
            factor.append([*line, math.sqrt(rest)])
        forward: list[float] = []
        for i, line in enumerate(factor):
            known = math.fsum(line[k] * forward[k] for k in range(i))
            forward.append((self._projected[chosen[i]] - known) / line[i])
        solution = [0.0] * len(chosen)
        for i in reversed(range(len(chosen))):
            known = math.fsum(factor[k][i] * solution[k] for k in range(i + 1, len(chosen)))
            solution[i] = (forward[i] - known) / factor[i][i]
        least = -_ZERO * math.sqrt(self._size)
        rounded = (0.0 if least < value < 0 else value for value in solution)
        return tuple(value / self._scales[i] for value, i in zip(rounded, chosen, strict=True))
