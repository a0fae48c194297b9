"""The rows of a job, by step: those it trains on and those it is validated on. No torch, as `passes.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gshare.agent.data.sampler import Sampler
from gshare.agent.data.split import split_rows
from gshare.agent.data.tokens import TokenStore
from gshare.agent.errors import UsageError
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.train.part import Row


@dataclass(frozen=True)
class JobData:
    """The rows of a job: token files opened, split, and put in order."""

    train: TokenStore
    val: TokenStore
    val_rows: np.ndarray  # int64, row ids in `val`
    sampler: Sampler

    @classmethod
    def open(cls, request: JobRequest) -> JobData:
        """Raises UsageError when nothing is left to train on, GshareError for a damaged token file."""
        spec = request.spec
        assert spec.seed is not None
        train = TokenStore.open(Path(request.train_store), request.train_hash)
        if request.val_store is not None:
            val = TokenStore.open(Path(request.val_store), request.val_hash)
            train_rows, val_rows = np.arange(train.n_rows), np.arange(val.n_rows)
        else:
            val = train
            split = split_rows(train, val_fraction=spec.val_fraction, seed=spec.seed)
            train_rows, val_rows = split.train, split.val
        if len(train_rows) == 0:
            raise UsageError(f"adapter {spec.name}: {spec.data} leaves no row to train on")
        sampler = Sampler(
            train_rows,
            seed=spec.seed,
            batch_size=spec.per_device_train_batch_size,
            accumulation=spec.gradient_accumulation_steps,
            num_train_epochs=spec.num_train_epochs,
            max_steps=spec.max_steps,
        )
        return cls(train, val, val_rows, sampler)

    def validation(self) -> list[Row]:
        return [Row(*self.val.row(int(i))) for i in self.val_rows]

    def micro_batches(self, step: int) -> list[list[Row]]:
        """The rows of 0-based optimizer step `step`, numbered through the step."""
        batches: list[list[Row]] = []
        sample = 0
        for ids in self.sampler.step_rows(step):
            batch = []
            for i in ids:
                batch.append(Row(*self.train.row(i), sample=sample))
                sample += 1
            batches.append(batch)
        return batches
