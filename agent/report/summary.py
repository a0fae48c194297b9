"""What a report says of its runs together: who was best, what differed, what was saved, what paid."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from gshare.agent.report.model import PATTERNS, Report, Run

#: Keys of a spec that are no hyper-parameters.
_NO_HYPER = frozenset(("name", "output_dir"))


@dataclass(frozen=True)
class Saving:
    """What one pattern stopped. `unknown`: of so many runs the lengths are not known; they count nothing."""

    pattern: str
    runs: int
    trained: int
    saved: int
    exact: bool
    unknown: int


def leaderboard(runs: Sequence[Run]) -> list[Run]:
    """By the best validation loss; then those without a finite one, then the never evaluated. Equal ones stay
    as they were found: a sweep's in its file's order, by which it chose its winner too."""

    def rank(run: Run) -> tuple[int, float]:
        value = run.best_val_loss
        if value is None:
            return 2, 0.0
        return (0, value) if math.isfinite(value) else (1, 0.0)

    return sorted(runs, key=rank)


def differing(runs: Sequence[Run]) -> list[str]:
    """The hyper-parameters in which the runs differ, in the spec's order; a run without a record counts as
    none. `lora_alpha` is left out where it is 2 × r everywhere, as when nobody sets it."""
    specs = [run.spec for run in runs if run.spec is not None]
    keys = [
        key
        for key in (specs[0].__struct_fields__ if specs else ())
        if key not in _NO_HYPER and any(getattr(spec, key) != getattr(specs[0], key) for spec in specs)
    ]
    if all(spec.lora_alpha == 2 * spec.r for spec in specs):
        keys = [key for key in keys if key != "lora_alpha"]
    more = dict.fromkeys(key for run in runs for key in run.hyper if key not in _NO_HYPER)
    return keys + [key for key in more if key not in keys and _differs(runs, key)]


def _differs(runs: Sequence[Run], key: str) -> bool:
    values = [hyper(run, key) for run in runs if hyper(run, key) is not None]
    return any(value != values[0] for value in values)


def hyper(run: Run, key: str) -> Any:
    """A run's value of a hyper-parameter; None: not known, or not set."""
    if run.spec is not None and key in run.spec.__struct_fields__:
        return msgspec.to_builtins(getattr(run.spec, key))
    return run.hyper.get(key)


def savings(runs: Sequence[Run]) -> list[Saving]:
    """A line a pattern that stopped something, in the order of `PATTERNS`."""
    found = []
    for pattern in PATTERNS:
        stopped = [run for run in runs if run.pattern == pattern]
        known = [(run.samples, saved) for run in stopped if (saved := run.saved) is not None]
        if stopped:
            found.append(
                Saving(
                    pattern,
                    runs=len(stopped),
                    trained=sum(samples.count for samples, _ in known if samples is not None),
                    saved=sum(saved.count for _, saved in known),
                    exact=all(saved.exact for _, saved in known),
                    unknown=len(stopped) - len(known),
                )
            )
    return found


def full_length(runs: Sequence[Run]) -> int | None:
    """Samples of all runs at their full lengths; None when one of them is not known."""
    totals = [run.samples_total for run in runs]
    known = [total.count for total in totals if total is not None]
    return sum(known) if len(known) == len(totals) else None


def samples_cost(run: Run) -> float | None:
    return None if run.samples is None else float(run.samples.count)


def seconds_cost(run: Run) -> float | None:
    return run.seconds


def pareto(runs: Sequence[Run], cost: Callable[[Run], float | None]) -> list[Run]:
    """The runs that no other beats in both cost and best validation loss, cheapest first. Runs of which
    either is not known, or not a number, are no part of it; of equal ones the first."""
    known = [(value, run.best_val_loss, run) for run in runs if (value := cost(run)) is not None]
    finite = [one for one in known if one[1] is not None and math.isfinite(one[1]) and math.isfinite(one[0])]
    front: list[Run] = []
    best = math.inf
    for _, loss, run in sorted(finite, key=lambda one: one[:2]):
        assert loss is not None
        if loss < best:
            best = loss
            front.append(run)
    return front


def notes(report: Report) -> list[str]:
    """What a reader has to know before comparing, and what could not be read."""
    found = list(report.notes)
    runs = report.runs
    keys = {run.data_key for run in runs if run.data_key and run.best_val_loss is not None}
    if len(keys) > 1:
        found.append(
            "runs were validated on different rows (other data, max_length, val_fraction or seed): their "
            "validation losses do not compare"
        )
    bases = {(run.model, run.base_dtype) for run in runs if run.model}
    if len(bases) > 1:
        found.append("runs are on different bases: " + ", ".join(sorted(f"{m} ({d})" for m, d in bases)))
    if any(run.samples is not None and not run.samples.exact for run in runs):
        found.append("≤: an epoch's last step may have held fewer rows than a full step, which were counted")
    found += [f"{run.name}: {note}" for run in runs for note in run.notes]
    return found
