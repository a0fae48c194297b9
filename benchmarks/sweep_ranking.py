"""What `benchmarks/sweep.py` says of losses: how well a warm-up ranks, and whether two arms agree. Pure.

Losses are {configuration: value}; one that is missing or not a number ranks last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gshare.agent.jobs.selection import Contender, select
from gshare.agent.jobs.sweep import Trial

#: Shares of a job's steps, as in ALTO's figure 7.
WARMUPS = (0.01, 0.02, 0.05, 0.10, 0.20)
#: The true top: this share of the configurations, rounded up.
TOP = 0.25
#: The sweep's winner may be so much above the full search's best, relative.
TOLERANCE = 0.005

History = Mapping[str, Mapping[int, float]]  # configuration: {step: loss}


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's ρ: Pearson's correlation of the ranks, equal values sharing the mean of theirs. None where
    a side is constant, or has fewer than two values."""
    a, b = _ranks(one), _ranks(other)
    middle = (len(a) + 1) / 2
    product = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    square = sum((x - middle) ** 2 for x in a) * sum((y - middle) ** 2 for y in b)
    return product / math.sqrt(square) if square > 0 else None


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (1 + sum(other == value for other in values)) / 2
        for value in values
    ]


def number(value: float | None) -> float:
    """For sorting: what is no number is beyond all."""
    return value if value is not None and math.isfinite(value) else math.inf


def best(losses: Mapping[str, float | None]) -> str:
    """The name with the lowest loss, the first of equals."""
    return min(losses, key=lambda name: number(losses[name]))


def top(losses: Mapping[str, float | None]) -> list[str]:
    """The ⌈TOP · K⌉ with the lowest losses, lowest first."""
    return sorted(losses, key=lambda name: number(losses[name]))[: math.ceil(TOP * len(losses))]


def boundaries(total_steps: int) -> dict[float, int]:
    """The step of each warm-up's end, as a sweep has it; those that would be the last step are left out."""
    found = {
        warmup: Trial.of("", batch=1, total_steps=total_steps, warmup=warmup).boundary for warmup in WARMUPS
    }
    return {warmup: step for warmup, step in found.items() if step}


def ranking(
    history: History, totals: Mapping[str, int], final: Mapping[str, float | None]
) -> list[dict[str, Any]]:
    """For each warm-up: ρ between its ranking and the final one, which share of the true top it would keep,
    whether the best is among them and what the best of them is above it: all ranked together, as in the
    paper, and `…_alike`, as a sweep does. Of the second ρ is the mean over groups of as many steps, weighted
    by their sizes. A loss that `history` lacks at the boundary was no number."""
    found = []
    true_top = top(final)
    for warmup in WARMUPS:
        steps = {name: boundaries(total).get(warmup) for name, total in totals.items()}
        losses = {
            name: None if step is None else history.get(name, {}).get(step) for name, step in steps.items()
        }
        kept = top(losses)
        verdicts = select(
            [Contender(name, steps[name] or totals[name], number(losses[name])) for name in totals], TOP
        )
        alike = [name for name, one in verdicts.items() if one.goes_on]
        found.append(
            {
                "warmup": warmup,
                "steps": sorted({step for step in steps.values() if step is not None}),
                "spearman": spearman(
                    [number(losses[name]) for name in final], [number(final[name]) for name in final]
                ),
                "coverage": len(set(kept) & set(true_top)) / len(true_top),
                "best_inside": best(final) in kept,
                "excess": _excess(final, kept),
                "spearman_alike": _within_groups(losses, final, steps, totals),
                "coverage_alike": len(set(alike) & set(true_top)) / len(true_top),
                "best_inside_alike": best(final) in alike,
                "excess_alike": _excess(final, alike),
            }
        )
    return found


def _excess(final: Mapping[str, float | None], kept: Sequence[str]) -> float:
    """What the best of `kept` is above the best of all, relative."""
    lowest = number(final[best(final)])
    return min(number(final[name]) for name in kept) / lowest - 1 if math.isfinite(lowest) else math.inf


def _within_groups(
    losses: Mapping[str, float | None],
    final: Mapping[str, float | None],
    steps: Mapping[str, int | None],
    totals: Mapping[str, int],
) -> float | None:
    """The mean of each group's ρ, weighted by its size; None where no group has one."""
    found, weight = 0.0, 0
    made = {name: steps[name] or totals[name] for name in final}
    for group in set(made.values()):
        names = [name for name in final if made[name] == group]
        rho = spearman([number(losses[name]) for name in names], [number(final[name]) for name in names])
        if rho is not None:
            found, weight = found + rho * len(names), weight + len(names)
    return found / weight if weight else None


def disagreements(full: History, other: History) -> list[str]:
    """Where a loss of `other` is not bit for bit that of `full`; a step that `full` has not is no fault."""
    return [
        f"{name} step {step}: {loss!r}, in the full search {full[name][step]!r}"
        for name, losses in other.items()
        for step, loss in losses.items()
        if step in full.get(name, {}) and repr(full[name][step]) != repr(loss)
    ]


def verdict(full: Mapping[str, float | None], sweep: Mapping[str, float | None]) -> dict[str, Any]:
    """The winner's validation loss against the best of the full search."""
    best_full, winner = best(full), best(sweep)
    excess = (
        number(sweep[winner]) / number(full[best_full]) - 1
        if math.isfinite(number(full[best_full]))
        else math.inf
    )
    return {
        "best_of_full": best_full,
        "best_val_loss": full[best_full],
        "winner": winner,
        "winner_val_loss": sweep[winner],
        "excess": excess,
        "passed": excess <= TOLERANCE,
    }
