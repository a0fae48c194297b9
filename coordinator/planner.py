"""Which sweep runs where and when, on a cluster's GPUs: planned anew when a task comes and when one ends.

`Planner` is pure: events with their times in, plans out. A task that ends before its time (early exits make
that the rule) or after it is no fault: what comes after is planned again from the GPUs that are free then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import shorten
from gshare.coordinator.plan import Assignment, Plan, Task, check_tasks, lower_bound_ms, plan_fault
from gshare.coordinator.plan_list import left_shifted, list_schedule, longest_first

#: For one plan. 11 tasks on 8 GPUs take some hundredths; of more, a good plan is there long before its proof.
SOLVE_SECONDS = 1.0

MakePlan = Callable[[Sequence[Task], Sequence[str]], Plan]


def greedy_plan(tasks: Sequence[Task], gpus: Sequence[str]) -> Plan:
    """The longest-first list schedule, from 0 on. UsageError: these tasks can never run on these GPUs."""
    check_tasks(tasks, gpus)
    found = list_schedule(longest_first(tasks), gpus)
    return Plan(_ordered(found), lower_bound_ms(tasks, gpus), _end(found), "greedy")


def best_plan(tasks: Sequence[Task], gpus: Sequence[str], *, seconds: float = SOLVE_SECONDS) -> Plan:
    """The smallest makespan that CP-SAT finds within `seconds`, and never more than `greedy_plan`'s.

    Without `ortools` it is `greedy_plan`. From 0 on. UsageError: these tasks can never run on these GPUs.
    """
    greedy = greedy_plan(tasks, gpus)
    if greedy.end_ms == greedy.bound_ms:
        return greedy
    from gshare.coordinator.plan_cp_sat import solve

    try:
        solved = solve(tasks, gpus, greedy.assignments, greedy.bound_ms, seconds)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "ortools":
            raise
        return greedy
    plan = greedy._replace(bound_ms=solved.bound_ms)
    if not solved.assignments:
        return plan
    # The solver is content with any start that does not move the end. In its order, but each task wherever
    # there is room first, most end earlier; the last may end later (Graham, SIAM J. Appl. Math. 17, 1969).
    order = {one.task: (one.start_ms, one.end_ms) for one in solved.assignments}
    listed = list_schedule(sorted(tasks, key=lambda task: (*order[task.name], task.name)), gpus)
    found = min((listed, left_shifted(solved.assignments)), key=lambda some: (_end(some), _sum_of_ends(some)))
    fault = plan_fault(tasks, gpus, found)
    assert fault is None, fault
    if _end(found) >= greedy.end_ms:
        return plan
    return plan._replace(assignments=_ordered(found), method="cp-sat")


class Arrived(NamedTuple):
    """Tasks that wait from now on. They may be confined, but do not run yet.

    What comes together belongs into one event: of two, the first would be planned, and begun, as if alone.
    """

    now_ms: int
    tasks: tuple[Task, ...]


class Ended(NamedTuple):
    """A task has completed, failed, or was called off; early or late makes no difference."""

    now_ms: int
    task: str


class Planner:
    """Waiting and running tasks on fixed GPUs.

    What a plan says is to start now counts as running from then on, with its GPUs, until it has `Ended`.
    """

    def __init__(
        self, gpus: Sequence[str], make: MakePlan | None = None, *, seconds: float = SOLVE_SECONDS
    ) -> None:
        """`make` plans; `best_plan` within `seconds` when left out."""
        self._gpus = tuple(gpus)
        self._make = make or partial(best_plan, seconds=seconds)
        self._waiting: dict[str, Task] = {}
        self._running: dict[str, tuple[Task, Assignment]] = {}
        self._now_ms = 0

    @property
    def waiting(self) -> tuple[str, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> dict[str, Assignment]:
        """Where, since when, and until when it was expected."""
        return {name: assignment for name, (_, assignment) in self._running.items()}

    def handle(self, event: Arrived | Ended) -> Plan:
        """The plan from the event's time on; `Plan.starts` is what has to be started now.

        UsageError: a task of a name that is taken, or that can never run; nothing has changed then. The end
        of a task that is not here, such as one told twice, changes nothing.
        """
        if isinstance(event, Arrived):
            self._take(event.tasks)
        else:
            self._waiting.pop(event.task, None)
            self._running.pop(event.task, None)
        self._now_ms = max(self._now_ms, event.now_ms)  # clocks of several machines: never backwards
        tasks = [self._remaining(task, there) for task, there in self._running.values()]
        plan = self._make([*tasks, *self._waiting.values()], self._gpus).at(self._now_ms)
        for one in plan.starts:
            self._running[one.task] = (self._waiting.pop(one.task), one)
        return plan

    def _take(self, tasks: tuple[Task, ...]) -> None:
        for task in tasks:
            if task.running_on:
                raise UsageError(f"task {shorten(task.name)}: has arrived, but runs already")
        here = [task for task, _ in self._running.values()]
        check_tasks([*here, *self._waiting.values(), *tasks], self._gpus)
        self._waiting.update((task.name, task) for task in tasks)

    def _remaining(self, task: Task, there: Assignment) -> Task:
        """One that takes longer than it should have may end at any moment."""
        return task._replace(duration_ms=max(1, there.end_ms - self._now_ms), running_on=there.gpus)


def _ordered(assignments: Sequence[Assignment]) -> tuple[Assignment, ...]:
    return tuple(sorted(assignments, key=lambda one: (one.start_ms, one.task)))


def _end(assignments: Sequence[Assignment]) -> int:
    return max((one.end_ms for one in assignments), default=0)


def _sum_of_ends(assignments: Sequence[Assignment]) -> int:
    return sum(one.end_ms for one in assignments)
