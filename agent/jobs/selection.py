"""Who goes on after the warm-up: ⌈share · K⌉ of the K configurations, each compared with its like. Pure.

After the same share of the samples a batch of 1 has made eight times the steps of a batch of 8, and for that
alone its loss is lower. Ranked together, large batches are hardly ever among the best quarter, whatever they
come to: of the paper's 60 configurations over 376 rows of chat the best was in that quarter on one of three
seeds; on the others it had a batch of 8, and was number 29 and 33.

So each group of configurations that have made the same number of steps sends its share of them, rounded down,
and the places that are left go to the lowest losses of all. With one group, and with groups of one, that is
the ranking of all (ALTO, *Early exit*, pattern 3).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    """One configuration: steps that it has made, and its validation loss then; None: it is out already, and
    still one of the K."""

    name: str
    steps: int
    loss: float | None


@dataclass(frozen=True)
class Place:
    """`rank` of `of` among those with the same number of steps; `kept` of these go on, the last with
    `last_loss` (None: nobody)."""

    goes_on: bool
    rank: int
    of: int
    kept: int
    last_loss: float | None


def select(contenders: Sequence[Contender], share: float, *, among_all: bool = False) -> dict[str, Place]:
    """The place of everybody who is still in, by loss, the earlier of equals first.

    `among_all`: one ranking of all, whatever steps they have made.
    """
    groups: dict[int, list[Contender]] = defaultdict(list)
    for one in contenders:
        groups[0 if among_all else one.steps].append(one)
    ranked = {steps: _ranked(group) for steps, group in groups.items()}
    chosen = {
        one.name for steps, group in groups.items() for one in ranked[steps][: _down(share, len(group))]
    }
    everybody = _ranked(contenders)
    others = [one for one in everybody if one.name not in chosen]
    chosen |= {one.name for one in others[: share_of(share, len(contenders)) - len(chosen)]}
    places = {}
    for group in ranked.values():
        kept = [one for one in group if one.name in chosen]
        for rank, one in enumerate(group, start=1):
            last = kept[-1].loss if kept else None
            places[one.name] = Place(one.name in chosen, rank, len(group), len(kept), last)
    return {one.name: places[one.name] for one in everybody}


def share_of(share: float, count: int) -> int:
    """⌈share · count⌉ as meant in decimals: 0.1 of 30 are 3, though 0.1 · 30 is above 3 in floats. At least
    1: a share is above 0, however small."""
    return max(1, math.ceil(round(share * count, 9)))


def _down(share: float, count: int) -> int:
    return math.floor(round(share * count, 9))


def _ranked(contenders: Sequence[Contender]) -> list[Contender]:
    """Those that are in, the lowest loss first."""
    within = [(one.loss, place, one) for place, one in enumerate(contenders) if one.loss is not None]
    return [one for _, _, one in sorted(within, key=lambda ranked: ranked[:2])]
