"""The makespan by constraint programming (CP-SAT of `ortools`, the optional extra `plan`).

    start(i)  when task i starts           x(i, g)   task i is on GPU g
    a(i, j)   i has ended when j starts    C         the makespan, minimised

    Σ_g x(i, g) = gpus of i     x(i, g) and x(j, g)  ⟹  a(i, j) or a(j, i)     C ≥ Σ_i x(i, g) · duration of i

as in ALTO (its table 1), with literals in the place of its big-M. GPUs that no task tells apart are ordered
by the tasks on them, and equal tasks by their starts. Measured on instances of 11 tasks of 1, 2 and 4 GPUs
on 8: 0.03 s of a processor in the median (25 instances, at most 0.3 s) with the linear relaxation off, 0.06
to 0.3 s with it; with `add_cumulative` in the place of x and a, one of six was proven within 0.2 s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from gshare.coordinator.plan import Assignment, Task

#: Coefficients 2^i of the order of GPUs: more tasks than that are left out of it, which only weakens it.
_MOST_ORDERED = 48
#: Clauses, one a pair of tasks and GPU: making the model of more would take longer than the search may.
MOST_CLAUSES = 50_000


class Solved(NamedTuple):
    assignments: list[Assignment]  # empty: none was found in time
    bound_ms: int


def solve(
    tasks: Sequence[Task], gpus: Sequence[str], hint: Sequence[Assignment], bound_ms: int, seconds: float
) -> Solved:
    """The best plan found within `seconds` (wall clock), and the bound that was proven.

    `tasks` are valid by `check_tasks`; `hint` is a plan of theirs, `bound_ms` a lower bound. One thread and a
    fixed seed: the same tasks give the same plan, unless the time runs out. ModuleNotFoundError without
    `ortools`.
    """
    from ortools.sat.python import cp_model

    if len(tasks) * (len(tasks) - 1) // 2 * len(gpus) > MOST_CLAUSES:
        return Solved([], bound_ms)
    horizon = max(one.end_ms for one in hint)
    model = cp_model.CpModel()
    makespan = model.new_int_var(bound_ms, horizon, "makespan")
    hinted = _ordered(hint, tasks, gpus)
    starts, on = [], []
    for task in tasks:
        latest = 0 if task.running_on else horizon - task.duration_ms
        start = model.new_int_var(0, latest, f"start {task.name}")
        model.add_hint(start, hinted[task.name].start_ms)
        model.add(start + task.duration_ms <= makespan)
        usable = set(task.usable(gpus))
        here = {gpu: model.new_bool_var(f"{task.name} on {gpu}") for gpu in gpus if gpu in usable}
        model.add(sum(here.values()) == task.gpus)
        for gpu, literal in here.items():
            model.add_hint(literal, gpu in hinted[task.name].gpus)
        starts.append(start)
        on.append(here)
    for (i, first), (j, second) in combinations(enumerate(tasks), 2):
        both = on[i].keys() & on[j].keys()
        if not both:
            continue
        before, after = model.new_bool_var(""), model.new_bool_var("")
        there = hinted[first.name], hinted[second.name]
        model.add_hint(before, there[0].end_ms <= there[1].start_ms)
        model.add_hint(after, there[1].end_ms <= there[0].start_ms)
        model.add(starts[i] + first.duration_ms <= starts[j]).only_enforce_if(before)
        model.add(starts[j] + second.duration_ms <= starts[i]).only_enforce_if(after)
        model.add_at_most_one(before, after)
        if first.gpus + second.gpus > len(on[i].keys() | on[j].keys()):
            model.add_bool_or(before, after)
        for gpu in sorted(both):
            model.add_bool_or(before, after, on[i][gpu].negated(), on[j][gpu].negated())
        if first[1:] == second[1:] and not first.running_on:
            early, late = (i, j) if there[0].start_ms <= there[1].start_ms else (j, i)
            model.add(starts[early] <= starts[late])
    for gpu in gpus:
        model.add(
            sum(here[gpu] * task.duration_ms for task, here in zip(tasks, on, strict=True) if gpu in here)
            <= makespan
        )
    for alike in _alike(tasks, gpus):
        some = [here for here in on if alike[0] in here][:_MOST_ORDERED]
        keys = [sum(here[gpu] * (1 << bit) for bit, here in enumerate(some)) for gpu in alike]
        for one, other in pairwise(keys):
            model.add(one >= other)
    model.minimize(makespan)

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.linearization_level = 0
    status = solver.solve(model)
    # Every bound is an integer; below it by a rounding of the float it is reported as.
    proven = max(bound_ms, math.ceil(solver.best_objective_bound - 0.5))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solved([], min(proven, horizon))
    found = []
    for task, start, here in zip(tasks, starts, on, strict=True):
        begin = solver.value(start)
        where = tuple(gpu for gpu, literal in here.items() if solver.boolean_value(literal))
        found.append(Assignment(task.name, where, begin, begin + task.duration_ms, bool(task.running_on)))
    return Solved(found, proven)


def _ordered(hint: Sequence[Assignment], tasks: Sequence[Task], gpus: Sequence[str]) -> dict[str, Assignment]:
    """The hint by task, on GPUs in the order that the model asks for: one that breaks it would be dropped."""
    found = {one.task: one for one in hint}
    for alike in _alike(tasks, gpus):
        some = [task.name for task in tasks if alike[0] in task.usable(gpus)][:_MOST_ORDERED]

        keys = {
            gpu: sum(1 << bit for bit, name in enumerate(some) if gpu in found[name].gpus) for gpu in alike
        }
        new = dict(zip(sorted(alike, key=keys.__getitem__, reverse=True), alike, strict=True))
        found = {
            name: one._replace(gpus=tuple(new.get(gpu, gpu) for gpu in one.gpus))
            for name, one in found.items()
        }
    return found


def _alike(tasks: Sequence[Task], gpus: Sequence[str]) -> list[list[str]]:
    """Groups of two GPUs and more that no task tells apart."""
    groups: dict[tuple[bool, ...], list[str]] = {}
    usable = [frozenset(task.usable(gpus)) for task in tasks]
    for gpu in gpus:
        groups.setdefault(tuple(gpu in some for some in usable), []).append(gpu)
    return [group for group in groups.values() if len(group) > 1 and any(group[0] in some for some in usable)]
