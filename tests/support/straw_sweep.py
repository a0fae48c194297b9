"""A coordinator of straw under a sweep on a cluster: jobs by their curves in any order, and kills.

The world and the client in one: each `poll` trains somebody a step, and each `ask` may be the last one of a
life of the coordinator (`CoordinatorGone`, before or after it was done) or of the sweep (`Killed`).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from gshare.agent.errors import EXIT_FAILURE
from gshare.agent.jobs.early_exit import SweepExit
from gshare.agent.jobs.events import NOT_SAVED, Exit
from gshare.agent.jobs.packing import Packing
from gshare.agent.jobs.sweep import Sweep, Trial
from gshare.agent.jobs.sweep_records import Decision, DecisionLog
from gshare.agent.service.deciding import Deciding, Job
from gshare.coordinator.api_client import CoordinatorClient, CoordinatorGone
from gshare.coordinator.api_protocol import (
    JobRow,
    JobRows,
    JobsDone,
    ListClusterJobs,
    ResumeClusterJobs,
    StopClusterJobs,
    Submitted,
    SubmitToCluster,
)
from gshare.coordinator.sweeping import ClusterSweep
from sweep_engine import Curve, Killed


@dataclass
class StrawJob:
    curve: Curve
    pause_at: int
    step: int = 0
    saved: int = 0  # what is at home
    past: bool = False
    parked: bool = False
    state: str = "waiting"
    reason: str = ""
    exit: Exit | None = None

    def train(self, dice: random.Random, *, exits: bool) -> None:
        if self.state not in ("waiting", "running") or self.parked:
            return
        if dice.random() < 0.1:  # its node is lost
            self.step, self.state = self.saved, "waiting"
            return
        self.state = "running"
        if not (self.step and self.step == self.pause_at and not self.past):
            self.step += 1
            if self.step == self.curve.nan_at:
                self.state, self.reason = "diverged", "not finite"
            elif exits and self.step == self.curve.exit_at:
                self.exit = Exit(pattern="overfitting", step=self.step)
                self.state, self.reason = "stopped", "its gap"
            elif self.step == len(self.curve.losses):
                self.state = "completed"
        if self.state == "running" and self.step == self.pause_at and not self.past:
            self.state, self.parked = "paused", True
        if self.parked or dice.random() < 0.3:
            self.saved = self.step if dice.random() < 0.8 else self.saved

    def row(self, name: str) -> JobRow:
        losses = self.curve.losses[: self.step]
        return JobRow(
            job=name,
            state=self.state,
            step=self.step,
            val_loss=None if self.state == "diverged" else losses[-1] if losses else None,
            best_val_loss=min(losses, default=None),
            reason=self.reason,
            parked=self.parked and self.state == "paused",
            exit=self.exit,
            submission="s",
        )


@dataclass
class StrawCluster:
    curves: dict[str, Curve]
    settings: SweepExit
    seed: int
    kills: int = 0  # of the sweep and of the coordinator, each
    full_disks: int = 0  # jobs that fail since their files cannot be written
    exits: bool = True  # False: early exit does not reach the nodes
    replays: bool = True  # False: what was decided is not read again
    jobs: dict[str, StrawJob] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    looks: int = 0

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self._left = {Killed: self.kills, CoordinatorGone: self.kills}
        self.journal_id, self.seq = "", 0
        self.left_for_a_disk = False
        self.trials = [
            Trial.of(name, batch=1, total_steps=len(curve.losses), warmup=self.settings.warmup)
            for name, curve in self.curves.items()
        ]

    def run(self, most: int = 0) -> Sweep:
        """To the sweep's end, started again after each kill and each full disk."""
        while True:
            sweep = Sweep(self.trials, self.settings, Packing(lambda names: True, most=most))
            decided = [msgspec.json.decode(msgspec.json.encode(one), type=Decision) for one in self.decisions]
            decided = decided if self.replays else []
            sweep.replay(decided)
            work = SimpleNamespace(work=SimpleNamespace(samples=lambda step: step))
            jobs = cast("dict[str, Job]", dict.fromkeys(self.curves, work))
            log = cast("DecisionLog", SimpleNamespace(append=self._write))
            life = ClusterSweep(
                deciding=Deciding(sweep, jobs, log, lambda event: None),
                decided=decided,
                names=list(self.curves),
                submission="s",
                connect=lambda: cast("CoordinatorClient", self),
                fields=lambda names: {"names": names},
                on_event=lambda event: None,
                on_row=lambda row: None,
                say=lambda text: None,
                on_look=self._looked,
            )
            try:
                code = life.run()
            except Killed:
                continue
            if self.left_for_a_disk and not sweep.done:
                assert code == EXIT_FAILURE
                self.left_for_a_disk = False
                continue
            assert sweep.done
            return sweep

    def _looked(self, client: object) -> None:
        assert client is self
        self.looks += 1

    def _write(self, decision: Decision) -> None:
        self._perhaps(Killed)
        self.decisions.append(decision)
        self._perhaps(Killed)

    def _perhaps(self, *kinds: type[Exception]) -> None:
        for kind in kinds:
            if self._left[kind] and self._dice.random() < 0.05:
                self._left[kind] -= 1
                raise kind("killed here")

    # --- as the client of a coordinator

    def __enter__(self) -> StrawCluster:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def follow(self, names: list[str], *, new_only: bool) -> None:
        assert new_only

    def poll(self, timeout: float) -> list[Any]:
        if self.jobs:
            job = self.jobs[self._dice.choice(sorted(self.jobs))]
            job.train(self._dice, exits=self.exits)
            if self.full_disks and job.state == "running" and self._dice.random() < 0.1:
                self.full_disks -= 1
                self.left_for_a_disk = True
                job.state = "failed"
                job.reason = f"5 attempts failed, the last: step {job.step} was {NOT_SAVED}no space"
        self._perhaps(Killed, CoordinatorGone)
        return []

    def ask(self, reply: type, make: type, *, timeout: float | None = None, **fields: Any) -> Any:
        self._perhaps(Killed, CoordinatorGone)
        answer = self._answer(make, fields)
        self._perhaps(Killed, CoordinatorGone)
        assert isinstance(answer, reply)
        return answer

    def _answer(self, make: type, fields: dict[str, Any]) -> Any:
        if make is ListClusterJobs:
            return JobRows(reply_to=1, jobs=[job.row(name) for name, job in self.jobs.items()])
        if make is SubmitToCluster:
            assert fields["submission"] == "s"
            boundary = {trial.name: trial.boundary for trial in self.trials}
            for name in fields["names"]:
                self.asked.append(f"submit {name}")
                self.jobs.setdefault(name, StrawJob(self.curves[name], boundary[name]))
            return Submitted(reply_to=1, jobs=list(fields["names"]))
        for name in fields["jobs"]:
            job = self.jobs[name]
            self.asked.append(f"{make.__name__} {name}")
            if make is ResumeClusterJobs and job.parked:
                job.parked, job.past, job.state = False, True, "waiting"
                job.step = job.saved
            elif make is ResumeClusterJobs and job.state == "failed":
                job.step, job.state = job.saved, "waiting"
            elif make is StopClusterJobs:
                assert job.parked, f"{name} is stopped, and was not waiting"
                job.parked, job.state, job.reason = False, "stopped", fields["reason"]
        return JobsDone(reply_to=1)
