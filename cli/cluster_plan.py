"""`gshare cluster plan`: which of several sweeps would run when, on how many GPUs. Nothing is run.

    gshare cluster plan --gpus 8 --profile rates.json llama-70b.toml:4 qwen-32b.toml:2 llama-8b.toml

A sweep's duration is what it trains at most (`sweep_plan.py`), by the tokens a second that were measured; a
run's is all of its steps. A job's own losses may end it sooner, and then the rest is planned anew.
"""

from __future__ import annotations

import importlib.util
import json as json_module
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from cyclopts import Parameter
from gshare.agent.errors import EXIT_OK, UsageError
from gshare.agent.jobs.names import plain
from gshare.cli.board import columns, duration
from gshare.cli.streams import stderr_console
from rich.text import Text

if TYPE_CHECKING:
    from gshare.agent.data.work import Work as JobWork
    from gshare.agent.jobs.early_exit import SweepExit
    from gshare.agent.jobs.memory_profile import MemoryProfile
    from gshare.agent.jobs.spec import JobRequest, RunSpec
    from gshare.agent.jobs.sweep_ranges import Range
    from gshare.coordinator.plan import Plan
    from rich.console import Console

    #: Tokens a second of a run whose model lies in that directory, on so many GPUs.
    Rate = Callable[[RunSpec, Path, int], float]

#: More is no plan of sweeps but a slip.
MAX_GPUS = 4096
#: Keys of which more is more work; a smaller `val_fraction` leaves more to train on.
_MORE = ("gradient_accumulation_steps", "max_steps", "num_train_epochs", "per_device_train_batch_size")
INSTALL_PLAN = "pip install 'gshare[plan]'"


class Work(NamedTuple):
    """One sweep: what is to be trained, and how fast that goes."""

    name: str
    file: str
    gpus: int
    configurations: int
    tokens: int  # at most
    tokens_in_full: int  # every configuration to its last step
    tokens_per_second: float


