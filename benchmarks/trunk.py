"""What a shared trunk brings: jobs that adapt the top layers, in every way of running them on one GPU.

    python benchmarks/trunk.py [--shape 8b|smollm2|tiny] [--device cuda|cpu] [--cells n16-top1 …]
                               [--arms dedicated shared …] [--peft-jobs N] [--steps N] [--out FILE]
                               [--again] [--time-limit SECONDS] [--reckon] [--report] [--break-dedup]

A cell is a cohort of jobs (n16-top1: sixteen, each on the top layer; -two and -own: trunk_workload.py); an
arm is a way of running it, in processes of its own. Every arm trains the same logical jobs: rows, order,
initial weights, learning rates, steps. What FILE has under the same versions and workload is not run again,
so a run that was cut short is taken up by the same command. --time-limit cuts it short before an arm that,
judged by the last one like it (on a GPU the first by its operation count), would not end in time: exit code
75, and what is missing. --reckon prints these times and runs nothing.

    dedicated   gshare, one job after another       packed    gshare, one pass, equal rows run for each job
    peft        transformers + PEFT, one by one     shared    gshare, one pass, equal rows run once
    mps         PEFT, a process a job, stock MPS    cached    shared, states kept from the first epoch on

--peft-jobs N: arm peft trains N of the jobs, evenly chosen, and its rates are theirs; the table says so.

steady is the last epoch. cold is from the start of a process to the end of its first epoch; a dedicated job
has a process of its own, so it is set up as often as there are jobs. The first arm on a bare machine builds
kernels too, in its first epoch: its cold rate is too low by that. On a CPU seconds are the process's own,
not the clock's, and arm mps is left out: it is a GPU's.

Gate: every loss of every step, every adapter and moment byte and the held-out loss equal dedicated's, PEFT's
losses of the first epoch agree, no process failed, and dedicated is no slow baseline. When it fails there is
no ratio, and the exit code is 1. What is to be reached on an H200 stands at the end, line by line.
--break-dedup takes rows for equal that are only as long: the gate of a -two cell must fail; nothing is
written then. --report measures nothing: it judges the records of FILE, each arm beside those that were
measured under the same.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gshare.agent.service.environment import trainer_environment
from gshare.kernels.numerics import NUMERICS
from trunk_gate import Records, faults, ratios, report, targets
from trunk_operations import expected
from trunk_peft import TRIAL_STEPS
from trunk_processes import Failed, Launch, launch, run_arm
from trunk_time import Reckoning
from trunk_worker import Task
from trunk_workload import HELD_OUT, SCALES, Cohort

ROOT = Path(__file__).resolve().parent.parent
#: peft comes before mps, which needs its peak of memory.
ARMS = ("dedicated", "packed", "shared", "cached", "peft", "mps")
#: Nothing lies below the adapters: packed, shared and cached are one.
ALL_LAYERS_ARMS = ("dedicated", "packed", "peft", "mps")
CELLS = (
    *(f"n{jobs}-{layers}" for jobs in (16, 32, 8) for layers in ("top1", "top2", "all")),
    *("n16-all-own", "n8-all-own", "n8-top1-two"),
)
#: Exit code: arms are missing, the same command goes on (EX_TEMPFAIL of sysexits.h).
GO_ON = 75


def versions(device: str) -> dict[str, str]:
    found = {name: version(name) for name in ("torch", "transformers", "peft") if find_spec(name)}
    found |= {"python": platform.python_version(), "numerics": str(NUMERICS)}
    if device == "cpu":
        return found | {"cpu": _cpu_model(), "threads": trainer_environment()["OMP_NUM_THREADS"]}
    return found | {"triton": version("triton"), "gpu": _gpu_name()}


def _gpu_name() -> str:
    """Empty where there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except pynvml.NVMLError:
        return ""


def _cpu_model() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


def arms_of(cohort: Cohort, device: str, chosen: list[str] | None) -> list[str]:
    known = ARMS if cohort.top else ALL_LAYERS_ARMS
    return [arm for arm in known if arm in (chosen or ARMS) and (arm != "mps" or device == "cuda")]


