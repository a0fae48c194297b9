"""The planner of several sweeps: its time, its gap, its plans against list schedules and exhaustive search.

    python benchmarks/planner.py                                    about a minute
    python benchmarks/planner.py --random 20 --small 50 --seeds 2 --no-speed
    python benchmarks/planner.py --broken …       negative control: must fail (worse than the list)

Three parts:

    11 tasks     of 1, 2 and 4 GPUs on 8, as ALTO's: one instance with the durations of the ablation below,
                 and random ones. Gates: valid, never worse than longest-first, planned in under 1 s.
    small        instances of up to 5 tasks, some confined, some running. Gate: as short as what an exhaustive
                 search finds.
    ablation     those 11 sweeps by discrete events, from the rates in results/gpu.json and with exits drawn
                 as `planner_ablation.py` says: batching alone, with a scheduler in each sweep, with the
                 planner between the sweeps, with early exit.

A plan is made by one thread. Its time is judged by the processor's clock, since others may use the machine;
that of the wall stands beside it. The import of ortools is not in it, but said. Exit code 0 when every gate
holds, 1 when one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

from gshare.coordinator.plan import Plan, Task, plan_fault
from gshare.coordinator.plan_list import list_schedule, longest_first
from gshare.coordinator.planner import best_plan, greedy_plan
from planner_ablation import SAMPLES, Executor, Exits, Measured, Sweep, in_turn, paper_tasks, planned
from planner_exact import smallest_makespan

ROOT = Path(__file__).resolve().parent
GPUS = tuple(str(i) for i in range(8))
PLAN_LIMIT_S = 1.0
#: Of one H200, as the driver counts it (MiB).
CARD_MB = 143_771
#: ALTO, figure 12: all of it over batching alone.
PAPER_RATIO = 5.2
ARMS = {
    "batching": ("groups", "in turn", False),
    "+ scheduler in a sweep": ("backfill", "in turn", False),
    "+ planner between sweeps": ("backfill", "planned", False),
    "+ early exit": ("backfill", "planned", True),
    "batching + early exit": ("groups", "in turn", True),
}


def timed(tasks: Sequence[Task], gpus: Sequence[str], *, broken: bool, seconds: float) -> dict[str, Any]:
    """One plan, what it took, and what is wrong with it."""
    wall, cpu = time.perf_counter(), time.process_time()
    plan = _shortest_first(tasks, gpus) if broken else best_plan(tasks, gpus, seconds=seconds)
    took = {
        "wall_s": round(time.perf_counter() - wall, 4),
        "cpu_s": round(time.process_time() - cpu, 4),
    }
    greedy = greedy_plan(tasks, gpus)
    return took | {
        "makespan_s": plan.makespan_ms / 1000,
        "greedy_s": greedy.makespan_ms / 1000,
        "bound_s": plan.bound_ms / 1000,
        "gap": plan.gap,
        "fault": plan_fault(tasks, gpus, plan.assignments),
    }


def _shortest_first(tasks: Sequence[Task], gpus: Sequence[str]) -> Plan:
    """The negative control: a valid plan that nobody looked for."""
    found = list_schedule(longest_first(tasks)[::-1], gpus)
    return greedy_plan(tasks, gpus)._replace(assignments=tuple(found))


def random_eleven(draw: random.Random) -> list[Task]:
    """The paper's kind: widths 4, 4, 2, 2, 2 and six times 1; 10 to 100 minutes."""
    widths = [4] * 2 + [2] * 3 + [1] * 6
    return [Task(f"t{i}", draw.randint(600_000, 6_000_000), width) for i, width in enumerate(widths)]


def random_small(draw: random.Random) -> tuple[list[Task], tuple[str, ...]]:
    """Up to 5 tasks on up to 4 GPUs: a third confined, a fourth of what can be running where it is."""
    gpus = GPUS[: draw.randint(1, 4)]
    idle = set(gpus)
    tasks = []
    for number in range(draw.randint(1, 5)):
        allowed = None
        if draw.random() < 1 / 3:
            allowed = frozenset(draw.sample(gpus, draw.randint(1, len(gpus))))
        most = len(allowed if allowed is not None else gpus)
        task = Task(
            f"t{number}", draw.randint(1, 30), draw.choice([n for n in (1, 2, 4) if n <= most]), allowed
        )
        here = [gpu for gpu in task.usable(gpus) if gpu in idle]
        if len(here) >= task.gpus and draw.random() < 1 / 4:
            task = task._replace(running_on=tuple(here[: task.gpus]))
            idle -= set(task.running_on)
        tasks.append(task)
    return tasks, gpus


