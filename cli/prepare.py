"""From flags or a TOML file to requests a trainer takes: spec, model, token files.

Shared by `gshare finetune` and `gshare audit`. What is wrong with the input shows here, before anything
is written under an output directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gshare.agent.data.prepare import find_model, prepare_requests
from gshare.agent.errors import UsageError
from gshare.agent.jobs.spec import JobRequest, RunSpec
from gshare.agent.jobs.spec_file import load_run_spec, run_spec_from_flags
from rich.console import Console
from rich.text import Text


def read_spec(
    model: str | None, adapters: Sequence[str], config: Path | None, options: dict[str, object]
) -> RunSpec:
    """The run from a file or from flags, never both; `options` are the flags that were given."""
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
    try:
        return str(Path(model).absolute()) if model is not None and Path(model).exists() else model
    except OSError:  # a name too long for a file: `load_run_spec` says so
        return model


def prepare(run: RunSpec, console: Console, *, resume: bool) -> tuple[Path, list[JobRequest]]:
    """The model found or converted, every data file tokenised and split once: what is wrong shows here."""
    with console.status(Text(f"looking for {Path(run.model).name}")) as status:

        def progress(what: str, done: int, total: int) -> None:
            status.update(Text(f"{what}: {done / total:.0%}" if total else what))

        model_dir = find_model(run, progress)
        requests = prepare_requests(run, model_dir, resume=resume, say=lambda line: console.print(Text(line)))
    return model_dir, requests
