"""The client of a trainer that an attempt has: it can also pause its job, and say where it waits."""

from __future__ import annotations

import contextlib
import time

import msgspec
from gshare.agent.jobs import suspects
from gshare.agent.service.client import TrainerGone
from gshare.agent.service.protocol import Jobs, ListJobs, PauseJobs, ResumeJobs
from gshare.agent.service.supervise import Supervisor

#: How often a waiting attempt's place in the queue is asked for, and a wish to pause repeated.
_ASK_SECONDS = 2.0


class AttemptSupervisor(Supervisor):
    """One job's supervisor that can also pause it and say where it waits. Used in its own thread."""

    gave_up = False
    _asked = 0.0
    _list_id = 0

    @property
    def ended_with(self) -> int | None:
        """The exit code of a trainer that ended in order, with an error."""
        return self._exit_code

    def wish_paused(self, job: str, paused: bool) -> None:
        """Ask the trainer until it is so. One that has come to its `pause_at` stays there."""
        status = self.table.get(job)
        if status is None or job in self._parked or time.monotonic() - self._asked < _ASK_SECONDS:
            return
        if status.state == ("running" if paused else "paused"):
            self._asked = time.monotonic()
            self._say(PauseJobs if paused else ResumeJobs, job)

    def is_parked(self, job: str) -> bool:
        """Whether it has come to its `pause_at`."""
        return job in self._parked

    def go_past(self, job: str) -> None:
        """Train one that has come to its `pause_at` to its end."""
        self.go_on(msgspec.structs.replace(self._by_name[job], pause_at=0))

    def position(self, job: str) -> int | None:
        """Where it waits for GPU memory; None: no news."""
        if self._connection is None:
            self._list_id = 0
            return None
        found = None
        if self._list_id and (reply := self._connection.reply(self._list_id)) is not None:
            self._list_id = 0
            if isinstance(reply, Jobs):
                found = next((status.position for status in reply.jobs if status.job == job), 0)
        status = self.table.get(job)
        waits = status is not None and status.state == "queued"
        if waits and not self._list_id and time.monotonic() - self._asked >= _ASK_SECONDS:
            self._asked = time.monotonic()
            with contextlib.suppress(TrainerGone):  # the next turn finds that out too
                self._list_id = self._connection.send(ListJobs)
        return found

    def _say(self, make: type[PauseJobs | ResumeJobs], job: str) -> None:
        if self._connection is not None:
            with contextlib.suppress(TrainerGone):
                self._send(make, (job,))

    def _do(self, action: suspects.Action) -> None:
        self.gave_up = self.gave_up or isinstance(action, suspects.GiveUp)
        super()._do(action)
