"""`gshare finetune`: spec → model → token files → a trainer process → live table → leaderboard.

    gshare finetune --model MODEL --adapter data/a.jsonl:out/a --adapter data/b.jsonl:out/b [flags]
    gshare finetune --adapters-config adapters.toml [--resume] [--json] [--detach] [--dry-run] [flags]

Everything about the input is checked before the first byte is written under an output directory.
"""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from gshare.agent.data.prepare import run_estimate
from gshare.agent.errors import EXIT_OK, EXIT_RETRY, UsageError
from gshare.agent.jobs.events import Event
from gshare.agent.jobs.spec import JobRequest, RunSpec
from gshare.agent.jobs.spec_rules import check_ranks
from gshare.agent.service.base_identity import base_identity
from gshare.agent.service.output_dir import RunRecord, check_free_output_dir
from gshare.agent.service.registry import RUNNER, GpuRequest, TrainerConfig, collect_dead
from gshare.agent.service.sinks import Sinks, check_sinks
from gshare.cli.estimate import dry_run_json
from gshare.cli.finetune_flags import AdapterFlags, GpuFlags, RunFlags, given
from gshare.cli.gpu_plan import budget_line, plan_gpu, request_gpu, save_often
from gshare.cli.prepare import prepare, read_spec
from gshare.cli.streams import stderr_console
from rich.text import Text

if TYPE_CHECKING:  # numpy starts threads: no program whose signals one thread is to have imports it
    from gshare.agent.train.trunk_forecast import Forecast

#: Test hook: "module:class" of another engine, so that the processes can be tested without torch.
RUNNER_VARIABLE = "GSHARE_TEST_RUNNER"

_NO_RUN_FLAGS = RunFlags()
_NO_ADAPTER_FLAGS = AdapterFlags()
_NO_GPU_FLAGS = GpuFlags()


def finetune(
    *,
    model: str | None = None,
    adapter: Annotated[Sequence[str], Parameter(negative=())] = (),
    adapters_config: Annotated[Path | None, Parameter(name=["--adapters-config", "--adapters"])] = None,
    resume: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    detach: Annotated[bool, Parameter(negative=())] = False,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    report_to: Annotated[Sequence[str], Parameter(negative=())] = (),
    device: str = "auto",
    join: Annotated[bool, Parameter(negative="--no-join")] = True,
    trace: Annotated[bool, Parameter(negative=())] = False,
    run_flags: RunFlags = _NO_RUN_FLAGS,
    adapter_flags: AdapterFlags = _NO_ADAPTER_FLAGS,
    gpu_flags: GpuFlags = _NO_GPU_FLAGS,
) -> int:
    """Train adapters on one base, all at the same time.

    Parameters
    ----------
    model
        The base: a directory in Hugging Face format, a hub id, or a .gguf file.
    adapter
        DATA:OUT or NAME=DATA:OUT; once for every adapter.
    adapters_config
        A TOML file with the whole run; flags go over what it says.
    resume
        Go on from the newest checkpoint in each output directory.
    json
        One JSON line an event on stdout, the leaderboard last; with --dry-run one object.
    detach
        Return when the trainer has started; `gshare jobs` follows and stops it.
    dry_run
        Check everything, show how much memory the run takes and what its adapters share; train nothing.
    report_to
        tensorboard, wandb or trackio; may be given more than once.
    device
        auto, cpu, cuda or cuda:N.
    join
        Join a trainer that runs with the same base and settings, and let others join this one's.
    trace
        Keep a trace of the trainer's phases, which `gshare gpu trace` shows. Such a trainer is not shared.
    """
    run = read_spec(model, adapter, adapters_config, given(run_flags, adapter_flags))
    if not run.adapters:
        raise UsageError(f"{run.source}: no adapter; add one with [[adapter]]")
    check_sinks(report_to)
    plan = plan_gpu(gpu_flags, device, outlives=detach)
    if plan is not None:
        check_ranks(run.adapters)
    if gpu_flags.experimental_mps:
        run = save_often(run)
    _check_output_dirs(run, resume=resume)
    console = stderr_console()
    model_dir, requests = prepare(run, console, resume=resume)
    base = base_identity(model_dir)
    check_prepared(run, base, requests)
    cards = plan.cards if plan is not None else ()
    estimate = partial(run_estimate, run, model_dir, requests, on_gpu=plan is not None, cards=cards)
    gpu = None
    if plan is not None:
        if plan.note:
            console.print(Text(f"warning: {plan.note}"))
        task = f"finetune {', '.join(request.spec.name for request in requests)}"
        gpu = request_gpu(plan, estimate, task, shared=join and base is not None)
        console.print(Text(budget_line(plan, gpu, estimate)))
    elif gpu_flags.vram is not None:
        console.print(Text("--vram is not used: the run is on the CPU, where nothing is reserved"))
    if dry_run:
        it, trunk = estimate(), _trunk(run, model_dir, requests)
        if json:
            print(json_module.dumps(dry_run_json(run, model_dir, requests, it, gpu, trunk)))
        else:
            print("\n".join([it.table(), *([trunk.told()] if trunk is not None else [])]))
        return EXIT_OK
    collect_dead()
    config = trainer_config(run, model_dir, base=base, device=device, gpu=gpu, trace=trace)
    if detach:
        return detach_run(config, requests, report_to, join=join)
    return supervise_run(config, requests, report_to, json_lines=json, join=join)


