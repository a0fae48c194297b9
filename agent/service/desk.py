"""What clients ask of a trainer, applied between two rounds: they join, submit, stop, pause, and leave.

A job belongs to the connection that submitted it. Of a client that is gone nothing is left but its jobs'
checkpoints: what it had asked for and had not got is dropped, its part of the reservation is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec
from gshare.agent.errors import GshareError, RetryLater
from gshare.agent.jobs.events import ENDED, Event, JobChanged
from gshare.agent.jobs.names import check_name
from gshare.agent.jobs.spec import JobRequest, WarmStart
from gshare.agent.service.output_dir import START_DIR, OutputClaim, RunRecord
from gshare.agent.service.parts import Parts
from gshare.agent.service.protocol import (
    STOPPED_BY,
    Done,
    JobStatus,
    JoinTrainer,
    OpenTrainer,
    PauseJobs,
    Refused,
    ResumeJobs,
    Shutdown,
    StopJobs,
    SubmitJobs,
    TakeWeights,
    WeightsTaken,
)
from gshare.agent.service.registry import TrainerConfig, append_line
from gshare.agent.service.server import Command, Connection
from gshare.agent.service.table import JobTable


class Runner(Protocol):
    """The engine as the trainer drives it; `gshare.agent.train.runner.Runner` is the real one.

    It is made with `reservation` and `may_grow` only where something was reserved, and with `tracer` only
    where a trace was asked for.
    """

    def expect(self, requests: Sequence[JobRequest]) -> None: ...
    def admit(self, request: JobRequest) -> None: ...
    def stop(self, job: str, reason: str) -> None: ...
    def pause(self, job: str) -> None: ...
    def resume(self, job: str, pause_at: int | None = None) -> None: ...
    def about_to_resume(self, jobs: Sequence[str]) -> AbstractContextManager[None]: ...
    def take_weights(self, job: str, directory: Path) -> WarmStart: ...
    def run_round(self) -> bool: ...
    def close(self) -> None: ...


class Desk:
    """The trainer's main thread gives `apply_all` the commands that are there, once there is an engine
    (`runner`)."""

    def __init__(
        self,
        directory: Path,
        config: TrainerConfig,
        table: JobTable,
        *,
        reply: Callable[[Connection, msgspec.Struct], None],
        on_event: Callable[[Event], None],
        warn: Callable[[str], None],
        last_seq: Callable[[], int],
    ) -> None:
        self._directory = directory
        self._config = config
        self._table = table
        self._reply = reply
        self._on_event = on_event
        self._warn = warn
        self._last_seq = last_seq
        self._owner: dict[str, int | None] = {}  # job → key of its connection; None: detached
        self._claims: dict[str, OutputClaim] = {}
        self._names: dict[int, str] = {}  # key of a connection → its client's name in row and shares
        self._promised: dict[str, int] = {}  # name of a job that a client brings → its connection
        self._pending: list[tuple[Connection, JoinTrainer]] = []  # until the trainer is opened
        self._opener: int | None = None  # the client whose jobs are on trial
        self._opener_left = False
        self.open = config.joinable and bool(config.join_key)
        self.parts = Parts()
        self.base: str | None = None
        self.runner: Runner | None = None
        self.shutdown = False

    def apply_all(self, commands: Sequence[Command]) -> None:
        """In their order. A sweep resumes its survivors one by one: their checkpoints are read together."""
        resumed = [job for one in commands if isinstance(one.request, ResumeJobs) for job in one.request.jobs]
        with self._engine.about_to_resume(resumed):
            for command in commands:
                self.apply(command)

    def apply(self, command: Command) -> None:
        connection, request = command.connection, command.request
        if request is None:
            self._client_left(connection)
        elif isinstance(request, JoinTrainer):
            self._join(connection, request)
        elif isinstance(request, SubmitJobs):
            self._submit(connection, request)
        elif isinstance(request, TakeWeights):
            self._take_weights(connection, request)
        else:
            done: list[str] = []
            failed: dict[str, str] = {}
            if isinstance(request, StopJobs):
                own = [job for job, owner in self._owner.items() if owner == connection.key]
                done, failed = self.stop(
                    request.jobs or own, request.reason or f"{STOPPED_BY}{connection.client}"
                )
            elif isinstance(request, PauseJobs):
                done, failed = self._each(request.jobs, self._engine.pause)
            elif isinstance(request, ResumeJobs):
                done, failed = self._each(
                    request.jobs, lambda job: self._engine.resume(job, request.pause_at)
                )
            elif isinstance(request, OpenTrainer):
                self._open()
            elif isinstance(request, Shutdown):
                self.shutdown = True
            self._reply(connection, Done(reply_to=request.id, jobs=done, failed=failed))

    def _take_weights(self, connection: Connection, request: TakeWeights) -> None:
        try:
            self._check_active(request.job)
            if Path(request.directory).name != START_DIR:  # what is there is replaced
                raise GshareError(f"{request.directory}: weights for a clone go into a folder {START_DIR!r}")
            start = self._engine.take_weights(request.job, Path(request.directory))
            self._reply(connection, WeightsTaken(reply_to=request.id, start=start))
        except GshareError as error:
            self._reply(connection, Refused(reply_to=request.id, reason=str(error)))

    def stop(self, jobs: Sequence[str], reason: str) -> tuple[list[str], dict[str, str]]:
        """Checkpoint and stop: those that were, and why the others were not."""
        return self._each(jobs, lambda job: self._engine.stop(job, reason))

    def dismiss(self, *, late: bool) -> None:
        """Refuses those who wait for the trainer to be opened when nobody will: its opener is gone, or is
        `late`. To be called after commands were applied: whatever came first, nobody keeps on waiting."""
        if not self._pending or not (self._opener_left or (late and self._opener is None)):
            return
        pending, self._pending = self._pending, []
        reason = (
            "the client whose jobs were on trial has left it"
            if self._opener_left
            else "the client that it was started for has not come"
        )
        for connection, request in pending:
            self._refuse(connection, request, reason)

    def job_ended(self, job: str) -> None:
        """Its directory is free for the next run."""
        claim = self._claims.pop(job, None)
        if claim is not None:
            claim.release()

    def release(self) -> None:
        for claim in self._claims.values():
            claim.release()

    def ended_early(self, job: JobRequest, client: str, reason: str) -> None:
        """A job that ends before the engine had it: nothing of it was written."""
        name = job.spec.name
        self._table.decided(name)
        if name in self._table.active():
            return  # one of the same name, which is not this one
        self._table.add(JobStatus(job=name, state="queued", client=client, output_dir=job.spec.output_dir))
        self._on_event(JobChanged(job=name, state="stopped", step=0, total_steps=0, reason=reason))

    @property
    def _engine(self) -> Runner:
        assert self.runner is not None
        return self.runner

    def _each(self, jobs: Sequence[str], action: Callable[[str], object]) -> tuple[list[str], dict[str, str]]:
        done: list[str] = []
        failed: dict[str, str] = {}
        for job in jobs:
            try:
                self._check_active(job)
                action(job)
                done.append(job)
            except GshareError as error:
                failed[job] = str(error)
        return done, failed

    def _check_active(self, job: str) -> None:
        status = self._table.get(job)
        if status is None:
            raise GshareError(f"job {job} is not in this trainer")
        if status.state in ENDED:
            raise GshareError(f"job {job} has ended: {status.state}")

    # ------------------------------------------------------------------ clients that come and go

    def _join(self, connection: Connection, request: JoinTrainer) -> None:
        if connection.closed:
            return
        if not self._config.join_key:
            self._refuse(connection, request, "it was started with --no-join")
        elif not self.open:
            self._pending.append((connection, request))
        else:
            self._make_room(connection, request)

    def _make_room(self, connection: Connection, request: JoinTrainer) -> None:
        active = set(self._table.active())
        for job in request.jobs:
            if job in active or self._is_promised(job, connection):
                self._refuse(connection, request, f"a job named {job} runs in it, or is to")
                return
        name = self._unique_name(connection)
        try:
            self.parts.join(name, request.budget_mb, request.resident_mb)
        except GshareError as error:
            self._refuse(connection, request, str(error))
            return
        self._names[connection.key] = name
        self._promised.update(dict.fromkeys(request.jobs, connection.key))
        self._reply(connection, Done(reply_to=request.id, jobs=request.jobs, seq=self._last_seq()))

    def _refuse(self, connection: Connection, request: JoinTrainer, reason: str) -> None:
        self._reply(connection, Refused(reply_to=request.id, reason=reason))

    def _unique_name(self, connection: Connection) -> str:
        """A joining client's: never that of the client which the reservation was made for."""
        gpu = self._config.gpu
        taken = {*self._names.values(), gpu.client if gpu else ""}
        return (
            connection.client if connection.client not in taken else f"{connection.client}#{connection.key}"
        )

    def _is_promised(self, job: str, connection: Connection) -> bool:
        """To another client."""
        return self._promised.get(job, connection.key) != connection.key

    def _open(self) -> None:
        if not self._config.join_key:
            return
        self.open = True
        pending, self._pending = self._pending, []
        for connection, request in pending:
            self._join(connection, request)

    def _client_left(self, connection: Connection) -> None:
        jobs = [job for job, owner in self._owner.items() if owner == connection.key]
        self._promised = {job: key for job, key in self._promised.items() if key != connection.key}
        self._pending = [one for one in self._pending if one[0] is not connection]
        self._opener_left |= connection.key == self._opener
        if connection.detached:
            self._owner.update(dict.fromkeys(jobs, None))
            return  # its part of the reservation stays with its jobs
        active = set(self._table.active())
        self.stop([job for job in jobs if job in active], "its client left")
        name = self._names.pop(connection.key, None)
        if name is not None:
            self._give_back(name)

    def _give_back(self, name: str) -> None:
        try:
            self.parts.leave(name)
        except GshareError as error:  # it stays reserved: too much, and no harm
            self._warn(f"the part of {name} is not given back: {error}")

    # ------------------------------------------------------------------ jobs

    def _submit(self, connection: Connection, request: SubmitJobs) -> None:
        if self._opener is None and connection.key not in self._names:
            self._opener = connection.key
        # Gone while the trainer waited for memory: the waiting room has heard of it, and the desk will not.
        self._opener_left |= connection.closed and connection.key == self._opener
        if connection.closed and not connection.detached:
            for job in request.jobs:
                self.ended_early(job, connection.client, "its client left")
            return
        self._first_jobs_of(connection)
        active = set(self._table.active())
        for job in request.names:
            if job not in active or self._owner.get(job) == connection.key:
                self._promised.setdefault(job, connection.key)
        done: list[str] = []
        failed: dict[str, str] = {}
        busy: list[str] = []
        if len(request.jobs) > 1:
            self._engine.expect(request.jobs)
        for job in request.jobs:
            try:
                self._admit(job, connection)
                done.append(job.spec.name)
            except GshareError as error:
                failed[job.spec.name] = str(error)
                if isinstance(error, RetryLater):
                    busy.append(job.spec.name)
            finally:
                self._table.decided(job.spec.name)
        self._reply(connection, Done(reply_to=request.id, jobs=done, failed=failed, busy=busy))

    def _first_jobs_of(self, connection: Connection) -> None:
        """Who brings jobs without having joined is the client that the trainer was started for."""
        if connection.key in self._names:
            return
        gpu = self._config.gpu
        name = connection.client
        if name in self._names.values():
            name = f"{name}#{connection.key}"
        self._names[connection.key] = name
        if gpu is not None and gpu.part_mb and name == gpu.client:
            self.parts.own(name, gpu.resident_mb)

    def _admit(self, request: JobRequest, connection: Connection) -> None:
        spec = request.spec
        check_name(spec.name, what="job")
        if spec.name in self._table.active() or self._is_promised(spec.name, connection):
            raise GshareError(
                f"job {spec.name}: a job of this name runs in this trainer, or is to; choose another"
            )
        claim = OutputClaim(self._run_record(request), resume=request.resume)
        # A clone that was stopped goes on from what its directory says, whoever resumes it.
        request = msgspec.structs.replace(request, start=claim.run.start)
        status = JobStatus(
            job=spec.name, state="queued", client=connection.client, output_dir=spec.output_dir
        )
        self._table.add(status)
        self._claims[spec.name] = claim
        self._owner[spec.name] = None if connection.detached else connection.key
        try:
            append_line(self._directory / "jobs.jsonl", status)
        except OSError as error:
            self._warn(f"{self._directory}: {error.strerror}; a crash may go unexplained")
        try:
            self._engine.admit(msgspec.structs.replace(request, client=self._names[connection.key]))
        except GshareError:
            self._table.remove(spec.name)
            self._claims.pop(spec.name, claim).undo()
            del self._owner[spec.name]
            raise

    def _run_record(self, request: JobRequest) -> RunRecord:
        return RunRecord(
            model=self._config.model,
            base_dtype=self._config.base_dtype,
            base=self.base,
            spec=request.spec,
            train_hash=request.train_hash,
            val_hash=request.val_hash,
            start=request.start,
        )
