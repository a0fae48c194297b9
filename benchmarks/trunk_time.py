"""How long an arm of `benchmarks/trunk.py` takes on an H200, reckoned: to run it in pieces.

Products by operation count (`trunk_operations.py`); the rest are constants, seconds, from what
`benchmarks/results/gpu.json` says of the same card and shape. A reckoning of process time, within a factor of
two: no result of anything. Where a like arm was measured already, it is scaled by what that one took.
"""

from __future__ import annotations

from typing import Any

from trunk_operations import expected
from trunk_workload import Cohort

#: Floating-point operations per second that come out: many rows at once, one job's rows.
PACKED, ALONE = 550e12, 275e12
#: A process: interpreter, imports and CUDA, base of 8B drawn. PEFT: its imports and model too.
START, PEFT_START = 16.0, 26.0
#: Of an engine: the first launch of each shape, products compared, graphs captured.
SHAPES = 6.0
#: Host time for an adapter: its initial values, by adapted layer (sixteen of 32 layers: six seconds).
DRAW = 6.0 / (16 * 32)
#: A step's launches on the host, at least: gshare's alone and of many; PEFT's without adapters and by adapted
#: layer (32: 169 tokens at 304 a second).
STEP, PEFT_STEP, PEFT_LAYER = 0.006, 0.06, 0.0155
#: PEFT's trial of settings (`trunk_peft.best_settings`): a model each, and how many there are.
PEFT_MODEL, SETTINGS = 7.0, 4
#: Processes at once under MPS, and until all of them train (six: 60 s).
AT_ONCE, WAVE_START = 7, 60.0


def seconds(cohort: Cohort, arm: str, trial_steps: int) -> float:
    """Of the arm's processes, one after another. Kernels that a bare machine builds first are left out."""
    operations = 2.0 * expected(cohort)[arm] * cohort.epochs
    steps = cohort.steps * cohort.epochs
    adapted = cohort.top or cohort.config.num_layers
    if arm in ("peft", "mps"):
        step = max(PEFT_STEP + PEFT_LAYER * adapted, operations / ALONE / (steps * cohort.jobs))
        if arm == "mps":
            return -(-cohort.jobs // AT_ONCE) * (WAVE_START + steps * step)
        trial = PEFT_START + SETTINGS * (PEFT_MODEL + 2 * trial_steps * step * 1.5)
        return trial + PEFT_START + cohort.jobs * steps * step
    draws = cohort.jobs * adapted * DRAW
    rounds = steps * (cohort.jobs if arm == "dedicated" else 1)
    run = max(operations / (ALONE if arm == "dedicated" else PACKED), rounds * STEP)
    return START + SHAPES + draws + run


class Reckoning:
    """Seconds of the arms to come, by those that were measured."""

    def __init__(self, trial_steps: int, *, known_card: bool) -> None:
        """`known_card`: the constants are this machine's, so that an arm can be judged before one like it."""
        self._trial_steps, self._known = trial_steps, known_card
        self._factors: dict[str, float] = {}

    def saw(self, arm: str, record: dict[str, Any]) -> None:
        """An arm's record; the newest counts."""
        if "error" not in record:
            cohort = Cohort(**record["under"]["workload"])
            self._factors[arm] = record["wall_s"] / seconds(cohort, arm, self._trial_steps)

    def __call__(self, cohort: Cohort, arm: str) -> float:
        """0 where nothing is known."""
        factor = self._factors.get(arm, 1.0 if self._known else 0.0)
        return factor * seconds(cohort, arm, self._trial_steps)
