"""What `benchmarks/trunk.py` trains: W16's length draw, labels on the last 60 % of each sequence, top layers.

    one   a same-data cohort: every job sees the same sequences; learning rates differ, the seed is one
    two   two data sets of equal lengths; every other job sees the second
    own   unrelated tenants: sequences, lengths and seed of its own for each job

A job is `epochs` times the same `steps` optimizer steps at batch 1: the first epoch is its cold run, the last
is timed. Held-out rows are drawn as the others, from steps that no job trains.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from gpu_workload import Workload, shape_config
from gshare.agent.base.config import ModelConfig
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.train.part import Row

LABELLED = 0.6
#: Of the length draw's 64 steps, those that no job trains.
HELD_OUT = (62, 63)


@dataclass(frozen=True)
class Scale:
    """A model shape and how much of the work is done at it."""

    model: str  # of gpu_workload.SHAPES
    base_dtype: str
    steps: int
    epochs: int  # on CUDA three: launched, captured, replayed
    shorten: int  # lengths are divided by it


SCALES = {
    "8b": Scale("llama-3.1-8b", "bf16", steps=8, epochs=3, shorten=1),
    "smollm2": Scale("smollm2-135m", "fp32", steps=2, epochs=2, shorten=8),
    "tiny": Scale("tiny", "fp32", steps=2, epochs=2, shorten=8),
}
_CELL = re.compile(r"n(?P<jobs>\d+)-(?:top(?P<top>\d+)|all)(?:-(?P<data>two|own))?")


@cache
def _row(step: int, data: int, length: int, vocabulary: int) -> Row:
    """Drawn once, not in every epoch that is timed."""
    tokens = np.random.default_rng((step, data)).integers(3, vocabulary, length)
    return Row(tokens.astype(np.int32), np.arange(length) >= length - int(LABELLED * length))


@dataclass(frozen=True)
class Cohort:
    """The logical jobs of one cell; the same in every arm."""

    model: str
    base_dtype: str
    jobs: int
    top: int  # how many of the upper layers are adapted; 0: all
    data: str  # one | two | own
    steps: int
    epochs: int
    shorten: int
    rank: int = 16

    @classmethod
    def of(cls, cell: str, scale: Scale) -> Cohort:
        """`n16-top1`, `n8-top2-two`, `n16-all-own`, …; ValueError when it is none of these."""
        found = _CELL.fullmatch(cell)
        jobs, top = (int(found[key] or 0) for key in ("jobs", "top")) if found else (0, 0)
        if not found or not 1 <= jobs <= 64 or top > shape_config(scale.model).num_layers:
            raise ValueError(
                f"{cell}: a cell is n<jobs>-top<layers> or n<jobs>-all, then -two or -own for other data; "
                f"1 to 64 jobs, no more layers than {scale.model} has"
            )
        size = (scale.steps, scale.epochs, scale.shorten)
        return cls(scale.model, scale.base_dtype, jobs, top, found["data"] or "one", *size)

    @property
    def config(self) -> ModelConfig:
        return shape_config(self.model)

    @property
    def lowest_layer(self) -> int:
        return self.config.num_layers - self.top if self.top else 0

    def rows(self, step: int, job: int) -> list[Row]:
        """What a job sees in a step of any epoch."""
        data = {"one": 0, "two": job % 2, "own": job}[self.data]
        lengths = Workload(64, 64, self.config.vocab_size).lengths()
        length = max(int(lengths[step, data if self.data == "own" else 0]) // self.shorten, 2)
        return [_row(step, data, length, self.config.vocab_size)]

    def held_out(self, job: int) -> list[Row]:
        return [row for step in HELD_OUT for row in self.rows(step, job)]

    def tokens(self, jobs: Iterable[int] | None = None) -> int:
        """Of these jobs, by default all, in one epoch."""
        chosen = range(self.jobs) if jobs is None else jobs
        each = (self.rows(step, job) for job in chosen for step in range(self.steps))
        return sum(len(row.tokens) for rows in each for row in rows)

    def specs(self) -> list[AdapterSpec]:
        top = tuple(range(self.lowest_layer, self.config.num_layers)) if self.top else None
        return [
            AdapterSpec(
                name=f"j{job:02d}",
                data="w.jsonl",
                output_dir=f"j{job:02d}",
                r=self.rank,
                lora_alpha=2.0 * self.rank,
                layers_to_transform=top,
                # A sweep over two decades, whatever the number of jobs.
                learning_rate=1e-5 * 100.0 ** (job / max(self.jobs - 1, 1)),
                seed=job if self.data == "own" else 0,
            )
            for job in range(self.jobs)
        ]
