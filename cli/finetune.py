"""`gshare finetune`: spec → model → token files → a trainer process → live table → leaderboard.

    gshare finetune --model MODEL --adapter data/a.jsonl:out/a --adapter data/b.jsonl:out/b [flags]
    gshare finetune --adapters-config adapters.toml [--resume] [--json] [--detach] [--dry-run] [flags]

Everything about the input is checked before the first byte is written under an output directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from gshare.agent.errors import EXIT_OK, RetryLater, UsageError
from gshare.agent.jobs.events import Event
from gshare.agent.jobs.spec import AdapterSpec, JobRequest, RunSpec
from gshare.agent.jobs.spec_file import load_run_spec, run_spec_from_flags
from gshare.agent.service.output_dir import LOCK_FILE, RunRecord, check_output_dir
from gshare.agent.service.registry import RUNNER, TrainerConfig, collect_dead, is_held
from gshare.agent.service.sinks import Sinks, check_sinks
from gshare.cli.finetune_flags import AdapterFlags, RunFlags, given
from gshare.cli.paths import cache_dir
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from gshare.agent.data.tokens import TokenStore

#: Test hook: "module:class" of another engine, so that the processes can be tested without torch.
RUNNER_VARIABLE = "GSHARE_TEST_RUNNER"

_NO_RUN_FLAGS = RunFlags()
_NO_ADAPTER_FLAGS = AdapterFlags()


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
    run_flags: RunFlags = _NO_RUN_FLAGS,
    adapter_flags: AdapterFlags = _NO_ADAPTER_FLAGS,
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
        One JSON line an event on stdout, the leaderboard last.
    detach
        Return when the trainer has started; `gshare jobs` follows and stops it.
    dry_run
        Check everything, show how much memory the run takes, and train nothing.
    report_to
        tensorboard, wandb or trackio; may be given more than once.
    device
        auto, cpu, cuda or cuda:N.
    """
    run = _read_spec(model, adapter, adapters_config, given(run_flags, adapter_flags))
    if not run.adapters:
        raise UsageError(f"{run.source}: no adapter; add one with [[adapter]]")
    check_sinks(report_to)
    _check_output_dirs(run, resume=resume)
    console = Console(stderr=True)
    model_dir, requests = _prepare(run, console, resume=resume)
    if dry_run:
        print(_memory_table(run, model_dir, requests, device))
        return EXIT_OK
    collect_dead()
    config = TrainerConfig(
        model=run.model,
        model_dir=str(model_dir),
        base_dtype=run.base_dtype,
        schedule=run.schedule,
        max_tokens_per_pass=run.max_tokens_per_pass,
        max_adapters_per_pass=run.max_adapters_per_pass,
        device=device,
        runner=os.environ.get(RUNNER_VARIABLE) or RUNNER,
    )
    if detach:
        return _detach(config, requests, report_to)
    return _supervise(config, requests, report_to, json_lines=json)


def _read_spec(
    model: str | None, adapters: Sequence[str], config: Path | None, options: dict[str, object]
) -> RunSpec:
    if config is not None:
        if adapters:
            raise UsageError(f"--adapter and --adapters-config {config}: give one of them")
        return load_run_spec(config, {**options, "model": _absolute(model)})
    if model is None:
        raise UsageError(
            "--model is missing: a directory, a hub id or a .gguf file (or give --adapters-config FILE)"
        )
    return run_spec_from_flags(model=model, adapters=adapters, options=options)


def _absolute(model: str | None) -> str | None:
    """A path on the command line is relative to here, whatever directory the file is in."""
    return str(Path(model).absolute()) if model is not None and Path(model).exists() else model


def _check_output_dirs(run: RunSpec, *, resume: bool) -> None:
    for spec in run.adapters:
        check_output_dir(RunRecord(model=run.model, base_dtype=run.base_dtype, spec=spec), resume=resume)
        if is_held(Path(spec.output_dir) / LOCK_FILE):
            raise RetryLater(
                f"adapter {spec.name}: a trainer is writing to {spec.output_dir}; wait for it, "
                "or stop its job with `gshare jobs stop`"
            )


