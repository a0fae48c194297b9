"""One process of an arm of `benchmarks/trunk.py`.

    python benchmarks/trunk_worker.py '{"arm": "shared", …}'      prints one JSON line

Setting up is timed from the process's start: interpreter, imports, base and kernels in memory. With a
`meeting` (a directory: processes that train at once) it waits there for the others before its first and
before its last epoch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import trunk_arms
import trunk_peft
from gshare.agent.train.part import Row
from trunk_activity import SmActivity
from trunk_workload import Cohort

#: How long a process waits for those that it trains beside.
PATIENCE_S = 400.0


@dataclass(frozen=True)
class Task:
    cohort: Cohort
    arm: str  # one of trunk_arms.ARMS, or peft, mps, settings
    device: str
    jobs: list[int]
    spawned: float  # time.monotonic() of the one that started it
    break_dedup: bool = False  # negative control: rows are one another's when they are as long
    attention: str = "sdpa"
    checkpointing: bool = False
    meeting: str = ""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Task:
        values = json.loads(text)
        cohort = Cohort(**values.pop("cohort"))
        return cls(cohort=cohort, **values)


def run(task: Task) -> dict[str, Any]:
    """Trains the task's jobs; what `benchmarks/trunk.py` records of it."""
    device = torch.device(task.device)
    if task.arm == "settings":
        return trunk_peft.best_settings(task.cohort, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = _gshare(task, device) if task.arm in trunk_arms.ARMS else _peft(task, device)
    if device.type == "cuda":
        found["peak_mb"] = torch.cuda.max_memory_reserved() / 2**20
    return found


def _gshare(task: Task, device: torch.device) -> dict[str, Any]:
    cohort = task.cohort
    engine = trunk_arms.make_engine(cohort, task.arm, device)
    set_up, activity = _since(task, device), SmActivity()
    groups = [[job] for job in task.jobs] if task.arm == "dedicated" else [task.jobs]
    times, trunk, fates = trunk_arms.train(engine, cohort, groups, activity)
    found: dict[str, Any] = {"setup_s": set_up, **asdict(times), "jobs": fates}
    if activity.mean is not None:
        found["sm_active"] = activity.mean
    if task.arm == "dedicated":
        found["floor_tokens_per_s"] = trunk_arms.solo_floor(engine.base, cohort)
    else:
        found["trunk_shared"] = trunk.shared
        found["most_jobs_in_pass"] = engine.most_adapters
    return found


def _peft(task: Task, device: torch.device) -> dict[str, Any]:
    peft = trunk_peft.make_peft(task.cohort, device, task.attention, task.checkpointing)
    set_up, activity = _since(task, device), SmActivity()
    if not task.meeting:
        times, fates = trunk_peft.train_each(peft, task.cohort, task.jobs, activity)
        found = {"setup_s": set_up, **asdict(times), "jobs": fates}
        return found if activity.mean is None else found | {"sm_active": activity.mean}
    meeting = Meeting(Path(task.meeting), task.jobs[0])
    meeting.wait("first")
    job = trunk_peft.Job(peft, task.cohort, task.jobs[0])
    job.epoch()
    first_end = _now(device)
    for _ in range(task.cohort.epochs - 2):
        job.epoch()
    meeting.wait("last")
    job.epoch()
    return {"first_end": first_end, "end": _now(device), "jobs": {job.name: {"losses": job.losses}}}


class Meeting:
    """A directory where processes wait for each other: each says that it is there, one says go."""

    def __init__(self, directory: Path, name: int) -> None:
        self._directory, self._name = directory, name

    def wait(self, where: str) -> None:
        (self._directory / f"{where}-{self._name}").touch()
        until = time.monotonic() + PATIENCE_S
        while not (self._directory / f"{where}-go").exists():
            if time.monotonic() > until:
                raise TimeoutError(f"the others did not come to the {where} epoch in {PATIENCE_S:.0f} s")
            time.sleep(0.005)


def _now(device: torch.device) -> float:
    """A time that other processes of this machine have too."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic()


def _since(task: Task, device: torch.device) -> float:
    """Seconds since the process began, as `Clock` counts them."""
    now = trunk_arms.Clock(device)()
    return now if device.type == "cpu" else now - task.spawned


def main() -> int:
    task = Task.decode(sys.argv[1])
    if task.break_dedup:
        Row.content = property(lambda row: len(row.tokens))  # type: ignore[assignment]
    print(json.dumps(run(task)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
