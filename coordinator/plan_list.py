"""List scheduling: at each moment, the first tasks of a list that fit are started. No solver is needed.

In the order of falling durations it is the plan that is made without `ortools`, and the one that the solver's
plan is never worse than.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from gshare.coordinator.plan import Assignment, Task


def longest_first(tasks: Sequence[Task]) -> list[Task]:
    """Falling durations; of equal ones the wider first, then by name."""
    return sorted(tasks, key=lambda task: (-task.duration_ms, -task.gpus, task.name))


def list_schedule(tasks: Sequence[Task], gpus: Sequence[str]) -> list[Assignment]:
    """`tasks`, valid by `check_tasks`, in this order of preference; what runs stays. By start.

    A task gets those of the free GPUs that the fewest waiting tasks may use: the others stay free for these.
    """
    found: list[Assignment] = []
    ends: list[tuple[int, tuple[str, ...]]] = []  # a heap
    free = set(gpus)
    now = 0

    def start(task: Task, on: tuple[str, ...]) -> None:
        end = now + task.duration_ms
        found.append(Assignment(task.name, on, now, end, bool(task.running_on)))
        heapq.heappush(ends, (end, on))
        free.difference_update(on)

    waiting = []
    for task in tasks:
        if task.running_on:
            start(task, task.usable(gpus))
        else:
            waiting.append((task, task.usable(gpus)))
    wanted = {gpu: sum(gpu in usable for _, usable in waiting) for gpu in gpus}
    while waiting:
        left = []
        for task, usable in waiting:
            here = [gpu for gpu in usable if gpu in free]
            if len(here) < task.gpus:
                left.append((task, usable))
                continue
            chosen = set(
                sorted(here, key=lambda gpu: wanted[gpu])[: task.gpus]
            )  # stable: ties in their order
            start(task, tuple(gpu for gpu in usable if gpu in chosen))
            for gpu in usable:
                wanted[gpu] -= 1
        waiting = left
        if not waiting:
            break
        now = ends[0][0]
        while ends and ends[0][0] == now:
            free.update(heapq.heappop(ends)[1])
    return found


def left_shifted(assignments: Sequence[Assignment]) -> list[Assignment]:
    """The same GPUs and order on each, everything as early as that allows."""
    free_at: dict[str, int] = {}
    found = []
    for one in sorted(assignments, key=lambda one: (one.start_ms, one.end_ms, one.task)):
        start = max(free_at.get(gpu, 0) for gpu in one.gpus)
        end = start + one.end_ms - one.start_ms
        found.append(one._replace(start_ms=start, end_ms=end))
        free_at.update(dict.fromkeys(one.gpus, end))
    return found
