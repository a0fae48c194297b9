"""`--report-to tensorboard|wandb|trackio`: metrics to where people look at them. Runs in the client.

A sink is three methods; each package is an optional extra and imported when it is asked for. What a sink
raises while training never stops the training: it is reported once and the sink is left alone.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import msgspec
from gshare.agent.errors import UsageError
from gshare.agent.jobs.events import ENDED, Evaluated, Event, JobChanged, Stepped
from gshare.agent.jobs.names import nearest
from gshare.agent.jobs.spec import AdapterSpec, JobRequest

PROJECT = "gshare"


class Sink(Protocol):
    """Where metrics go; one run per job. Values are finite."""

    def log(self, job: str, step: int, values: dict[str, float]) -> None: ...
    def finish(self, job: str) -> None: ...
    def close(self) -> None: ...


class TensorBoardSink:
    """Event files in `<output_dir>/tensorboard`; the `tensorboard` package alone, no torch."""

    def __init__(self, specs: Sequence[AdapterSpec]) -> None:
        self._event = import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._open = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self._directories = {spec.name: Path(spec.output_dir) / "tensorboard" for spec in specs}
        self._writers: dict[str, Any] = {}

    def log(self, job: str, step: int, values: dict[str, float]) -> None:
        writer = self._writers.get(job)
        if writer is None:
            writer = self._writers[job] = self._open(str(self._directories[job]))
        scalars = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))

    def finish(self, job: str) -> None:
        writer = self._writers.pop(job, None)
        if writer is not None:
            writer.close()

    def close(self) -> None:
        for job in list(self._writers):
            self.finish(job)


class RunSink:
    """wandb and trackio: both give a run object with `log(values, step=…)` and `finish()`."""

    def __init__(self, specs: Sequence[AdapterSpec], start: Callable[[AdapterSpec], Any]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._start = start
        self._runs: dict[str, Any] = {}

    def log(self, job: str, step: int, values: dict[str, float]) -> None:
        run = self._runs.get(job)
        if run is None:
            run = self._runs[job] = self._start(self._specs[job])
        run.log(values, step=step)

    def finish(self, job: str) -> None:
        run = self._runs.pop(job, None)
        if run is not None:
            run.finish()

    def close(self) -> None:
        for job in list(self._runs):
            self.finish(job)


def _make_wandb(specs: Sequence[AdapterSpec]) -> Sink:
    wandb = import_module("wandb")

    def start(spec: AdapterSpec) -> Any:
        # Several runs at once in one process.
        return wandb.init(
            project=PROJECT, name=spec.name, config=msgspec.to_builtins(spec), reinit="create_new"
        )

    return RunSink(specs, start)


def _make_trackio(specs: Sequence[AdapterSpec]) -> Sink:
    trackio = import_module("trackio")

    def start(spec: AdapterSpec) -> Any:
        return trackio.init(project=PROJECT, name=spec.name, config=msgspec.to_builtins(spec))

    return RunSink(specs, start)


SINKS: dict[str, Callable[[Sequence[AdapterSpec]], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": _make_wandb,
    "trackio": _make_trackio,
}


class Sinks:
    """All sinks of a run, fed with the trainer's events."""

    def __init__(self, names: Sequence[str], requests: Sequence[JobRequest]) -> None:
        """Raises `UsageError` for an unknown name or a missing package."""
        specs = [request.spec for request in requests]
        self._sinks: dict[str, Sink] = {name: _make(name, specs) for name in dict.fromkeys(names)}
        self._logged: dict[str, int] = {}  # the last step of every job: wandb drops steps that go back

    def take(self, event: Event) -> None:
        if isinstance(event, Stepped):
            if event.step <= self._logged.get(event.job, 0):
                return  # done again after a resumption: the same values
            self._logged[event.job] = event.step
            values = {
                "loss": event.loss,
                "grad_norm": event.grad_norm,
                "learning_rate": event.learning_rate,
                "epoch": event.epoch,
                "tokens_per_second": event.tokens / event.seconds if event.seconds > 0 else math.nan,
            }
            self._log(event.job, event.step, values)
        elif isinstance(event, Evaluated):
            self._log(event.job, event.step, {"val_loss": event.val_loss})
        elif isinstance(event, JobChanged) and event.state in ENDED:
            self._each(lambda sink: sink.finish(event.job))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks.clear()

    def _log(self, job: str, step: int, values: dict[str, float]) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        if finite:
            self._each(lambda sink: sink.log(job, step, finite))

    def _each(self, action: Callable[[Sink], None]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                action(sink)
            except Exception as error:  # whatever a foreign package raises: network, quota, full disk
                print(
                    f"--report-to {name}: stopped reporting: {type(error).__name__}: {error}", file=sys.stderr
                )
                del self._sinks[name]


def check_sinks(names: Sequence[str]) -> None:
    """Raises `UsageError` for an unknown sink or one whose package is missing, before anything runs."""
    for name in names:
        _make(name, ())


def _make(name: str, specs: Sequence[AdapterSpec]) -> Sink:
    make = SINKS.get(name)
    if make is None:
        near = nearest(name, SINKS)
        hint = f"did you mean {near}?" if near else f"known: {', '.join(SINKS)}"
        raise UsageError(f"--report-to {name}: no such sink; {hint}")
    try:
        return make(specs)
    except ImportError as error:
        raise UsageError(
            f"--report-to {name} needs the package {name} ({error}); "
            f"install it with: pip install 'gshare[{name}]'"
        ) from None
