"""From flags or a TOML file to requests a trainer takes: spec, model, token files.

Shared by `gshare finetune` and `gshare audit`. What is wrong with the input shows here, before anything
is written under an output directory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gshare.agent.data.prepare import Progress, find_model, prepare_requests
from gshare.agent.errors import UsageError
from gshare.agent.jobs.spec import JobRequest, RunSpec
from gshare.agent.jobs.spec_file import load_run_spec, run_spec_from_flags
from rich.console import Console
from rich.text import Text

#: Where there is no terminal: a base of 8B takes minutes to convert, one that was converted before no second.
SILENT_SECONDS, AGAIN_SECONDS = 2.0, 5.0


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
    with told_while(console, f"looking for {Path(run.model).name}") as tell:
        model_dir = find_model(run, shares(tell))
        tell("reading the data")
        requests = prepare_requests(run, model_dir, resume=resume, say=lambda line: console.print(Text(line)))
    return model_dir, requests


@contextlib.contextmanager
def told_while(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Takes what is done now: one line that changes on a terminal; elsewhere a line of what lasts, and again
    with its time, so that nobody takes it for dead."""
    if console.is_terminal:
        with console.status(Text(text)) as status:
            yield lambda text: status.update(Text(text))
        return
    now = [text]
    over = threading.Event()
    teller = threading.Thread(target=_tell, args=(console, now, over), daemon=True)
    teller.start()

    def tell(text: str) -> None:
        now[0] = text

    try:
        yield tell
    finally:
        over.set()
        teller.join()


def shares(tell: Callable[[str], None]) -> Progress:
    """As `find_model` takes it."""

    def progress(what: str, done: int, total: int) -> None:
        tell(f"{what}: {done / total:.0%}" if total else what)

    return progress


def _tell(console: Console, now: list[str], over: threading.Event) -> None:
    began, wait, told = time.monotonic(), SILENT_SECONDS, ""
    while not over.wait(wait):
        lasts = f" ({time.monotonic() - began:.0f} s)" if told == now[0] else ""
        told = now[0]
        console.print(Text(f"{told}{lasts}"))
        wait = AGAIN_SECONDS
