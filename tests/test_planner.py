"""Plans of whole tasks on whole GPUs: valid, never worse than a list schedule, optimal where that shows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from gshare.agent.errors import UsageError
from gshare.coordinator import plan_cp_sat
from gshare.coordinator.plan import Assignment, Plan, Task, check_tasks, lower_bound_ms, plan_fault
from gshare.coordinator.plan_cp_sat import Solved
from gshare.coordinator.plan_list import left_shifted, list_schedule, longest_first
from gshare.coordinator.planner import best_plan, greedy_plan
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from planner_exact import smallest_makespan

#: Far more than any of these needs: what a test finds is not a matter of the machine's load.
PATIENT = 120.0


def gpus(count: int) -> tuple[str, ...]:
    return tuple(f"g{i}" for i in range(count))


def confined(allowed: Sequence[str] | None) -> frozenset[str] | None:
    return None if allowed is None else frozenset(allowed)


@st.composite
def instances(draw: st.DrawFn, most: int = 5) -> tuple[list[Task], tuple[str, ...]]:
    """Up to `most` tasks of 1, 2 or 4 GPUs on 1 to 4; some confined, some running."""
    there = gpus(draw(st.integers(1, 4)))
    idle = set(there)
    tasks = []
    for number in range(draw(st.integers(1, most))):
        allowed = confined(draw(st.none() | st.lists(st.sampled_from(there), min_size=1, unique=True)))
        usable = len(allowed) if allowed is not None else len(there)
        wide = draw(st.sampled_from([n for n in (1, 2, 4) if n <= usable]))
        task = Task(f"t{number}", draw(st.integers(1, 12)), wide, allowed)
        here = [gpu for gpu in task.usable(there) if gpu in idle]
        if len(here) >= wide and draw(st.integers(0, 3)) == 0:
            task = task._replace(running_on=tuple(here[:wide]))
            idle -= set(here[:wide])
        tasks.append(task)
    return tasks, there


@given(instances(most=8))
@settings(max_examples=100, deadline=None)
def test_the_greedy_plan_is_valid_and_no_better_than_the_bound(
    case: tuple[list[Task], tuple[str, ...]],
) -> None:
    tasks, there = case
    plan = greedy_plan(tasks, there)
    assert plan_fault(tasks, there, plan.assignments) is None
    assert plan.bound_ms == lower_bound_ms(tasks, there) <= plan.end_ms == plan.greedy_ms


@given(instances())
@settings(max_examples=60, deadline=None)
def test_with_the_solver_it_is_optimal_and_proven_to_be(case: tuple[list[Task], tuple[str, ...]]) -> None:
    pytest.importorskip("ortools", reason="the extra `plan`")
    tasks, there = case
    exact = smallest_makespan(tasks, there)
    plan = best_plan(tasks, there, seconds=PATIENT)
    assert plan_fault(tasks, there, plan.assignments) is None
    assert (plan.makespan_ms, plan.gap) == (exact, 0.0)
    assert exact <= plan.greedy_ms


@given(instances())
@settings(max_examples=80, deadline=None)
def test_the_bound_is_one(case: tuple[list[Task], tuple[str, ...]]) -> None:
    assert lower_bound_ms(*case) <= smallest_makespan(*case)


@pytest.mark.parametrize(
    ("tasks", "bound"),
    [
        ([Task("long", 9), Task("short", 1)], 9),
        ([Task(f"t{i}", 3) for i in range(9)], 7),  # 27 / 4 = 6.75
        ([Task("a", 5, 3), Task("b", 4, 3)], 9),  # two of three GPUs are never beside one another on four
        ([Task("a", 5, 3), Task("b", 4, 2)], 7),  # w = 2: (4 · 5 + 2 · 4) / 4
        ([Task(f"t{i}", 4, allowed=frozenset({"g0"})) for i in range(3)], 12),
    ],
)
def test_each_part_of_the_bound(tasks: list[Task], bound: int) -> None:
    assert lower_bound_ms(tasks, gpus(4)) == bound


def test_a_bound_that_is_too_high_would_be_seen() -> None:
    """Negative control: the search finds less than a bound of one more."""
    tasks = [Task("a", 5, 3), Task("b", 4, 3)]
    assert smallest_makespan(tasks, gpus(4)) < lower_bound_ms(tasks, gpus(4)) + 1


#: Graham's example for three machines: longest first ends at 11, 5 + 4 | 5 + 4 | 3 + 3 + 3 at 9.
LISTED = [Task("a", 5), Task("b", 5), Task("c", 4), Task("d", 4), Task("e", 3), Task("f", 3), Task("g", 3)]


def test_the_solver_beats_the_list_where_it_can() -> None:
    pytest.importorskip("ortools", reason="the extra `plan`")
    there = gpus(3)
    plan = best_plan(LISTED, there, seconds=PATIENT)
    assert (plan.method, plan.makespan_ms, plan.gap) == ("cp-sat", 9, 0.0)
    assert plan.greedy_ms == greedy_plan(LISTED, there).end_ms == 11


def test_the_same_tasks_give_the_same_plan() -> None:
    pytest.importorskip("ortools", reason="the extra `plan`")
    assert best_plan(LISTED, gpus(3), seconds=PATIENT) == best_plan(LISTED, gpus(3), seconds=PATIENT)


def test_without_the_solver_it_is_the_list_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    monkeypatch.setitem(sys.modules, "ortools", None)
    assert best_plan(LISTED, gpus(3)) == greedy_plan(LISTED, gpus(3))


def test_another_missing_module_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: only `ortools` itself may be absent."""

    def broken(*_: object) -> Solved:
        raise ModuleNotFoundError("no module named pandas", name="pandas")

    monkeypatch.setattr(plan_cp_sat, "solve", broken)
    with pytest.raises(ModuleNotFoundError, match="pandas"):
        best_plan(LISTED, gpus(3))


