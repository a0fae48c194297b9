"""Starts the processes of an arm of `benchmarks/trunk.py`, and makes of what they say one record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_peft import mps_daemon
from gshare.agent.service.environment import trainer_environment, usable_cores
from trunk_activity import SmActivity
from trunk_worker import Task

SCRIPT = Path(__file__).resolve().parent / "trunk_worker.py"
TIMEOUT_S = 570.0
#: GPU memory that a process has beside what torch reserves: context and kernels.
CONTEXT_MB = 700.0
#: Of a GPU's memory, what processes may be given together.
USABLE = 0.95

#: Runs a task to its end; raises Failed.
Launch = Callable[[Task], dict[str, Any]]


class Failed(Exception):
    """A process of an arm ended otherwise than well; the text is the end of what it wrote."""


class Worker:
    """A task in a process of its own, its output in `directory`."""

    def __init__(self, task: Task, directory: Path, env: dict[str, str]) -> None:
        self._files = [directory / f"{task.jobs[0]}.{kind}" for kind in ("out", "err")]
        command = [sys.executable, str(SCRIPT), task.encode()]
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=err)

    def result(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            self.stop()
        if code != 0:
            said = self._files[1].read_text(errors="replace").strip().splitlines()[-3:]
            raise Failed(f"exit code {code}" if code is not None else f"not done in {timeout_s:.0f} s", *said)
        return json.loads(self._files[0].read_text().splitlines()[-1])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def launch(task: Task) -> dict[str, Any]:
    """In a process of its own."""
    with tempfile.TemporaryDirectory(prefix="gshare-trunk-") as where:
        env = os.environ | trainer_environment()
        return Worker(replace(task, spawned=time.monotonic()), Path(where), env).result()


def run_arm(task: Task, launch: Launch, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """An arm's record: seconds and rates, cold and steady, of all jobs. `known`: the arms before it."""
    trained = task.cohort.tokens(task.jobs)
    if task.arm == "mps":
        found = _waves(task, at_once(known, len(task.jobs)))
        cold_s = found["cold_s"]
    else:
        found = launch(task)
        # A dedicated job is a process that loads the base; the others' first epochs ran in one that was warm.
        processes = len(task.jobs) if task.arm in ("dedicated", "peft") else 1
        found["cold_s"] = cold_s = processes * found["setup_s"] + found["first"]
    record = {
        "steady_tokens_per_s": trained / found["steady"],
        "cold_tokens_per_s": trained / cold_s,
        "tokens": trained,
        "steady_s": found.pop("steady"),
        "cold_s": found.pop("cold_s"),
        **({"first_epoch_s": found.pop("first")} if "first" in found else {}),
        **found,
    }
    if "floor_tokens_per_s" in record:
        record["of_floor"] = record["steady_tokens_per_s"] / record["floor_tokens_per_s"]
    return record


def at_once(known: dict[str, dict[str, Any]], jobs: int) -> int:
    """How many PEFT processes the GPU holds, by the peak of the one that ran alone; one core each."""
    if "peak_mb" not in known.get("peft", {}):
        raise Failed("how many processes fit is known from arm peft: run it first")
    import pynvml

    pynvml.nvmlInit()
    total_mb = int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total) / 2**20
    fitting = int(USABLE * total_mb / (known["peft"]["peak_mb"] + CONTEXT_MB))
    return max(1, min(fitting, jobs, usable_cores()))


def _waves(task: Task, together: int) -> dict[str, Any]:
    """A process a job, `together` at a time, each wave under an MPS daemon of its own."""
    found: dict[str, Any] = {"together": together, "steady": 0.0, "cold_s": 0.0, "jobs": {}}
    activity = SmActivity()
    for start in range(0, len(task.jobs), together):
        with tempfile.TemporaryDirectory(prefix="gshare-trunk-") as where, mps_daemon(Path(where)) as daemon:
            env = daemon | trainer_environment() | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}
            _wave(task, task.jobs[start : start + together], Path(where), env, activity, found)
    if activity.mean is not None:
        found["sm_active"] = activity.mean
    return found


def _wave(
    task: Task,
    jobs: Sequence[int],
    directory: Path,
    env: dict[str, str],
    activity: SmActivity,
    found: dict[str, Any],
) -> None:
    """Its cold run ends when its last job has made its first epoch; the last epochs begin together."""
    spawned = time.monotonic()
    tasks = [replace(task, jobs=[job], spawned=spawned, meeting=str(directory)) for job in jobs]
    workers: list[Worker] = []
    try:
        for one in tasks:
            workers.append(Worker(one, directory, env))
        _gather(workers, directory, "first", jobs)
        _gather(workers, directory, "last", jobs)
        begun = time.monotonic()
        activity(True)
        results = [worker.result() for worker in workers]
        activity(False)
    finally:
        for worker in workers:
            worker.stop()
    found["steady"] += max(one["end"] for one in results) - begun
    found["cold_s"] += max(one["first_end"] for one in results) - spawned
    for one in results:
        found["jobs"] |= one["jobs"]


def _gather(workers: Sequence[Worker], directory: Path, where: str, jobs: Sequence[int]) -> None:
    """Say go when all are there."""
    until = time.monotonic() + TIMEOUT_S
    while not all((directory / f"{where}-{job}").exists() for job in jobs):
        for worker in workers:
            if worker.process.poll() is not None:
                worker.result()
                raise Failed(f"a process ended before the {where} epoch")
        if time.monotonic() > until:
            raise Failed(f"not every process came to the {where} epoch in {TIMEOUT_S:.0f} s")
        time.sleep(0.01)
    (directory / f"{where}-go").touch()
