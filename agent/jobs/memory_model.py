"""The memory and the time of a pass, from measurements: M̂ = k0 + k1·B·L + … (ALTO, *Memory profiling*).

What adapters and their optimizer state take in the arena is known to the byte and not fitted: it is added.

    model = fit_memory(loads, peaks)
    model.predict(load), model.bound(load)      # bytes; the bound has the safety margin on it

Terms beyond B·L (overhead on weights and optimizer state, rank × tokens, logits, masks, the squared row) are
taken where they make the worst error on points that the fit has not seen smaller. No coefficient is negative:
more of anything never costs less, so what is larger than a measured point is never predicted below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from gshare.agent.jobs.least_squares import RelativeSystem
from gshare.agent.jobs.pass_load import PassLoad

#: Of the prediction, at least: what the project promises of the worst error on unseen configurations.
SAFETY_MARGIN = 0.05
#: A model that misses points it has not seen by more is not used.
MOST_ERROR = 0.25
#: So many parts are left out in turn. Coprime with the periods in which the measured grid varies ranks (4),
#: lengths (3), optimizers and dropout (2), so that no part takes all points of one kind.
FOLDS = 5
#: One more term has to be worth so much of the worst error.
WORTH = 0.002
#: So many points a term: fewer are learnt by heart.
POINTS_A_TERM = 2

_TERMS: dict[str, Callable[[PassLoad], float]] = {
    "constant": lambda load: 1.0,
    "tokens": lambda load: load.tokens,
    "adapter_bytes": lambda load: load.adapter_bytes,
    "optimizer_bytes": lambda load: load.optimizer_bytes,
    "largest_adapter": lambda load: load.largest_adapter,
    "rank_tokens": lambda load: load.ranks * load.tokens,
    "logit_bytes": lambda load: load.logit_bytes,
    "mask_bytes": lambda load: load.mask_bytes,
    "row_squared": lambda load: load.longest_row**2,
    "adapters": lambda load: load.adapters,
}
#: Terms that a model may have beside the constant, and the time of a step.
MEMORY_TERMS = (
    *("tokens", "adapter_bytes", "optimizer_bytes", "rank_tokens", "largest_adapter"),
    *("logit_bytes", "mask_bytes", "row_squared"),
)
TIME_TERMS = ("tokens", "adapters", "adapter_bytes")


@dataclass(frozen=True)
class Fit:
    """`coefficients` of `terms`, none negative; `r2` and `worst_error` are of points left out of the fit."""

    terms: tuple[str, ...]
    coefficients: tuple[float, ...]
    r2: float
    worst_error: float  # |predicted − measured| ÷ measured
    least_share: float  # the smallest predicted ÷ measured, left out or not
    arena: bool = False  # the arena's bytes are part of it, beside the terms

    def predict(self, load: PassLoad) -> float:
        """In the unit of what was fitted: bytes, seconds."""
        pairs = zip(self.coefficients, self.terms, strict=True)
        return _arena_bytes(load, self.arena) + math.fsum(k * _TERMS[term](load) for k, term in pairs)

    @property
    def margin(self) -> float:
        """Share of the prediction that has to be added: `SAFETY_MARGIN`, or what a measured point needed."""
        return max(SAFETY_MARGIN, 1 / self.least_share - 1)

    def bound(self, load: PassLoad) -> int:
        """Bytes with the safety margin, rounded up; at least what was measured at every measured point."""
        return math.ceil(self.predict(load) * (1 + self.margin))


def fit_memory(loads: Sequence[PassLoad], peaks: Sequence[float]) -> Fit | None:
    """The model of peak bytes; None when there are fewer than `FOLDS` points, or no model is like them."""
    return _best(_Folds(loads, peaks, ("constant", *MEMORY_TERMS), arena=True))


def fit_seconds(loads: Sequence[PassLoad], seconds: Sequence[float]) -> Fit | None:
    """The model of an optimizer step's seconds; None as for `fit_memory`."""
    return _best(_Folds(loads, seconds, ("constant", *TIME_TERMS), arena=False))


