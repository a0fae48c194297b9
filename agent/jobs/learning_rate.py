"""Learning rate of an optimizer step: transformers' schedules as one pure function.

Source of the formulas: `transformers.optimization.get_constant_schedule_with_warmup`,
`get_linear_schedule_with_warmup`, `get_cosine_schedule_with_warmup` (half a cosine). The operations run
in the same order in double precision, so the values are equal to the last bit. No state: a job resumed
at step k needs nothing but k.
"""

from __future__ import annotations

import math

from gshare.agent.jobs.spec import LrSchedulerType


def warmup_steps(total_steps: int, warmup_ratio: float) -> int:
    """Steps of linear warm-up: ceil(total · ratio), as transformers' TrainingArguments."""
    return math.ceil(total_steps * warmup_ratio)


def learning_rate_at(
    step: int, *, total_steps: int, base: float, kind: LrSchedulerType, warmup_ratio: float = 0.0
) -> float:
    """The learning rate of the optimizer step with index `step` (0-based: `step` steps are done).

    With warm-up the first step has rate 0, and `base` is reached at step index `warmup_steps`. "constant"
    honours the warm-up too (transformers' "constant_with_warmup"). Past `total_steps` "linear" stays at 0.
    """
    assert step >= 0, step
    assert total_steps >= 1, total_steps
    warm = warmup_steps(total_steps, warmup_ratio)
    if step < warm:
        return base * (float(step) / float(max(1, warm)))
    if kind == "constant":
        return base * 1.0
    if kind == "linear":
        return base * max(0.0, float(total_steps - step) / float(max(1, total_steps - warm)))
    assert kind == "cosine", kind
    progress = float(step - warm) / float(max(1, total_steps - warm))
    return base * max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))
