"""A sweep's machine: the same winner whatever fits at once and whoever is killed; nobody loses steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from gshare.agent.jobs.early_exit import Rank, SweepExit
from gshare.agent.jobs.packing import Packing
from gshare.agent.jobs.sweep import (
    Action,
    Added,
    Ask,
    Begin,
    Ended,
    Note,
    Paused,
    Resumed,
    Run,
    Stop,
    Sweep,
    Trial,
)
from gshare.agent.jobs.sweep_records import Decision
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sweep_engine import Curve, Engine

#: Few values, so that ties are common.
LOSS = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0]) | st.floats(0.01, 9.0)


@st.composite
def _curves(draw: st.DrawFn) -> dict[str, Curve]:
    curves = {}
    for number in range(draw(st.integers(1, 9))):
        losses = tuple(draw(st.lists(LOSS, min_size=1, max_size=12)))
        exit_at = draw(st.integers(0, len(losses))) if draw(st.booleans()) else 0
        nan_at = draw(st.integers(2, 12)) if draw(st.integers(0, 4)) == 0 else 0
        curves[f"j{number}"] = Curve(losses, exit_at, nan_at, draw(st.sampled_from([1, 2, 4])))
    return curves


def _expected(curves: dict[str, Curve], early: SweepExit) -> tuple[dict[str, int], set[str], str | None]:
    """From the definition: each job's last step, who was selected, and the winner."""
    last: dict[str, int] = {}
    ranked: list[tuple[float, int, str]] = []
    for index, (name, curve) in enumerate(curves.items()):
        ends = [step for step in (curve.exit_at, curve.nan_at) if 0 < step <= len(curve.losses)]
        last[name] = min(ends, default=len(curve.losses))
        boundary = math.ceil(early.warmup * len(curve.losses) - 1e-9)
        if boundary >= len(curve.losses):
            if not ends:
                ranked.append((curve.losses[-1], index, name))
        elif last[name] > boundary:
            ranked.append((curve.losses[boundary - 1], index, name))
            if not early.underperformance:
                continue
    keep = math.ceil(early.keep * len(curves) - 1e-9) if early.underperformance else len(ranked)

    def group(name: str) -> int:
        """Steps at the ranking."""
        steps = len(curves[name].losses)
        return min(steps, math.ceil(early.warmup * steps - 1e-9)) if early.rank == "same_steps" else 0

    order = [name for _, _, name in sorted(ranked)]
    sizes = Counter(group(name) for name in curves)
    # Whoever is n-th of its group waits for the group's n-th place. Whole places first, then one round after
    # the other, in each the larger remainder and then the lower loss.
    claims = []
    for steps, size in sizes.items():
        whole, rest = divmod(round(early.keep * size, 9), 1)
        for place, name in enumerate(name for name in order if group(name) == steps):
            claims.append((max(0, place - int(whole) + 1), -rest, order.index(name), name))
    on = [name for *_, name in sorted(claims)][:keep]
    if not early.underperformance:
        on = order
    selected = set()
    for name in order:
        boundary = math.ceil(early.warmup * len(curves[name].losses) - 1e-9)
        if boundary >= len(curves[name].losses):
            continue
        if name in on:
            selected.add(name)
        else:
            last[name] = boundary
    best = []
    for index, (name, curve) in enumerate(curves.items()):
        seen = curve.losses[: last[name]]
        best.append((min(seen), index, name))
    return last, selected, min(best)[2] if best else None


def _selected(engine: Engine) -> set[str]:
    return {one.job for one in engine.decisions if one.event == "selected"}


def _check(engine: Engine, sweep: Sweep) -> None:
    last, selected, winner = _expected(engine.curves, engine.settings)
    assert _selected(engine) == selected
    assert {name: max(steps) for name, steps in engine.steps_done.items()} == last
    assert sweep.winner == winner
    assert engine.at_once <= engine.most or engine.most == 0
    assert engine.passed_over == []
    for name, steps in engine.steps_done.items():
        assert set(steps) == set(range(1, last[name] + 1)), name


EARLY = st.builds(
    SweepExit,
    warmup=st.sampled_from([0.05, 0.2, 0.5, 0.9]),
    keep=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
    underperformance=st.sampled_from([True, True, True, False]),
    rank=st.sampled_from(["same_steps", "same_steps", "all"]),
)


