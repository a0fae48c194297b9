"""`gshare jobs clone NAME --set KEY=VALUE … [--warm]`: a changed copy of a job joins the running trainer.

The clone is this command's own job, as with `gshare finetune`: shown until it ends, stopped by Ctrl-C, left
to a client in the background by --detach. Its parent may be anybody's of this user; nothing of it changes.
A warm clone starts from the weights that its parent has between two rounds; of a parent that has ended, from
those of its newest checkpoint. They are kept in its `start/`, so that it is made again from there, whatever
becomes of the parent. Where the parent's trainer has ended too, the clone is a run of its own from what the
parent's `run.json` says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from gshare.agent.data.prepare import check_adapters, find_model, prepare_requests, run_estimate
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.jobs.clone import cloned_spec, free_name, parse_settings, spec_toml
from gshare.agent.jobs.early_exit import EarlyExit, SweepExit
from gshare.agent.jobs.events import ENDED
from gshare.agent.jobs.names import shorten
from gshare.agent.jobs.spec import AdapterSpec, JobRequest, RunSpec, WarmStart
from gshare.agent.jobs.spec_rules import check_ranks
from gshare.agent.jobs.sweep_records import SWEEP_FILE, SWEEP_LOCK, Decision, append_decision, read_sweep
from gshare.agent.service.base_identity import base_identity
from gshare.agent.service.joining import why_not_this, with_identity
from gshare.agent.service.output_dir import (
    CLONE_FILE,
    LOCK_FILE,
    RUN_FILE,
    START_DIR,
    RunRecord,
    check_free_output_dir,
    read_record,
)
from gshare.agent.service.protocol import TakeWeights, TrainerHello, WeightsTaken
from gshare.agent.service.registry import TrainerConfig, is_held, read_json
from gshare.cli.finetune import detach_run, supervise_run, trainer_config
from gshare.cli.finetune_flags import ReserveFlags
from gshare.cli.gpu_plan import budget_line, plan_gpu, request_gpu
from gshare.cli.jobs import (
    COMMAND_SECONDS,
    ClusterFlag,
    Found,
    StateDirFlag,
    connected,
    find_all,
    find_job,
)
from gshare.cli.streams import stderr_console
from rich.console import Console
from rich.text import Text

_NO_FLAGS = ReserveFlags()


def clone(
    name: str,  # by position alone: --name is the clone's
    /,
    *,
    set_: Annotated[Sequence[str], Parameter(name="--set", negative=())] = (),
    new_name: Annotated[str | None, Parameter(name="--name")] = None,
    warm: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    detach: Annotated[bool, Parameter(negative=())] = False,
    cluster: ClusterFlag = None,
    state_dir: StateDirFlag = None,
    reserve_flags: ReserveFlags = _NO_FLAGS,
) -> int:
    """Train a changed copy of a job, from new weights or from the job's own.

    It joins the job's trainer, or is a run of its own where that has ended. The job itself stays as it is.
    Ctrl-C checkpoints and stops the clone only. On a cluster (cold only) the coordinator places it like a
    submitted job, and Ctrl-C leaves it running.

    Parameters
    ----------
    name
        The job, as `gshare jobs` lists it.
    set_
        KEY=VALUE of the job spec, such as learning_rate=1e-4; once for every key that changes.
    new_name
        Of the clone; NAME-clone when left out. Its output_dir is a folder of that name beside the job's.
    warm
        Start from the job's weights of this moment (of one that has ended: its newest checkpoint), with a
        fresh optimizer, instead of from new ones.
    json
        One JSON line an event on stdout, the leaderboard last.
    detach
        Return when the clone runs; `gshare jobs` follows and stops it.
    """
    settings = parse_settings(set_)
    if cluster is not None:
        from gshare.cli.clone_cluster import clone_cluster_job

        if warm or reserve_flags != _NO_FLAGS:
            what = "--warm" if warm else "a flag of the GPU"
            raise UsageError(f"{what} is for jobs of this machine: a clone on a cluster is cold, and placed")
        return clone_cluster_job(cluster, state_dir, name, settings, new_name, json_lines=json, detach=detach)
    parent = find_job(name, running=False)
    if parent.trainer is None:
        config, hello = None, None
    else:
        config, hello = _look(parent)
    record = _record_of(parent)
    beside = Path(record.spec.output_dir).parent
    configurations = _configurations(beside)
    new_name = new_name or free_name(name, _names_taken(beside) | configurations)
    _check_name_is_free(new_name, configurations, beside)
    spec = cloned_spec(record.spec, settings, name=new_name, warm=warm, base_dir=Path.cwd())
    run = _own_run(config, record, spec)
    out = Path(spec.output_dir)
    _check_output_dir(run, out)
    sweep = _sweep_of(record)
    console = stderr_console()
    model_dir = find_base(run) if config is None else Path(config.model_dir)
    request = prepare(run, model_dir, console)
    if sweep is not None:
        request = msgspec.structs.replace(request, early_exit=sweep.early_exit)
    if config is None or hello is None:
        config = _new_config(run, model_dir, record, request, reserve_flags, console, detach=detach)
    else:
        config = _own_config(config, hello, run, request, reserve_flags, console, detach=detach)
    try:
        if warm:
            request = msgspec.structs.replace(request, start=_take_weights(parent, out / START_DIR))
        _write_spec(run, record, request, parent.status.job)
        if sweep is not None:
            sweep.note(parent, request, settings)
        if detach:
            return detach_run(config, [request], (), join=True)
        code = supervise_run(config, [request], (), json_lines=json, join=True)
    except BaseException:
        _clear_up(out)
        raise
    _clear_up(out)
    return code


def find_base(run: RunSpec) -> Path:
    """The directory of the model that a parent's record names."""
    return find_model(run)