def _prepare(run: RunSpec, console: Console, *, resume: bool) -> tuple[Path, list[JobRequest]]:
    """The model found or converted, every data file tokenised and split once: what is wrong shows here."""
    from gshare.agent.base.resolve import resolve_model

    with console.status(Text(f"looking for {run.model}")) as status:

        def progress(what: str, done: int, total: int) -> None:
            status.update(Text(f"{what}: {done / total:.0%}" if total else what))

        found = resolve_model(run.model, cache_dir=cache_dir(), base_dtype=run.base_dtype, progress=progress)
        requests: list[JobRequest] = []
        for spec in run.adapters:
            train = _tokenise(spec, spec.data, found.path, console)
            val = _tokenise(spec, spec.val_data, found.path, console) if spec.val_data else None
            if val is None:
                _check_split(spec, train)
            requests.append(
                JobRequest(
                    spec=spec,
                    train_store=str(train.path),
                    train_hash=train.hash,
                    val_store=str(val.path) if val else None,
                    val_hash=val.hash if val else None,
                    resume=resume,
                )
            )
    return found.path, requests


def _tokenise(spec: AdapterSpec, data: str, tokenizer_dir: Path, console: Console) -> TokenStore:
    from gshare.agent.data.build import build_token_store

    store = build_token_store(
        Path(data),
        tokenizer_dir,
        cache_dir=cache_dir() / "tokens",
        data_format=spec.data_format,
        max_length=spec.max_length,
        on_bad_turns=spec.on_bad_turns,
        train_on_prompt=spec.train_on_prompt,
    )
    meta = store.meta
    counted = f"{meta.n_rows} rows, {meta.n_tokens} tokens, {meta.n_label_tokens} trained"
    console.print(Text(f"{spec.name}: {data}: {counted}"))
    for kind, counts in (("dropped", meta.dropped), ("note", meta.notes)):
        for reason, rows in counts.items():
            first = ", ".join(map(str, rows.first_rows))
            console.print(Text(f"{spec.name}: {kind}: {rows.count} rows: {reason} (first: {first})"))
    return store


def _check_split(spec: AdapterSpec, store: TokenStore) -> None:
    from gshare.agent.data.split import split_rows

    assert spec.seed is not None
    try:
        split_rows(store, val_fraction=spec.val_fraction, seed=spec.seed)
    except UsageError as error:
        raise UsageError(f"adapter {spec.name}: {spec.data}: {error}") from None


def _memory_table(run: RunSpec, model_dir: Path, requests: Sequence[JobRequest], device: str) -> str:
    from gshare.agent.base.config import read_config
    from gshare.agent.base.device import pick_device
    from gshare.agent.jobs.memory import ModelShape, estimate_run, largest_pass

    tokens, longest = largest_pass(run)
    estimate = estimate_run(
        ModelShape.of(read_config(model_dir)),
        [request.spec for request in requests],
        base_dtype=run.base_dtype,
        device="cuda" if pick_device(device).type == "cuda" else "cpu",
        pass_tokens=tokens,
        longest_row=longest,
    )
    return estimate.table()


def _detach(config: TrainerConfig, requests: list[JobRequest], report_to: Sequence[str]) -> int:
    from gshare.agent.service.detach import DetachedPlan, detach

    pid, log = detach(DetachedPlan(config=config, requests=requests, report_to=list(report_to)))
    for request in requests:
        print(request.spec.name)
    how = "`gshare jobs attach NAME` follows, `gshare jobs stop NAME` stops"
    print(f"detached: process {pid}, log {log}; {how}", file=sys.stderr)
    return EXIT_OK


def _supervise(
    config: TrainerConfig, requests: Sequence[JobRequest], report_to: Sequence[str], *, json_lines: bool
) -> int:
    from gshare.agent.service.supervise import StopRequest, Supervisor
    from gshare.cli.live import make_view

    sinks = Sinks(report_to, requests)
    view = make_view([(r.spec.name, r.spec.output_dir) for r in requests], json_lines=json_lines)
    told = False

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
                on_connected=lambda: view.say(f"a trainer loads {config.model}"),
                stop=stop,
            )
            code = supervisor.run()
    finally:
        sinks.close()
    view.finish()
    if code not in (EXIT_OK, stop.exit_code):
        view.say(f"log of the trainer: {supervisor.logs[-1]}")
    return code