@given(_curves(), EARLY, st.integers(0, 4), st.integers(0, 10**6))
@settings(deadline=None)
def test_the_result_is_that_of_the_definition_whatever_fits_at_once(
    curves: dict[str, Curve], early: SweepExit, most: int, seed: int
) -> None:
    engine = Engine(curves, early, most, 0, seed)
    _check(engine, engine.run())
    for name, steps in engine.steps_done.items():
        assert steps == sorted(set(steps)), f"{name} made a step twice"


@given(_curves(), EARLY, st.integers(0, 4), st.integers(1, 12), st.integers(0, 10**6))
@example(
    {"j0": Curve((0.25,) * 3 + (0.5,) * 3 + (0.25,) * 5), **{f"j{i}": Curve((0.25,)) for i in range(1, 6)}},
    SweepExit(warmup=0.5, keep=0.1),
    0,
    2,
    3901,
)  # killed after its best loss and before its boundary
@settings(deadline=None)
def test_kills_at_any_action_change_nothing(
    curves: dict[str, Curve], early: SweepExit, most: int, kills: int, seed: int
) -> None:
    engine = Engine(curves, early, most, kills, seed)
    _check(engine, engine.run())


@given(_curves(), EARLY, st.integers(0, 4), st.integers(1, 12), st.integers(0, 10**6))
@example({f"j{i}": Curve((2.0, 1.0) * 5) for i in range(4)}, SweepExit(warmup=0.5, keep=1.0), 0, 4, 7)
@settings(deadline=None)
def test_kills_that_take_checkpoints_change_nothing(
    curves: dict[str, Curve], early: SweepExit, most: int, kills: int, seed: int
) -> None:
    """A warm-up that is repeated has the evaluation at its boundary again, ranked or not."""
    engine = Engine(curves, early, most, kills, seed, forgets=True)
    _check(engine, engine.run())


class _Hasty(Sweep):
    """Ranks whoever is there as soon as somebody is: what a sweep that did not rotate would do."""

    def _go_on(self) -> list[Action]:
        return [*self._rank(), *self._admit()]


class _Rounding(Sweep):
    """Reads losses back less exactly than they were written."""

    def replay(self, decisions: Sequence[Decision]) -> None:  # type: ignore[override]
        super().replay([msgspec.structs.replace(one, evidence=_rounded(one.evidence)) for one in decisions])


def _rounded(evidence: dict[str, object]) -> dict[str, object]:
    return {key: round(value) if isinstance(value, float) else value for key, value in evidence.items()}


@pytest.mark.parametrize(("broken", "kills"), [(_Hasty, 0), (_Rounding, 5)])
def test_the_properties_notice_a_broken_machine(broken: type[Sweep], kills: int) -> None:
    curves = {f"j{i}": Curve(tuple(9.0 - i / 50 - step / 10 for step in range(10))) for i in range(8)}
    wrong = 0
    for seed in range(20):
        engine = Engine(curves, SweepExit(warmup=0.2), 2, kills, seed, broken)
        try:
            _check(engine, engine.run())
        except AssertionError:
            wrong += 1
    assert wrong > 0


# ---------------------------------------------------------------------- by hand


def _sweep(count: int, *, most: int = 0, **early: object) -> Sweep:
    trials = [Trial.of(f"j{i}", batch=1, total_steps=20, warmup=0.05) for i in range(count)]
    return Sweep(trials, SweepExit(**early), Packing(lambda names: True, most=most))  # type: ignore[arg-type]


def _of(actions: Sequence[Action], kind: type[Action]) -> list[str]:
    return [action.job for action in actions if isinstance(action, kind) and not isinstance(action, Ask)]


def test_the_boundary_is_rounded_up_and_lies_before_the_last_step() -> None:
    def boundary(steps: int, warmup: float) -> int:
        return Trial.of("a", batch=1, total_steps=steps, warmup=warmup).boundary

    assert [boundary(steps, 0.05) for steps in (1, 2, 20, 21, 100)] == [0, 1, 1, 2, 5]
    assert boundary(30, 0.1) == 3  # 0.1 · 30 is above 3 in floats
    assert boundary(30, 1e-12) == 1