def prepare(run: RunSpec, model_dir: Path, console: Console) -> JobRequest:
    """The clone's data tokenised and split, from the cache where it is the parent's."""
    check_adapters(run, model_dir)
    (request,) = prepare_requests(run, model_dir, resume=False, say=lambda line: console.print(Text(line)))
    return request


def _look(parent: Found) -> tuple[TrainerConfig, TrainerHello]:
    """The parent's trainer, which runs."""
    status = parent.status
    assert parent.trainer is not None
    if status.state == "queued":
        why = status.reason or "its trainer loads the base"
        raise RetryLater(f"job {status.job} has not started yet ({why}); clone it when it runs")
    config = read_json(parent.trainer / "trainer.json", TrainerConfig)
    with connected(parent.trainer) as client:
        hello = client.hello
    if hello.gshare != version("gshare"):
        raise GshareError(
            f"the trainer of job {status.job} is gshare {hello.gshare}, this is {version('gshare')}; use the "
            "same"
        )
    return config, hello


def _record_of(parent: Found) -> RunRecord:
    """What the parent was made from."""
    status = parent.status
    record = read_record(Path(status.output_dir))
    if record is None or record.spec.name != status.job:
        raise GshareError(f"{Path(status.output_dir) / RUN_FILE}: not the record of job {status.job}")
    return record


def _own_run(theirs: TrainerConfig | None, record: RunRecord, spec: AdapterSpec) -> RunSpec:
    """The clone's run, with the settings of its parent's trainer. What a trainer that has ended had of
    schedule and passes is recorded nowhere, and changes no bits."""
    if theirs is None:
        return RunSpec(
            model=record.model,
            base_dtype=record.base_dtype,  # type: ignore[arg-type]  # one of them: a run had it
            adapters=(spec,),
        )
    return RunSpec(
        model=theirs.model,
        base_dtype=theirs.base_dtype,  # type: ignore[arg-type]  # one of them: a run had it
        schedule=theirs.schedule,  # type: ignore[arg-type]
        max_tokens_per_pass=theirs.max_tokens_per_pass,
        max_adapters_per_pass=theirs.max_adapters_per_pass,
        adapters=(spec,),
    )