def test_a_solver_that_is_worse_or_late_gives_the_greedy_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    one_after_another = left_shifted(
        [Assignment(task.name, ("g0",), i, i + task.duration_ms) for i, task in enumerate(LISTED)]
    )
    shortest_first = list_schedule(list(reversed(longest_first(LISTED))), gpus(3))
    greedy = greedy_plan(LISTED, gpus(3))
    assert max(one.end_ms for one in shortest_first) > greedy.end_ms
    for found in (one_after_another, shortest_first, []):
        monkeypatch.setattr(plan_cp_sat, "solve", lambda *_, found=found: Solved(found, 9))
        plan = best_plan(LISTED, gpus(3))
        assert (plan.assignments, plan.method, plan.end_ms) == (greedy.assignments, "greedy", greedy.end_ms)
        assert plan.bound_ms == 9


def test_a_broken_solver_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a plan that puts two tasks on one GPU at once, forgets one, or cuts one short."""
    good = list_schedule(LISTED, gpus(3))
    twice = [one._replace(start_ms=0, end_ms=one.end_ms - one.start_ms, gpus=("g0",)) for one in good]
    short = [good[0]._replace(end_ms=good[0].end_ms - 1), *good[1:]]
    assert plan_fault(LISTED, gpus(3), good) is None
    assert "before that is free" in (plan_fault(LISTED, gpus(3), twice) or "")
    assert "another duration" in (plan_fault(LISTED, gpus(3), short) or "")
    assert "not every task" in (plan_fault(LISTED, gpus(3), good[1:]) or "")
    wide = [Task("w", 2, 2, frozenset({"g0", "g1"}))]
    for where in (("g0",), ("g0", "g0"), ("g0", "g2")):
        assert "wrong GPUs" in (plan_fault(wide, gpus(3), [Assignment("w", where, 0, 2)]) or "")
    running = [Task("r", 2, running_on=("g0",))]
    assert "runs already" in (plan_fault(running, gpus(3), [Assignment("r", ("g0",), 1, 3)]) or "")


def test_a_solver_with_an_invalid_plan_never_gets_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its starts are only an order: what comes of them is checked."""
    together = [Assignment(task.name, ("g0",), 0, task.duration_ms) for task in LISTED]
    monkeypatch.setattr(plan_cp_sat, "solve", lambda *_: Solved(together, 9))
    plan = best_plan(LISTED, gpus(3))
    assert plan_fault(LISTED, gpus(3), plan.assignments) is None
    short = [one._replace(task="a") for one in together]
    monkeypatch.setattr(plan_cp_sat, "solve", lambda *_: Solved(short, 9))
    with pytest.raises(KeyError):
        best_plan(LISTED, gpus(3))


