"""The smallest makespan by trying everything: for small instances, to compare planners with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from gshare.coordinator.plan import Task


def smallest_makespan(tasks: Sequence[Task], gpus: Sequence[str]) -> int:
    """Milliseconds. Every order of the tasks with every choice of GPUs, each as early as its GPUs are free.

    Some plan of the smallest makespan is of that form: take one, order its tasks by their starts, and put
    each as early as the ones before it on its GPUs allow; nothing ends later by that. States reached twice
    are looked at once, and GPUs free at the same moment and usable by the same tasks are one choice.
    """
    number = {gpu: i for i, gpu in enumerate(gpus)}
    free = [0] * len(gpus)
    for task in tasks:
        for gpu in task.running_on:
            free[number[gpu]] = task.duration_ms
    waiting = [task for task in tasks if not task.running_on]
    usable = [tuple(number[gpu] for gpu in task.usable(gpus)) for task in waiting]
    kinds = [tuple(i in some for some in usable) for i in range(len(gpus))]
    best = sum(task.duration_ms for task in tasks)
    seen: set[tuple[frozenset[int], tuple[object, ...]]] = set()

    def go(left: frozenset[int], at: tuple[int, ...]) -> None:
        nonlocal best
        if max(at) >= best:
            return
        if not left:
            best = max(at)
            return
        key = (left, tuple(sorted(zip(kinds, at, strict=True))))
        if key in seen:
            return
        seen.add(key)
        for i in sorted(left):
            tried: set[tuple[object, ...]] = set()
            for some in combinations(usable[i], waiting[i].gpus):
                alike = tuple(sorted((kinds[gpu], at[gpu]) for gpu in some))
                if alike in tried:
                    continue
                tried.add(alike)
                end = max(at[gpu] for gpu in some) + waiting[i].duration_ms
                go(left - {i}, tuple(end if gpu in some else time for gpu, time in enumerate(at)))

    go(frozenset(range(len(waiting))), tuple(free))
    return best
