"""Which sequences of a pass run where: once below the adapters that see them, each for itself above.

    T tokens of the pass, L layers; a job's lowest adapted layer is where its sequences stop being anybody's

Below a job's lowest adapted layer a sequence's hidden states depend on its tokens and the base alone, so rows
of the same content run once, whoever's they are: below the lowest layer of the whole pass in the *trunk*,
above it as shared rows of a *stage*. A stage begins wherever a job's adapter does; there its rows come into
being, copies of the shared ones. Jobs are sorted by that layer, so the rows of a stage's own jobs come first
in every later stage too. Nothing is declared: equality is found by content. It changes no bits (NUMERICS.md).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gshare.agent.train.part import Part, Row


def content(row: Row) -> Hashable:
    """What makes two rows one below every adapter: their tokens, which positions follow from."""
    return row.content


@dataclass(frozen=True)
class TrunkUse:
    """Tokens times layers below the adapters of a pass: those that the jobs would have run each for itself,
    and those that were run. Sums of passes add up."""

    asked: int = 0
    computed: int = 0

    @property
    def shared(self) -> float:
        """The part that was not run, 0 … 1."""
        return 1.0 - self.computed / self.asked if self.asked else 0.0

    def __add__(self, other: TrunkUse) -> TrunkUse:
        return TrunkUse(self.asked + other.asked, self.computed + other.computed)


@dataclass(frozen=True)
class StagePlan:
    """The layers from `first` up to the next stage's: the rows that run, and where they come from."""

    first: int
    rows: tuple[Row, ...]  # those of parts[:parts], then the shared ones
    parts: int  # of the plan's parts, how many have an adapter here
    own: int  # of `rows`, how many are theirs
    source: tuple[int, ...]  # of each row: its index among the rows of the stage before, or of the trunk

    @property
    def own_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows[: self.own])

    @property
    def shared_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows[self.own :])


@dataclass(frozen=True)
class PassPlan:
    """A pass, laid out by layers. `parts` are the pass's, sorted; `order[i]` is where parts[i] was."""

    parts: tuple[Part, ...]
    order: tuple[int, ...]
    trunk: tuple[Row, ...]  # what runs below the first stage; empty where that begins at layer 0
    stages: tuple[StagePlan, ...]

    @classmethod
    def of(cls, parts: Sequence[Part], *, share: bool = True) -> PassPlan:
        """`share=False`: every row is taken for another, so each runs for itself from layer 0 on."""
        order = sorted(range(len(parts)), key=lambda i: parts[i].adapter.lowest_layer)
        ordered = tuple(parts[i] for i in order)
        keyed: list[list[tuple[Hashable, Row]]] = []
        for i, part in enumerate(ordered):
            keyed.append([(content(row) if share else (i, j), row) for j, row in enumerate(part.rows)])
        first, *above = sorted({part.adapter.lowest_layer for part in ordered})
        trunk = _distinct(keyed) if first else {}
        at, stages = {key: i for i, key in enumerate(trunk)}, []
        owned = 0  # rows of jobs that began in an earlier stage
        for layer in (first, *above):
            count = sum(part.adapter.lowest_layer <= layer for part in ordered)
            own = [pair for rows in keyed[:count] for pair in rows]
            shared = _distinct(keyed[count:])
            keys = [key for key, _ in own[owned:]] + list(shared)
            source = (*range(owned), *(at[key] for key in keys)) if trunk or stages else ()
            rows = (*(row for _, row in own), *shared.values())
            stages.append(StagePlan(layer, rows, count, len(own), source))
            owned, at = len(own), {key: len(own) + i for i, key in enumerate(shared)}
        return cls(ordered, tuple(order), tuple(trunk.values()), tuple(stages))

    def use(self, kept: int = 0) -> TrunkUse:
        """`kept`: tokens of the trunk whose states were there already."""
        asked = sum(part.tokens * part.adapter.lowest_layer for part in self.parts)
        ends = [stage.first for stage in self.stages[1:]]
        computed = (sum(len(row.tokens) for row in self.trunk) - kept) * self.stages[0].first
        for stage, end in zip(self.stages, ends, strict=False):
            computed += stage.shared_tokens * (end - stage.first)
        return TrunkUse(asked, computed)

    def in_order(self, values: Sequence[list[float]]) -> list[list[float]]:
        """What belongs to each of `parts`, in the order of the pass as it was given."""
        given: list[list[float]] = [[]] * len(values)
        for index, value in zip(self.order, values, strict=True):
            given[index] = value
        return given


def _distinct(keyed: Sequence[Sequence[tuple[Hashable, Row]]]) -> dict[Hashable, Row]:
    """The first row of each content, in order."""
    found: dict[Hashable, Row] = {}
    for rows in keyed:
        for key, row in rows:
            found.setdefault(key, row)
    return found


def starts_of(rows: Sequence[Row], at: int = 0) -> list[int]:
    """First token of each row and the end, from token `at` on."""
    return list(accumulate((len(row.tokens) for row in rows), initial=at))


def gathered(source: Sequence[int], before: Sequence[int], rows: Sequence[Row]) -> np.ndarray:
    """(tokens of `rows`,) int64: the token of the stage before that each goes on from. `before[s]` is the
    first token there of its row s."""
    return np.concatenate(
        [np.arange(before[s], before[s] + len(row.tokens)) for s, row in zip(source, rows, strict=True)]
    )
