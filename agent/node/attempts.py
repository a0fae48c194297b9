"""All attempts of a node: accepted, run, stopped, fenced, resumed after a restart, forgotten.

Lives in the agent's loop; the disk is asked in threads, changes one after the other. What must survive the
agent is on the disk before anybody hears of it: the record of a new attempt before `AttemptAccepted`, an end
before its event.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.jobs.events import ENDED, Event, JobChanged, JobStateName, Stepped
from gshare.agent.node.attempt import Outcome, RunningAttempt
from gshare.agent.node.blobs import BlobStore
from gshare.agent.node.checks import check_start, local_name
from gshare.agent.node.durable import check_room
from gshare.agent.node.models import collect_models, model_hash, place_model
from gshare.agent.node.progress import advance, found_on_disk
from gshare.agent.node.protocol import AttemptStatus, StartAttempt
from gshare.agent.node.records import (
    RECORD,
    AttemptRecord,
    Fences,
    make_attempt,
    new_record,
    read_records,
    write_record,
)
from gshare.agent.node.state_dir import StateDir

#: owner, attempt, the event, whether it is durable
Publish = Callable[[str, int, Event, bool], None]
Say = Callable[[Literal["info", "warning", "error"], str], None]

#: Of an attempt that this node never had, or has forgotten.
NOT_HERE = "not on this node"
#: What a drained attempt waits for.
RESUMES = "the node's agent stopped; it resumes at its next start"


@dataclass
class Attempt:
    """One attempt as the loop knows it. `running` None: it has ended."""

    record: AttemptRecord
    directory: Path
    status: AttemptStatus
    running: RunningAttempt | None = None
    unsaved: bool = field(default=False)  # the record on the disk is older: the disk was full

    @property
    def active(self) -> bool:
        return self.record.ended is None

    @property
    def out(self) -> Path:
        return self.directory / "out"


class Attempts:
    def __init__(self, state: StateDir, blobs: BlobStore, publish: Publish, say: Say) -> None:
        self._state = state
        self._blobs = blobs
        self._publish = publish
        self._say = say
        self._attempts: dict[tuple[str, str, int], Attempt] = {}
        self._fences = Fences(state.fences)
        self._changing = asyncio.Lock()
        self._ending: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.interrupting = False

    @property
    def running(self) -> int:
        return sum(attempt.running is not None for attempt in self._attempts.values())

    def active_owners(self) -> set[str]:
        return {attempt.record.owner for attempt in self._attempts.values() if attempt.active}

    def statuses(self, owner: str) -> list[AttemptStatus]:
        """Those of `owner`; of everybody when it is empty."""
        return [a.status for a in self._attempts.values() if not owner or a.record.owner == owner]

    def find(self, owner: str, job: str, attempt: int) -> Attempt:
        """The attempt; with an empty owner the only one of that job and number. UsageError: none."""
        if owner:
            found = [a for a in [self._attempts.get((owner, job, attempt))] if a is not None]
        else:
            found = [a for key, a in self._attempts.items() if key[1:] == (job, attempt)]
        if len(found) != 1:
            several = "several owners have it" if found else NOT_HERE
            raise UsageError(f"attempt {attempt} of {job[:64]}: {several}")
        return found[0]

    def resume_all(self, told: Collection[tuple[str, str, int]], since: float) -> None:
        """At the start: goes on with what had not ended, tells of what cannot be read.

        `told`: the attempts whose end is in the journal, which reaches back to `since` (Unix time, s). An
        agent that was killed between writing an end down and telling it left an end that nobody heard of.
        """
        newest: dict[tuple[str, str], Attempt] = {}
        for directory, record in read_records(self._state.attempts):
            if isinstance(record, str):
                self._say("error", record)
                continue
            status = record.ended or _first_status(record)
            attempt = Attempt(record, directory, self._look(status, directory / "out"))
            self._attempts[record.key] = attempt
            owner, job, number = record.key
            self._fences.raise_to(owner, job, number)
            older = newest.get((owner, job))
            if older is None or older.record.request.attempt < number:
                newest[owner, job] = attempt
        for attempt in list(self._attempts.values()):
            owner, job, number = attempt.record.key
            if attempt.record.ended is not None:
                unheard = attempt.record.key not in told and not attempt.record.ended.parked
                if unheard and _written(attempt.directory) >= since:
                    self._publish(owner, number, _ending_of(attempt.record.ended), True)
                continue
            if newest[owner, job] is not attempt:
                self._start_ending(attempt, Outcome("stopped", "a newer attempt of this job is here"))
            elif attempt.record.stop is not None:
                self._start_ending(attempt, Outcome("stopped", attempt.record.stop))
            else:
                self._run(attempt, None)

    async def start(self, owner: str, request: StartAttempt) -> None:
        """Accepts the attempt, again if it was. UsageError, DiskFull or RetryLater: why not."""
        async with self._changing:
            total = check_start(request)
            key = (owner, request.job, request.attempt)
            if key in self._attempts:
                return
            highest = self._fences.highest(owner, request.job)
            if request.attempt <= highest:
                raise UsageError(
                    f"attempt {request.attempt} of {request.job}: attempt {highest} has been here; "
                    "only a newer one can start"
                )
            if self.draining:
                raise RetryLater("the node is draining: it starts nothing new")
            record = new_record(owner, request, local_name(owner, request.job))
            attempt = await asyncio.to_thread(self._make, record, total)
            self._attempts[key] = attempt
            older = self._fence(attempt)
            self._tell(attempt, JobChanged(job=request.job, state="queued", step=0, total_steps=0))
            self._run(attempt, older)

    def stop(self, attempt: Attempt, reason: str) -> None:
        """Checkpoint and stop; the end comes as an event."""
        if not attempt.active:
            raise UsageError(f"attempt {attempt.record.request.attempt}: has ended: {attempt.status.state}")
        self._change(attempt, stop=reason or "stopped by its coordinator")
        if attempt.running is not None:
            attempt.running.stop()

    def set_paused(self, attempt: Attempt, paused: bool) -> None:
        if not attempt.active or attempt.record.stop is not None:
            raise UsageError(f"attempt {attempt.record.request.attempt}: has ended or is being stopped")
        self._change(attempt, paused=paused)
        if attempt.running is not None:
            attempt.running.set_paused(paused)

    async def forget(self, attempt: Attempt) -> None:
        """Removes the files of an attempt that has ended."""
        if attempt.active or attempt.running is not None:
            raise UsageError(f"attempt {attempt.record.request.attempt}: still runs; stop it first")
        self._attempts.pop(attempt.record.key, None)
        # First the record: what is left of a half-removed directory must not come back as an attempt.
        aside = attempt.directory.with_name(f".new-forgotten-{attempt.directory.name}")
        await asyncio.to_thread(_remove, attempt.directory, aside)

    async def interrupt(self) -> None:
        """Checkpoints and stops everything; a later agent goes on. Returns when all have stopped."""
        self.draining = self.interrupting = True
        for attempt in self._attempts.values():
            if attempt.running is not None:
                attempt.running.stop()
        await self._idle.wait()
        await asyncio.gather(*self._ending, return_exceptions=True)

    def collect(self) -> None:
        """Removes what nobody uses any more, and writes records that a full disk had refused. May block."""
        for attempt in list(self._attempts.values()):
            if attempt.unsaved:
                self._save(attempt)
        used = {model_hash(a.record.request.model) for a in list(self._attempts.values()) if a.active}
        try:
            collect_models(self._state.models, used)
        finally:  # whatever is in the way of one
            self._blobs.collect()

    # ------------------------------------------------------------------ making and running

    def _make(self, record: AttemptRecord, total: int) -> Attempt:
        request = record.request
        refs = [request.data, *request.model.files, *request.checkpoint]
        refs += [request.val_data] if request.val_data else []
        missing = self._blobs.missing(refs)
        if missing:
            names = ", ".join(ref.name[:64] for ref in missing[:3])
            raise RetryLater(
                f"attempt {request.attempt} of {request.job}: {len(missing)} of its files are not here "
                f"({names}); send them first"
            )
        # A run writes checkpoints and a converted or quantised base: asked for before anything is tokenised.
        check_room(self._state.attempts, min(total, 1 << 30))
        place_model(request.model, self._state.models, self._blobs)
        directory = make_attempt(record, self._state.attempts, self._blobs)
        try:
            self._fences.raise_to(*record.key)
        except OSError:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return Attempt(record, directory, self._look(_first_status(record), directory / "out"))

    def _fence(self, attempt: Attempt) -> RunningAttempt | None:
        """Stops the older attempts of the job; the one that is waited for."""
        owner, job, number = attempt.record.key
        running = None
        for older in self._attempts.values():
            if older.record.key[:2] == (owner, job) and older is not attempt and older.active:
                self._change(older, stop=f"attempt {number} of this job was started here")
                if older.running is not None:
                    older.running.stop()
                    running = older.running
        return running

    def _run(self, attempt: Attempt, after: RunningAttempt | None) -> None:
        loop = asyncio.get_running_loop()

        def call(function: Callable[..., None]) -> Callable[..., None]:
            return lambda *arguments: _call(loop, function, attempt, *arguments)

        attempt.running = RunningAttempt(
            attempt.record,
            attempt.directory,
            self._state.models,
            on_event=call(self._take),
            on_position=call(self._place),
            on_end=call(self._start_ending),
            after=after,
        )
        self._idle.clear()
        attempt.running.start()

    def _take(self, attempt: Attempt, event: Event) -> None:
        if event.job in ("", attempt.record.name):  # a trainer's own word: each of its jobs hears it
            event = msgspec.structs.replace(event, job=attempt.record.request.job)
            if isinstance(event, JobChanged):
                event = msgspec.structs.replace(event, reason=_for_its_user(event.reason, attempt.record))
            self._tell(attempt, event)

    def _place(self, attempt: Attempt, position: int) -> None:
        attempt.status = msgspec.structs.replace(attempt.status, position=position)

    def _start_ending(self, attempt: Attempt, outcome: Outcome) -> None:
        task = asyncio.get_running_loop().create_task(self._end(attempt, outcome))
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """`_end` failed: a defect. Nobody awaits its task before the agent leaves, so it is told here."""
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler(
                {"message": "the end of an attempt", "exception": error, "task": task}
            )

    async def _end(self, attempt: Attempt, outcome: Outcome) -> None:
        stopped = attempt.record.stop
        parked = outcome.parked and stopped is None
        by_itself = parked or outcome.exit is not None
        interrupted = self.interrupting and not by_itself and (outcome.state == "stopped" or outcome.retry)
        state: JobStateName = outcome.state
        reason, retry = _for_its_user(outcome.reason, attempt.record), outcome.retry
        if interrupted and stopped is None:
            state, reason, retry = "queued", RESUMES, False
        elif stopped is not None and state == "stopped" and not by_itself:
            reason, retry = stopped, False
        step = outcome.step or attempt.status.step
        event = JobChanged(
            job=attempt.record.request.job,
            state="paused" if parked else state,
            step=step,
            total_steps=outcome.total_steps or attempt.status.total_steps,
            reason=reason,
            exit=outcome.exit,
        )
        status = msgspec.structs.replace(
            advance(attempt.status, event),
            state=state,
            retry=retry,
            position=0,
            exit=outcome.exit,
            parked=parked,
        )
        if state in ENDED:
            async with self._changing:
                status = await asyncio.to_thread(self._look, status, attempt.out)
                attempt.record = msgspec.structs.replace(attempt.record, ended=status)
                await asyncio.to_thread(self._save, attempt)
        attempt.status = status
        attempt.running = None
        if not self.running:
            self._idle.set()
        self._publish(attempt.record.owner, attempt.record.request.attempt, event, True)

    def _look(self, status: AttemptStatus, out: Path) -> AttemptStatus:
        """`found_on_disk`; of a directory that cannot be read, what is known without it. An attempt ends, and
        an agent starts, all the same: one that stayed running for ever could never be drained."""
        try:
            return found_on_disk(status, out)
        except OSError as error:
            self._say("warning", f"{out}: {error.strerror}; its newest checkpoint is not known")
            return status

    def _tell(self, attempt: Attempt, event: Event) -> None:
        attempt.status = advance(attempt.status, event)
        durable = not isinstance(event, Stepped)
        self._publish(attempt.record.owner, attempt.record.request.attempt, event, durable)

    def _change(self, attempt: Attempt, *, stop: str | None = None, paused: bool | None = None) -> None:
        record = attempt.record
        if stop is not None and record.stop is None:
            record = msgspec.structs.replace(record, stop=stop)
        if paused is not None:
            record = msgspec.structs.replace(record, paused=paused)
        attempt.record = record
        self._save(attempt)

    def _save(self, attempt: Attempt) -> None:
        """A disk that is full is asked again later: what runs is right either way."""
        try:
            write_record(attempt.record, attempt.directory)
            attempt.unsaved = False
        except OSError as error:
            attempt.unsaved = True
            self._say("warning", f"{attempt.directory}: {error.strerror}; its record is older than the truth")


def _for_its_user(reason: str, record: AttemptRecord) -> str:
    """With the job's own name for the one that it has in a trainer; paths that hold it stay paths."""
    return re.sub(
        rf"(?<![\w./-]){re.escape(record.name)}(?![\w/-]|\.\w)", lambda _: record.request.job, reason
    )


def _ending_of(status: AttemptStatus) -> JobChanged:
    return JobChanged(
        job=status.job,
        state=status.state,
        step=status.step,
        total_steps=status.total_steps,
        reason=status.reason,
        exit=status.exit,
    )


def _written(directory: Path) -> float:
    return (directory / RECORD).stat().st_mtime


def _first_status(record: AttemptRecord) -> AttemptStatus:
    request = record.request
    return AttemptStatus(
        owner=record.owner,
        job=request.job,
        attempt=request.attempt,
        state="queued",
        gpu=request.gpu,
    )


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """From an attempt's thread. A loop that is closed has nobody to tell."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)


def _remove(directory: Path, aside: Path) -> None:
    try:
        directory.rename(aside)
    except FileNotFoundError:
        return
    except OSError as error:
        raise GshareError(f"{directory}: {error.strerror}") from None
    shutil.rmtree(aside, ignore_errors=True)
