"""Who goes on after the warm-up: ⌈share · K⌉ of the K configurations, each compared with its like. Pure.

After the same share of the samples a batch of 1 has made eight times the steps of a batch of 8, and for that
alone its loss is lower. Ranked together, large batches are hardly ever among the best quarter, whatever they
come to: of the paper's 60 configurations over 376 rows of chat the best was in that quarter on one of three
seeds; on the others it had a batch of 8, and was number 29 and 33.

So the places are shared out among the groups of configurations that have made the same number of steps, in
proportion to their sizes, by largest remainder; equal remainders go to the lower loss that would go on by it.
With one group, and with groups of one each, that is the ranking of all (ALTO, *Early exit*, pattern 3).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Of fewer with as many steps a place among them says next to nothing.
FEW = 4


@dataclass(frozen=True)
class Contender:
    """One configuration: steps that it has made, and its validation loss then; None: it is out already, and
    still one of the K."""

    name: str
    steps: int
    loss: float | None


@dataclass(frozen=True)
class Place:
    """`rank` of the `of` that are in; `kept` of them go on, the last with `last_loss`. None: nobody."""

    rank: int
    of: int
    kept: int
    last_loss: float | None


@dataclass(frozen=True)
class Verdict:
    """Whether it goes on, its place among those with as many steps, and among all."""

    goes_on: bool
    alike: Place
    among_all: Place


def select(contenders: Sequence[Contender], share: float, *, among_all: bool = False) -> dict[str, Verdict]:
    """Everybody who is still in, by loss, the earlier of equals first.

    `among_all`: one ranking of all, whatever steps they have made.
    """
    everybody = _ranked(contenders)
    sizes = Counter(0 if among_all else one.steps for one in contenders)
    ranked: dict[int, list[Contender]] = {steps: [] for steps in sizes}
    for one in everybody:
        ranked[0 if among_all else one.steps].append(one)
    chosen = _chosen(ranked, sizes, share, everybody)
    alike = {name: place for group in ranked.values() for name, place in _places(group, chosen).items()}
    overall = _places(everybody, chosen)
    return {one.name: Verdict(one.name in chosen, alike[one.name], overall[one.name]) for one in everybody}


def standings(contenders: Sequence[Contender]) -> dict[str, float | None]:
    """Where each stands among those with as many steps, above 0 (the lowest loss) and below 1; None: as its
    loss. What a sampler is told: of losses after unlike numbers of steps it would learn to make many.

    Those with less than FEW of their like stand among each other: alone, each would be in the middle.
    """
    ranked = _ranked(contenders)
    sizes = Counter(one.steps for one in ranked)
    groups: dict[int, list[Contender]] = {}
    for one in ranked:
        groups.setdefault(one.steps if sizes[one.steps] >= FEW else 0, []).append(one)
    found: dict[str, float | None] = {one.name: None for one in contenders}
    for group in groups.values():
        for place, one in enumerate(group):
            found[one.name] = (place + 0.5) / len(group)
    return found


def share_of(share: float, count: int) -> int:
    """⌈share · count⌉ as meant in decimals: 0.1 of 30 are 3, though 0.1 · 30 is above 3 in floats. At least
    1: a share is above 0, however small."""
    return max(1, math.ceil(round(share * count, 9)))


def _chosen(
    ranked: Mapping[int, list[Contender]],
    sizes: Mapping[int, int],
    share: float,
    everybody: Sequence[Contender],
) -> set[str]:
    """Names. What a group has nobody for goes to the others."""
    order = {one.name: place for place, one in enumerate(everybody)}
    quota = {steps: round(share * size, 9) for steps, size in sizes.items()}
    waiting = {steps: group[math.floor(quota[steps]) :] for steps, group in ranked.items()}
    chosen = {one.name for steps, group in ranked.items() for one in group[: math.floor(quota[steps])]}
    left = share_of(share, sum(sizes.values())) - len(chosen)
    while left > 0 and any(waiting.values()):
        # Once round: each group at most one more.
        able = [steps for steps, group in waiting.items() if group]
        able.sort(key=lambda steps: (-(quota[steps] % 1), order[waiting[steps][0].name]))
        for steps in able[:left]:
            chosen.add(waiting[steps].pop(0).name)
            left -= 1
    return chosen


def _places(group: Sequence[Contender], chosen: set[str]) -> dict[str, Place]:
    kept = [one for one in group if one.name in chosen]
    last = kept[-1].loss if kept else None
    return {one.name: Place(rank, len(group), len(kept), last) for rank, one in enumerate(group, start=1)}


def _ranked(contenders: Sequence[Contender]) -> list[Contender]:
    """Those that are in, the lowest loss first."""
    within = [(one.loss, place, one) for place, one in enumerate(contenders) if one.loss is not None]
    return [one for _, _, one in sorted(within, key=lambda ranked: ranked[:2])]


# ---------------------------------------------------------------------- what is written down


def evidence_of(verdict: Verdict, steps: int) -> dict[str, Any]:
    """`…_alike`: among those that have made as many `steps`, where these are not all."""
    overall, alike = verdict.among_all, verdict.alike
    found = {
        "rank": overall.rank,
        "of": overall.of,
        "kept": overall.kept,
        "last_kept_val_loss": overall.last_loss,
    }
    if alike.of == overall.of:
        return found
    return found | {
        "steps": steps,
        "rank_alike": alike.rank,
        "of_alike": alike.of,
        "kept_alike": alike.kept,
        "last_kept_val_loss_alike": alike.last_loss,
    }


def describe_rank(evidence: Mapping[str, Any]) -> str:
    """Of one that goes on."""
    if "rank_alike" in evidence:
        return "number {rank_alike} of {of_alike} that have made as many steps".format(**evidence)
    return "number {rank} of {of}".format(**evidence)


def describe_drop(verdict: Verdict) -> str:
    overall, alike = verdict.among_all, verdict.alike
    if alike.of == overall.of:
        return f"number {overall.rank} of {overall.of} at the end of the warm-up; {_kept(overall)}"
    on = _kept(alike, " of these") if alike.kept else "none of these goes on"
    return (
        f"number {alike.rank} of {alike.of} that have made as many steps at the end of the warm-up; {on} "
        f"(of all it is number {overall.rank} of {overall.of}, and {_go_on(overall.kept)})"
    )


def _kept(place: Place, of: str = "") -> str:
    which = "with" if place.kept == 1 else "the last of them with"
    return f"{_go_on(place.kept, of)}, {which} {place.last_loss:.4g}"


def _go_on(count: int, of: str = "") -> str:
    return f"{count}{of} {'goes' if count == 1 else 'go'} on"