def fit_terms(
    loads: Sequence[PassLoad], targets: Sequence[float], terms: Sequence[str], *, arena: bool
) -> Fit | None:
    """The fit over these terms, and the arena's bytes as they are if `arena`; None when the points cannot
    tell the terms apart, or a coefficient is negative."""
    return _Folds(loads, targets, terms, arena=arena).fit(tuple(range(len(terms))))


def _best(folds: _Folds) -> Fit | None:
    """The fewest terms whose worst error is within `WORTH` of the best."""
    if folds.points < FOLDS:
        return None
    fits: list[Fit] = []
    optional = range(1, len(folds.terms))
    for count in range(min(len(optional), folds.points // POINTS_A_TERM - 1) + 1):
        for others in combinations(optional, count):
            fit = folds.fit((0, *others))
            if fit is not None:
                fits.append(fit)
    if not fits:
        return None
    best = min(fit.worst_error for fit in fits)
    return next(fit for fit in fits if fit.worst_error <= best + WORTH)


def _arena_bytes(load: PassLoad, arena: bool) -> int:
    return load.adapter_bytes + load.optimizer_bytes if arena else 0


class _Folds:
    """The points, and each part of them left out in turn."""

    def __init__(
        self, loads: Sequence[PassLoad], targets: Sequence[float], terms: Sequence[str], *, arena: bool
    ) -> None:
        self.points, self.terms = len(loads), tuple(terms)
        self._arena = arena
        self._known = [_arena_bytes(load, arena) for load in loads]
        self._targets = targets
        self._rows = [[_TERMS[term](load) for term in terms] for load in loads]
        self._whole = self._system(range(self.points))
        self._without = [
            self._system([i for i in range(self.points) if i % FOLDS != fold]) for fold in range(FOLDS)
        ]

    def _system(self, chosen: Sequence[int]) -> RelativeSystem:
        return RelativeSystem(
            [self._rows[i] for i in chosen],
            [self._targets[i] for i in chosen],
            [self._known[i] for i in chosen],
        )

    def fit(self, chosen: Sequence[int]) -> Fit | None:
        coefficients = self._whole.solve(chosen)
        if coefficients is None or min(coefficients) < 0:
            return None
        left_out = [system.solve(chosen) for system in self._without]
        unseen: list[float] = []
        for i in range(len(self._rows)):
            solution = left_out[i % FOLDS]
            if solution is None:
                return None
            unseen.append(self._value(i, chosen, solution))
        seen = [self._value(i, chosen, coefficients) for i in range(len(self._rows))]
        least = min(
            predicted / y
            for values in (unseen, seen)
            for predicted, y in zip(values, self._targets, strict=True)
        )
        if least <= 0:
            return None
        return Fit(
            terms=tuple(self.terms[i] for i in chosen),
            coefficients=coefficients,
            r2=_r2(unseen, self._targets),
            worst_error=max(abs(p - y) / y for p, y in zip(unseen, self._targets, strict=True)),
            least_share=least,
            arena=self._arena,
        )

    def _value(self, i: int, chosen: Sequence[int], coefficients: Sequence[float]) -> float:
        pairs = zip(coefficients, chosen, strict=True)
        return self._known[i] + math.fsum(k * self._rows[i][j] for k, j in pairs)


def _r2(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """1 − Σ (ŷ − y)² / Σ (y − ȳ)²; 1 where all measured are the same and predicted so, else 0."""
    mean = math.fsum(measured) / len(measured)
    spread = math.fsum((y - mean) ** 2 for y in measured)
    missed = math.fsum((p - y) ** 2 for p, y in zip(predicted, measured, strict=True))
    if spread == 0:
        return 1.0 if missed == 0 else 0.0
    return 1.0 - missed / spread