@dataclass(frozen=True)
class _Sweep:
    """The sweep that the parent is a configuration of. A clone is none: it is not ranked, but what stops a
    configuration by its own losses stops it too."""

    directory: Path
    early_exit: EarlyExit

    def note(self, parent: Found, clone: JobRequest, settings: Mapping[str, str]) -> None:
        """Among its decisions, as long as it runs."""
        if not is_held(self.directory / SWEEP_LOCK):
            return
        start, spec = clone.start, clone.spec
        decision = Decision(
            time=time.time(),
            job=parent.status.job,
            event="cloned",
            step=start.step if start is not None else parent.status.step,
            reason=f"as {spec.name}, {'warm' if start is not None else 'cold'}",
            evidence={"clone": spec.name, "output_dir": spec.output_dir, "set": dict(settings)},
        )
        append_decision(self.directory, decision)


def _sweep_of(parent: RunRecord) -> _Sweep | None:
    """GshareError: its sweep.json is damaged."""
    directory = Path(parent.spec.output_dir).parent
    sweep = read_sweep(directory)
    if sweep is None or parent.spec.name not in {one.name for one in sweep.configurations}:
        return None
    try:
        return _Sweep(directory, msgspec.convert(sweep.early_exit, SweepExit).of_job())
    except msgspec.ValidationError as error:
        raise GshareError(f"{directory / SWEEP_FILE}: early_exit: {error}") from None


def _names_taken(beside: Path) -> set[str]:
    """Of jobs, and of what lies beside the parent's output_dir."""
    return {job.status.job for job in find_all()} | {entry.name for entry in beside.iterdir()}


def _configurations(directory: Path) -> set[str]:
    """Names of the configurations of the sweep that is there, and of their directories, which those that
    wait have not got yet."""
    sweep = read_sweep(directory)
    configurations = sweep.configurations if sweep is not None else []
    return {name for one in configurations for name in (one.name, Path(one.output_dir).name)}


def _check_name_is_free(name: str, configurations: set[str], beside: Path) -> None:
    if name in configurations:
        raise UsageError(f"--name {name}: is of a configuration of the sweep in {beside}; choose another")
    if any(job.status.job == name and job.status.state not in ENDED for job in find_all()):
        raise UsageError(f"--name {name}: a job of this name is running; choose another")


def _check_output_dir(run: RunSpec, out: Path) -> None:
    (spec,) = run.adapters
    check_free_output_dir(RunRecord(model=run.model, base_dtype=run.base_dtype, spec=spec), resume=False)
    for entry in (out / START_DIR, out / CLONE_FILE):
        if os.path.lexists(entry):
            raise UsageError(f"{entry}: is there already; remove it, or choose another --name or output_dir")


def _own_config(
    theirs: TrainerConfig,
    hello: TrainerHello,
    run: RunSpec,
    request: JobRequest,
    flags: ReserveFlags,
    console: Console,
    *,
    detach: bool,
) -> TrainerConfig:
    """The configuration with which the clone's client joins: the parent's, with a part of its own on the GPU.

    UsageError: nobody can join that trainer from here.
    """
    gpu = None
    if theirs.gpu is not None:
        gpus = flags.gpus or hello.gpu or ",".join(theirs.gpu.gpus)
        plan = plan_gpu(replace(flags, gpus=gpus), "auto", outlives=detach)
        assert plan is not None, "GPUs that are named are found or refused"
        check_ranks([request.spec])
        if plan.note:
            console.print(Text(f"warning: {plan.note}"))
        estimate = partial(
            run_estimate, run, Path(theirs.model_dir), [request], on_gpu=True, cards=plan.cards
        )
        gpu = request_gpu(plan, estimate, f"clone {request.spec.name}", shared=True)
        console.print(Text(budget_line(plan, gpu, estimate)))
    elif flags != _NO_FLAGS:
        console.print(Text("flags of the GPU are not used: the trainer is on the CPU"))
    mine = msgspec.structs.replace(theirs, gpu=gpu, base="", join_key="", joinable=True)
    mine = with_identity(mine, join=True)
    if reason := why_not_this(mine, theirs):
        raise UsageError(f"the trainer {hello.trainer_id} cannot be joined from here: {reason}")
    return mine


