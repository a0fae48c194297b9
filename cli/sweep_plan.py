"""`gshare sweep plan`: what a sweep would do, from its machine alone, with nothing trained.

The machine itself is driven, each job by as many tokens as its steps have, in the order in which they would
end if all that train at once step together. No loss is known, so those go on that have most before them (of
each number of steps, where these are ranked apart), and nobody's own losses stop it: what is saved by that
comes on top.

Places of those that are stopped within the warm-up go to others (`selection.py`), so what a sweep costs is
bounded by the costliest of all, whatever steps they have made: `most_tokens`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from gshare.agent.data.work import Work
from gshare.agent.jobs.early_exit import SweepExit
from gshare.agent.jobs.packing import Packing
from gshare.agent.jobs.selection import share_of
from gshare.agent.jobs.sweep import Action, Begin, Ended, Paused, Run, Sweep, Trial
from gshare.agent.jobs.sweep_ranges import SampledSpace
from gshare.agent.jobs.sweep_spec import SweepSpec
from gshare.agent.train.trunk_forecast import Forecast, Stretch
from gshare.cli.board import columns, duration
from gshare.cli.sweep_files import Files
from gshare.cli.sweep_memory import Memory
from gshare.cli.sweep_values import is_numbered, values_of, values_text

#: A sweep of hundreds has as many sets: beyond this nobody reads them.
SETS_SHOWN = 30

#: Steps of a warm-up below which a plan says so. SmolLM2, 20 steps, learning rates 2e-5 to 5e-3: after one
#: the order agreed with the final one by rho 0.4 to 0.98, after four by 0.7 to 0.95 (`benchmarks/sweep.py`).
SHORT_WARMUP = 5

#: Keys by which one configuration is more work than another; `data` brings its rows.
_COSTS = frozenset(
    (
        "data",
        "gradient_accumulation_steps",
        "max_steps",
        "num_train_epochs",
        "per_device_train_batch_size",
        "seed",
        "val_fraction",
    )
)


@dataclass(frozen=True)
class Stage:
    """From one admission or end to the next: who trains at once, from which of its steps each."""

    names: tuple[str, ...]
    memory_mb: int
    tokens: float
    trains: Stretch


@dataclass(frozen=True)
class Plan:
    trials: Sequence[Trial]
    work: Mapping[str, Work]
    alone_mb: Mapping[str, int]
    budget_mb: int
    stages: Sequence[Stage]
    tokens: float  # of the `covered` configurations, at most
    tokens_in_full: float  # of training each of these to its end
    covered: int  # all of the sweep; or those of its first draw, where the others may be other work
    tokens_per_second: float | None

    @property
    def tokens_of_stages(self) -> float:
        return sum(stage.tokens for stage in self.stages)


def plan_of(
    trials: Sequence[Trial],
    work: Mapping[str, Work],
    settings: SweepExit,
    memory: Memory,
    *,
    most: int,
    tokens_per_second: float | None,
    sampled: SampledSpace | None = None,
) -> Plan:
    """The plan of these configurations; of a `sampled` sweep, those of its first draw."""
    count = sampled.n_trials if sampled is not None else len(trials)
    places = places_of(settings, count)
    if count > len(trials):  # all places may be theirs, whoever is drawn after them
        settings = msgspec.structs.replace(settings, keep=min(1.0, places / len(trials)))
    # What is drawn later is the same work unless a key of that kind is drawn.
    alike = sampled is not None and _COSTS.isdisjoint(sampled.ranges)
    covered = list(trials) + [trials[0]] * (count - len(trials)) if alike else list(trials)
    return Plan(
        trials=trials,
        work=work,
        alone_mb={trial.name: memory.predicted_mb([trial.name]) for trial in trials},
        budget_mb=memory.budget_mb,
        stages=_stages(trials, work, settings, memory, most=most),
        tokens=most_tokens(covered, work, places),
        tokens_in_full=sum(tokens_of(work[trial.name], trial.total_steps) for trial in covered),
        covered=len(covered),
        tokens_per_second=tokens_per_second,
    )


def most_tokens(trials: Sequence[Trial], work: Mapping[str, Work], places: int) -> float:
    """Of a sweep in which `places` of these go on after the warm-up, whichever: no less than it can cost."""
    rest = sorted((_rest(trial, work[trial.name]) for trial in trials), reverse=True)
    in_full = sum(tokens_of(work[trial.name], trial.total_steps) for trial in trials)
    return in_full - sum(rest[places:])


def places_of(settings: SweepExit, count: int) -> int:
    """How many of `count` go on after the warm-up."""
    return share_of(settings.keep if settings.underperformance else 1.0, count)


def _rest(trial: Trial, work: Work) -> float:
    """Tokens after its warm-up; 0 where it has none, as it is not stopped then."""
    return tokens_of(work, trial.total_steps) - tokens_of(work, trial.boundary) if trial.boundary else 0.0


def _stages(
    trials: Sequence[Trial], work: Mapping[str, Work], settings: SweepExit, memory: Memory, *, most: int
) -> list[Stage]:
    """Where nobody leaves the warm-up early, and those with most before them have the lowest losses."""
    by_name = {trial.name: trial for trial in trials}
    costliest = sorted(trials, key=lambda trial: -_rest(trial, work[trial.name]))
    loss = {trial.name: float(index) for index, trial in enumerate(costliest)}
    sweep = Sweep(trials, settings, Packing(memory.fits, most=most))
    done = dict.fromkeys(by_name, 0)
    running: dict[str, int] = {}  # job: the step at which it pauses or ends
    stages: list[Stage] = []

    def start(actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Run):
                running[action.job] = action.pause_at or by_name[action.job].total_steps

    start(sweep.handle(Begin()))
    while running:
        steps = min(until - done[name] for name, until in running.items())
        names = tuple(running)
        tokens = 0.0
        trains = Stretch({name: done[name] for name in names}, steps)
        for name in names:
            tokens += tokens_of(work[name], done[name] + steps) - tokens_of(work[name], done[name])
            done[name] += steps
        stages.append(Stage(names, memory.predicted_mb(names), tokens, trains))
        for name in names:
            if done[name] < running[name]:
                continue
            del running[name]
            if done[name] == by_name[name].total_steps:
                start(sweep.handle(Ended(name, "completed", done[name], loss[name], loss[name])))
            else:
                start(sweep.handle(Paused(name, done[name], loss[name])))
    return stages


def tokens_of(work: Work, step: int) -> float:
    """Of the first `step` steps, each row as the mean of its data."""
    return work.samples(step) * work.mean_tokens


def print_plan(plan: Plan, spec: SweepSpec, trunk: Forecast, files: Files, *, json_lines: bool) -> None:
    """On stdout: it is what the command gives."""
    rate = plan.tokens_per_second
    seconds = plan.tokens / rate if rate else None
    in_full = plan.tokens_in_full / rate if rate else None
    if json_lines:
        print(json.dumps(_as_json(plan, spec, trunk, files, seconds, in_full)), flush=True)
        return
    title = ("configuration", "batch", "steps", "warm-up", "samples", "alone, MiB")
    values = {name: values_text(each) for name, each in values_of(spec).items()}
    numbered = any(map(is_numbered, values))
    lines: list[tuple[str, ...]] = [(*title, "values") if numbered else title]
    for trial in plan.trials:
        samples = plan.work[trial.name].samples(trial.total_steps)
        cells = (trial.batch, trial.total_steps, trial.boundary, samples, plan.alone_mb[trial.name])
        line = (trial.name, *map(str, cells))
        lines.append((*line, values[trial.name]) if numbered else line)
    print("\n".join(columns(lines)))
    widest = max(plan.stages, key=lambda stage: stage.memory_mb)
    most = max(len(stage.names) for stage in plan.stages)
    print(
        f"{len(plan.trials)} configurations, {most} at once at most; largest set {widest.memory_mb:,} MiB of "
        f"{plan.budget_mb:,}"
    )
    print("\n".join(_together(plan.stages)))
    print("\n".join(_told_tokens(plan, spec.sampled.n_trials if spec.sampled is not None else 0)))
    print(trunk.told())
    print(files.told())
    if note := short_warmup(plan.trials):
        print(note)
    time = (
        f"{duration(seconds)} at most, {duration(in_full)} in full"
        if rate
        else "not known; --tokens-per-second says how fast it trains"
    )
    print(f"time: {time}", flush=True)


def _told_tokens(plan: Plan, n_trials: int) -> list[str]:
    """What the plan covers, and costs at most."""
    drawn, lines = len(plan.trials), []
    which = ""
    if drawn < n_trials:
        others = f"the first {drawn} of {n_trials}; the others are drawn from their losses"
        if plan.covered == n_trials:
            which = f"all {n_trials}: "
            lines.append(f"{others}, and each is as much work")
        else:
            which = f"the first {drawn} alone: " if drawn > 1 else "the first alone: "
            lines.append(f"{others}, and what they cost hangs on what is drawn")
    lines.append(
        f"{which}{plan.tokens:,.0f} tokens at most, of {plan.tokens_in_full:,.0f} in full "
        f"({1 - plan.tokens / plan.tokens_in_full:.1%} less; each row as its data's mean)"
    )
    if plan.covered == drawn and plan.tokens > plan.tokens_of_stages * (1 + 1e-9):
        lines.append(
            f"{plan.tokens_of_stages:,.0f} of them at most where nobody is stopped within its warm-up: "
            "places are shared out among those that have made as many steps"
        )
    return lines


def short_warmup(trials: Sequence[Trial]) -> str:
    """What is to be said of a warm-up that tells configurations apart by hardly any step; "" of others."""
    ranked = [trial for trial in trials if trial.boundary]
    if len(ranked) < 2 or (least := min(ranked, key=lambda one: one.boundary)).boundary >= SHORT_WARMUP:
        return ""
    steps = "1 step" if least.boundary == 1 else f"{least.boundary} steps"
    mend = math.ceil(100 * SHORT_WARMUP / least.total_steps) / 100
    longer = Trial.of(least.name, batch=least.batch, total_steps=least.total_steps, warmup=mend).boundary
    cure = f"warmup = {mend:g} gives it {longer}" if mend <= 0.5 else "train for more steps"
    return f"a short warm-up: {least.name} is ranked after {steps} of {least.total_steps}; {cure}"


def _together(stages: Sequence[Stage]) -> list[str]:
    """Who trains beside whom, in turn: a line a set; one that goes on with the same members is one."""
    sets: list[Stage] = []
    for stage in stages:
        goes_on = bool(sets) and sets[-1].names == stage.names
        before = sets.pop().tokens if goes_on else 0.0
        sets.append(replace(stage, tokens=before + stage.tokens))
    lines: list[tuple[str, ...]] = [("", "MiB", "tokens", "train together")]
    for number, stage in enumerate(sets[:SETS_SHOWN], start=1):
        lines.append((str(number), f"{stage.memory_mb:,}", f"{stage.tokens:,.0f}", ", ".join(stage.names)))
    left = len(sets) - SETS_SHOWN
    return columns(lines) + ([f"and {left} sets more; --json has them all"] if left > 0 else [])


def _as_json(
    plan: Plan,
    spec: SweepSpec,
    trunk: Forecast,
    files: Files,
    seconds: float | None,
    in_full: float | None,
) -> dict[str, Any]:
    return {
        "type": "sweep_plan",
        "name": spec.name,
        "budget_mb": plan.budget_mb,
        "configurations": [
            {
                "name": trial.name,
                "hyper_parameters": values,
                "batch": trial.batch,
                "total_steps": trial.total_steps,
                "boundary": trial.boundary,
                "samples_total": plan.work[trial.name].samples(trial.total_steps),
                "memory_mb": plan.alone_mb[trial.name],
            }
            for trial, values in zip(plan.trials, spec.hyper_parameters, strict=True)
        ],
        "stages": [
            {"names": list(stage.names), "memory_mb": stage.memory_mb, "tokens": stage.tokens}
            for stage in plan.stages
        ],
        "tokens": plan.tokens,
        "tokens_in_full": plan.tokens_in_full,
        "tokens_of": plan.covered,
        "configurations_in_all": spec.sampled.n_trials if spec.sampled is not None else len(plan.trials),
        "trunk": trunk.as_json(),
        "files_bytes": files.most,
        "files_room_bytes": files.room,
        "seconds": seconds,
        "seconds_in_full": in_full,
    }
