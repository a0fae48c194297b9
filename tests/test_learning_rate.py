"""Learning rates equal transformers' schedulers to the last bit."""

from __future__ import annotations

import pytest
from gshare.agent.jobs.learning_rate import learning_rate_at, warmup_steps
from gshare.agent.jobs.spec import LrSchedulerType

THEIRS = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def transformers_rates(
    kind: LrSchedulerType, *, total: int, base: float, warmup_ratio: float, steps: int
) -> list[float]:
    import torch
    from transformers import TrainingArguments
    from transformers.optimization import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    # A warmup_steps below 1 is a ratio in transformers 5.
    warm = TrainingArguments(warmup_steps=warmup_ratio, use_cpu=True).get_warmup_steps(total)
    scheduler = get_scheduler(
        THEIRS[kind], optimizer=optimizer, num_warmup_steps=warm, num_training_steps=total
    )
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("total", "warmup_ratio"), [(1, 0.0), (7, 0.0), (7, 0.5), (33, 0.03), (40, 0.99)])
def test_equal_to_transformers(kind: LrSchedulerType, total: int, warmup_ratio: float) -> None:
    base = 2e-4 / 3
    ours = [
        learning_rate_at(step, total_steps=total, base=base, kind=kind, warmup_ratio=warmup_ratio)
        for step in range(total + 3)
    ]
    theirs = transformers_rates(kind, total=total, base=base, warmup_ratio=warmup_ratio, steps=total + 3)
    assert ours == theirs


def test_negative_control_an_off_by_one_step_is_seen() -> None:
    shifted = [
        learning_rate_at(step + 1, total_steps=7, base=1e-3, kind="cosine", warmup_ratio=0.5)
        for step in range(7)
    ]
    assert shifted != transformers_rates("cosine", total=7, base=1e-3, warmup_ratio=0.5, steps=7)


def test_warmup_rounds_up_and_starts_at_zero() -> None:
    assert warmup_steps(33, 0.03) == 1
    assert warmup_steps(100, 0.03) == 3
    assert learning_rate_at(0, total_steps=100, base=1.0, kind="constant", warmup_ratio=0.03) == 0.0
    assert learning_rate_at(3, total_steps=100, base=1.0, kind="constant", warmup_ratio=0.03) == 1.0
