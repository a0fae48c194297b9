"""Which rows each optimizer step trains on: a pure function of (rows, seed, step), nothing to save.

Counts are those of the Hugging Face Trainer and TRL with `dataloader_drop_last=False`: an epoch is
ceil(n / (batch × accumulation)) steps, its last step may hold fewer rows, `max_steps` wins over
`num_train_epochs`.
"""

from __future__ import annotations

import math

import numpy as np
from gshare.agent.errors import UsageError
from numpy.typing import NDArray

#: Step counts go into 64-bit fields of messages and checkpoints; floats below this hold each exactly.
MAX_STEPS = 2**53


class Sampler:
    """Rows by step. `rows` (n,): ids of the training rows; order and ids both matter."""

    def __init__(
        self,
        rows: NDArray[np.int64],
        *,
        seed: int,
        batch_size: int,
        accumulation: int,
        num_train_epochs: float,
        max_steps: int,
    ) -> None:
        if len(rows) == 0:
            raise UsageError("there are no training rows")
        if batch_size < 1 or accumulation < 1:
            raise UsageError("batch size and gradient accumulation must be at least 1")
        self._rows = np.asarray(rows, dtype=np.int64)
        self._seed = seed
        self._batch = batch_size
        self._per_step = batch_size * accumulation
        self.steps_per_epoch = math.ceil(len(rows) / self._per_step)
        steps = float(max_steps) if max_steps > 0 else num_train_epochs * self.steps_per_epoch
        if not steps <= MAX_STEPS:
            raise UsageError(
                f"num_train_epochs {num_train_epochs} with max_steps {max_steps} asks for {steps:g} steps; "
                f"at most {MAX_STEPS:g} are allowed"
            )
        self.total_steps = max_steps if max_steps > 0 else math.ceil(steps)
        if self.total_steps < 1:
            raise UsageError(f"nothing to do: num_train_epochs is {num_train_epochs}, max_steps {max_steps}")
        self._cached: tuple[int, NDArray[np.int64]] | None = None  # the last epoch asked for

    def step_rows(self, step: int) -> list[list[int]]:
        """Micro-batches of row ids of the 0-based `step`; an epoch's last step may hold fewer."""
        if not 0 <= step < self.total_steps:
            raise IndexError(f"step {step} of {self.total_steps}")
        epoch, index = divmod(step, self.steps_per_epoch)
        rows = self._epoch(epoch)[index * self._per_step : (index + 1) * self._per_step].tolist()
        return [rows[i : i + self._batch] for i in range(0, len(rows), self._batch)]

    def epoch_at(self, step: int) -> float:
        """Epochs done after `step` optimizer steps."""
        return step / self.steps_per_epoch

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._rows[permutation(len(self._rows), self._seed, epoch)])
        return self._cached[1]


def permutation(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of range(n), the same under every numpy.

    Stable argsort of raw Philox4x64-10 words (Salmon et al., SC 2011) under key (seed, epoch). Not
    `Generator.permutation`: numpy may change its streams between versions; a bit generator's raw
    words it may not (NEP 19).
    """
    key = np.asarray([seed % 2**64, epoch], dtype=np.uint64)
    words = np.random.Philox(key=key).random_raw(n)
    return np.argsort(words, kind="stable")