def sample(jobs: int, count: int) -> list[int]:
    """`count` of the jobs, evenly chosen, the first among them; 0: all."""
    count = min(count or jobs, jobs)
    return [job * jobs // count for job in range(count)]


def measure(
    cohort: Cohort,
    arm: str,
    device: str,
    known: Records,
    launch: Launch,
    *,
    peft_jobs: int = 0,
    break_dedup: bool = False,
) -> dict[str, Any]:
    """The arm's record, or its error."""
    jobs = sample(cohort.jobs, peft_jobs) if arm == "peft" else list(range(cohort.jobs))
    task = Task(cohort, arm, device, jobs, time.monotonic(), break_dedup)
    load = os.getloadavg()[0]
    started = time.perf_counter()
    try:
        if arm in ("peft", "mps"):
            task = _with_settings(task, known, launch)
        found = run_arm(task, launch, known)
        if arm == "peft":
            found["settings"] = {"attention": task.attention, "checkpointing": task.checkpointing}
            found["sampled"] = [len(jobs), cohort.jobs]
    except (Failed, OSError) as error:
        found = {"error": ": ".join(str(one) for one in error.args)}
    took = round(time.perf_counter() - started, 1)
    return found | {"wall_s": took, "load_average_before": round(load, 1)}


def _with_settings(task: Task, known: Records, launch: Launch) -> Task:
    """On a GPU the best settings for PEFT are tried; arm mps takes over those of arm peft."""
    settings = known.get("peft", {}).get("settings")
    if settings is None and task.device == "cuda":
        settings = launch(replace(task, arm="settings"))
    if settings is None:
        return task
    return replace(task, attention=settings["attention"], checkpointing=settings["checkpointing"])


def run(given: argparse.Namespace, launch: Launch = launch, now: Callable[[], float] = time.monotonic) -> int:
    """Measures what is missing, writes and prints; the exit code."""
    begun, until = now(), given.time_limit or math.inf
    kept = given.out.exists() and not given.break_dedup
    results: dict[str, Any] = json.loads(given.out.read_text()) if kept else {}
    versioned, passed = versions(given.device), True
    reckoning = Reckoning(TRIAL_STEPS, known_card=given.device == "cuda" and given.shape == "8b")
    for cell, result in results.items():
        for arm, record in result["arms"].items():
            if cell.startswith(f"{given.shape}-") and record["under"]["versions"] == versioned:
                reckoning.saw(arm, record)
    missing: list[str] = []
    how = "the same command goes on"
    for name, cohort in given.cells:
        cell = f"{given.shape}-{name}"
        under = {"versions": versioned, "workload": asdict(cohort), "device": given.device}
        records: Records = results.setdefault(cell, {}).setdefault("arms", {})
        operations = expected(cohort)
        for arm in arms_of(cohort, given.device, given.arms):
            found = records.get(arm)
            if found and found["under"] == under and "error" not in found and not given.again:
                continue
            takes = reckoning(cohort, arm)
            if missing or now() - begun + takes > until:
                if not missing and takes > until:
                    how = "the first takes longer by itself: raise --time-limit"
                missing.append(f"{cell} {arm} (about {takes:.0f} s)" if takes else f"{cell} {arm}")
                continue
            known = {one: record for one, record in records.items() if record["under"] == under}
            found = measure(
                cohort,
                arm,
                given.device,
                known,
                launch,
                peft_jobs=given.peft_jobs,
                break_dedup=given.break_dedup,
            )
            records[arm] = found | {"under": under}
            reckoning.saw(arm, records[arm])
            print(f"{cell} {arm}: {found.get('error', 'measured')} ({found['wall_s']} s)", file=sys.stderr)
            _conclude(results[cell], cohort, under, operations)
            if not given.break_dedup:
                _write(given.out, results)
        current = _conclude(results[cell], cohort, under, operations)
        if missing and len(current) < 2:
            continue  # nothing to compare yet
        print(report(name, cohort, current, operations), flush=True)
        passed &= not faults(cohort, current)
    if given.shape == "8b":
        print(targets({name: results[f"8b-{name}"] for name, _ in given.cells}), flush=True)
    if missing:
        print(
            f"not begun, for want of time in {until:.0f} s: {', '.join(missing)}; {how}",
            file=sys.stderr,
        )
    return 1 if not passed else GO_ON if missing else 0


def judge(given: argparse.Namespace) -> int:
    """Gate, ratios and table of what FILE has, written back; the exit code."""
    if not given.out.exists():
        raise SystemExit(f"{given.out}: no such file; without --report it is measured")
    results: dict[str, Any] = json.loads(given.out.read_text())
    passed = True
    for name, _ in given.cells:
        arms: Records = results.get(f"{given.shape}-{name}", {}).get("arms", {})
        if not arms:
            continue
        under = arms["dedicated" if "dedicated" in arms else next(iter(arms))]["under"]
        cohort = Cohort(**under["workload"])
        current = _conclude(results[f"{given.shape}-{name}"], cohort, under, expected(cohort))
        print(report(name, cohort, current, expected(cohort)), flush=True)
        passed &= not faults(cohort, current)
    _write(given.out, results)
    if given.shape == "8b":
        print(targets({name: results.get(f"8b-{name}", {}) for name, _ in given.cells}))
    return 0 if passed else 1


def reckon(given: argparse.Namespace) -> str:
    """A line an arm: the seconds that it would take, by operation count and constants alone."""
    reckoning, lines, total = Reckoning(TRIAL_STEPS, known_card=True), [], 0.0
    for name, cohort in given.cells:
        for arm in arms_of(cohort, "cuda", given.arms):
            takes = reckoning(cohort, arm)
            lines.append(f"{name:12} {arm:10} {takes:5.0f} s")
            total += takes
    return "\n".join([*lines, f"{'all':23} {total:5.0f} s"])


def _conclude(result: dict[str, Any], cohort: Cohort, under: Any, operations: dict[str, int]) -> Records:
    """Gate and ratios of the arms that were measured under the same, in the order of `ARMS`."""
    arms: Records = result["arms"]
    current = {arm: arms[arm] for arm in ARMS if arm in arms and arms[arm]["under"] == under}
    wrong = faults(cohort, current)
    result |= {"gate": wrong or "passed", "multiply_adds": operations}
    result.pop("ratios", None)
    if not wrong:
        result["ratios"] = ratios(current, operations)
    return current


def _write(out: Path, results: dict[str, Any]) -> None:
    """Lists of numbers on one line each."""
    text = json.dumps(results, indent=1, ensure_ascii=False)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(out)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SCALES, default="8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--cells", nargs="+", help=f"default: {' '.join(CELLS)}")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all that the cell has")
    parser.add_argument("--peft-jobs", type=int, default=0, help="of arm peft; default: all of the cell")
    parser.add_argument("--steps", type=int, help="of an epoch, 1 to 62; default: the shape's")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin nothing that ends later")
    parser.add_argument("--reckon", action="store_true", help="print how long each arm would take on an H200")
    parser.add_argument("--report", action="store_true", help="measure nothing; judge what FILE has")
    parser.add_argument(
        "--out",
        type=Path,
        help="default: benchmarks/results/trunk_DEVICE.json; of tiny in the temporary directory",
    )
    parser.add_argument("--again", action="store_true", help="measure what FILE has already")
    parser.add_argument("--break-dedup", action="store_true", help="negative control: the gate must fail")
    given = parser.parse_args(arguments)
    names = given.cells or (["n8-top1-two"] if given.break_dedup else CELLS)
    scale = SCALES[given.shape]
    if given.steps is not None:
        if not 1 <= given.steps <= min(HELD_OUT):
            parser.error(f"--steps {given.steps}: 1 to {min(HELD_OUT)}")
        scale = replace(scale, steps=given.steps)
    if given.time_limit is not None and not given.time_limit > 0:
        parser.error(f"--time-limit {given.time_limit}: more than 0 seconds")
    if given.time_limit is not None and given.again:
        parser.error("--again with --time-limit would begin anew each time; give another --out")
    if given.reckon and given.shape != "8b":
        parser.error("--reckon knows --shape 8b only")
    try:
        given.cells = [(name, Cohort.of(name, scale)) for name in names]
    except ValueError as error:
        parser.error(str(error))
    blunt = [name for name, cohort in given.cells if cohort.data != "two" or not cohort.top]
    if given.break_dedup and blunt:
        parser.error(f"--break-dedup shows in cells n…-top…-two only, not in {', '.join(blunt)}")
    measures = not (given.reckon or given.report or given.break_dedup)
    if measures and {"peft", "mps"} & set(given.arms or ARMS) and not find_spec("peft"):
        parser.error("arms peft and mps need peft (extra dev); name the others with --arms")
    if given.peft_jobs < 0:
        parser.error(f"--peft-jobs {given.peft_jobs}: at least 1, or 0 for all")
    if given.device == "cuda" and not (given.reckon or given.report) and not _gpu_name():
        parser.error("the driver shows no GPU; --device cpu --shape smollm2 (or tiny) runs without one")
    if given.out is None:
        # What is committed is 8B's and SmolLM2's.
        where = Path(tempfile.gettempdir()) if given.shape == "tiny" else ROOT / "benchmarks/results"
        given.out = where / f"trunk_{given.device}.json"
    return given


def main() -> int:
    given = parse()
    if given.reckon:
        print(reckon(given))
        return 0
    return judge(given) if given.report else run(given)


if __name__ == "__main__":
    sys.exit(main())
