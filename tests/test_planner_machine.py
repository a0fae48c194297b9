"""The planner over time: replanned when a task comes and when one ends, whatever it took; pure."""

from __future__ import annotations

import heapq

import pytest
from gshare.agent.errors import UsageError
from gshare.coordinator.plan import Plan, Task, plan_fault
from gshare.coordinator.planner import Arrived, Ended, Planner, best_plan, greedy_plan
from hypothesis import given, settings
from hypothesis import strategies as st

GPUS = ("g0", "g1", "g2", "g3")

#: (when it comes, what it was said to take, what it takes, GPUs)
Life = tuple[int, int, int, int]
lives = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 10), st.integers(1, 15), st.sampled_from([1, 2, 4])),
    min_size=1,
    max_size=8,
)


def play(planner: Planner, work: list[Life]) -> tuple[dict[str, tuple[int, int]], list[Plan]]:
    """Runs what the planner says to start, for as long as it really takes: (start and end by name, plans)."""
    queue: list[tuple[int, int, str]] = []  # ends before arrivals of the same moment
    for number, (comes, *_) in enumerate(work):
        heapq.heappush(queue, (comes, 1, f"t{number}"))
    ran: dict[str, tuple[int, int]] = {}
    busy: dict[str, str] = {}
    plans = []
    while queue:
        now, arrives, name = heapq.heappop(queue)
        _, said, takes, wide = work[int(name[1:])]
        if arrives:
            plan = planner.handle(Arrived(now, (Task(name, said, wide),)))
        else:
            busy = {gpu: owner for gpu, owner in busy.items() if owner != name}
            plan = planner.handle(Ended(now, name))
        plans.append(plan)
        for one in plan.starts:
            assert one.task not in ran
            takes = work[int(one.task[1:])][2]
            ran[one.task] = (now, now + takes)
            for gpu in one.gpus:
                assert gpu not in busy, f"{one.task} on {gpu} beside {busy[gpu]}"
                busy[gpu] = one.task
            heapq.heappush(queue, (now + takes, 0, one.task))
    return ran, plans


@given(lives)
@settings(max_examples=60, deadline=None)
def test_every_task_runs_once_and_nothing_runs_on_a_gpu_that_is_taken(work: list[Life]) -> None:
    planner = Planner(GPUS, greedy_plan)
    ran, plans = play(planner, work)
    assert sorted(ran) == sorted(f"t{i}" for i in range(len(work)))
    assert (planner.running, planner.waiting) == ({}, ())
    assert all(plan.now_ms <= plan.bound_ms <= plan.end_ms <= plan.greedy_ms for plan in plans)


@given(lives)
@settings(max_examples=8, deadline=None)
def test_the_same_with_the_solver_and_twice_the_same(work: list[Life]) -> None:
    pytest.importorskip("ortools", reason="the extra `plan`")
    first = play(Planner(GPUS, seconds=120.0), work)
    assert sorted(first[0]) == sorted(f"t{i}" for i in range(len(work)))
    assert first == play(Planner(GPUS, seconds=120.0), work)


def test_a_planner_that_forgets_what_runs_is_caught() -> None:
    """Negative control: without the running tasks the second task lands on the first one's GPUs."""

    def forgetful(tasks: list[Task], gpus: tuple[str, ...]) -> Plan:
        return greedy_plan([task for task in tasks if not task.running_on], gpus)

    with pytest.raises(AssertionError, match="beside"):
        play(Planner(GPUS, forgetful), [(0, 5, 5, 4), (1, 5, 5, 4)])  # type: ignore[arg-type]


def test_a_task_that_ends_early_makes_room_at_once() -> None:
    planner = Planner(GPUS, greedy_plan)
    assert [one.task for one in planner.handle(Arrived(0, (Task("long", 100, 4),))).starts] == ["long"]
    waits = planner.handle(Arrived(10, (Task("next", 50, 2),)))
    assert waits.starts == ()
    assert waits.end_ms == 150  # 90 are left of the first
    assert planner.waiting == ("next",)
    plan = planner.handle(Ended(30, "long"))
    assert [(one.task, one.start_ms, one.end_ms) for one in plan.starts] == [("next", 30, 80)]


