"""What a schedule sees of a job, and what the runner asks of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class JobView:
    """What a schedule may know of a runnable job. Paused, ended and diverged jobs are left out by the
    caller."""

    name: str
    client: str
    weight: float  # > 0
    order: int  # admission number: smaller came first
    step: int  # optimizer steps done
    next_tokens: int  # tokens of the next optimizer step, all its micro-batches together
    last_val_loss: float | None  # None: never evaluated


class Schedule(Protocol):
    def next_round(self, jobs: Sequence[JobView], *, max_tokens: int, max_adapters: int) -> list[str]:
        """Names of the jobs of the next round, each once; empty only when `jobs` is."""
        ...

    def ran(self, name: str, tokens: int) -> None:
        """`name` finished one optimizer step over `tokens` tokens. Nothing happens when it was forgotten
        meanwhile (it ended in the middle of its round)."""
        ...

    def forget(self, name: str) -> None:
        """`name` has ended and will not come back."""
        ...
