"""What `gshare sweep plan` promises: no sweep costs more than it says, and it says what it covers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from gshare.agent.data.work import Work
from gshare.agent.jobs.early_exit import Rank, SweepExit
from gshare.agent.jobs.selection import Contender, select
from gshare.agent.jobs.sweep import Trial
from gshare.agent.jobs.sweep_ranges import Range, SampledSpace
from gshare.agent.jobs.sweep_spec import SweepSpec
from gshare.agent.train.trunk_forecast import Forecast
from gshare.cli.sweep_files import Files
from gshare.cli.sweep_memory import Memory
from gshare.cli.sweep_plan import Plan, plan_of, print_plan
from gshare.cli.sweep_values import drawn, values_of, values_text
from hypothesis import find, given
from hypothesis import strategies as st


class Room:
    """Of a device that holds `at_once` configurations."""

    budget_mb = 100

    def fits(self, names: Sequence[str]) -> bool:
        return len(names) <= 3

    def predicted_mb(self, names: Sequence[str]) -> int:
        return 10 * len(names)


FILES = Files(Path("/runs/out"), 2_500_000_000, 1_000_000)


@dataclass(frozen=True)
class Case:
    trials: list[Trial]
    work: dict[str, Work]
    settings: SweepExit
    losses: list[float | None]  # None: stopped at the last step of its warm-up

    def plan(self, sampled: SampledSpace | None = None) -> Plan:
        memory = cast("Memory", Room())
        return plan_of(
            self.trials, self.work, self.settings, memory, most=0, tokens_per_second=None, sampled=sampled
        )

    def tokens(self, name: str, step: int) -> float:
        return self.work[name].samples(step) * self.work[name].mean_tokens

    def cost_of(self, losses: Sequence[float | None]) -> float:
        """What a sweep with these losses trains, by its definition."""
        contenders = [
            Contender(one.name, one.boundary or one.total_steps, loss)
            for one, loss in zip(self.trials, losses, strict=True)
        ]
        share = self.settings.keep if self.settings.underperformance else 1.0
        verdicts = select(contenders, share, among_all=self.settings.rank == "all")
        cost = 0.0
        for one in self.trials:
            goes_on = one.name in verdicts and verdicts[one.name].goes_on
            cost += self.tokens(one.name, one.total_steps if goes_on or not one.boundary else one.boundary)
        return cost


def case_of(
    rows: Sequence[tuple[int, int, int]], settings: SweepExit, losses: Sequence[float | None] = ()
) -> Case:
    """`rows`: of each configuration its steps, its batch size and the rows of its data."""
    trials, work = [], {}
    for number, (steps, batch, count) in enumerate(rows):
        trials.append(Trial.of(f"c{number}", batch=batch, total_steps=steps, warmup=settings.warmup))
        per_epoch = -(-count // batch)
        work[f"c{number}"] = Work(steps, per_epoch, count, batch, 2, 7.0)
    return Case(trials, work, settings, list(losses))


RANKS: tuple[Rank, ...] = ("same_steps", "all")
SETTINGS = st.builds(
    SweepExit,
    warmup=st.sampled_from([0.05, 0.25, 0.5]),
    keep=st.sampled_from([0.01, 0.25, 0.34, 0.5, 1.0]),
    rank=st.sampled_from(RANKS),
    underperformance=st.sampled_from([True, True, True, False]),
)
ROWS = st.lists(
    st.tuples(st.sampled_from([1, 4, 8, 20]), st.sampled_from([1, 2, 8]), st.integers(1, 30)),
    min_size=1,
    max_size=12,
)


@st.composite
def cases(draw: st.DrawFn, *, stopped: bool = True) -> Case:
    rows = draw(ROWS)
    loss = st.floats(0.5, 5.0) | st.sampled_from([1.0, 2.0])
    losses = draw(st.lists(st.none() | loss if stopped else loss, min_size=len(rows), max_size=len(rows)))
    return case_of(rows, draw(SETTINGS), losses)


@given(cases())
def test_no_sweep_costs_more_than_its_plan_says(case: Case) -> None:
    plan = case.plan()
    assert case.cost_of(case.losses) <= plan.tokens * (1 + 1e-9)
    assert plan.tokens <= plan.tokens_in_full * (1 + 1e-9)


@given(cases(stopped=False))
def test_without_early_exits_the_stages_are_the_costliest_that_there_can_be(case: Case) -> None:
    costliest = case.plan().tokens_of_stages
    assert case.cost_of(case.losses) <= costliest * (1 + 1e-9)


@given(cases())
def test_where_all_are_ranked_together_the_bound_is_reached(case: Case) -> None:
    case = replace(case, settings=msgspec.structs.replace(case.settings, rank="all"))
    losses = [
        case.tokens(one.name, one.boundary) - case.tokens(one.name, one.total_steps) if one.boundary else 0.0
        for one in case.trials
    ]
    plan = case.plan()
    assert plan.tokens == pytest.approx(case.cost_of(losses)) == pytest.approx(plan.tokens_of_stages)


def test_the_file_s_order_is_no_bound() -> None:
    """Control: where the first of the file go on a plan is exceeded, and the property finds that."""
    find(
        cases(stopped=False),
        lambda case: case.cost_of([*range(len(case.trials))]) * (1 + 1e-9) < case.cost_of(case.losses),
    )
    # Three learning rates, each with a batch of 1 and of 2; the last three cost more than the first three.
    case = case_of([(20, batch, 40) for _ in range(3) for batch in (1, 2)], SweepExit(warmup=0.25, keep=0.34))
    assert case.plan().tokens == 7.0 * (3 * (5 + 10) + 3 * 30)
    assert case.cost_of([float(number) for number in range(6)]) == 7.0 * (3 * (5 + 10) + 2 * 15 + 30)


def test_places_of_those_that_are_stopped_early_are_counted() -> None:
    """Two groups of four: one of each goes on, or, where all short ones are stopped, two of the long ones."""
    case = case_of([(8, 1, 9)] * 4 + [(20, 1, 9)] * 4, SweepExit(warmup=0.25, keep=0.25))
    plan = case.plan()
    assert plan.tokens_of_stages == 7 * (4 * 2 + 4 * 5 + 6 + 15)
    assert plan.tokens == 7 * (4 * 2 + 4 * 5 + 15 + 15) == case.cost_of([None] * 4 + [1.0] * 4)


def spec_of(case: Case, space: SampledSpace | None, **values: Any) -> SweepSpec:
    """All configurations have these values; `values` are those in which they differ."""
    same = {"learning_rate": 0.000123456, "r": 8, "target_modules": ("q_proj", "v_proj"), "lora_alpha": 16}
    adapters = [SimpleNamespace(name=one.name, **same, per_device_train_batch_size=1) for one in case.trials]
    spec = SimpleNamespace(name="s", sampled=space, hyper_parameters=[values] * len(adapters))
    spec.run = SimpleNamespace(adapters=adapters)
    return cast("SweepSpec", spec)


def told(
    case: Case, space: SampledSpace | None, capsys: pytest.CaptureFixture[str]
) -> tuple[str, dict[str, Any]]:
    """As text and as JSON."""
    spec = spec_of(case, space)
    trunk = cast("Forecast", SimpleNamespace(told=lambda: "trunk", as_json=lambda: {}))
    print_plan(case.plan(space), spec, trunk, FILES, json_lines=False)
    text = capsys.readouterr().out
    assert "files: up to 2.5 GB in /runs/out, where 1.0 MB are free" in text
    print_plan(case.plan(space), spec, trunk, FILES, json_lines=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["files_bytes"], found["files_room_bytes"]) == (FILES.most, FILES.room)
    return text, found


def space_of(n_trials: int, **ranges: Range) -> SampledSpace:
    return SampledSpace(dict(ranges), n_trials, batch=2, seed=0)


TWO = case_of([(20, 1, 40)] * 2, SweepExit(warmup=0.25, keep=0.25))


def test_a_sampled_sweep_is_planned_as_a_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Of eight, two are drawn, and both may be those that go on."""
    text, json_object = told(TWO, space_of(8, learning_rate=Range(1e-5, 1e-3)), capsys)
    assert "the first 2 of 8; the others are drawn from their losses, and each is as much work\n" in text
    assert "all 8: 490 tokens at most, of 1,120 in full (56.2% less; each row as its data's mean)\n" in text
    assert (json_object["tokens"], json_object["tokens_in_full"]) == (490, 1120)
    assert (json_object["tokens_of"], json_object["configurations_in_all"]) == (8, 8)


