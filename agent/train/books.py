"""The runner's books: every job's state, its files, and what is said of it.

Files are written by `CheckpointWriter`'s threads from host snapshots; a job whose files cannot be written
ends, and nobody else notices. What a job becomes at its end or pause is said once its files stand; the others
train on meanwhile.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.early_exit import describe_exit
from gshare.agent.jobs.events import (
    ENDED,
    NOT_SAVED,
    CheckpointSaved,
    Evaluated,
    Event,
    Exit,
    JobChanged,
    JobStateName,
    LastLosses,
    Stepped,
    TrainerMessage,
)
from gshare.agent.jobs.schedules import Schedule
from gshare.agent.trace import Tracer
from gshare.agent.train.checkpoint import Snapshot, adapter_config
from gshare.agent.train.checkpoint_writer import CheckpointWriter, Kind
from gshare.agent.train.gpu_guard import NoGuard
from gshare.agent.train.job import Job
from gshare.agent.train.out_of_memory import whose_limit

log = logging.getLogger(__name__)


class Books:
    """Jobs by name, in order of admission, ended ones included."""

    def __init__(
        self,
        *,
        emit: Callable[[Event], None],
        schedule: Schedule,
        guard: NoGuard,
        tracer: Tracer,
        model_dir: Path,
        fingerprint: dict[str, str],
    ) -> None:
        self.emit = emit
        self.schedule = schedule
        self.guard = guard
        self.tracer = tracer
        self.fingerprint = fingerprint
        self.writer = CheckpointWriter()
        self.jobs: dict[str, Job] = {}
        self._model_dir = model_dir
        self._saves: Counter[str] = Counter()  # of each job, submitted and not yet told of
        self._failing: set[str] = set()  # a save of theirs has failed, and others are not told of yet

    def find(self, name: str) -> Job:
        """As it is once its files stand, if it waits for them. UsageError for a job that was never here."""
        if name not in self.jobs:
            known = ", ".join(self.jobs) or "none"
            raise UsageError(f"no job named {name!r} in this trainer; its jobs: {known}")
        job = self.jobs[name]
        if job.settling is not None:
            self.wait_for_files()
        return job

    def running(self) -> list[Job]:
        return [job for job in self.jobs.values() if job.is_active]

    def say(self, level: Literal["info", "warning", "error"], text: str, job: str = "") -> None:
        self.emit(TrainerMessage(level=level, text=text, job=job))

    # ------------------------------------------------------------------ states

    def change(
        self,
        job: Job,
        state: JobStateName,
        reason: str,
        last: LastLosses | None = None,
        exit: Exit | None = None,
    ) -> None:
        job.state, job.reason = state, reason
        self.emit(
            JobChanged(
                job=job.name,
                state=state,
                step=job.step,
                total_steps=job.total_steps,
                reason=reason,
                last=last,
                exit=exit,
            )
        )

    def finish(self, job: Job) -> None:
        """Its last step is done: save, and end as `completed` once the files stand."""
        self.save(job, "final")
        self._settle(job, lambda: self._leave(job, "completed", ""))

    def leave_early(self, job: Job, cause: Exit) -> None:
        """A pattern of its losses stops it: save as at an end, and end as `stopped` once the files stand.

        No checkpoint of this step: a resume then stops at the same one again, by the same losses.
        """
        self.save(job, "final")
        self._settle(job, lambda: self._leave(job, "stopped", describe_exit(cause), cause))

    def park(self, job: Job) -> None:
        """Pause it where it was asked to: evaluated, without its memory, and said so once its checkpoint
        stands."""
        self.save(job, "step")
        self._settle(job, lambda: self.change(job, "paused", "it was to pause here"))

    def _settle(self, job: Job, then: Callable[[], None]) -> None:
        """Give its memory back; `then`, once what was saved of it stands. Until then it is `running` for
        others, and in no round."""
        job.park()
        job.settling = then
        self._settled(job)

    def _settled(self, job: Job) -> None:
        if job.settling is not None and not self._saves[job.name]:
            then, job.settling = job.settling, None
            then()

    def wait_for_files(self) -> bool:
        """Wait for the writer and say what became of those that waited for it; False when none did."""
        waited = any(job.settling is not None for job in self.jobs.values())
        self.writer.flush()
        self.collect_saves()
        return waited

    def diverge(self, job: Job, what: str) -> None:
        """Nothing more of this job is saved: what is on disk is from when its values were numbers."""
        kept = (
            f"its newest checkpoint is of step {job.saved_step}"
            if job.saved_step > 0
            else "no checkpoint was due yet"
        )
        self.end(
            job, "diverged", f"{what} not finite at step {job.step}; {kept}; a lower learning_rate may help"
        )

    def fail(self, job: Job, error: Exception) -> None:
        log.error("job %s failed", job.name, exc_info=error)
        self.end(job, "failed", self.reason(error))

    def reason(self, error: Exception) -> str:
        """One line for people; of an out-of-memory error under a reservation, whose limit it was."""
        if whose := whose_limit(error, self.guard):
            return whose
        return str(error) if isinstance(error, GshareError) else f"{type(error).__name__}: {error}"

    def end(self, job: Job, state: JobStateName, reason: str, cause: Exit | None = None) -> None:
        """After its files; a job that has ended meanwhile (they could not be written) stays as it is."""
        self.wait_for_files()
        if job.state not in ENDED:
            self._leave(job, state, reason, cause)

    def _leave(self, job: Job, state: JobStateName, reason: str, cause: Exit | None = None) -> None:
        self.schedule.forget(job.name)
        if not job.parked:
            job.adapter.close()
        self.change(job, state, reason, exit=cause)

    # ------------------------------------------------------------------ files

    def save(self, job: Job, kind: Kind) -> None:
        """Hand a host snapshot to the writer; `kind` is step, best or final."""
        if kind == "step" and job.saved_step == job.step:
            return
        assert job.begun == job.step, f"{job.name}: the weights are those of step {job.begun} already"
        if kind == "step":
            job.saved_step = job.step
        with self.tracer.span("Save", kind=kind):
            copy = job.adapter.on_host(optimizer=kind == "step")
            snapshot = Snapshot(
                job=job.name,
                step=job.step,
                adapter=copy.parameters,
                optimizer=copy.optimizer,
                state={**job.counters(), "fingerprint": self.fingerprint},
                wait=copy.wait,
            )
            self._saves[job.name] += 1
            self.writer.submit(
                snapshot,
                job.output_dir,
                kind,
                adapter_config=adapter_config(job.spec, str(self._model_dir)),
                save_total_limit=job.spec.save_total_limit,
            )
        self.guard.record("save")

    def collect_saves(self) -> None:
        """Tell what the writer did since the last look; a failed save ends its job."""
        for result in self.writer.results():
            self._saves[result.job] -= 1
            if result.error is None and not result.superseded:
                self.emit(CheckpointSaved(job=result.job, step=result.step, path=str(result.path)))
            job = self.jobs.get(result.job)
            if job is None:
                continue
            if result.error is not None and job.state not in ENDED and job.name not in self._failing:
                self._fail_save(job, f"checkpoint of step {result.step} was {NOT_SAVED}{result.error}")
            self._settled(job)

    def _fail_save(self, job: Job, reason: str) -> None:
        """In no round any more, and `failed` once nothing writes to its directory: it is free for another run
        of that name then, which must not hear of this one's saves."""

        def leave() -> None:
            self._failing.discard(job.name)
            self._leave(job, "failed", reason)

        self._failing.add(job.name)
        if not job.parked:
            job.park()
        job.settling = leave

    def record(self, job: Job, event: Stepped | Evaluated, *, type: str) -> bool:
        """Append to metrics.jsonl; a full disk ends the job (its last checkpoint stays)."""
        fields = msgspec.structs.asdict(event)
        del fields["job"]
        try:
            job.append_metrics({"type": type, **fields})
        except OSError as error:
            where = job.output_dir / "metrics.jsonl"
            self.fail(
                job, GshareError(f"losses of step {event.step} were {NOT_SAVED}{where}: {error.strerror}")
            )
            return False
        return True