def test_a_planner_that_is_not_optimal_is_caught() -> None:
    """Negative control of the comparison with the search: the list schedule alone does not pass it."""
    assert greedy_plan(LISTED, gpus(3)).makespan_ms > smallest_makespan(LISTED, gpus(3)) == 9


def test_confined_tasks_keep_their_gpus_free() -> None:
    """The anyone's task goes where the confined one cannot."""
    tasks = [Task("any", 6), Task("only-0", 5, allowed=frozenset({"g0"}))]
    plan = greedy_plan(tasks, gpus(2))
    assert {one.task: one.gpus for one in plan.assignments} == {"any": ("g1",), "only-0": ("g0",)}
    assert plan.makespan_ms == 6


def test_when_the_time_is_over_the_gap_says_how_far_it_may_be() -> None:
    """A millisecond is not even enough to look at the model."""
    pytest.importorskip("ortools", reason="the extra `plan`")
    tasks = [Task(f"t{i}", 1000 + 7919 * i % 613, (1, 1, 2, 4)[i % 4]) for i in range(24)]
    plan = best_plan(tasks, gpus(8), seconds=0.001)
    assert plan_fault(tasks, gpus(8), plan.assignments) is None
    assert plan.end_ms <= plan.greedy_ms
    assert plan.gap == (plan.end_ms - plan.bound_ms) / plan.end_ms > 0


def test_more_tasks_than_the_solver_can_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of so many would take longer to make than the search may."""
    monkeypatch.setattr(plan_cp_sat, "MOST_CLAUSES", 10)
    pytest.importorskip("ortools", reason="the extra `plan`")
    assert best_plan(LISTED, gpus(3), seconds=PATIENT) == greedy_plan(LISTED, gpus(3))


def test_a_plan_without_tasks_ends_at_once() -> None:
    plan = best_plan([], gpus(2))
    assert (plan.assignments, plan.makespan_ms, plan.gap, plan.starts) == ((), 0, 0.0, ())


def test_a_plan_at_another_time() -> None:
    plan = Plan((Assignment("a", ("g0",), 0, 4), Assignment("b", ("g0",), 4, 5)), 5, 5, "greedy").at(100)
    assert [(one.start_ms, one.end_ms) for one in plan.assignments] == [(100, 104), (104, 105)]
    assert (plan.makespan_ms, plan.bound_ms, plan.greedy_ms, plan.gap) == (5, 105, 105, 0.0)
    assert [one.task for one in plan.starts] == ["a"]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([Task("a", 1), Task("a", 2)], "task 'a': there is another of that name"),
        ([Task("a", 0)], "duration 0 ms"),
        ([Task("a", 10**15)], "duration 1000000000000000 ms"),
        ([Task("a", 1, 0)], "needs 0 GPUs"),
        ([Task("a", 1, 4)], "needs 4 GPUs at once, and 2 are there"),
        ([Task("a", 1, 2, frozenset({"g0"}))], "needs 2 GPUs at once, and it may use 1"),
        ([Task("a", 1, 1, frozenset({"g7"}))], "no GPU 'g7'; known: g0, g1"),
        ([Task("a", 1, 1, frozenset({"G0"}))], "no GPU 'G0'; did you mean g0?"),
        ([Task("a", 1, 2, None, ("g0",))], "runs on 1 GPUs, but needs 2"),
        (
            [Task("a", 1, 1, None, ("g0",)), Task("b", 1, 1, None, ("g0",))],
            "runs on g0, but so does task 'a'",
        ),
    ],
)
def test_tasks_that_no_plan_can_hold(tasks: list[Task], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_tasks(tasks, gpus(2))
    assert message in str(caught.value)
    with pytest.raises(UsageError):
        best_plan(tasks, gpus(2))
