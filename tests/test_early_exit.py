"""The patterns of early exit on hand-made loss series, and properties over arbitrary ones."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from gshare.agent.jobs.early_exit import EarlyExit, Patterns, describe_exit, slope
from gshare.agent.jobs.events import Evaluated, Exit, Stepped
from hypothesis import given
from hypothesis import strategies as st

LOSSES = st.floats(0.0, 100.0)
SERIES = st.lists(st.tuples(LOSSES, LOSSES), min_size=1, max_size=30)
Event = Stepped | Evaluated


def _stepped(step: int, loss: float) -> Stepped:
    return Stepped(
        job="a",
        step=step,
        total_steps=100,
        epoch=0.0,
        loss=loss,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=1,
        label_tokens=1,
        seconds=0.0,
        adapters_in_pass=1,
    )


def _evaluated(step: int, val_loss: float) -> Evaluated:
    return Evaluated(job="a", step=step, val_loss=val_loss, label_tokens=1, best=False)


def _events(series: Sequence[tuple[float, float]]) -> list[Event]:
    """One step and one evaluation for each (train, val)."""
    pairs = [
        (_stepped(step, train), _evaluated(step, val)) for step, (train, val) in enumerate(series, start=1)
    ]
    return list(itertools.chain.from_iterable(pairs))


def _first_exit(series: Sequence[tuple[float, float]], settings: EarlyExit) -> Exit | None:
    machine = Patterns(settings)
    return next((found for event in _events(series) if (found := machine.handle(event)) is not None), None)


#: α = 1: the training loss itself, so that the series below can be read.
RAW = EarlyExit(ema_alpha=1.0)
ONLY_DIVERGENCE = EarlyExit(ema_alpha=1.0, overfitting=False)
ONLY_OVERFITTING = EarlyExit(ema_alpha=1.0, divergence=False)


def test_divergence_when_both_rise_at_two_evaluations_in_a_row() -> None:
    found = _first_exit([(2.0, 2.0), (1.0, 1.0), (1.1, 1.2), (1.3, 1.4), (9.0, 9.0)], ONLY_DIVERGENCE)
    assert found is not None
    assert (found.pattern, found.step) == ("divergence", 4)
    assert found.evidence["train_slope"] == pytest.approx(0.2)
    assert found.evidence["val_slope"] == pytest.approx(0.2)
    assert found.evidence["train_losses"] == [1.1, 1.3]
    assert found.evidence["evaluations"] == 2
    assert "divergence at step 4" in describe_exit(found)


@pytest.mark.parametrize(
    "series",
    [
        [(1.0, 1.0), (1.1, 1.1), (1.0, 1.2), (1.1, 1.3), (1.0, 1.4)],  # train falls every other time
        [(1.0, 1.0), (1.1, 1.1), (1.2, 1.0), (1.3, 1.1), (1.4, 1.0)],  # val falls every other time
        [(1.0, 1.0), (1.0005, 1.0005), (1.001, 1.001), (1.0015, 1.0015)],  # flatter than the threshold
        [(1.0 - 0.1 * i, 1.0 + 0.1 * i) for i in range(9)],  # only val: that is overfitting
    ],
)
def test_no_divergence_where_one_condition_fails(series: list[tuple[float, float]]) -> None:
    assert _first_exit(series, ONLY_DIVERGENCE) is None


def test_the_counter_returns_to_zero_at_the_first_evaluation_that_fails() -> None:
    """Two rises, but not in a row; the control is the same series without what comes between."""
    rise, fall = [(1.0, 1.0), (1.2, 1.2)], [(1.0, 1.0)]
    assert _first_exit(rise + fall + [(1.2, 1.2)], ONLY_DIVERGENCE) is None
    assert _first_exit([*rise, (1.4, 1.4)], ONLY_DIVERGENCE) is not None


def test_overfitting_when_the_gap_is_wide_and_val_rises_twice() -> None:
    found = _first_exit([(1.0, 1.0), (0.9, 0.95), (0.8, 1.0), (0.7, 1.05), (0.1, 9.0)], RAW)
    assert found is not None
    assert (found.pattern, found.step) == ("overfitting", 4)
    assert found.evidence["gap"] == pytest.approx((1.05 - 0.7) / 0.7)
    assert found.evidence["previous_val_loss"] == 1.0
    assert "50.0% above the training loss" in describe_exit(found)


@pytest.mark.parametrize(
    "series",
    [
        [(0.5, 1.0), (0.4, 0.9), (0.3, 0.8), (0.2, 0.7)],  # wide, and val falls
        [(1.0, 1.0), (0.99, 1.01), (0.98, 1.02), (0.97, 1.03)],  # val rises, the gap is 6 %
        [(0.5, 1.0), (0.4, 1.1), (0.3, 1.05), (0.2, 1.1), (0.1, 1.05)],  # val rises every other time
        [(0.5, 1.0)],  # nothing to have risen from
    ],
)
def test_no_overfitting_where_one_condition_fails(series: list[tuple[float, float]]) -> None:
    assert _first_exit(series, ONLY_OVERFITTING) is None


def test_a_longer_patience_waits_longer() -> None:
    series = [(1.0, 1.0 + 0.3 * i) for i in range(8)]
    steps = []
    for patience in (1, 2, 5):
        found = _first_exit(series, EarlyExit(divergence=False, overfitting_patience=patience))
        assert found is not None
        steps.append(found.step)
    assert steps == [2, 3, 6]


def test_the_training_loss_is_smoothed_over_steps_not_over_evaluations() -> None:
    """ℓ̂ = 0.1·ℓ + 0.9·ℓ̂ from the first step on: two steps of 2 and 1 give 1.9."""
    machine = Patterns(EarlyExit(divergence=False, overfitting_patience=1))
    for event in (_stepped(1, 2.0), _evaluated(1, 2.0), _stepped(2, 1.0)):
        assert machine.handle(event) is None
    found = machine.handle(_evaluated(2, 2.5))
    assert found is not None
    assert found.evidence["train_loss"] == pytest.approx(1.9)


def test_divergence_comes_first_and_a_switched_off_pattern_never() -> None:
    series = [(1.0 + 0.1 * i, 2.0 + 0.5 * i) for i in range(6)]
    found = _first_exit(series, RAW)
    assert found is not None
    assert found.pattern == "divergence"
    assert _first_exit(series, EarlyExit(divergence=False, overfitting=False)) is None


def test_what_is_not_a_number_is_passed_over() -> None:
    """The trainer ends such a job; here it must not stick in the average."""
    machine = Patterns(EarlyExit(ema_alpha=0.5))
    for event in (_stepped(1, 1.0), _stepped(2, math.nan), _evaluated(2, math.nan), _stepped(3, math.inf)):
        assert machine.handle(event) is None
    assert machine.state()["train"] == 1.0
    assert machine.state()["vals"] == []


def test_no_training_loss_left_is_the_widest_gap() -> None:
    found = _first_exit([(0.0, 1.0), (0.0, 1.1)], EarlyExit(overfitting_patience=1))
    assert found is not None
    assert found.evidence["gap"] == math.inf
    msgspec.json.encode(found)  # strict: infinity becomes null


@given(SERIES, st.integers(0, 59), st.integers(2, 4), st.integers(1, 3))
def test_a_job_resumed_from_json_exits_where_it_would_have(
    series: list[tuple[float, float]], cut: int, window: int, patience: int
) -> None:
    settings = EarlyExit(window=window, divergence_patience=patience, overfitting_patience=patience)
    events = _events(series)
    whole, machine = Patterns(settings), Patterns(settings)
    for index, event in enumerate(events):
        if index == cut:
            state = json.loads(json.dumps(machine.state()))
            machine = Patterns(settings)
            machine.restore(state)
        assert machine.handle(event) == whole.handle(event)


def test_a_state_that_lost_its_counters_would_be_noticed() -> None:
    """The control of the property above."""
    series = [(1.0, 1.0), (1.2, 1.2), (1.4, 1.4)]
    machine = Patterns(ONLY_DIVERGENCE)
    for event in _events(series[:2]):
        assert machine.handle(event) is None
    fresh = Patterns(ONLY_DIVERGENCE)
    fresh.restore({**machine.state(), "rising": 0})
    last = _events(series)[-2:]
    assert [machine.handle(event) for event in last][-1] is not None
    assert [fresh.handle(event) for event in last][-1] is None


@given(SERIES, st.integers(2, 5), st.integers(1, 3), st.floats(0.01, 1.0))
def test_as_the_definition_says(
    series: list[tuple[float, float]], window: int, patience: int, alpha: float
) -> None:
    """Against the definition written over whole series, with numpy's least squares."""
    settings = EarlyExit(
        window=window, divergence_patience=patience, overfitting_patience=patience, ema_alpha=alpha
    )
    smooth: list[float] = []
    for train, _ in series:
        smooth.append(train if not smooth else alpha * train + (1 - alpha) * smooth[-1])
    vals = [val for _, val in series]

    def fitted(values: Sequence[float]) -> float:
        return float(np.polyfit(np.arange(window), values, 1)[0])

    steep, wide = [], []
    for i in range(len(series)):
        both = i + 1 >= window and min(
            fitted(smooth[i + 1 - window : i + 1]), fitted(vals[i + 1 - window : i + 1])
        )
        near = both is not False and abs(both - settings.slope_threshold) < 1e-9
        if near:  # numpy rounds otherwise
            return
        steep.append(both is not False and both > settings.slope_threshold)
        gap = (vals[i] - smooth[i]) / smooth[i] if smooth[i] > 0 else math.inf
        wide.append(i > 0 and vals[i] > vals[i - 1] and gap > settings.gap_threshold)
    expected = next(
        (
            ("divergence" if all(steep[i + 1 - patience : i + 1]) else "overfitting", i + 1)
            for i in range(patience - 1, len(series))
            if all(steep[i + 1 - patience : i + 1]) or all(wide[i + 1 - patience : i + 1])
        ),
        None,
    )
    found = _first_exit(series, settings)
    assert (found and (found.pattern, found.step)) == expected


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9))
def test_slope_is_that_of_least_squares(values: list[float]) -> None:
    assert slope(values) == pytest.approx(float(np.polyfit(range(len(values)), values, 1)[0]), abs=1e-9)
