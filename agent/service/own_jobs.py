"""A client's own jobs: sent to its trainer, followed by its events, ended by its word where none has them.

The half of `Supervisor` (`supervise.py`) that knows jobs; the other knows trainers, and gives this one the
connection to the present one.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from gshare.agent.errors import EXIT_FAILURE, EXIT_OK, EXIT_RETRY, EXIT_SIGINT
from gshare.agent.jobs import suspects
from gshare.agent.jobs.events import (
    ENDED,
    Evaluated,
    Event,
    JobChanged,
    JobStateName,
    Stepped,
    TrainerMessage,
)
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.service.client import TrainerClient
from gshare.agent.service.hold import Joined, Spawned
from gshare.agent.service.joining import with_identity
from gshare.agent.service.protocol import Done, JobStatus, PauseJobs, Refused, ResumeJobs, SubmitJobs
from gshare.agent.service.registry import FinishedJob, TrainerConfig, not_recorded, record_finished
from gshare.agent.service.stopping import StopRequest
from gshare.agent.service.table import JobTable


@dataclass
class OwnJobs:
    """The fields are those of `Supervisor`, where they are described."""

    config: TrainerConfig
    requests: Sequence[JobRequest]
    on_event: Callable[[Event], None]
    on_tick: Callable[[], None] = lambda: None
    on_connected: Callable[[], None] = lambda: None
    stop: StopRequest = field(default_factory=StopRequest)
    client: str = ""
    join: bool = True
    first: Sequence[str] | None = None

    def __post_init__(self) -> None:
        names = [request.spec.name for request in self.requests]
        self.client = self.client or f"pid-{os.getpid()}"
        self.config = with_identity(self.config, join=self.join)
        if self.config.gpu is not None:
            gpu = msgspec.structs.replace(self.config.gpu, client=self.client)
            self.config = msgspec.structs.replace(self.config, gpu=gpu)
        self._by_name = dict(zip(names, self.requests, strict=True))
        self._machine = suspects.Suspects(names if self.first is None else self.first)
        self._actions: deque[suspects.Action] = deque()
        self.table = JobTable()
        for request in self.requests:
            self.table.add(
                JobStatus(job=request.spec.name, state="queued", output_dir=request.spec.output_dir)
            )
        self._trainer: Spawned | Joined | None = None
        self._connection: TrainerClient | None = None
        self._submitted: set[str] = set()  # ever: these resume
        self._here: set[str] = set()  # sent to the trainer that runs now
        self._parked: set[str] = set()  # of these: paused where they were to pause, until `go_on`
        self.over = False  # every job that has not ended is ended for a reason that is none of its own
        self._waiting: dict[int, tuple[str, ...]] = {}  # SubmitJobs not answered yet
        self._held: list[Event] = []  # of jobs of these names; whose they are, the answers say
        self._answered_once = False  # by the trainer that runs now: it has its memory and its base
        self._busy: set[str] = set()  # refused because another trainer writes to their directories
        self._warned: set[str] = set()
        self._exit_code: int | None = None  # of a trainer that ended in order, with an error

    @property
    def _connected(self) -> TrainerClient:
        assert self._connection is not None
        return self._connection

    def _submit(self, jobs: tuple[str, ...]) -> None:
        """Jobs that have paused in this trainer go on in it, if somebody else has not let them already."""
        here = [job for job in jobs if job in self._here]
        for job in here:
            if job in self._parked:
                self._parked.discard(job)
                self._connected.send(ResumeJobs, jobs=[job], pause_at=self._by_name[job].pause_at)
        jobs = tuple(job for job in jobs if job not in here)
        if not jobs:
            return
        requests = [
            msgspec.structs.replace(self._by_name[job], resume=True)
            if job in self._submitted
            else self._by_name[job]
            for job in jobs
        ]
        self._submitted |= set(jobs)
        self._here |= set(jobs)
        names = [] if self.first is None else list(self._by_name)
        self._waiting[self._connected.send(SubmitJobs, jobs=requests, names=names)] = jobs

    def _send(self, make: type[PauseJobs | ResumeJobs], jobs: tuple[str, ...]) -> None:
        """The reply does not matter: what fails has ended meanwhile, and its event says so."""
        self._connected.send(make, jobs=list(jobs))

    def _answered(self, request_id: int) -> None:
        reply = self._connected.reply(request_id)
        if reply is None:
            return
        jobs = self._waiting.pop(request_id)
        self._answered_once = True
        if isinstance(reply, Refused):
            failed = dict.fromkeys(jobs, reply.reason)
        else:
            assert isinstance(reply, Done), reply
            failed = reply.failed
            self._busy |= set(reply.busy)
        for job, reason in failed.items():
            self._here.discard(job)
            self._actions.extend(self._end(job, "failed", reason))

    def _ours(self, events: Sequence[Event]) -> Iterator[Event]:
        """Those that are of this client's jobs, each looked at when those before it were taken. Of the first
        submission none is held: those names are kept for it, and a trainer that waits for memory tells of a
        stop long before it answers."""
        asked = {job for jobs in self._waiting.values() for job in jobs} if self._answered_once else set()
        known = [*self._held, *events]
        self._held = [event for event in known if _is_state(event) and event.job in asked]
        for event in known:
            if not (_is_state(event) and event.job in asked) and self._is_ours(event):
                yield event

    def _is_ours(self, event: Event) -> bool:
        """Not of a job that has only the name of one: of one that is still to be sent, was refused, or has
        ended."""
        status = self.table.get(event.job)
        if status is None:
            return True
        return event.job in self._here and not (_is_state(event) and status.state in ENDED)

    def _take(self, event: Event) -> list[suspects.Action]:
        """Shows the event and tells the machine."""
        self.table.update(event)
        actions = self._note_pause(event)
        self.on_event(event)
        if actions:
            return actions
        if isinstance(event, Stepped):
            return self._machine.handle(suspects.Passed(event.job, event.step))
        if isinstance(event, JobChanged) and event.state in ENDED:
            self._parked.discard(event.job)
            return self._machine.handle(suspects.Ended(event.job))
        return []

    def _note_pause(self, event: Event) -> list[suspects.Action]:
        """A job that has paused where it was to leaves those that run; somebody else may let it go on."""
        if not isinstance(event, JobChanged):
            return []
        if event.state == "paused" and event.step == self._by_name[event.job].pause_at:
            self._parked.add(event.job)
            return self._machine.handle(suspects.Ended(event.job))
        if event.state == "running" and event.job in self._parked:
            self._parked.discard(event.job)
            self._by_name[event.job] = msgspec.structs.replace(self._by_name[event.job], pause_at=0)
            return self._machine.handle(suspects.Added(event.job))
        return []

    def _end(self, job: str, state: JobStateName, reason: str, *, ran: bool = True) -> list[suspects.Action]:
        """A job ends by the client's word: no trainer has it (any more). One that never ran is not listed."""
        status = self.table.get(job)
        assert status is not None
        if status.state in ENDED:
            return []
        event = JobChanged(
            job=job, state=state, step=status.step, total_steps=status.total_steps, reason=reason
        )
        actions = self._take(event)
        last = self.table.get(job)
        assert last is not None
        if not ran:
            return actions
        trainer_id = self._trainer.directory.name if self._trainer else ""
        try:
            record_finished(FinishedJob(status=last, ended=time.time(), trainer_id=trainer_id))
        except OSError as error:
            self._warn(not_recorded(error))
        return actions

    def _warn(self, text: str) -> None:
        """Once for every text."""
        if text not in self._warned:
            self._warned.add(text)
            self.on_event(TrainerMessage(level="warning", text=text))

    def _end_all(self, state: JobStateName, reason: str) -> None:
        self.over = True
        for status in self.table.all():
            self._end(status.job, state, reason)

    def _code(self) -> int:
        states = {status.state for status in self.table.all()}
        if states <= {"completed"}:
            return EXIT_OK
        if self.stop.exit_code is not None:
            return self.stop.exit_code
        if self._exit_code is not None:
            return self._exit_code
        failed = {status.job for status in self.table.all() if status.state in ("failed", "diverged")}
        if failed and failed <= self._busy:
            return EXIT_RETRY
        return EXIT_FAILURE if failed else EXIT_SIGINT


def _is_state(event: Event) -> bool:
    """It says how far a job is; the others are words."""
    return isinstance(event, JobChanged | Stepped | Evaluated)