def test_what_is_not_drawn_yet_is_left_out_where_it_may_be_other_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, json_object = told(TWO, space_of(8, per_device_train_batch_size=Range(1, 8)), capsys)
    assert "the first 2 of 8; the others are drawn from their losses, and what they cost hangs on" in text
    assert (
        "the first 2 alone: 280 tokens at most, of 280 in full (0.0% less; each row as its data's mean)\n"
        in text
    )
    assert (json_object["tokens_of"], json_object["configurations_in_all"]) == (2, 8)


def test_where_all_are_drawn_there_are_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    text, json_object = told(TWO, space_of(2, learning_rate=Range(1e-5, 1e-3)), capsys)
    assert "others" not in text
    assert "\n175 tokens at most, of 280 in full (37.5% less; each row as its data's mean)\n" in text
    assert (json_object["tokens_of"], json_object["configurations_in_all"]) == (2, 2)


def test_the_values_of_what_is_called_by_its_number_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    space = SampledSpace({"learning_rate": Range(1e-5, 1e-3), "target_modules": []}, 2, batch=2, seed=0)
    case = case_of([(20, 1, 40)] * 2, SweepExit())
    case.trials[:] = [replace(one, name=f"s-c{number}") for number, one in enumerate(case.trials, start=1)]
    case.work.update({"s-c1": case.work["c0"], "s-c2": case.work["c1"]})
    text, _ = told(case, space, capsys)
    lines = text.splitlines()
    assert lines[0].endswith("  values")
    assert lines[1].startswith("s-c1 ")
    assert lines[1].endswith("  lr 0.000123, target_modules q_proj+v_proj")
    spec = spec_of(case, space)
    assert drawn(spec) == [
        f"s-c{number}: drawn with lr 0.000123, target_modules q_proj+v_proj" for number in (1, 2)
    ]
    assert drawn(spec, 1) == drawn(spec)[1:]
    # Of a grid only that in which its configurations differ, and it is not drawn.
    assert values_of(spec_of(case, None, r=4)) == {"s-c1": {"r": 4}, "s-c2": {"r": 4}}
    assert drawn(spec_of(case, None, r=4)) == []


def test_names_that_say_their_values_stand_alone(capsys: pytest.CaptureFixture[str]) -> None:
    case = case_of([(20, 1, 40)], SweepExit())
    case = replace(case, trials=[replace(case.trials[0], name="s-r8")], work={"s-r8": case.work["c0"]})
    trunk = cast("Forecast", SimpleNamespace(told=lambda: "trunk"))
    print_plan(case.plan(), spec_of(case, None, r=8), trunk, FILES, json_lines=False)
    assert "values" not in capsys.readouterr().out


def test_values_in_short() -> None:
    values = {
        "learning_rate": 1.23456e-5,
        "per_device_train_batch_size": 4,
        "optim": "adamw",
        "max_steps": None,
    }
    assert values_text(values) == "lr 1.23e-05, batch 4, optim adamw, max_steps None"
    assert values_text({}) == ""
