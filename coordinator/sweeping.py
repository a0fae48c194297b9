"""A sweep on a cluster: a client of the coordinator, whose jobs the configurations are.

    Run     a job is submitted, to pause where its warm-up ends; or, paused there, it is resumed
    Stop    a job that waits at the end of its warm-up is stopped: what it has by then comes home
    rows of `ListClusterJobs` ──► Paused, Resumed, Ended

Steered by how the jobs stand and not by what is told of them: events say only when to look. So nothing is
lost by a gap in them, by a coordinator that was killed, or by a kill of this process: the next look sees
what was missed, and a word that did not arrive is said again. A sweep's submissions have one id, under which
no job is taken twice. Which node trains what is the coordinator's placement alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gshare.agent.errors import EXIT_FAILURE, GshareError
from gshare.agent.jobs.events import JobChanged, is_of_machine
from gshare.agent.jobs.sweep import Begin, Ended, Paused, Resumed, Run, Stop
from gshare.agent.jobs.sweep import Event as SweepEvent
from gshare.agent.jobs.sweep_records import Decision, Pattern
from gshare.agent.service.deciding import UNRANKED, Deciding
from gshare.agent.service.stopping import StopRequest
from gshare.coordinator.api_client import CoordinatorClient, CoordinatorGone, NoCoordinator
from gshare.coordinator.api_protocol import (
    ClusterEvent,
    JobEnded,
    JobEvent,
    JobMoved,
    JobRow,
    JobRows,
    JobsDone,
    ListClusterJobs,
    ResumeClusterJobs,
    StopClusterJobs,
    Submitted,
    SubmitToCluster,
)
from gshare.coordinator.facts import ENDED_STATES

#: How long a coordinator that went away is waited for: it is being started again, or it was ended.
AWAY_SECONDS = 60.0
#: The coordinator writes every job to its disk before it answers.
SUBMIT_SECONDS = 300.0
#: Between two looks at the jobs: when something has happened, and when nothing was heard.
LOOK_SECONDS, QUIET_SECONDS = 0.2, 5.0
#: Of a job that is done, while its results are on their way: a second stop would end it without them.
_ARRIVING = frozenset({"publishing", "placing"})


@dataclass
class ClusterSweep:
    """One life of a sweep. `connect` opens a checked connection; `submission` is the sweep's id, and `fields`
    gives the other fields of `SubmitToCluster` for jobs of these names. `decided`: by earlier lives.
    `names`: of all its jobs, those still to be drawn too."""

    deciding: Deciding
    decided: Iterable[Decision]
    names: Sequence[str]
    submission: str
    connect: Callable[[], CoordinatorClient]
    fields: Callable[[Sequence[str]], dict[str, Any]]
    on_event: Callable[[ClusterEvent], None]
    on_row: Callable[[JobRow], None]
    say: Callable[[str], None]
    on_tick: Callable[[], None] = lambda: None
    on_look: Callable[[CoordinatorClient], None] = lambda client: None  # after each look at the jobs
    stop: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        self.rows: dict[str, JobRow] = {}  # of its jobs, as of the last look
        self._runs: dict[str, Run] = {}  # what each is to do
        self._new: set[str] = set()  # of these: the coordinator was not asked for yet
        #: Who was left behind at the ranking: by an earlier life too, which may not have come to stop them.
        self._stops = {one.job: one.reason for one in self.decided if one.pattern == "underperformance"}
        self._paused: set[str] = set()  # by a person, as the machine knows
        self._since = ("", 0)
        self._looked, self._next_look = False, 0.0

    def run(self) -> int:
        """The exit code: 0 when the sweep is done and nothing failed, 1 when something did; when it was left,
        its jobs on the cluster as they are, 130 or 143, and 1 when files of one could not be written.
        GshareError: no coordinator for a minute, or one that refuses what is asked."""
        self._tell(Begin())
        deadline = None
        while not self._over and self.stop.exit_code is None:
            try:
                with self.connect() as client:
                    deadline = None
                    self._talk(client)
            except (CoordinatorGone, NoCoordinator):
                if deadline is None:
                    deadline = time.monotonic() + AWAY_SECONDS
                    self.say("the coordinator is gone; jobs run on; waiting for it to come back")
                self._wait(deadline)
        return self.deciding.code if self._over else self.stop.exit_code or 0

    @property
    def _over(self) -> bool:
        """Every configuration has ended, and what it leaves is at home."""
        sweep = self.deciding.sweep
        return self._looked and sweep.done and not any(self._is_to_be_stopped(job) for job in self._stops)

    def _wait(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise GshareError(
                f"no coordinator has answered for {AWAY_SECONDS:.0f} s; jobs run on: start it again with "
                "`gshare coordinator`, and go on with --resume"
            )
        self.on_tick()
        time.sleep(0.2)

    def _talk(self, client: CoordinatorClient) -> None:
        client.journal_id, client.seq = self._since
        client.follow(self.names, new_only=True)
        self._looked, self._next_look = False, 0.0
        while not self._over and self.stop.exit_code is None:
            if time.monotonic() >= self._next_look:
                self._look(client)
            for event in client.poll(0.1):
                self.on_event(event)
                if _is_news(event):
                    self._next_look = min(self._next_look, time.monotonic() + LOOK_SECONDS)
            self._since = client.journal_id, client.seq
            self.on_tick()

    # ------------------------------------------------------------------ how the jobs stand

    def _look(self, client: CoordinatorClient) -> None:
        """What has happened, and what is to be done about it."""
        self._next_look = time.monotonic() + QUIET_SECONDS
        listed = client.ask(JobRows, ListClusterJobs).jobs
        self.rows = {row.job: row for row in listed if row.submission == self.submission}
        for row in self.rows.values():
            self.on_row(row)
            # One that the coordinator was not asked for stands as an earlier life left it.
            if row.job in self.deciding.jobs and row.job not in self._new:
                event = self._happened(row)
                if isinstance(event, Ended) and event.state == "failed" and is_of_machine(event.reason):
                    self.stop.exit_code = EXIT_FAILURE
                    self.say(f"{row.job}: {UNRANKED}")
                    return
                if event is not None:
                    self._tell(event)
        if self._carry_out(client):
            self._next_look = time.monotonic() + LOOK_SECONDS
        self._looked = not self._new
        self.on_look(client)

    def _happened(self, row: JobRow) -> SweepEvent | None:
        """How it stands as an event of the machine; None: nothing new that the sweep decides by."""
        phase = self.deciding.sweep.phase(row.job)
        if phase in ("waiting", "ended"):
            return None
        if row.best_val_loss is not None:
            self.deciding.sweep.note_best(row.job, row.best_val_loss)
        if row.state in ENDED_STATES:
            return _ended(row)
        if row.parked:
            arrived = phase == "warming" and row.val_loss is not None
            return Paused(row.job, row.step, row.val_loss) if arrived and row.val_loss is not None else None
        if row.state == "paused":
            # At the step of its boundary and not parked: its node was lost there, the loss is an older one.
            boundary = self._runs[row.job].pause_at if row.job in self._runs else 0
            if row.job in self._paused or row.val_loss is None or row.step == boundary:
                return None
            self._paused.add(row.job)
            return Paused(row.job, row.step, row.val_loss)
        if row.job in self._paused or phase == "ready":
            self._paused.discard(row.job)
            return Resumed(row.job, row.step)
        return None

    # ------------------------------------------------------------------ what is to be done

    def _tell(self, event: SweepEvent) -> None:
        for action in self.deciding.handle(event):
            if isinstance(action, Run):
                self._runs[action.job] = action
                self._new.add(action.job)
            else:
                assert isinstance(action, Stop), action
                self._stops[action.job] = action.reason

    def _carry_out(self, client: CoordinatorClient) -> bool:
        """Whether there was something to do."""
        missing = [job for job in self._runs if job not in self.rows]
        if missing:
            fields = self.fields(missing)
            client.ask(
                Submitted, SubmitToCluster, timeout=SUBMIT_SECONDS, submission=self.submission, **fields
            )
        go_on = [job for job in self._runs if job in self.rows and self._is_to_go_on(self.rows[job])]
        if go_on:
            client.ask(JobsDone, ResumeClusterJobs, jobs=go_on)
        self._new.clear()
        stops: dict[str, list[str]] = {}
        for job, reason in self._stops.items():
            if self._is_to_be_stopped(job) and self.rows[job].state not in _ARRIVING:
                stops.setdefault(reason, []).append(job)
        for reason, jobs in stops.items():
            client.ask(JobsDone, StopClusterJobs, jobs=jobs, reason=reason)
        return bool(missing or go_on or stops)

    def _is_to_go_on(self, row: JobRow) -> bool:
        """It waits where its warm-up has ended, or has failed in an earlier life and is to be tried again."""
        if row.parked:
            return self.deciding.sweep.phase(row.job) == "training"
        return row.state == "failed" and row.job in self._new

    def _is_to_be_stopped(self, job: str) -> bool:
        return job in self.rows and self.rows[job].state not in ENDED_STATES


def _is_news(event: ClusterEvent) -> bool:
    moved = isinstance(event, JobEvent) and isinstance(event.event, JobChanged)
    return moved or isinstance(event, JobMoved | JobEnded)


def _ended(row: JobRow) -> Ended:
    pattern: Pattern = row.exit.pattern if row.exit is not None else ""
    if row.state == "stopped" and not pattern:
        pattern = "user"
    return Ended(
        row.job,
        row.state,  # type: ignore[arg-type]  # one of ENDED_STATES
        row.step,
        val_loss=row.val_loss,
        best_val_loss=row.best_val_loss,
        pattern=pattern,
        reason=row.reason,
        evidence=row.exit.evidence if row.exit is not None else {},
    )
