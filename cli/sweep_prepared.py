"""A sweep's file with its data tokenised, and the claim on its directory, wherever it is to be trained."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.data.split import CannotSplit
from gshare.agent.data.work import plan_work
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.jobs.faults import said_once
from gshare.agent.jobs.names import shorten
from gshare.agent.jobs.sampler import draw
from gshare.agent.jobs.spec import AdapterSpec, JobRequest, RunSpec
from gshare.agent.jobs.spec_rules import ADAPTER_TYPES, adapter_value
from gshare.agent.jobs.sweep import Added, Sweep, Trial
from gshare.agent.jobs.sweep_records import (
    SWEEP_FILE,
    SWEEP_LOCK,
    Configuration,
    SamplerRecord,
    SweepRecord,
    read_sweep,
    write_sweep,
)
from gshare.agent.jobs.sweep_spec import SweepFile
from gshare.agent.node.durable import FULL
from gshare.agent.service.base_identity import base_identity
from gshare.agent.service.deciding import Job
from gshare.agent.service.output_dir import CHANGEABLE
from gshare.agent.service.registry import take_lock
from gshare.cli.finetune import check_prepared
from gshare.cli.prepare import prepare
from rich.console import Console

#: Not compared as they are written: a run's resumption may change them. Steps and tokens are compared
#: instead, and where a sweep evaluates decides about its exits.
_NOT_FIXED = CHANGEABLE - {"eval_steps"} | {"name"}
#: In `SweepRecord.fixed` for a key in which the configurations differ; no key has it as a value.
_NOT_ALIKE = "not the same in all"


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
        self.cluster = self.submission = ""  # as in `SweepRecord`
        space = source.spec().sampled
        if space is not None and not self.sampled:
            self.sampled = draw(space, [])
        self._take()

    def draw(self, sweep: Sweep) -> tuple[Added, dict[str, Job]]:
        """What a sampler gives next, told how those so far did at the boundary; it is written down first."""
        space = self.spec.sampled
        assert space is not None
        told = sweep.told()
        values = [told[name] for name in self.jobs]
        drawn = draw(space, list(zip(self.sampled, values, strict=True)))
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
            stopped_early = msgspec.structs.replace(request, early_exit=spec.early_exit.of_job())
            self.jobs[request.spec.name] = Job(stopped_early, work)

    def _prepare(self, run: RunSpec) -> tuple[Path, list[JobRequest]]:
        """As for a run. What is wrong in the same way with several configurations is said once."""
        try:
            model_dir, requests = prepare(run, self.console, resume=self.resume)
            self.base = base_identity(model_dir)
            check_prepared(run, self.base, requests)
            return model_dir, requests
        except CannotSplit as error:  # found at the first; without validation there is no sweep
            raise UsageError(
                f"{error.where}: {error.what}, and a sweep ranks by validation loss; add rows, or set "
                "val_data"
            ) from None
        except UsageError as error:
            raise UsageError(said_once(str(error), "adapter")) from None

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
            cluster=self.cluster,
            submission=self.submission,
            sampler=self._sampler(),
            fixed=self._fixed(),
        )

    def _sampler(self) -> SamplerRecord | None:
        space = self.spec.sampled
        if space is None:
            return None
        return SamplerRecord(
            seed=space.seed,
            n_trials=space.n_trials,
            batch=space.batch,
            ranges=_as_json(space.ranges),
        )

    def _fixed(self) -> dict[str, Any]:
        """Not from the template: a value left out, such as of `lora_alpha`, may follow from a swept one."""
        found: list[dict[str, Any]] = [
            {
                **_as_json(job.request.spec),
                "training data": job.request.train_hash,
                "validation data": job.request.val_hash,
            }
            for job in self.jobs.values()
        ]
        return {
            key: value if all(one[key] == value for one in found) else _NOT_ALIKE
            for key, value in found[0].items()
            if key not in _NOT_FIXED
        }


def earlier(source: SweepFile, *, resume: bool, on_cluster: bool) -> SweepRecord | None:
    """The sweep that is in the directory already; UsageError when there is one and `resume` was not said, or
    when its jobs are elsewhere. GshareError: what it has drawn cannot be."""
    before = read_sweep(source.directory)
    if before is not None and not resume:
        raise UsageError(
            f"{source.directory} already holds a sweep ({before.name}); go on with --resume, or choose "
            "another output_dir"
        )
    if before is not None and bool(before.cluster) != on_cluster:
        where, how = ("on a cluster", "add") if before.cluster else ("on this machine", "leave out")
        raise UsageError(
            f"the sweep in {source.directory} runs {where}: {how} --cluster FILE, or choose another "
            "output_dir"
        )
    for number, values in enumerate(before.sampled if before is not None else [], start=1):
        for key, value in values.items():
            fault = adapter_value(key, value)[1] if key in ADAPTER_TYPES else "no adapter has such a key"
            if fault is not None:
                raise GshareError(
                    f"{source.directory / SWEEP_FILE}: sampled, number {number}, {shorten(key)}: {fault}; "
                    "put it back as it was, or choose another output_dir"
                )
    return before


@contextlib.contextmanager
def claimed(made: Prepared, before: SweepRecord | None, *, resume: bool) -> Iterator[None]:
    """The sweep's directory, its alone meanwhile, with what `--resume` needs in it. `before`: the first look.

    RetryLater: another sweep runs there, or has gone on since that look. UsageError as by `earlier`, or the
    directory cannot be made.
    """
    directory = made.source.directory
    try:
        # Where a link leads that has no end yet, as the configurations' own directories.
        directory.resolve().mkdir(parents=True, exist_ok=True)
        lock = take_lock(directory / SWEEP_LOCK)
    except OSError as error:
        if error.errno in FULL:
            raise GshareError(f"output_dir {directory}: {error.strerror}") from None
        raise UsageError(
            f"output_dir {directory} cannot be written ({error.strerror}: {error.filename}); name another one"
        ) from None
    if lock is None:
        raise RetryLater(f"{directory}: another sweep runs there; wait for it, or choose another output_dir")
    try:
        # Again under the lock: another sweep may have begun or gone on here since the first look.
        if earlier(made.source, resume=resume, on_cluster=bool(made.cluster)) != before:
            raise RetryLater(f"{directory}: another sweep has gone on there meanwhile; start this one again")
        if before is None:
            write_sweep(directory, made.record())
        yield
    finally:
        os.close(lock)


def check_same(before: SweepRecord, now: SweepRecord) -> None:
    """UsageError naming what a resumed sweep would do otherwise than it began."""
    changes = [
        f"{key}: {shorten(getattr(before, key))} → {shorten(getattr(now, key))}"
        for key in ("model", "base_dtype")
        if getattr(before, key) != getattr(now, key)
    ]
    exits = {"rank": "all"} | before.early_exit  # what a sweep did before it was a key
    changes += [
        f"[early_exit] {key} = {exits.get(key)!r}, now {value!r}"
        for key, value in now.early_exit.items()
        if exits.get(key) != value
    ]
    if before.fixed is not None:
        changes += _changes_of_sampler(before.sampler, now.sampler)
        changes += _changes_of_fixed(before.fixed, now.fixed or {})
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


def _as_json(value: object) -> Any:
    """As it comes back from the file: lists for tuples."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _changes_of_sampler(before: SamplerRecord | None, now: SamplerRecord | None) -> list[str]:
    if before is None or now is None:
        return [] if before is now else [f"[sweep.ranges] is {'gone' if before else 'new'}"]
    changes = [
        f"[sweep] {key}: {getattr(before, key)} → {getattr(now, key)}"
        for key in ("seed", "n_trials", "batch")
        if getattr(before, key) != getattr(now, key)
    ]
    return changes + [
        f"[sweep.ranges] {key}: {shorten(before.ranges.get(key))} → {shorten(now.ranges.get(key))}"
        for key in before.ranges.keys() | now.ranges.keys()
        if before.ranges.get(key) != now.ranges.get(key)
    ]


def _changes_of_fixed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A key of one of them alone is of another version of gshare."""
    return [
        f"{key}: {_shown(key, before[key])} → {_shown(key, now[key])}"
        for key in before.keys() & now.keys()
        if before[key] != now[key]
    ]


def _shown(key: str, value: object) -> str:
    if value == _NOT_ALIKE:
        return _NOT_ALIKE
    return shorten(str(value)[:12] if key.endswith(" data") else value)
