"""Who is best: rows of all jobs, and what to believe when a node's file and its events disagree. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from gshare.coordinator.facts import JobRecord


class Row(NamedTuple):
    """One job; None: there was no evaluation yet."""

    job: str
    node: str
    state: str
    val_loss: float | None  # the best one
    best_step: int | None
    step: int
    total_steps: int


def row_of(job: JobRecord) -> Row:
    node = job.node or job.last_node
    return Row(job.facts.name, node, job.state, job.best_val_loss, job.best_step, job.step, job.total_steps)


def ranked(rows: Iterable[Row]) -> list[Row]:
    """The lowest val loss first, NaN, infinite and missing last; ties: the earlier step, then the name."""

    def key(row: Row) -> tuple[bool, float, float, str]:
        bad = row.val_loss is None or not math.isfinite(row.val_loss)
        loss = 0.0 if bad or row.val_loss is None else row.val_loss
        return bad, loss, math.inf if row.best_step is None else row.best_step, row.job

    return sorted(rows, key=key)


def better(val_loss: float, best: float | None) -> bool:
    """Whether an evaluation is the best so far: of equal ones the earlier stays, NaN never is."""
    return math.isfinite(val_loss) and (best is None or not math.isfinite(best) or val_loss < best)


def same_best(a: tuple[float | None, int | None], b: tuple[float | None, int | None]) -> bool:
    """Whether two (val loss, step) say the same; NaN equals NaN."""
    same_loss = a[0] == b[0] or (a[0] is not None and b[0] is not None and a[0] != a[0] and b[0] != b[0])
    return same_loss and a[1] == b[1]