def _new_config(
    run: RunSpec,
    model_dir: Path,
    parent: RunRecord,
    request: JobRequest,
    flags: ReserveFlags,
    console: Console,
    *,
    detach: bool,
) -> TrainerConfig:
    """Of a trainer of the clone's own, as `gshare finetune` would start; one with the same base is joined.

    UsageError: the model is another one by now.
    """
    base = base_identity(model_dir)
    if parent.base is not None and base != parent.base:
        raise UsageError(
            f"{model_dir} is not the model any more that {parent.spec.name} was trained on; put that one "
            "there, or start a run of the new one with `gshare finetune`"
        )
    plan = plan_gpu(flags, "auto", outlives=detach)
    gpu = None
    if plan is not None:
        check_ranks([request.spec])
        if plan.note:
            console.print(Text(f"warning: {plan.note}"))
        estimate = partial(run_estimate, run, model_dir, [request], on_gpu=True, cards=plan.cards)
        gpu = request_gpu(plan, estimate, f"clone {request.spec.name}", shared=base is not None)
        console.print(Text(budget_line(plan, gpu, estimate)))
    console.print(Text(f"the trainer of {parent.spec.name} has ended: its clone is a run of its own"))
    return trainer_config(run, model_dir, base=base, device="auto", gpu=gpu)


def _take_weights(parent: Found, directory: Path) -> WarmStart:
    """Written to `directory`: the weights of a job that trains, or else those of its newest checkpoint."""
    status = parent.status
    _make(directory.parent)
    if parent.trainer is None or status.state in ENDED:
        from gshare.agent.train.checkpoint import start_from_saved

        return start_from_saved(Path(status.output_dir), directory, parent=status.job)
    with connected(parent.trainer) as client:
        reply = client.ask(TakeWeights, job=status.job, directory=str(directory), timeout=COMMAND_SECONDS)
    assert isinstance(reply, WeightsTaken), reply
    return reply.start


def _write_spec(run: RunSpec, parent: RunRecord, request: JobRequest, name: str) -> None:
    """`clone.toml`: with --resume it goes on with the clone, which knows its start by its directory."""
    spec, start = request.spec, request.start
    path = Path(spec.output_dir) / CLONE_FILE
    how = f"warm, from step {start.step}, weights {start.sha256}" if start is not None else "cold"
    keys = ("model", "base_dtype", "schedule", "max_tokens_per_pass", "max_adapters_per_pass")
    values = {key: getattr(run, key) for key in keys} | {"model": parent.model}
    comment = f"Clone of {name} ({how}). Goes on: gshare finetune --resume --adapters-config {path}"
    _make(path.parent)
    try:
        path.write_text(spec_toml(values, spec, comment), encoding="utf-8")
    except OSError as error:
        raise GshareError(f"{path}: {error.strerror}") from None


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GshareError(f"{shorten(str(directory))}: {error.strerror}") from None


def _clear_up(out: Path) -> None:
    """Of a clone that never ran, nothing is left; what stood in the directory before stays."""
    if (out / RUN_FILE).exists() or ((out / LOCK_FILE).exists() and is_held(out / LOCK_FILE)):
        return
    with contextlib.suppress(OSError):
        shutil.rmtree(out / START_DIR, ignore_errors=True)
        (out / CLONE_FILE).unlink(missing_ok=True)
        (out / LOCK_FILE).unlink(missing_ok=True)
        os.rmdir(out)