def test_a_task_that_takes_longer_keeps_its_gpus() -> None:
    planner = Planner(GPUS, greedy_plan)
    planner.handle(Arrived(0, (Task("late", 10, 4),)))
    plan = planner.handle(Arrived(25, (Task("next", 5, 1),)))
    assert plan.starts == ()
    assert {one.task: (one.start_ms, one.running) for one in plan.assignments} == {
        "late": (25, True),
        "next": (26, False),
    }
    assert [one.task for one in planner.handle(Ended(40, "late")).starts] == ["next"]


def test_running_tasks_stay_where_they_are_through_any_replan() -> None:
    pytest.importorskip("ortools", reason="the extra `plan`")
    planner = Planner(GPUS, seconds=120.0)
    planner.handle(Arrived(0, (Task("a", 100, 2),)))
    where = planner.running["a"].gpus
    for number in range(5):
        plan = planner.handle(Arrived(number + 1, (Task(f"b{number}", 7 + number, 1 + number % 2),)))
        assert next(one.gpus for one in plan.assignments if one.task == "a") == where


def test_what_is_told_twice_or_of_nobody_changes_nothing() -> None:
    planner = Planner(GPUS, greedy_plan)
    planner.handle(Arrived(0, (Task("a", 10, 4),)))
    planner.handle(Arrived(0, (Task("b", 10, 4),)))
    for name in ("nobody", "nobody"):
        assert planner.handle(Ended(1, name)).starts == ()
    assert [one.task for one in planner.handle(Ended(2, "a")).starts] == ["b"]
    assert planner.handle(Ended(2, "a")).starts == ()
    assert tuple(planner.running) == ("b",)


def test_a_task_that_waits_can_be_called_off() -> None:
    planner = Planner(GPUS, greedy_plan)
    planner.handle(Arrived(0, (Task("a", 10, 4),)))
    planner.handle(Arrived(0, (Task("b", 10, 4),)))
    plan = planner.handle(Ended(1, "b"))
    assert (plan.end_ms, planner.waiting) == (10, ())


def test_what_cannot_be_taken_leaves_everything_as_it_was() -> None:
    planner = Planner(GPUS, greedy_plan)
    planner.handle(Arrived(0, (Task("a", 10, 4),)))
    wrong = [Task("a", 5), Task("b", 5, 8), Task("c", 5, 1, None, ("g0",)), Task("d", 0)]
    for task in wrong:
        with pytest.raises(UsageError):
            planner.handle(Arrived(1, (Task("fine", 1), task)))
    assert (tuple(planner.running), planner.waiting) == (("a",), ())


def test_what_comes_together_is_planned_together() -> None:
    """Negative control: one after the other the short one is begun first, and the wide one waits for it."""
    wide, short = Task("wide", 10, 4), Task("short", 9, 3)
    beside = Task("beside", 9, 1)
    planner = Planner(GPUS, greedy_plan)
    assert [one.task for one in planner.handle(Arrived(0, (short, wide, beside))).starts] == ["wide"]
    apart = Planner(GPUS, greedy_plan)
    assert [
        one.task for task in (short, wide, beside) for one in apart.handle(Arrived(0, (task,))).starts
    ] == [
        "short",
        "beside",
    ]


def test_time_does_not_go_back() -> None:
    planner = Planner(GPUS, greedy_plan)
    planner.handle(Arrived(100, (Task("a", 10, 4),)))
    assert planner.handle(Arrived(50, (Task("b", 5, 4),))).now_ms == 100


def test_a_solver_s_plan_of_the_rest_is_a_plan_of_the_rest() -> None:
    """What `Planner` hands over, running tasks among it, is valid as a problem of its own."""
    pytest.importorskip("ortools", reason="the extra `plan`")
    tasks = [Task("r", 3, 2, None, ("g1", "g3")), Task("w", 4, 4), Task("s", 2, 1), Task("u", 3, 2)]
    plan = best_plan(tasks, GPUS, seconds=120.0)
    assert plan_fault(tasks, GPUS, plan.assignments) is None
    assert plan.gap == 0.0