def durations(
    sweeps: Sequence[Sweep], measured: Measured, packing: str, exits: Exits | None, seed: int
) -> list[tuple[Sweep, float]]:
    """Each sweep's seconds. The same seed draws the same exits, however they are packed."""
    found = []
    for sweep in sweeps:
        executor = Executor(sweep, measured, CARD_MB, backfill=packing == "backfill")
        found.append((sweep, executor.run(exits, random.Random(f"{seed} {sweep.name}"))))
    return found


def ablation(measured: Measured, exits: Exits, seeds: int) -> dict[str, Any]:
    """The arms' makespans (hours) for sweeps that come in `seeds` different orders, and what exits saved."""
    hours: dict[str, list[float]] = {arm: [] for arm in ARMS}
    walls: list[float] = []
    saved: list[dict[str, float]] = []
    for seed in range(seeds):
        sweeps = paper_tasks()
        random.Random(seed).shuffle(sweeps)
        for arm, (packing, between, leaves) in ARMS.items():
            takes = durations(sweeps, measured, packing, exits if leaves else None, seed)
            if between == "in turn":
                seconds = in_turn(takes, len(GPUS))
            else:  # the planner knows the time without exits alone
                saved += [dict(sweep.saved) for sweep in sweeps] if leaves else []
                said = durations(sweeps, measured, packing, None, seed)
                seconds = planned(
                    takes, [each for _, each in said], len(GPUS), walls.append, time.perf_counter
                )
            hours[arm].append(seconds / 3600)
    samples = sum(len(sweep.grid()) for sweep in paper_tasks()) * seeds
    return {
        "hours": {arm: [round(h, 3) for h in each] for arm, each in hours.items()},
        "batching_over": {
            arm: _spread([one / other for one, other in zip(hours["batching"], each, strict=True)])
            for arm, each in hours.items()
        },
        "paper_batching_over_all": PAPER_RATIO,
        "exits": exits._asdict(),
        "samples_saved": {
            pattern: round(sum(one[pattern] for one in saved) / samples / SAMPLES, 4) for pattern in saved[0]
        },
        "rates": {
            "source": "benchmarks/results/gpu.json",
            "hardware": measured.hardware,
            "tokens_per_second": {tokens: round(tokens / s) for tokens, s in measured.seconds_at},
            "row_tokens": round(measured.row_tokens, 1),
        },
        "replans": len(walls),
        "replan_wall_s": _spread(walls),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    kinds = {"mean": mean, "median": median, "least": min, "most": max}
    return {kind: round(of(values), 3) for kind, of in kinds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--random", type=int, default=100, help="random instances of 11 tasks")
    parser.add_argument("--small", type=int, default=300, help="instances for the exhaustive search")
    parser.add_argument("--seeds", type=int, default=10, help="orders of arrival, and draws of exits")
    parser.add_argument("--seconds", type=float, default=30.0, help="limit of a plan")
    parser.add_argument("--warmup", type=float, default=Exits().warmup)
    parser.add_argument("--keep", type=float, default=Exits().keep)
    parser.add_argument("--diverging", type=float, default=Exits().diverging)
    parser.add_argument("--overfitting", type=float, default=Exits().overfitting)
    parser.add_argument("--rates", type=Path, default=ROOT / "results" / "gpu.json")
    parser.add_argument("--broken", action="store_true")
    parser.add_argument("--no-speed", action="store_true", help="do not judge the time of a plan")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    begin = time.perf_counter()
    try:
        from ortools.sat.python import cp_model  # noqa: F401
    except ModuleNotFoundError:
        print("ortools is not installed: pip install 'gshare[plan]'", file=sys.stderr)
        return 2
    imported = time.perf_counter() - begin
    measured = Measured(args.rates)
    exits = Exits(args.warmup, args.keep, args.diverging, args.overfitting)

    def plan_of(tasks: Sequence[Task], gpus: Sequence[str]) -> dict[str, Any]:
        return timed(tasks, gpus, broken=args.broken, seconds=args.seconds)

    takes = durations(paper_tasks(), measured, "backfill", None, 0)
    paper = plan_of([Task(sweep.name, round(1000 * s), sweep.gpus) for sweep, s in takes], GPUS)
    print(row("11 tasks of the ablation", paper), flush=True)
    draw = random.Random(0)
    eleven = [plan_of(random_eleven(draw), GPUS) for _ in range(args.random)]
    random_summary = summary(eleven)
    print(rows("11 random tasks", random_summary), flush=True)
    small = []
    for _ in range(args.small):
        tasks, gpus = random_small(draw)
        small.append(plan_of(tasks, gpus) | {"exact_s": smallest_makespan(tasks, gpus) / 1000})
    agreed = sum(one["makespan_s"] == one["exact_s"] for one in small)
    print(f"small instances: {agreed} of {len(small)} as short as the exhaustive search's", flush=True)
    found = ablation(measured, exits, args.seeds)
    print(table(found))

    every = [paper, *eleven, *small]
    gates = {
        "every plan valid": not any(one["fault"] for one in every),
        "never worse than longest-first": all(one["makespan_s"] <= one["greedy_s"] for one in every),
        "no plan below its bound": all(one["bound_s"] <= one["makespan_s"] for one in every),
        "as short as the exhaustive search": agreed == len(small),
    }
    if not args.no_speed:
        slowest = max(one["cpu_s"] for one in (paper, *eleven))
        gates[f"a plan of 11 tasks under {PLAN_LIMIT_S:.0f} s of a processor"] = slowest < PLAN_LIMIT_S
    for name, held in gates.items():
        print(f"{name}: {'ok' if held else 'FAILED'}")
    report = {
        "work": "P | size_j | C_max: 11 tasks of 1, 2 and 4 GPUs on 8",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread used",
        "versions": {"python": platform.python_version(), "ortools": version("ortools")},
        "import_ortools_s": round(imported, 2),
        "paper_instance": paper,
        "random": random_summary,
        "small": {"instances": len(small), "agreed": agreed},
        "ablation": found,
        "gates": gates,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(gates.values()) else 1


def row(name: str, one: dict[str, Any]) -> str:
    return (
        f"{name}: planned in {one['wall_s']:.3f} s (processor {one['cpu_s']:.3f} s), gap {one['gap']:.2%}; "
        f"{one['makespan_s'] / 3600:.2f} h, longest first {one['greedy_s'] / 3600:.2f} h, "
        f"bound {one['bound_s'] / 3600:.2f} h"
    )


def summary(some: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "instances": len(some),
        "proven_optimal": sum(one["gap"] == 0 for one in some),
        "gap": _spread([one["gap"] for one in some]),
        "wall_s": _spread([one["wall_s"] for one in some]),
        "cpu_s": _spread([one["cpu_s"] for one in some]),
        "greedy_over_this": _spread([one["greedy_s"] / one["makespan_s"] for one in some]),
    }


def rows(name: str, found: dict[str, Any]) -> str:
    wall, cpu, over = found["wall_s"], found["cpu_s"], found["greedy_over_this"]
    return (
        f"{name}, {found['instances']} times: planned in {wall['median']:.3f} s (at most {wall['most']:.3f}),"
        f" processor {cpu['median']:.3f} s (at most {cpu['most']:.3f}); {found['proven_optimal']} proven"
        f" optimal, largest gap {found['gap']['most']:.2%}; longest first takes {over['mean']:.3f} times as"
        f" long (at most {over['most']:.3f})"
    )


def table(found: dict[str, Any]) -> str:
    lines = [f"ablation, 11 sweeps on 8 GPUs, {len(found['hours']['batching'])} orders of arrival:"]
    for arm, hours in found["hours"].items():
        ratio = found["batching_over"][arm]
        lines.append(
            f"  {arm:26} {mean(hours):7.2f} h   batching ÷ this {ratio['mean']:.2f} "
            f"({ratio['least']:.2f} to {ratio['most']:.2f})"
        )
    saved = found["samples_saved"]
    parts = ", ".join(f"{pattern} {part:.1%}" for pattern, part in saved.items())
    lines.append(f"  ALTO's batching ÷ all of it: {found['paper_batching_over_all']} (8 H100, figure 12)")
    lines.append(f"  samples saved {sum(saved.values()):.1%} ({parts}); ALTO's 72 to 83 %")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
