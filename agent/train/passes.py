"""How the steps of a round are cut into passes. No torch: a plan cuts them as a trainer does.

pass: rows of many adapters that run forward and backward together, so many tokens at most
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gshare.agent.train.part import Part, Row

if TYPE_CHECKING:
    from gshare.agent.train.adapter import Adapter


@dataclass(frozen=True)
class StepWork:
    """One adapter's next optimizer step: its micro-batches (lists of rows) in order."""

    adapter: Adapter
    step: int  # 0-based
    micro_batches: Sequence[Sequence[Row]]

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for batch in self.micro_batches for row in batch)

    @property
    def label_tokens(self) -> int:
        return sum(row.label_tokens for batch in self.micro_batches for row in batch)


def split_passes(work: Sequence[StepWork], max_tokens: int) -> list[list[Part]]:
    """Micro-batch j of every adapter goes into pass j; a pass over `max_tokens` is cut between rows.

    A single row longer than `max_tokens` is a pass of its own. Each adapter's rows keep their order.
    """
    passes: list[list[Part]] = []
    for j in range(max((len(w.micro_batches) for w in work), default=0)):
        current: list[Part] = []
        used = 0
        for w in work:
            if j >= len(w.micro_batches):
                continue
            rows: list[Row] = []
            for row in w.micro_batches[j]:
                length = len(row.tokens)
                if used and used + length > max_tokens:
                    if rows:
                        current.append(Part(w.adapter, rows, w.step, w.label_tokens))
                    passes.append(current)
                    current, rows, used = [], [], 0
                rows.append(row)
                used += length
            if rows:
                current.append(Part(w.adapter, rows, w.step, w.label_tokens))
        if current:
            passes.append(current)
    return passes


def evaluation_passes(work: Sequence[StepWork], max_tokens: int) -> list[list[Part]]:
    """The passes of an evaluation: the first row of every adapter, then the second of each, up to
    `max_tokens` a pass, so that adapters with the same rows have them in the same pass."""
    turns = [(i, w) for i in range(max((len(w.micro_batches[0]) for w in work), default=0)) for w in work]
    passes: list[dict[str, tuple[StepWork, list[Row]]]] = []
    used = max_tokens
    for i, w in turns:
        if i >= len(w.micro_batches[0]):
            continue
        row = w.micro_batches[0][i]
        if used + len(row.tokens) > max_tokens:
            passes.append({})
            used = 0
        passes[-1].setdefault(w.adapter.name, (w, []))[1].append(row)
        used += len(row.tokens)
    return [[Part(w.adapter, rows, w.step, 1) for w, rows in one.values()] for one in passes]
