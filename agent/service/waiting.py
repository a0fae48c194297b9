"""What clients ask of a trainer that still waits for GPU memory: jobs come, are stopped, lose their client.

    room = WaitingRoom(ended=…)
    room.take(command)              # as they come
    room.answers()                  # to be sent
    room.over                       # nobody waits for the memory any more: give the place in the queue up
    room.kept()                     # for when the memory is there: the submissions that are left, in order

No engine is there yet, so a stop needs no checkpoint and writes nothing, and there is nothing to pause.
Pure: what happens to a job is told to `ended`, what clients are answered is left for the caller to send.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.service.protocol import (
    STOPPED_BY,
    Done,
    JoinTrainer,
    OpenTrainer,
    PauseJobs,
    Refused,
    ResumeJobs,
    Shutdown,
    StopJobs,
    SubmitJobs,
    TakeWeights,
)
from gshare.agent.service.server import Command, Connection

#: Told of a job that ends before it began: its request, the name of its client, and why.
Ended = Callable[[JobRequest, str, str], None]
Answer = tuple[Connection, Done | Refused]


class WaitingRoom:
    """The submissions of a trainer without an engine."""

    def __init__(self, ended: Ended, *, is_open: bool = True) -> None:
        """`is_open`: not for the jobs on trial of one client, which will open the trainer for the others."""
        self._ended = ended
        self._open = is_open
        self._kept: list[tuple[Connection, SubmitJobs]] = []
        self._joins: list[tuple[Connection, JoinTrainer]] = []
        self._answers: list[Answer] = []
        self._owners: list[Connection] = []  # connected clients that have brought jobs: they may bring more
        self._had_jobs = False
        self._shut_down = False

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs that wait, in the order in which they came."""
        return [job.spec.name for _, submit in self._kept for job in submit.jobs]

    @property
    def over(self) -> bool:
        """Jobs have come, none is left, nor a client that brought one or wants to; or a client has shut the
        trainer down.

        Who only follows or lists does not count: the memory would be waited for in vain.
        """
        return self._shut_down or (self._had_jobs and not self.jobs and not self._owners and not self._joins)

    def answers(self) -> list[Answer]:
        """The answers not given out yet."""
        taken, self._answers = self._answers, []
        return taken

    def kept(self) -> list[Command]:
        """The submissions, then who wants to join, for the trainer to apply; the room is empty afterwards."""
        kept: list[Command] = [Command(connection, request) for connection, request in self._kept]
        kept += [Command(connection, request) for connection, request in self._joins]
        self._kept, self._joins = [], []
        return kept

    def dismiss(self, *, late: bool) -> None:
        """Refuses those who wait for the trainer to be opened when nobody will: no client is left that has
        brought jobs, or none has come and that is `late`."""
        if self._open or self._owners or not (self._had_jobs or late):
            return
        reason = "the client that it was started for is not there"
        self._answers += [
            (connection, Refused(reply_to=request.id, reason=reason)) for connection, request in self._joins
        ]
        self._joins = []

    def take(self, command: Command) -> None:
        connection, request = command.connection, command.request
        if request is None:
            self._client_left(connection)
        elif isinstance(request, SubmitJobs):
            self._had_jobs = True
            if connection not in self._owners:
                self._owners.append(connection)
            self._kept.append((connection, request))
        elif isinstance(request, JoinTrainer):
            self._joins.append((connection, request))
        elif isinstance(request, StopJobs):
            self._stop(connection, request)
        elif isinstance(request, (PauseJobs, ResumeJobs)):
            self._refuse(connection, request)
        elif isinstance(request, TakeWeights):
            reason = f"job {request.job} waits for GPU memory and has no weights yet"
            self._answers.append((connection, Refused(reply_to=request.id, reason=reason)))
        elif isinstance(request, OpenTrainer):
            self._answers.append((connection, Done(reply_to=request.id)))  # nothing has run: on trial still
        elif isinstance(request, Shutdown):
            self._shut_down = True
            self._end(lambda owner, name: True, "the trainer was shut down")
            self._answers.append((connection, Done(reply_to=request.id)))

    def _client_left(self, connection: Connection) -> None:
        if connection in self._owners:
            self._owners.remove(connection)
        self._joins = [one for one in self._joins if one[0] is not connection]
        if not connection.detached:
            self._end(lambda owner, name: owner is connection, "its client left")

    def _stop(self, connection: Connection, request: StopJobs) -> None:
        waiting = set(self.jobs)
        names = request.jobs or self._of(connection)
        done = [name for name in names if name in waiting]
        self._end(lambda owner, name: name in done, request.reason or f"{STOPPED_BY}{connection.client}")
        failed = {name: f"job {name} is not in this trainer" for name in names if name not in waiting}
        self._answers.append((connection, Done(reply_to=request.id, jobs=done, failed=failed)))

    def _of(self, connection: Connection) -> list[str]:
        return [job.spec.name for owner, submit in self._kept if owner is connection for job in submit.jobs]

    def _refuse(self, connection: Connection, request: PauseJobs | ResumeJobs) -> None:
        waiting = set(self.jobs)
        failed = {
            name: f"job {name} waits for GPU memory and can only be stopped until it runs"
            if name in waiting
            else f"job {name} is not in this trainer"
            for name in request.jobs
        }
        busy = [name for name in request.jobs if name in waiting]
        self._answers.append((connection, Done(reply_to=request.id, failed=failed, busy=busy)))

    def _end(self, is_meant: Callable[[Connection, str], bool], reason: str) -> None:
        """Take jobs out. A submission with none left is answered: nobody else will."""
        kept: list[tuple[Connection, SubmitJobs]] = []
        for owner, submit in self._kept:
            leaving = [job for job in submit.jobs if is_meant(owner, job.spec.name)]
            for job in leaving:
                self._ended(job, owner.client, reason)
            staying = [job for job in submit.jobs if not is_meant(owner, job.spec.name)]
            if staying:
                kept.append((owner, msgspec.structs.replace(submit, jobs=staying)))
            else:
                self._answers.append((owner, Done(reply_to=submit.id)))
        self._kept = kept
