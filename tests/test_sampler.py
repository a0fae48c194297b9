"""The sampler: every epoch all rows once, HF's counts, and a pure function of the step."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gshare.agent.data.sampler import Sampler, permutation
from gshare.agent.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st


def make(
    n: int, batch: int = 2, accumulation: int = 2, epochs: float = 3, max_steps: int = -1, seed: int = 0
) -> Sampler:
    rows = np.arange(100, 100 + n, dtype=np.int64)
    return Sampler(
        rows,
        seed=seed,
        batch_size=batch,
        accumulation=accumulation,
        num_train_epochs=epochs,
        max_steps=max_steps,
    )


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 40),
    batch=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    seed=st.integers(-(2**63), 2**64),
)
def test_every_epoch_is_all_rows_once_in_micro_batches(
    n: int, batch: int, accumulation: int, seed: int
) -> None:
    sampler = make(n, batch, accumulation, epochs=2, seed=seed)
    assert sampler.steps_per_epoch == math.ceil(n / (batch * accumulation))
    assert sampler.total_steps == 2 * sampler.steps_per_epoch
    for epoch in range(2):
        seen: list[int] = []
        for step in range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch):
            micro = sampler.step_rows(step)
            assert 1 <= len(micro) <= accumulation
            assert all(len(rows) == batch for rows in micro[:-1])
            assert 1 <= len(micro[-1]) <= batch
            seen += [row for rows in micro for row in rows]
        assert sorted(seen) == list(range(100, 100 + n))


def test_micro_batch_partition_does_not_move_rows_between_steps() -> None:
    flat = [
        [[row for rows in make(11, batch, 4 // batch).step_rows(step) for row in rows] for step in range(9)]
        for batch in (1, 2, 4)
    ]
    assert flat[0] == flat[1] == flat[2]


def test_steps_can_be_asked_in_any_order() -> None:
    forward = [make(10).step_rows(step) for step in range(9)]
    sampler = make(10)
    assert [sampler.step_rows(step) for step in reversed(range(9))] == forward[::-1]


def test_epochs_and_seeds_shuffle_differently() -> None:
    orders = {tuple(permutation(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_permutation_is_pinned() -> None:
    """Under every numpy: a resume or an audit elsewhere must see the same order."""
    assert permutation(10, 42, 1).tolist() == [4, 9, 5, 3, 0, 2, 7, 1, 6, 8]


def test_steps_as_hugging_face_counts_them() -> None:
    assert make(10, 2, 2, epochs=3).total_steps == 9
    assert make(10, 2, 2, epochs=0.5).total_steps == 2
    assert make(10, 2, 2, max_steps=7).total_steps == 7
    assert make(1, 8, 8, epochs=1).total_steps == 1


def test_epoch_at() -> None:
    sampler = make(10)
    assert [sampler.epoch_at(step) for step in (0, 3, 9)] == [0.0, 1.0, 3.0]


@pytest.mark.parametrize(
    "bad", [{"n": 0}, {"n": 4, "batch": 0}, {"n": 4, "accumulation": 0}, {"n": 4, "epochs": 0}]
)
def test_nothing_to_do_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        make(**bad)


def test_steps_outside_the_run() -> None:
    for step in (-1, 9):
        with pytest.raises(IndexError):
            make(10).step_rows(step)


@pytest.mark.parametrize("epochs", [1e18, 1e300, 1e308, float("inf"), float("nan")])
def test_a_step_count_beyond_64_bits_is_refused(epochs: float) -> None:
    with pytest.raises(UsageError, match="num_train_epochs"):
        Sampler(np.arange(100), seed=0, batch_size=1, accumulation=1, num_train_epochs=epochs, max_steps=-1)
