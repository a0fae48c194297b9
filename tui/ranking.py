"""Which adapter is best: the order of the leaderboard, and of any column. Pure."""

from __future__ import annotations

import math
from typing import Protocol


class Ranked(Protocol):
    """What of a job its rank depends on."""

    name: str
    best_val_loss: float | None
    best_step: int | None


Rank = tuple[bool, float, float, str]


def rank_key(job: Ranked) -> Rank:
    """The lowest validation loss first; NaN, infinite and missing last; ties: the earlier step, the name."""
    bad, loss = number_key(job.best_val_loss)
    return bad, loss, math.inf if job.best_step is None else job.best_step, job.name


def number_key(value: float | None) -> tuple[bool, float]:
    """Sorts numbers with NaN, infinite and missing ones last."""
    if value is None or not math.isfinite(value):
        return True, 0.0
    return False, value
