"""What a submission over the socket has to keep: the rules that `gshare submit` keeps for a job's file.

A job is in the store for good once it is taken, so what could not become a directory, a number of a database
or a message to a node is refused before: all of it, a line each.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gshare.agent.errors import UsageError
from gshare.agent.jobs.faults import Faults
from gshare.agent.jobs.names import name_fault, shorten
from gshare.agent.jobs.spec_rules import run_value
from gshare.agent.node.checks import (
    MAX_FILES,
    check_exits,
    check_file_name,
    check_sha256,
    check_size,
    check_spec,
)
from gshare.coordinator.api_protocol import JobSubmission, LocalFile, SubmitToCluster

#: MiB of a base or an adapter, as `ram_mb` in cluster.toml.
MAX_MIB = 2**31 - 1
#: Of a model; a thousand times the largest there is.
MAX_PARAMETERS = 10**15
MAX_PATH = 4096  # PATH_MAX of Linux, with the NUL
MAX_PART = 255  # NAME_MAX


def check_submission(request: SubmitToCluster) -> None:
    """UsageError with every fault, each naming its job and key."""
    faults = Faults()
    if not request.jobs:
        faults.add("submission", "holds no job")
    if (fault := name_fault(request.submission)) is not None:
        faults.add("submission", fault)
    _check_run(request, faults)
    names: set[str] = set()
    outputs: dict[str, str] = {}
    for job in request.jobs:
        name = job.spec.name
        where = f"job {shorten(name, 40)}"
        if name in names:
            faults.add(where, "a second job of that name in the submission")
        names.add(name)
        owner = outputs.setdefault(job.spec.output_dir, name)
        if owner != name:
            faults.add(f"{where}, output_dir", f"is that of job {owner} in the submission")
        _check_job(job, where, faults)
    faults.raise_if_any()


def directory_fault(text: str) -> str | None:
    """Why a directory that a client names cannot be made here; None: it can, as far as its name goes."""
    if not text.isprintable():
        return f"{shorten(text)} holds control characters"
    path = Path(text)
    if not path.is_absolute() or ".." in path.parts:
        return f"{shorten(text)} must be an absolute path, without '..'"
    if not path.name:
        return f"{shorten(text)} is no directory of a job's own"
    if len(os.fsencode(text)) >= MAX_PATH or any(len(os.fsencode(part)) > MAX_PART for part in path.parts):
        return f"{shorten(text)} is longer than a file system can hold"
    return None


def _check_run(request: SubmitToCluster, faults: Faults) -> None:
    values: dict[str, Any] = {
        "model": request.model.name,
        "max_tokens_per_pass": request.max_tokens_per_pass,
        "max_adapters_per_pass": request.max_adapters_per_pass,
    }
    for key, value in values.items():
        if (fault := run_value(key, value)[1]) is not None:
            faults.add(key, fault)
    if len(request.model.name) > MAX_PATH:
        faults.add("model", f"{shorten(request.model.name)} is too long")
    _check_between(request.model.parameters, MAX_PARAMETERS, "model, parameters", faults)
    if len(request.model.files) > MAX_FILES:
        faults.add("model", f"{len(request.model.files)} files; at most {MAX_FILES} are possible")
    for file in request.model.files:
        _check_file(file, "model", faults)
    if len({file.name for file in request.model.files}) < len(request.model.files):
        faults.add("model", "two files of one name")


def _check_job(job: JobSubmission, where: str, faults: Faults) -> None:
    if (fault := name_fault(job.spec.name)) is not None:
        faults.add(f"{where}, name", fault)
    if (fault := directory_fault(job.spec.output_dir)) is not None:
        faults.add(f"{where}, output_dir", fault)
    check_spec(job.spec, where, faults)
    check_exits(job.early_exit, job.pause_at, where, faults)
    _check_file(job.data, f"{where}, data", faults)
    if job.val_data is not None:
        _check_file(job.val_data, f"{where}, val_data", faults)
    _check_between(job.base_mb, MAX_MIB, f"{where}, base_mb", faults)
    _check_between(job.adapter_mb, MAX_MIB, f"{where}, adapter_mb", faults)


def _check_between(number: int, most: int, where: str, faults: Faults) -> None:
    if not 0 <= number <= most:
        faults.add(where, f"must be from 0 to {most}, not {shorten(number)}")


def _check_file(file: LocalFile, where: str, faults: Faults) -> None:
    """A name that the node can give it, a path that can be opened here, a hash, a size."""
    try:
        if "/" in check_file_name(file.name):
            raise UsageError(f"{shorten(file.name)} must be a plain file name")
        check_sha256(file.sha256)
        check_size(file.size, what=shorten(file.name))
    except UsageError as error:
        faults.add(where, str(error))
    if not file.path.startswith("/") or "\0" in file.path or len(os.fsencode(file.path)) >= MAX_PATH:
        faults.add(where, f"{shorten(file.path)} must be an absolute path")