def plan(
    sweeps: Annotated[Sequence[str], Parameter(negative=())],
    /,
    *,
    gpus: int,
    tokens_per_second: float | None = None,
    profile: Path | None = None,
    seconds: float | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Plan several sweeps on the GPUs of a cluster: the order and places that end soonest. Nothing is run.

    Parameters
    ----------
    sweeps
        FILE or FILE:N, the TOML file of a sweep or run and how many GPUs it takes at once (1 when left out).
    gpus
        How many GPUs there are, all alike.
    tokens_per_second
        What one sweep trains, on all of its GPUs. Instead of --profile.
    profile
        The file that `gshare estimate --measure` kept (it says where), for sweeps of its base on one GPU. Or
        one of your own: {"version": 1, "rates": [{"model": "Llama-3.1-8B", "base_dtype": "bf16", "gpus": 1,
        "tokens_per_second": 16352}]}, where model is that of the sweep's file or the last part of it.
    seconds
        How long to search for a better plan; 1 when left out.
    json
        One object: the tasks with their GPUs and times in seconds, the end, the bound, the gap.
    """
    from gshare.coordinator.plan import Task
    from gshare.coordinator.planner import SOLVE_SECONDS, best_plan
    from gshare.coordinator.throughput import duration_ms

    _check_flags(gpus, tokens_per_second, profile, seconds)
    rate = _rate(profile, tokens_per_second)
    console = stderr_console()
    work = [_work(*_file_and_gpus(text), rate, console) for text in sweeps]
    tasks = [Task(one.name, duration_ms(one.tokens, one.tokens_per_second), one.gpus) for one in work]
    found = best_plan(
        tasks, [str(i) for i in range(gpus)], seconds=SOLVE_SECONDS if seconds is None else seconds
    )
    if found.gap and importlib.util.find_spec("ortools") is None:
        note = f"there may be a better plan, and ortools, which looks for it, is missing: {INSTALL_PLAN}"
        console.print(Text(note))
    if json:
        print(json_module.dumps(_as_json(found, work, gpus)))
    else:
        print("\n".join(_table(found, work)))
    return EXIT_OK


def _check_flags(gpus: int, rate: float | None, profile: Path | None, seconds: float | None) -> None:
    if not 1 <= gpus <= MAX_GPUS:
        raise UsageError(f"--gpus: {gpus} is not within 1 to {MAX_GPUS}")
    if (rate is None) == (profile is None):
        raise UsageError(
            "give either --profile FILE or --tokens-per-second: how long a sweep takes follows from it"
        )
    if rate is not None and not 0 < rate < float("inf"):
        raise UsageError(f"--tokens-per-second: {rate} is no rate; it must be above 0")
    if seconds is not None and not 0 < seconds <= 3600:
        raise UsageError(f"--seconds: {seconds} is not above 0 and at most 3600")


def _rate(profile: Path | None, tokens_per_second: float | None) -> Rate:
    """UsageError, from here or from what is returned: the profile is none, or knows nothing of a run."""
    from gshare.agent.jobs.memory_profile import DamagedProfile, read_profile_file
    from gshare.coordinator.throughput import read_profile

    if profile is None:
        assert tokens_per_second is not None
        return lambda run, model_dir, gpus: tokens_per_second
    try:
        measured = read_profile_file(profile)
    except DamagedProfile as error:
        raise UsageError(f"{error}; `gshare estimate --measure` mends its own") from None
    except FileNotFoundError:
        measured = None  # the other reader says so
    if measured is not None:
        return partial(_measured_rate, measured, profile)
    rates = read_profile(profile)
    return lambda run, model_dir, gpus: rates.tokens_per_second(run.model, run.base_dtype, gpus)


def _measured_rate(measured: MemoryProfile, file: Path, run: RunSpec, model_dir: Path, gpus: int) -> float:
    """Of the run's passes when they are full, by the steps that were timed on one device."""
    from gshare.agent.base.config import read_config
    from gshare.agent.jobs.memory import ModelShape, largest_pass
    from gshare.agent.jobs.memory_choice import CPU_CARD, is_checkpointing, predicted_speed
    from gshare.agent.service.base_identity import base_identity

    instead = "; measure that with `gshare estimate --measure`, or give a file of rates (see --help)"
    key = measured.key
    if gpus != 1:
        raise UsageError(f"{file}: was measured on one GPU, {run.source} takes {gpus}{instead}")
    if key.base != base_identity(model_dir):
        raise UsageError(f"{file}: was measured of another base than {run.model}{instead}")
    checkpointing = is_checkpointing(run.adapters)
    if (key.base_dtype, key.checkpointing) != (run.base_dtype, checkpointing):
        with_it = "with" if key.checkpointing else "without"
        raise UsageError(f"{file}: was measured in {key.base_dtype}, {with_it} checkpointing{instead}")
    tokens, longest = largest_pass(run)
    speed = predicted_speed(
        ModelShape.of(read_config(model_dir)),
        run.adapters,
        measured,
        base_dtype=run.base_dtype,
        device="cpu" if key.card == CPU_CARD else "cuda",
        pass_tokens=tokens,
        longest_row=longest,
    )
    if speed is None:
        raise UsageError(
            f"{file}: passes of {tokens:,} tokens are far larger than what was measured{instead}"
        )
    return speed


def _file_and_gpus(text: str) -> tuple[Path, int]:
    """ "FILE:4" → (FILE, 4); a file of that very name is meant as it stands."""
    path, colon, count = text.rpartition(":")
    if not colon or Path(text).exists() or not count.isdecimal():
        return Path(text), 1
    return Path(path), int(count[:9])


def _work(path: Path, gpus: int, rate: Rate, console: Console) -> Work:
    from gshare.agent.data.prepare import find_model, prepare_requests
    from gshare.cli.prepare import shares, told_while

    name, run, draws, early_exit = _read(path)
    with told_while(console, f"looking for {Path(run.model).name}") as tell:
        model_dir = find_model(run, shares(tell))
    # What a sampled sweep may draw are choices of one configuration.
    one_of_them = run if draws is None else msgspec.structs.replace(run, adapters=run.adapters[:1])
    speed = rate(one_of_them, model_dir, gpus)
    said: set[str] = set()

    def say(line: str) -> None:
        """What is counted of a file, once: sixty configurations of a grid read the same one."""
        of_data = line.partition(": ")[2]  # without the adapter's name
        if of_data not in said:
            said.add(of_data)
            console.print(Text(f"{name}: {of_data}"))

    with told_while(console, "reading the data"):
        requests = prepare_requests(run, model_dir, resume=False, say=say)
    done = [_work_of(request) for request in requests]
    if draws is not None:
        one = max(range(len(done)), key=lambda n: done[n].samples(done[n].total_steps) * done[n].mean_tokens)
        requests, done = [requests[one]] * draws, [done[one]] * draws
    tokens, in_full = _count(requests, done, early_exit)
    return Work(name, str(path), gpus, len(requests), tokens, in_full, speed)


def _read(path: Path) -> tuple[str, RunSpec, int | None, SweepExit | None]:
    """(name, run, how many are drawn, a sweep's settings): of a sampled sweep those of which one is as much
    work as any that may be drawn; it stands for all."""
    from gshare.agent.jobs.faults import TomlFile
    from gshare.agent.jobs.spec_file import load_run_spec
    from gshare.agent.jobs.sweep_spec import SweepFile

    if "sweep" not in TomlFile(path).table:
        return path.stem, load_run_spec(path), None, None
    file = SweepFile(path)
    sweep = file.spec()
    if sweep.sampled is None:
        return sweep.name, sweep.run, None, sweep.early_exit
    choices = {key: _costliest(key, values) for key, values in sweep.sampled.ranges.items()}
    candidates = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    return sweep.name, file.spec(candidates).run, sweep.sampled.n_trials, sweep.early_exit


def _costliest(key: str, values: Range | list[Any]) -> list[Any]:
    """Of what may be drawn, those of which one is the most work; of a key that moves no token any value."""
    if isinstance(values, list):
        if key == "data":
            return values
        if key == "max_steps":  # -1: as many as the epochs have
            return sorted({max(values), min(values)})
        return [max(values) if key in _MORE else values[0]]
    end = values.high if key in _MORE else values.low
    return [int(end) if end.is_integer() else end]


def _count(
    requests: Sequence[JobRequest], works: Sequence[JobWork], early_exit: SweepExit | None
) -> tuple[int, int]:
    """(tokens at most, in full) of a sweep's configurations, or of a run's jobs, which nothing stops."""
    from gshare.agent.jobs.sweep import Trial
    from gshare.cli.sweep_plan import most_tokens, places_of

    trials, work = [], {}
    for number, (request, done) in enumerate(zip(requests, works, strict=True)):
        warmup = early_exit.warmup if early_exit is not None else 1.0
        batch = request.spec.per_device_train_batch_size
        trials.append(Trial.of(str(number), batch=batch, total_steps=done.total_steps, warmup=warmup))
        work[str(number)] = done
    places = places_of(early_exit, len(trials)) if early_exit is not None else len(trials)
    return round(most_tokens(trials, work, places)), round(most_tokens(trials, work, len(trials)))


def _work_of(request: JobRequest) -> JobWork:
    from gshare.agent.data.work import plan_work

    try:
        return plan_work([request])[0]
    except UsageError as error:
        raise UsageError(f"adapter {request.spec.name}: {request.spec.data}: {error}") from None


def training_tokens(request: JobRequest) -> int:
    """Of all steps of a job; each row as the mean of those that it trains on."""
    return _count([request], [_work_of(request)], None)[1]


def _table(found: Plan, work: Sequence[Work]) -> list[str]:
    by_name = {one.name: one for one in work}
    lines = [("sweep", "configurations", "tokens", "starts", "ends", "GPUs")]
    for one in found.assignments:
        it = by_name[one.task]
        counts = (str(it.configurations), f"{it.tokens:,}")
        times = (duration(one.start_ms / 1000), duration(one.end_ms / 1000))
        lines.append((plain(one.task), *counts, *times, ", ".join(one.gpus)))
    end, bound, greedy = (duration(ms / 1000) for ms in (found.end_ms, found.bound_ms, found.greedy_ms))
    how = "longest first" if found.method == "greedy" else f"CP-SAT (longest first: {greedy})"
    gap = "proven best" if found.gap == 0 else f"no plan ends before {bound}, {found.gap:.2%} sooner"
    return [*columns(lines), "", _counted(work), f"all done after {end}, {how}; {gap}"]


def _counted(work: Sequence[Work]) -> str:
    """What the tokens are, of which the times follow."""
    tokens, in_full = sum(one.tokens for one in work), sum(one.tokens_in_full for one in work)
    if tokens == in_full:
        return f"counted: all {in_full:,} tokens, every configuration to its last step"
    return (
        f"counted: {tokens:,} tokens at most, of {in_full:,} in full: of a sweep, those go on after the "
        "warm-up that have most before them"
    )


def _as_json(found: Plan, work: Sequence[Work], gpus: int) -> dict[str, Any]:
    by_name = {one.name: one for one in work}
    return {
        "type": "plan",
        "gpus": gpus,
        "method": found.method,
        "makespan_s": found.makespan_ms / 1000,
        "bound_s": found.bound_ms / 1000,
        "greedy_s": found.greedy_ms / 1000,
        "gap": found.gap,
        "tasks": [
            {
                **by_name[one.task]._asdict(),
                "gpus": [int(gpu) for gpu in one.gpus],
                "start_s": one.start_ms / 1000,
                "end_s": one.end_ms / 1000,
            }
            for one in found.assignments
        ],
    }
