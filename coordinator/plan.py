"""What a plan of whole tasks on whole GPUs is: tasks, assignments, what makes a plan valid, a lower bound.

A task needs a number of GPUs for a time, all at once and without a break; the makespan is to be small:
P | size_j | C_max (Drozdowski, EJOR 94, 1996), with two additions. A task may be confined to some of the
GPUs, and one that runs stays where it is. Times are integers of milliseconds: sums are exact, so "optimal"
is too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import nearest, shorten

#: The longest task, some 3,000 years: sums of thousands of them stay far inside 64 bits.
MAX_DURATION_MS = 10**14

Method = Literal["cp-sat", "greedy"]


class Task(NamedTuple):
    name: str
    duration_ms: int  # that it still needs, at least 1
    gpus: int = 1
    allowed: frozenset[str] | None = None  # None: any GPU
    running_on: tuple[str, ...] = ()  # it runs there now, and stays

    def usable(self, gpus: Sequence[str]) -> tuple[str, ...]:
        """Those of `gpus`, in their order, that the task may be on."""
        if self.running_on:
            return tuple(gpu for gpu in gpus if gpu in self.running_on)
        return tuple(gpu for gpu in gpus if self.allowed is None or gpu in self.allowed)


class Assignment(NamedTuple):
    task: str
    gpus: tuple[str, ...]
    start_ms: int
    end_ms: int
    running: bool = False  # it ran there before the plan was made


class Plan(NamedTuple):
    """Who runs where from `now_ms` on, by start and name."""

    assignments: tuple[Assignment, ...]
    bound_ms: int  # no plan can end before
    greedy_ms: int  # when the longest-first list schedule would end
    method: Method  # what the assignments come from
    now_ms: int = 0

    @property
    def end_ms(self) -> int:
        return max((one.end_ms for one in self.assignments), default=self.now_ms)

    @property
    def makespan_ms(self) -> int:
        return self.end_ms - self.now_ms

    @property
    def gap(self) -> float:
        """How much of the makespan a better plan might save at most: 0.0 is proven optimal."""
        return (self.end_ms - self.bound_ms) / self.makespan_ms if self.makespan_ms else 0.0

    @property
    def starts(self) -> tuple[Assignment, ...]:
        """What is to be started now."""
        return tuple(one for one in self.assignments if one.start_ms == self.now_ms and not one.running)

    def at(self, now_ms: int) -> Plan:
        """The same plan, begun at another time."""
        later = now_ms - self.now_ms
        moved = tuple(
            one._replace(start_ms=one.start_ms + later, end_ms=one.end_ms + later) for one in self.assignments
        )
        return Plan(moved, self.bound_ms + later, self.greedy_ms + later, self.method, now_ms)


def check_tasks(tasks: Sequence[Task], gpus: Sequence[str]) -> None:
    """UsageError, naming the task, when no plan can hold them."""
    if len(set(gpus)) < len(gpus):
        raise UsageError("the GPUs of a plan: one is named twice")
    names: set[str] = set()
    owner: dict[str, str] = {}
    for task in tasks:
        where = f"task {shorten(task.name)}"
        if task.name in names:
            raise UsageError(f"{where}: there is another of that name; give each its own")
        names.add(task.name)
        if not 1 <= task.duration_ms <= MAX_DURATION_MS:
            raise UsageError(f"{where}: duration {task.duration_ms} ms is not within 1 to {MAX_DURATION_MS}")
        if task.gpus < 1:
            raise UsageError(f"{where}: needs {task.gpus} GPUs; at least 1 is meant")
        for gpu in sorted((task.allowed or frozenset()) | set(task.running_on)):
            if gpu not in gpus:
                near = nearest(gpu, gpus)
                hint = f"did you mean {near}?" if near else f"known: {', '.join(gpus[:20]) or 'none'}"
                raise UsageError(f"{where}: no GPU {shorten(gpu)}; {hint}")
        if task.running_on and len(set(task.running_on)) != task.gpus:
            raise UsageError(f"{where}: runs on {len(set(task.running_on))} GPUs, but needs {task.gpus}")
        for gpu in task.running_on:
            if gpu in owner:
                raise UsageError(f"{where}: runs on {gpu}, but so does task {shorten(owner[gpu])}")
            owner[gpu] = task.name
        if len(task.usable(gpus)) < task.gpus:
            of = (
                f"it may use {len(task.usable(gpus))}"
                if task.allowed is not None
                else f"{len(gpus)} are there"
            )
            raise UsageError(f"{where}: needs {task.gpus} GPUs at once, and {of}; it can never run")


def plan_fault(tasks: Sequence[Task], gpus: Sequence[str], assignments: Sequence[Assignment]) -> str | None:
    """What is wrong with assignments from 0 on, in a line; None: they are a plan of exactly these tasks."""
    by_name = {task.name: task for task in tasks}
    if sorted(one.task for one in assignments) != sorted(by_name):
        return "not every task is there once"
    free_at = dict.fromkeys(gpus, 0)
    for one in sorted(assignments, key=lambda one: (one.start_ms, one.end_ms)):
        task = by_name[one.task]
        if one.end_ms - one.start_ms != task.duration_ms:
            return f"{one.task} has another duration"
        if len(set(one.gpus)) != task.gpus or not set(one.gpus) <= set(task.usable(gpus)):
            return f"{one.task} is on the wrong GPUs"
        if task.running_on and one.start_ms != 0:
            return f"{one.task} runs already, but is to start later"
        for gpu in one.gpus:
            if one.start_ms < free_at[gpu]:
                return f"{one.task} starts on {gpu} before that is free"
            free_at[gpu] = one.end_ms
    return None


def lower_bound_ms(tasks: Sequence[Task], gpus: Sequence[str]) -> int:
    """A time that no plan beats: the longest task, and the GPU time of the tasks confined to a set of GPUs.

    The second for each set that a task is confined to, and with each of the dual feasible functions u(w) of
    Fekete and Schepers (Math. Program. 91, 2001): beside a task of more than G - w GPUs only such of fewer
    than w can run, so the first counts as G and the last as 0. w = 0 is the plain area.
    """
    bound = max((task.duration_ms for task in tasks), default=0)
    usable = {task.name: frozenset(task.usable(gpus)) for task in tasks}
    for some in {frozenset(gpus), *usable.values()}:
        inside = [task for task in tasks if usable[task.name] <= some]
        size = len(some)
        for w in range(size // 2 + 1):
            area = sum(
                task.duration_ms * (size if task.gpus > size - w else task.gpus if task.gpus >= w else 0)
                for task in inside
            )
            bound = max(bound, -(-area // max(1, size)))
    return bound