def _trunk(run: RunSpec, model_dir: Path, requests: Sequence[JobRequest]) -> Forecast | None:
    """What several adapters share; None: there is one."""
    if len(requests) < 2:
        return None
    from gshare.agent.base.config import read_config
    from gshare.agent.data.work import plan_work
    from gshare.agent.train.trunk_forecast import forecast, together

    steps = [work.total_steps for work in plan_work(requests)]
    by_name = {request.spec.name: request for request in requests}
    return forecast(
        together(dict(zip(by_name, steps, strict=True))),
        by_name,
        num_layers=read_config(model_dir).num_layers,
        max_tokens=run.max_tokens_per_pass,
    )


def trainer_config(
    run: RunSpec,
    model_dir: Path,
    *,
    base: str | None,
    device: str,
    gpu: GpuRequest | None,
    trace: bool = False,
) -> TrainerConfig:
    """What the run's trainer is told; `base` is the model's identity, where it has one."""
    return TrainerConfig(
        model=run.model,
        model_dir=str(model_dir.absolute()),
        base_dtype=run.base_dtype,
        schedule=run.schedule,
        max_tokens_per_pass=run.max_tokens_per_pass,
        max_adapters_per_pass=run.max_adapters_per_pass,
        trunk_cache=run.trunk_cache,
        trunk_cache_host=run.trunk_cache_host,
        device=device,
        gpu=gpu,
        trace=trace,
        base=base or "",
        runner=os.environ.get(RUNNER_VARIABLE) or RUNNER,
    )


def _check_output_dirs(run: RunSpec, *, resume: bool) -> None:
    for spec in run.adapters:
        check_free_output_dir(RunRecord(model=run.model, base_dtype=run.base_dtype, spec=spec), resume=resume)


def check_prepared(run: RunSpec, base: str | None, requests: Sequence[JobRequest]) -> None:
    """Another base or other data than a directory's run had: told before a trainer is started."""
    for request in requests:
        check_free_output_dir(
            RunRecord(
                model=run.model,
                base_dtype=run.base_dtype,
                base=base,
                spec=request.spec,
                train_hash=request.train_hash,
                val_hash=request.val_hash,
            ),
            resume=request.resume,
        )


def detach_run(
    config: TrainerConfig, requests: list[JobRequest], report_to: Sequence[str], *, join: bool
) -> int:
    """Leave `requests` to a client of their own, and say how to reach them."""
    from gshare.agent.service.detach import DetachedPlan, detach

    plan = DetachedPlan(config=config, requests=requests, report_to=list(report_to), join=join)
    pid, log = detach(plan)
    for request in requests:
        print(request.spec.name)
    how = "`gshare jobs attach NAME` follows, `gshare jobs stop NAME` stops"
    print(f"detached: process {pid}, log {log}; {how}", file=sys.stderr)
    return EXIT_OK


def supervise_run(
    config: TrainerConfig,
    requests: Sequence[JobRequest],
    report_to: Sequence[str],
    *,
    json_lines: bool,
    join: bool,
) -> int:
    """Run `requests` to their ends and show them; the exit code."""
    from gshare.agent.service.supervise import StopRequest, Supervisor
    from gshare.cli.live import make_view

    sinks = Sinks(report_to, requests)
    view = make_view([(r.spec.name, r.spec.output_dir) for r in requests], json_lines=json_lines)
    told = False

    def on_connected() -> None:
        if not supervisor.joined:  # then it has said whose trainer it joins
            view.say(f"a trainer loads {config.model}")

    def on_event(event: Event) -> None:
        view.take(event)
        sinks.take(event)

    def on_tick() -> None:
        nonlocal told
        if stop.exit_code is not None and not told:
            told = True
            view.say("stopping: the adapters are checkpointed (once more leaves at once)")
        view.tick()

    try:
        with StopRequest().listening() as stop, view:
            supervisor = Supervisor(
                config=config,
                requests=requests,
                on_event=on_event,
                on_tick=on_tick,
                on_connected=on_connected,
                stop=stop,
                join=join,
            )
            code = supervisor.run()
    finally:
        sinks.close()
    view.finish()
    if code not in (EXIT_OK, EXIT_RETRY, stop.exit_code) and supervisor.logs:
        view.say(f"log of the trainer: {supervisor.logs[-1]}")
    return code