@pytest.mark.parametrize(
    ("rank", "on"), [("same_steps", ["small0", "large0"]), ("all", ["small0", "small1"])]
)
def test_a_large_batch_is_compared_with_its_like(rank: Rank, on: list[str]) -> None:
    """Batches of 8 have made one step of 20 where batches of 1 have made eight of 160, and are behind all."""
    trials = [
        Trial.of(f"{size}{i}", batch=batch, total_steps=steps, warmup=0.05)
        for size, batch, steps in (("small", 1, 160), ("large", 8, 20))
        for i in range(4)
    ]
    sweep = Sweep(trials, SweepExit(rank=rank), Packing(lambda names: True))
    sweep.handle(Begin())
    actions: list[Action] = []
    for trial in trials:
        loss = (1.0 if trial.batch == 1 else 5.0) + 0.1 * int(trial.name[-1])
        actions = sweep.handle(Paused(trial.name, trial.boundary, loss))
    assert sorted(_of(actions, Run)) == sorted(on)
    notes = {
        one.job: one for one in actions if isinstance(one, Note) and one.event in ("selected", "stopped")
    }
    assert notes["large1"].evidence["rank"] == 6
    assert ("rank_alike" in notes["large1"].evidence) is (rank == "same_steps")
    if rank == "same_steps":
        assert notes["large1"].evidence["steps"] == 1
        assert "number 2 of 4 that have made as many steps" in notes["large1"].reason


def test_the_smallest_share_keeps_one() -> None:
    sweep = _sweep(3, keep=1e-12)
    sweep.handle(Begin())
    actions: list[Action] = []
    for i in range(3):
        actions = sweep.handle(Paused(f"j{i}", 1, 5.0 - i))
    assert _of(actions, Run) == ["j2"]
    assert _of(actions, Stop) == ["j1", "j0"]


def test_a_quarter_is_kept_rounded_up_and_the_rest_is_stopped_with_evidence() -> None:
    sweep = _sweep(5)
    assert _of(sweep.handle(Begin()), Run) == ["j0", "j1", "j2", "j3", "j4"]
    actions: list[Action] = []
    for i in range(5):
        actions = sweep.handle(Paused(f"j{i}", 1, 5.0 - i))
    assert _of(actions, Run) == ["j3", "j4"]  # in the order of the file, as all fit
    assert _of(actions, Stop) == ["j2", "j1", "j0"]
    stops = [one for one in actions if isinstance(one, Note) and one.event == "stopped"]
    assert {one.pattern for one in stops} == {"underperformance"}
    assert stops[0].evidence["rank"] == 3
    assert stops[0].evidence["last_kept_val_loss"] == 2.0
    assert (
        "validation loss 3 is number 3 of 5 at the end of the warm-up; 2 go on, the last of them with 2"
        in stops[0].reason
    )


def test_slots_are_filled_as_they_come_free_and_the_ranking_waits_for_the_last() -> None:
    sweep = _sweep(4, most=2)
    assert _of(sweep.handle(Begin()), Run) == ["j0", "j1"]
    assert _of(sweep.handle(Paused("j1", 1, 1.0)), Run) == ["j2"]
    assert _of(sweep.handle(Ended("j0", "diverged", 1, reason="nan")), Run) == ["j3"]
    assert sweep.handle(Paused("j2", 1, 2.0))[1:] == []
    last = sweep.handle(Paused("j3", 1, 3.0))
    assert _of(last, Stop) == ["j2", "j3"]
    assert Run("j1", 0) in last


def test_a_person_steers() -> None:
    """Stopped before the ranking: not ranked. Resumed at the boundary: not stopped by the ranking."""
    sweep = _sweep(4)
    sweep.handle(Begin())
    sweep.handle(Paused("j0", 1, 1.0))
    sweep.handle(Ended("j0", "stopped", 1, 1.0, 1.0, "user", "stopped by hand"))
    sweep.handle(Paused("j1", 1, 9.0))
    assert _of(sweep.handle(Resumed("j1", 1)), Note) == ["j1"]
    sweep.handle(Paused("j2", 1, 2.0))
    actions = sweep.handle(Paused("j3", 1, 3.0))
    assert Run("j2", 0) in actions
    assert _of(actions, Stop) == ["j3"]
    assert sweep.phase("j1") == "training"


def test_all_diverged_is_an_end_without_a_winner() -> None:
    sweep = _sweep(2)
    sweep.handle(Begin())
    sweep.handle(Ended("j0", "diverged", 1))
    assert not sweep.done
    sweep.handle(Ended("j1", "failed", 1))
    assert sweep.done
    assert sweep.winner is None


