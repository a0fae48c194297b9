"""How much a job has to do, from its token files alone: steps, rows, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gshare.agent.data.sampler import Sampler
from gshare.agent.data.split import split_rows
from gshare.agent.data.tokens import TokenStore
from gshare.agent.jobs.spec import JobRequest


@dataclass(frozen=True)
class Work:
    """`rows`, `val_rows`: what it trains on in an epoch, and is validated on; `mean_tokens` of a row
    that it trains on."""

    total_steps: int
    steps_per_epoch: int
    rows: int
    rows_per_step: int
    val_rows: int
    mean_tokens: float

    def samples(self, step: int) -> int:
        """Rows trained on in the first `step` steps; an epoch's last step may hold fewer."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        return epochs * self.rows + min(self.rows, rest * self.rows_per_step)


def plan_work(requests: Sequence[JobRequest]) -> list[Work]:
    """Of each request. UsageError when nothing is left to train on."""
    splits: dict[tuple[object, ...], tuple[np.ndarray, int, float]] = {}
    works = []
    for request in requests:
        spec = request.spec
        assert spec.seed is not None
        key = (request.train_hash, request.val_hash, spec.val_fraction, spec.seed)
        if key not in splits:
            splits[key] = _split(request, spec.val_fraction, spec.seed)
        rows, val_rows, mean_tokens = splits[key]
        sampler = Sampler(
            rows,
            seed=spec.seed,
            batch_size=spec.per_device_train_batch_size,
            accumulation=spec.gradient_accumulation_steps,
            num_train_epochs=spec.num_train_epochs,
            max_steps=spec.max_steps,
        )
        works.append(
            Work(
                total_steps=sampler.total_steps,
                steps_per_epoch=sampler.steps_per_epoch,
                rows=len(rows),
                rows_per_step=spec.per_device_train_batch_size * spec.gradient_accumulation_steps,
                val_rows=val_rows,
                mean_tokens=mean_tokens,
            )
        )
    return works


def _split(request: JobRequest, val_fraction: float, seed: int) -> tuple[np.ndarray, int, float]:
    """(ids of the training rows, number of validation rows, mean tokens of a training row)."""
    store = TokenStore.open(Path(request.train_store), request.train_hash)
    if request.val_store is not None:
        assert request.val_hash is not None
        val = TokenStore.open(Path(request.val_store), request.val_hash)
        return np.arange(store.n_rows), val.n_rows, store.meta.n_tokens / max(1, store.n_rows)
    split = split_rows(store, val_fraction=val_fraction, seed=seed)
    return split.train, len(split.val), int(store.lengths[split.train].sum()) / max(1, len(split.train))
