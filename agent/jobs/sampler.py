"""Optuna's part in a sweep: it is asked for some configurations, told how they did, and asked for the next.

Each draw is a function of the settings and of what was drawn before and how it did: the study is made anew,
with a seed of its own. So a sweep that was killed draws what it would have drawn. `gshare[optuna]`, imported
when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import shorten
from gshare.agent.jobs.spec_rules import ADAPTER_TYPES
from gshare.agent.jobs.sweep_ranges import Range, SampledSpace

#: numpy's legacy generators, which are Optuna's, take no larger ones.
_SEEDS = 2**32


def draw(space: SampledSpace, told: Sequence[tuple[dict[str, Any], float | None]]) -> list[dict[str, Any]]:
    """The next `space.batch` configurations, fewer at the end, none when `space.n_trials` were drawn.

    `told`: all drawn before, in order, each with a figure that is lower for the better (None: it came to no
    boundary), of which the order alone counts.
    UsageError without Optuna, or when the ranges no longer hold what was drawn from them.
    """
    count = min(space.batch, space.n_trials - len(told))
    if count <= 0:
        return []
    _check_drawn(space, [values for values, _ in told])
    try:
        optuna = import_module("optuna")
    except ImportError:
        how = "pip install 'gshare[optuna]'"
        raise UsageError(f"[sweep.ranges] needs Optuna; install it with: {how}") from None
    kinds = optuna.distributions
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions: dict[str, Any] = {}
    for key, values in space.ranges.items():
        if not isinstance(values, Range):
            # By place: a choice may be a list of modules, which is no category of Optuna's.
            distributions[key] = kinds.CategoricalDistribution(list(range(len(values))))
        elif ADAPTER_TYPES[key] is int:
            step = int(values.step) if values.step else 1
            distributions[key] = kinds.IntDistribution(
                int(values.low), int(values.high), log=values.log, step=step
            )
        else:
            distributions[key] = kinds.FloatDistribution(
                values.low, values.high, log=values.log, step=values.step
            )
    # A seed a draw; the constant liar keeps those of one draw apart, whose losses are not known yet.
    seed = (space.seed + len(told)) % _SEEDS
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    study = optuna.create_study(sampler=sampler)
    for values, loss in told:
        study.add_trial(
            optuna.trial.create_trial(
                params={key: _place(space.ranges[key], value) for key, value in values.items()},
                distributions=distributions,
                value=loss,
                state=optuna.trial.TrialState.FAIL if loss is None else optuna.trial.TrialState.COMPLETE,
            )
        )
    trials = [study.ask(distributions) for _ in range(count)]
    return [{key: _value(space.ranges[key], value) for key, value in one.params.items()} for one in trials]


def _check_drawn(space: SampledSpace, drawn: Sequence[dict[str, Any]]) -> None:
    """The file may have been changed since: what was drawn has no place in other ranges."""
    undo = "put it back as it was, or choose another output_dir"
    for values in drawn:
        if values.keys() != space.ranges.keys():
            before, now = (", ".join(sorted(keys)) for keys in (values, space.ranges))
            raise UsageError(
                f"{space.source}: [sweep.ranges]: its values were drawn for {before}, not for {now}; {undo}"
            )
        for key, value in values.items():
            possible = space.ranges[key]
            if isinstance(possible, Range):
                fits = possible.low <= value <= possible.high
                what = f"from {possible.low:g} to {possible.high:g}"
            else:
                fits, what = value in possible, f"one of {shorten(possible)}"
            if not fits:
                raise UsageError(
                    f"{space.source}: [sweep.ranges], {key}: {shorten(value)} was drawn before, and is not "
                    f"{what}; {undo}"
                )


def _place(values: Range | list[Any], value: Any) -> Any:
    return value if isinstance(values, Range) else values.index(value)


def _value(values: Range | list[Any], place: Any) -> Any:
    return place if isinstance(values, Range) else values[place]