def test_a_failed_job_is_tried_again_when_resumed_unless_the_others_were_ranked() -> None:
    def resumed(*decisions: Decision) -> list[str]:
        sweep = _sweep(2)
        sweep.replay(decisions)
        return _of(sweep.handle(Begin()), Run)

    failed = Decision(time=0, job="j0", event="failed", step=0)
    at = Decision(time=0, job="j1", event="paused", step=1, evidence={"val_loss": 1.0})
    chosen = Decision(time=0, job="j1", event="selected", step=1)
    assert resumed(failed, at) == ["j0"]
    assert resumed(failed, at, chosen) == ["j1"]


def test_a_chosen_one_that_repeats_its_warm_up_pauses_at_its_boundary_and_goes_on() -> None:
    decided = [
        Decision(time=0, job="j0", event="paused", step=1, evidence={"val_loss": 1.0}),
        Decision(time=0, job="j1", event="stopped", step=1, pattern="underperformance"),
        Decision(time=0, job="j0", event="selected", step=1),
    ]
    for _ in range(2):  # killed again in between
        sweep = _sweep(2)
        sweep.replay(decided)
        actions = sweep.handle(Begin())
        assert actions == [Note("j0", "resumed", 1), Run("j0", 1)]
        decided.append(Decision(time=0, job="j0", event="resumed", step=1))
        assert sweep.lost("j0", 1) == sweep.lost("j0", 5) == 0
        assert sweep.lost("j0", 0) == 1
        assert sweep.handle(Resumed("j0", 0)) == []
        assert sweep.lost("j0", 0) == 0  # it is told once
    assert sweep.handle(Paused("j0", 1, 1.0)) == [Run("j0", 0)]
    assert sweep.handle(Resumed("j0", 1)) == []
    by_hand = sweep.handle(Paused("j0", 1, 1.0))
    assert by_hand == [Note("j0", "paused", 1, reason="by the user")]


def test_a_person_pauses_a_chosen_one_before_its_boundary() -> None:
    trial = Trial.of("j0", batch=1, total_steps=20, warmup=0.25)
    sweep = Sweep([trial], SweepExit(), Packing(lambda names: True))
    sweep.replay([Decision(time=0, job="j0", event="selected", step=5)])
    assert _of(sweep.handle(Begin()), Run) == ["j0"]
    assert _of(sweep.handle(Paused("j0", 3, 1.0)), Note) == ["j0"]
    assert _of(sweep.handle(Resumed("j0", 3)), Note) == ["j0"]
    assert sweep.handle(Paused("j0", 5, 1.0)) == [Run("j0", 0)]


def test_a_sampler_is_asked_when_its_last_ones_are_through_the_warm_up() -> None:
    trial = Trial.of("j0", batch=1, total_steps=20, warmup=0.05)
    sweep = Sweep([], SweepExit(keep=0.5), Packing(lambda names: True), expects_more=True)
    assert sweep.handle(Begin()) == [Ask()]
    assert _of(sweep.handle(Added((trial,))), Run) == ["j0"]
    assert sweep.handle(Paused("j0", 1, 2.0))[1:] == [Ask()]
    other = Trial.of("j1", batch=1, total_steps=20, warmup=0.05)
    assert _of(sweep.handle(Added((other,))), Run) == ["j1"]
    assert sweep.handle(Paused("j1", 1, 1.0))[1:] == [Ask()]
    actions = sweep.handle(Added(()))
    assert _of(actions, Run) == ["j1"]
    assert _of(actions, Stop) == ["j0"]


@pytest.mark.parametrize("rank", ["same_steps", "all"])
def test_what_a_sampler_is_told_goes_by_the_ranking(rank: Rank) -> None:
    steps = (20, 20, 20, 20, 40)
    trials = [Trial.of(f"j{i}", batch=1, total_steps=total, warmup=0.05) for i, total in enumerate(steps)]
    sweep = Sweep(trials, SweepExit(rank=rank), Packing(lambda names: True), expects_more=True)
    sweep.handle(Begin())
    assert set(sweep.told().values()) == {None}
    by_loss = {"j0": 5.0, "j1": 4.0, "j2": 3.0, "j3": 2.0, "j4": 1.0}
    for job, loss in by_loss.items():
        sweep.handle(Paused(job, 2 if job == "j4" else 1, loss))
    alike = {"j0": 0.875, "j1": 0.625, "j2": 0.375, "j3": 0.125, "j4": 0.5}
    assert sweep.told() == (by_loss if rank == "all" else alike)
