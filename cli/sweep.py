"""`gshare sweep`: many configurations of one adapter; each gets a warm-up, the best the whole training.

    gshare sweep sweep.toml [--vram …] [--resume] [--json] [flags]
    gshare sweep plan sweep.toml [--vram …] [--tokens-per-second N] [--json] [flags]

What is wrong with the file, the data or the memory shows before anything is written.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter
from gshare.agent.data.work import plan_work
from gshare.agent.errors import EXIT_OK, RetryLater, UsageError
from gshare.agent.jobs.names import shorten
from gshare.agent.jobs.packing import Packing
from gshare.agent.jobs.sampler import draw
from gshare.agent.jobs.spec import AdapterSpec, JobRequest, RunSpec
from gshare.agent.jobs.sweep import Added, Sweep, Trial
from gshare.agent.jobs.sweep_records import (
    Configuration,
    DecisionLog,
    SweepRecord,
    read_decisions,
    read_sweep,
    write_sweep,
)
from gshare.agent.jobs.sweep_spec import SweepFile
from gshare.agent.service.base_identity import base_identity
from gshare.agent.service.registry import GpuRequest, collect_dead, take_lock
from gshare.agent.service.sweeping import Job, SweepRun
from gshare.agent.train.trunk_forecast import forecast
from gshare.cli.finetune import check_prepared, trainer_config
from gshare.cli.finetune_flags import AdapterFlags, GpuFlags, RunFlags, given
from gshare.cli.gpu_plan import budget_line, plan_gpu, request_gpu
from gshare.cli.prepare import prepare
from gshare.cli.streams import stderr_console
from gshare.cli.sweep_board import Progress, print_result
from gshare.cli.sweep_memory import Memory, memory_of
from gshare.cli.sweep_plan import plan_of, print_plan
from rich.console import Console
from rich.text import Text

app = App(name="sweep", help="Try many configurations of an adapter, and train the best of them to the end.")

#: Held for as long as a sweep runs: two would decide against each other.
LOCK_FILE = "sweep.lock"

_NO_RUN_FLAGS = RunFlags()
_NO_ADAPTER_FLAGS = AdapterFlags()
_NO_GPU_FLAGS = GpuFlags()


@app.default
def sweep(
    file: Path,
    *,
    resume: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    device: str = "auto",
    join: Annotated[bool, Parameter(negative="--no-join")] = True,
    run_flags: RunFlags = _NO_RUN_FLAGS,
    adapter_flags: AdapterFlags = _NO_ADAPTER_FLAGS,
    gpu_flags: GpuFlags = _NO_GPU_FLAGS,
) -> int:
    """Train every configuration through its warm-up, then the best of them to the end.

    Parameters
    ----------
    file
        A TOML file with the run and a table [sweep]; flags go over what it says.
    resume
        Go on with a sweep that was stopped or killed: same winner, same bytes.
    json
        One JSON line an event on stdout, the result last.
    device
        auto, cpu, cuda or cuda:N.
    join
        Join a trainer that runs with the same base and settings, and let others join this one's.
    """
    source = SweepFile(file, given(run_flags, adapter_flags))
    reserved = plan_gpu(gpu_flags, device)
    console = stderr_console()
    before = _earlier(source, resume=resume)
    made = Prepared(source, before.sampled if before is not None else [], console, resume=before is not None)
    if before is not None:
        _check_same(before, made.record())
    memory = memory_of(made.spec.run, made.model_dir, made.specs(), reserved, gpu_flags.vram)
    gpu = None
    if reserved is not None:
        if not memory.fits(list(memory.specs)):  # else the estimate of all, which may grow, is asked for
            reserved = replace(reserved, vram_mb=memory.budget_mb)
        gpu = request_gpu(
            reserved, memory.estimate, f"sweep {source.name}", shared=join and made.base is not None
        )
        console.print(Text(budget_line(reserved, gpu, memory.estimate)))
    directory = source.directory
    directory.mkdir(parents=True, exist_ok=True)
    lock = take_lock(directory / LOCK_FILE)
    if lock is None:
        raise RetryLater(f"{directory}: another sweep runs there; wait for it, or choose another output_dir")
    try:
        # Again under the lock: another sweep may have begun or gone on here since the first look.
        if _earlier(source, resume=resume) != before:
            raise RetryLater(f"{directory}: another sweep has gone on there meanwhile; start this one again")
        if before is None:
            write_sweep(directory, made.record())
        return _run(made, memory, gpu, device=device, json_lines=json, join=join)
    finally:
        os.close(lock)


@app.command
def plan(
    file: Path,
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
    device: str = "auto",
    tokens_per_second: float | None = None,
    run_flags: RunFlags = _NO_RUN_FLAGS,
    adapter_flags: AdapterFlags = _NO_ADAPTER_FLAGS,
    gpu_flags: GpuFlags = _NO_GPU_FLAGS,
) -> int:
    """Show the configurations, their predicted memory, who trains beside whom, how much they share below
    their adapters, and how long; train nothing.

    Parameters
    ----------
    file
        A TOML file with the run and a table [sweep]; flags go over what it says.
    json
        One object on stdout.
    device
        auto, cpu, cuda or cuda:N.
    tokens_per_second
        Of all that train at once together; without it the plan says tokens and no time.
    """
    if tokens_per_second is not None and not 0 < tokens_per_second < math.inf:
        raise UsageError(f"--tokens-per-second: must be a finite number above 0, not {tokens_per_second}")
    source = SweepFile(file, given(run_flags, adapter_flags))
    gpu = plan_gpu(gpu_flags, device)
    made = Prepared(source, [], stderr_console(), resume=read_sweep(source.directory) is not None)
    memory = memory_of(made.spec.run, made.model_dir, made.specs(), gpu, gpu_flags.vram)
    planned = plan_of(
        made.trials(),
        {name: job.work for name, job in made.jobs.items()},
        made.spec.early_exit,
        memory,
        most=made.spec.max_concurrent,
        tokens_per_second=tokens_per_second,
    )
    trunk = forecast(
        [stage.trains for stage in planned.stages],
        {name: job.request for name, job in made.jobs.items()},
        num_layers=memory.shape.num_layers,
        max_tokens=made.spec.run.max_tokens_per_pass,
    )
    print_plan(planned, made.spec, trunk, json_lines=json)
    return EXIT_OK


class Prepared:
    """A sweep whose data is tokenised: everything about the input has been checked."""

    def __init__(
        self, source: SweepFile, sampled: Sequence[dict[str, Any]], console: Console, *, resume: bool
    ) -> None:
        """`sampled`: what a sampler has drawn before. UsageError for what is wrong with the model, the data
        or the output directories."""
        self.source = source
        self.console = console
        self.resume = resume
        self.created = time.time()
        self.sampled = list(sampled)
        self.jobs: dict[str, Job] = {}
        self.base: str | None = None
        space = source.spec().sampled
        if space is not None and not self.sampled:
            self.sampled = draw(space, [])
        self._take()

    def draw(self, sweep: Sweep) -> tuple[Added, dict[str, Job]]:
        """What a sampler gives next, told the losses at the boundary so far; it is written down first."""
        space = self.spec.sampled
        assert space is not None
        losses = [sweep.boundary_loss(name) for name in self.jobs]
        drawn = draw(space, list(zip(self.sampled, losses, strict=True)))
        if not drawn:
            return Added(()), {}
        before = len(self.sampled)
        self.sampled += drawn
        self._take()
        write_sweep(self.source.directory, self.record())
        names = list(self.jobs)[before:]
        return Added(tuple(self.trials()[before:])), {name: self.jobs[name] for name in names}

    def all_requests(self) -> list[JobRequest]:
        """Of every configuration; of those that are still to be drawn, name and directory only."""
        requests = [job.request for job in self.jobs.values()]
        if self.spec.sampled is not None:
            some = self.sampled[:1] * self.spec.sampled.n_trials
            later = self.source.spec(some).run.adapters[len(requests) :]
            requests += [JobRequest(spec=spec, train_store="", train_hash="") for spec in later]
        return requests

    def _take(self) -> None:
        """Prepare the configurations that are new; those before may be training."""
        self.spec = spec = self.source.spec(self.sampled)
        new = msgspec.structs.replace(spec.run, adapters=spec.run.adapters[len(self.jobs) :])
        self.model_dir, requests = self._prepare(new)
        for request, work in zip(requests, plan_work(requests), strict=True):
            if not work.val_rows:
                raise UsageError(
                    f"adapter {request.spec.name}: no validation rows, and a sweep ranks by validation loss; "
                    "raise val_fraction, or set val_data"
                )
            stopped_early = msgspec.structs.replace(request, early_exit=spec.early_exit)
            self.jobs[request.spec.name] = Job(stopped_early, work)

    def _prepare(self, run: RunSpec) -> tuple[Path, list[JobRequest]]:
        """As for a run. What is wrong in the same way with several configurations is said once."""
        try:
            model_dir, requests = prepare(run, self.console, resume=self.resume)
            self.base = base_identity(model_dir)
            check_prepared(run, self.base, requests)
            return model_dir, requests
        except UsageError as error:
            lines: dict[str, str] = {}
            for line in str(error).splitlines():
                without = line
                for adapter in run.adapters:
                    without = without.replace(f"adapter {adapter.name}:", "adapter:")
                lines.setdefault(without, line)
            raise UsageError("\n".join(lines.values())) from None

    def specs(self) -> list[AdapterSpec]:
        """Of the configurations so far."""
        return [job.request.spec for job in self.jobs.values()]

    def trials(self) -> list[Trial]:
        """As the sweep's machine takes them, in the file's order."""
        return [
            Trial.of(
                name,
                batch=job.request.spec.per_device_train_batch_size,
                total_steps=job.work.total_steps,
                warmup=self.spec.early_exit.warmup,
            )
            for name, job in self.jobs.items()
        ]

    def record(self) -> SweepRecord:
        """What `sweep.json` says of it."""
        hyper_parameters = dict(zip(self.jobs, self.spec.hyper_parameters, strict=True))
        return SweepRecord(
            name=self.spec.name,
            model=self.spec.run.model,
            base_dtype=self.spec.run.base_dtype,
            early_exit=msgspec.to_builtins(self.spec.early_exit),
            created=self.created,
            configurations=[
                Configuration(
                    name=name,
                    hyper_parameters=hyper_parameters[name],
                    total_steps=job.work.total_steps,
                    samples_total=job.work.samples(job.work.total_steps),
                    output_dir=job.request.spec.output_dir,
                )
                for name, job in self.jobs.items()
            ],
            sampled=self.sampled,
        )


def _earlier(source: SweepFile, *, resume: bool) -> SweepRecord | None:
    """The sweep that is in the directory already; UsageError when there is one and `resume` was not said."""
    before = read_sweep(source.directory)
    if before is not None and not resume:
        raise UsageError(
            f"{source.directory} already holds a sweep ({before.name}); go on with --resume, or choose "
            "another output_dir"
        )
    return before


def _check_same(before: SweepRecord, now: SweepRecord) -> None:
    """UsageError naming what a resumed sweep would do otherwise than it began."""
    changes = [
        f"{key}: {shorten(getattr(before, key))} → {shorten(getattr(now, key))}"
        for key in ("model", "base_dtype")
        if getattr(before, key) != getattr(now, key)
    ]
    changes += [
        f"early_exit {key}: {before.early_exit.get(key)} → {value}"
        for key, value in now.early_exit.items()
        if before.early_exit.get(key) != value
    ]
    old, new = ({one.name: one for one in record.configurations} for record in (before, now))
    changes += [f"configuration {name} is gone" for name in old.keys() - new.keys()]
    changes += [f"configuration {name} is new" for name in new.keys() - old.keys()]
    changes += [
        f"configuration {name}: {old[name].total_steps} → {new[name].total_steps} steps"
        for name in old.keys() & new.keys()
        if old[name].total_steps != new[name].total_steps
    ]
    if old.keys() == new.keys():
        changes += [
            f"configuration {name}: {key}: {shorten(was.get(key))} → {shorten(value)}"
            for name, was in ((name, one.hyper_parameters) for name, one in old.items())
            for key, value in new[name].hyper_parameters.items()
            # Data may have been moved: each run compares its tokens.
            if was.get(key) != value and key not in ("data", "val_data")
        ]
    if changes:
        shown = "; ".join(sorted(changes)[:4]) + (f"; {len(changes) - 4} more" if len(changes) > 4 else "")
        raise UsageError(
            f"this is not the sweep that was begun: {shown}; restore it, or choose another output_dir"
        )


def _draw(made: Prepared, machine: Sweep, memory: Memory) -> tuple[Added, dict[str, Job]]:
    added, jobs = made.draw(machine)
    memory.specs.update({name: job.request.spec for name, job in jobs.items()})
    return added, jobs


def _run(
    made: Prepared,
    memory: Memory,
    gpu: GpuRequest | None,
    *,
    device: str,
    json_lines: bool,
    join: bool,
) -> int:
    from gshare.agent.service.supervise import StopRequest
    from gshare.cli.live import make_view

    directory = made.source.directory
    collect_dead()
    machine = Sweep(
        made.trials(),
        made.spec.early_exit,
        Packing(memory.fits, most=made.spec.max_concurrent),
        expects_more=made.spec.sampled is not None,
    )
    machine.replay(read_decisions(directory))
    names = made.all_requests()
    view = make_view([(one.spec.name, one.spec.output_dir) for one in names], json_lines=json_lines)
    told = False

    def on_tick() -> None:
        nonlocal told
        if stop.exit_code is not None and not told:
            told = True
            view.say("stopping: what runs is checkpointed; --resume goes on (once more leaves at once)")
        view.tick()

    config = trainer_config(made.spec.run, made.model_dir, base=made.base, device=device, gpu=gpu)
    with StopRequest().listening() as stop, view, DecisionLog(directory) as log:
        run = SweepRun(
            sweep=machine,
            jobs=made.jobs,
            names=names,
            config=config,
            log=log,
            on_event=view.take,
            on_tick=on_tick,
            draw=lambda: _draw(made, machine, memory),
            on_connected=lambda: view.say(f"a trainer runs {made.spec.run.model}"),
            stop=stop,
            join=join,
        )
        code = run.run()
    left = None if machine.done else _progress(run)
    print_result(directory, json_lines=json_lines, left=left)
    if left is not None:
        view.say(f"the sweep is not done: gshare sweep {made.spec.run.source} --resume goes on with it")
    return code


def _progress(run: SweepRun) -> dict[str, Progress]:
    """Of the configurations that a trainer had when the sweep was left."""
    if run.supervisor is None:
        return {}
    return {
        status.job: Progress(
            status.step, run.jobs[status.job].work.samples(status.step), status.best_val_loss, status.state
        )
        for status in run.supervisor.table.all()
        if status.job in run.jobs
    }
