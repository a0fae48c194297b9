"""[sweep.ranges]: what Optuna may draw from, and what is wrong with an interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
from gshare.agent.jobs.spec_rules import ADAPTER_TYPES, adapter_value


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An interval of numbers that Optuna draws from."""

    low: float
    high: float
    log: bool = False
    step: float | None = None


@dataclass(frozen=True)
class SampledSpace:
    """What Optuna chooses from: a `Range` or a list of choices for each key."""

    ranges: dict[str, Range | list[Any]]
    n_trials: int
    batch: int
    seed: int
    source: str = "the sweep's file"  # for messages

    def highest(self, key: str) -> float:
        """Of a number that may be drawn; 0 where the key is none of those drawn."""
        values = self.ranges.get(key, [0])
        return values.high if isinstance(values, Range) else max(values)


def range_fault(key: str, interval: Range) -> str | None:
    """What is wrong with an interval, as Optuna's distributions have it; None: nothing."""
    low, high, step = interval.low, interval.high, interval.step
    if not -math.inf < low < high < math.inf or (interval.log and low <= 0):
        return "low must be below high, both finite, and above 0 where log = true"
    if step is not None and not 0 < step <= high - low:
        return f"step must be above 0 and at most high - low, not {step:g}"
    if step is not None and interval.log:
        return "takes a step or log = true, not both"
    if step is not None and (fault := _step_fault(low, high, step)):
        return fault
    if key not in ADAPTER_TYPES:
        return None  # said already
    whole = ADAPTER_TYPES[key] is int
    if whole and not all(one is None or one.is_integer() for one in (low, high, step)):
        return "low, high and step must be whole numbers"
    return adapter_value(key, int(high) if whole else high)[1]


def _step_fault(low: float, high: float, step: float) -> str | None:
    """In decimals, as Optuna counts and people write: 0.1 goes into 0.5."""
    first, last, one = (Decimal(str(number)) for number in (low, high, step))
    try:
        rest = (last - first) % one
    except InvalidOperation:  # more steps than decimals count
        return f"step {step:g} is too small for an interval from {low:g} to {high:g}"
    if not rest:
        return None
    highest = format((last - rest).normalize(), "f")
    return (
        f"high - low must be a multiple of step: in steps of {step:g} from {low:g} nothing above {highest} "
        f"would be drawn; set high = {highest}, or another step"
    )
