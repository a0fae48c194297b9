"""`gshare sweep`: many configurations of one adapter; each gets a warm-up, the best the whole training.

    gshare sweep sweep.toml [--vram …] [--resume] [--json] [flags]
    gshare sweep sweep.toml --cluster cluster.toml [--resume] [--json] [flags]
    gshare sweep plan sweep.toml [--vram …] [--tokens-per-second N] [--json] [flags]

What is wrong with the file, the data or the memory shows before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from gshare.agent.errors import EXIT_FAILURE, EXIT_OK, GshareError, UsageError
from gshare.agent.jobs.packing import Packing
from gshare.agent.jobs.sweep import Added, Sweep
from gshare.agent.jobs.sweep_records import DecisionLog, read_sweep
from gshare.agent.jobs.sweep_spec import SweepFile
from gshare.agent.service.deciding import Job
from gshare.agent.service.registry import GpuRequest, collect_dead
from gshare.agent.service.sweeping import SweepRun
from gshare.agent.train.trunk_forecast import forecast
from gshare.cli.cluster_flags import options_of
from gshare.cli.finetune import trainer_config
from gshare.cli.finetune_flags import AdapterFlags, GpuFlags, RunFlags, given
from gshare.cli.gpu_plan import budget_line, plan_gpu, request_gpu
from gshare.cli.streams import stderr_console
from gshare.cli.sweep_board import Progress, print_result
from gshare.cli.sweep_decided import decided_before
from gshare.cli.sweep_files import Files, files_of
from gshare.cli.sweep_memory import Memory, check_for_gpu, memory_of
from gshare.cli.sweep_plan import places_of, plan_of, print_plan
from gshare.cli.sweep_prepared import Prepared, check_same, claimed, earlier
from gshare.cli.sweep_values import drawn
from rich.text import Text

app = App(name="sweep", help="Try many configurations of an adapter, and train the best of them to the end.")

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
    cluster: Path | None = None,
    state_dir: Path | None = None,
    accept_new: Annotated[bool, Parameter(negative=())] = False,
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
    cluster
        Train on the nodes that this cluster file names. Ctrl-C leaves the jobs there; --resume goes on.
    state_dir
        The coordinator's, with --cluster; by default $XDG_STATE_HOME/gshare/coordinator.
    accept_new
        Trust host keys that are seen for the first time, if the cluster's coordinator has to be started.
    """
    source = SweepFile(file, given(run_flags, adapter_flags))
    if cluster is not None:
        _check_of_this_machine(gpu_flags, device, join=join)
        from gshare.cli.sweep_cluster import sweep_on_cluster

        options = options_of(cluster, state_dir, accept_new=accept_new)
        return sweep_on_cluster(source, options, resume=resume, json_lines=json)
    if state_dir is not None or accept_new:
        raise UsageError(f"--{'state-dir' if state_dir else 'accept-new'}: only with --cluster FILE")
    reserved = plan_gpu(gpu_flags, device)
    if reserved is not None:
        check_for_gpu(source)
    console = stderr_console()
    before = earlier(source, resume=resume, on_cluster=False)
    made = Prepared(source, before.sampled if before is not None else [], console, resume=before is not None)
    if before is not None:
        check_same(before, made.record())
    memory = memory_of(made.spec.run, made.model_dir, made.specs(), reserved, gpu_flags.vram)
    gpu = None
    if reserved is not None:
        if not memory.fits(list(memory.specs)):  # else the estimate of all, which may grow, is asked for
            reserved = replace(reserved, vram_mb=memory.budget_mb)
        gpu = request_gpu(
            reserved, memory.estimate, f"sweep {source.name}", shared=join and made.base is not None
        )
        console.print(Text(budget_line(reserved, gpu, memory.estimate)))
    if warning := _files(made, memory).warning():
        console.print(Text(f"warning: {warning}"))
    with claimed(made, before, resume=resume):
        return _run(made, memory, gpu, device=device, json_lines=json, join=join)


