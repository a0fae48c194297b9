"""Optuna's draws: a function of seed and history, within their ranges; skipped where it is not installed."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from gshare.agent.errors import UsageError
from gshare.agent.jobs.sampler import draw
from gshare.agent.jobs.sweep_ranges import Range, SampledSpace

SPACE = SampledSpace(
    ranges={
        "learning_rate": Range(1e-5, 1e-3, log=True),
        "r": Range(4, 64),
        "target_modules": ["all-linear", ["q_proj", "v_proj"]],
    },
    n_trials=20,
    batch=8,
    seed=3,
)


def test_without_optuna_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"needs Optuna; install it with: pip install 'gshare\[optuna\]'"):
        draw(SPACE, [])


def test_draws_are_a_function_of_what_was_told() -> None:
    pytest.importorskip("optuna", reason="the extra is not installed")
    told: list[tuple[dict[str, Any], float | None]] = []
    sizes = []
    while drawn := draw(SPACE, told):
        assert drawn == draw(SPACE, told)
        for one in drawn:
            assert 1e-5 <= one["learning_rate"] <= 1e-3
            assert isinstance(one["r"], int)
            assert 4 <= one["r"] <= 64
            assert one["target_modules"] in SPACE.ranges["target_modules"]  # type: ignore[operator]
        sizes.append(len(drawn))
        told += [(one, None if one["r"] > 60 else abs(one["r"] - 16.0)) for one in drawn]
    assert sizes == [8, 8, 4]
    # The control: told otherwise, it draws otherwise.
    other = [(values, None if loss is None else -loss) for values, loss in told[:16]]
    assert draw(SPACE, other) != draw(SPACE, told[:16])


def test_every_seed_that_a_file_may_have_is_drawn_from() -> None:
    """Optuna's own end at 2^32, and one is needed a draw; those below are given as they are."""
    pytest.importorskip("optuna", reason="the extra is not installed")
    told: list[tuple[dict[str, Any], float | None]] = [(DRAWN, 1.0)]
    last = replace(SPACE, seed=2**32 - 1)
    assert draw(last, []) != draw(replace(SPACE, seed=0), [])
    assert draw(last, told) == draw(replace(SPACE, seed=2**33 - 1), told)
    assert len(draw(replace(SPACE, seed=2**63 - 1), told)) == SPACE.batch


DRAWN: dict[str, Any] = {"learning_rate": 1e-4, "r": 8, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"target_modules": ["all-linear"]},
            r"target_modules: \['q_proj', 'v_proj'\] was drawn before, and is not one of",
        ),
        ({"r": Range(16, 64)}, "r: 8 was drawn before, and is not from 16 to 64"),
        (
            {"seed": Range(1, 9)},
            "its values were drawn for learning_rate, r, target_modules, not for learning_",
        ),
    ],
)
def test_ranges_that_no_longer_hold_what_was_drawn_are_named(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], told: str
) -> None:
    """A sweep's file that was edited before --resume. The control: as it was, it gets as far as Optuna."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    space = replace(SPACE, ranges={**SPACE.ranges, **changed}, source="s.toml")
    with pytest.raises(UsageError, match=rf"s\.toml: \[sweep\.ranges\].*{told}.*put it back as it was"):
        draw(space, [(DRAWN, 1.0)])
    with pytest.raises(UsageError, match="needs Optuna"):
        draw(SPACE, [(DRAWN, 1.0)])
