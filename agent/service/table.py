"""The last known status of every job, kept from the events: for the trainer, its clients and the screen."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
from gshare.agent.jobs.events import ENDED, Evaluated, Event, JobChanged, Stepped
from gshare.agent.service.protocol import JobStatus


class JobTable:
    """May be read from another thread than the one that updates: `ListJobs` is answered during rounds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, JobStatus] = {}
        self._arrived: dict[
            str, list[JobStatus]
        ] = {}  # not admitted or refused yet, the first of a name first
        self._position, self._reason = 0, ""

    def arrive(self, status: JobStatus) -> None:
        """A job that waits to be admitted: listed, unless one of its name is active, and not updated."""
        with self._lock:
            self._arrived.setdefault(status.job, []).append(status)

    def waits(self, position: int, reason: str) -> None:
        """Say of all jobs that wait to be admitted where they stand in a queue; 0 and "": in none."""
        with self._lock:
            self._position, self._reason = position, reason

    def decided(self, job: str) -> None:
        """The first one of that name is no longer waiting."""
        with self._lock:
            waiting = self._arrived[job]
            waiting.pop(0)
            if not waiting:
                del self._arrived[job]

    def listed(self) -> list[JobStatus]:
        """All jobs and those that wait to be admitted, one of each name: these before one that has ended."""
        with self._lock:
            jobs = dict(self._jobs)
            for job, waiting in self._arrived.items():
                if job not in jobs or jobs[job].state in ENDED:
                    jobs[job] = msgspec.structs.replace(
                        waiting[0], position=self._position, reason=self._reason
                    )
            return list(jobs.values())

    def add(self, status: JobStatus) -> None:
        with self._lock:
            self._jobs[status.job] = status

    def remove(self, job: str) -> None:
        with self._lock:
            self._jobs.pop(job, None)

    def get(self, job: str) -> JobStatus | None:
        return self._jobs.get(job)

    def all(self) -> list[JobStatus]:
        with self._lock:
            return list(self._jobs.values())

    def active(self) -> list[str]:
        return [status.job for status in self.all() if status.state not in ENDED]

    def update(self, event: Event) -> JobStatus | None:
        """Takes the event in; the job's new status."""
        with self._lock:
            status = self._jobs.get(event.job)
            if status is None:
                return None
            if isinstance(event, JobChanged):
                changes: dict[str, Any] = {
                    "state": event.state,
                    "step": event.step,
                    "total_steps": event.total_steps,
                    "reason": event.reason,
                }
                if event.last is not None:
                    changes.update(msgspec.structs.asdict(event.last))
            elif isinstance(event, Stepped):
                changes = {"step": event.step, "total_steps": event.total_steps, "loss": event.loss}
            elif isinstance(event, Evaluated):
                changes = {"val_loss": event.val_loss}
                if event.best:
                    changes["best_val_loss"] = event.val_loss
            else:
                return status
            self._jobs[event.job] = status = msgspec.structs.replace(status, **changes)
            return status