def _check_of_this_machine(flags: GpuFlags, device: str, *, join: bool) -> None:
    """UsageError for a flag that says how this machine would train."""
    names = [field.name for field in fields(flags) if getattr(flags, field.name) != field.default]
    names += ["device"] * (device != "auto") + ["no-join"] * (not join)
    if names:
        name = ("no-wait-gpu" if names[0] == "wait_gpu" else names[0]).replace("_", "-")
        raise UsageError(
            f"--{name} is of this machine, and with --cluster the nodes train: leave it out (each job "
            "reserves what it needs on its node, and cluster.toml bounds what a node gives)"
        )


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
    if gpu is not None:
        check_for_gpu(source)
    made = Prepared(source, [], stderr_console(), resume=read_sweep(source.directory) is not None)
    memory = memory_of(made.spec.run, made.model_dir, made.specs(), gpu, gpu_flags.vram)
    planned = plan_of(
        made.trials(),
        {name: job.work for name, job in made.jobs.items()},
        made.spec.early_exit,
        memory,
        most=made.spec.max_concurrent,
        tokens_per_second=tokens_per_second,
        sampled=made.spec.sampled,
    )
    trunk = forecast(
        [stage.trains for stage in planned.stages],
        {name: job.request for name, job in made.jobs.items()},
        num_layers=memory.shape.num_layers,
        max_tokens=made.spec.run.max_tokens_per_pass,
    )
    print_plan(planned, made.spec, trunk, _files(made, memory), json_lines=json)
    return EXIT_OK


def _files(made: Prepared, memory: Memory) -> Files:
    count = made.spec.sampled.n_trials if made.spec.sampled is not None else len(made.jobs)
    return files_of(
        made.source.directory,
        memory.shape,
        made.trials(),
        memory.specs,
        places=places_of(made.spec.early_exit, count),
        count=count,
    )


def _draw(
    made: Prepared, machine: Sweep, memory: Memory, say: Callable[[str], None]
) -> tuple[Added, dict[str, Job]]:
    before = len(made.jobs)
    added, jobs = made.draw(machine)
    for line in drawn(made.spec, before):
        say(line)
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
    decided = decided_before(directory, made.specs())
    collect_dead()
    machine = Sweep(
        made.trials(),
        made.spec.early_exit,
        Packing(memory.fits, most=made.spec.max_concurrent),
        expects_more=made.spec.sampled is not None,
    )
    machine.replay(decided)
    names = made.all_requests()
    live = [(one.spec.name, one.spec.output_dir) for one in names if one.spec.name not in machine.ended]
    view = make_view(live, json_lines=json_lines)
    told = False

    def on_tick() -> None:
        nonlocal told
        if stop.exit_code is not None and not told:
            told = True
            saved = "checkpointed" + (" where there is room" if stop.exit_code == EXIT_FAILURE else "")
            view.say(f"stopping: what runs is {saved}; --resume goes on (once more leaves at once)")
        view.tick()

    config = trainer_config(made.spec.run, made.model_dir, base=made.base, device=device, gpu=gpu)
    with StopRequest().listening() as stop, view, DecisionLog(directory) as log:
        for line in drawn(made.spec):
            view.say(line)
        run = SweepRun(
            sweep=machine,
            jobs=made.jobs,
            names=names,
            config=config,
            log=log,
            on_event=view.take,
            on_tick=on_tick,
            draw=lambda: _draw(made, machine, memory, view.say),
            on_connected=lambda: view.say(f"a trainer runs {made.spec.run.model}"),
            stop=stop,
            join=join,
        )
        code, fault = EXIT_FAILURE, None
        try:
            code = run.run()
        except GshareError as error:  # a decision was not written down
            if run.supervisor is None:
                raise
            fault = error
    left = None if machine.done and fault is None else _progress(run)
    print_result(directory, json_lines=json_lines, left=left)
    if left is not None:
        view.say(f"the sweep is not done: gshare sweep {made.spec.run.source} --resume goes on with it")
    if fault is not None:
        raise fault
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
