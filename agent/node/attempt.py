"""One running attempt: a thread that prepares it, then supervises it to its end on a trainer of this node.

The thread blocks where it likes; the agent's loop hears of it through two callbacks, which it calls in the
thread. How the attempt ended is told once, after everything else.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from gshare.agent.errors import EXIT_RETRY, EXIT_SIGTERM, EXIT_USAGE, GshareError
from gshare.agent.jobs.events import (
    ENDED,
    Event,
    Exit,
    JobChanged,
    JobStateName,
    TrainerMessage,
    is_of_machine,
)
from gshare.agent.jobs.spec import JobRequest, RunSpec
from gshare.agent.node.attempt_supervisor import AttemptSupervisor
from gshare.agent.node.checks import owner_tag
from gshare.agent.node.durable import read_struct, write_struct
from gshare.agent.node.models import model_path
from gshare.agent.node.prepare_job import (
    MODULE,
    PREPARE_VARIABLE,
    NotPrepared,
    PrepareAnswer,
    PreparedJob,
    PrepareJob,
)
from gshare.agent.node.records import AttemptRecord, local_spec
from gshare.agent.service.environment import trainer_environment
from gshare.agent.service.output_dir import LOCK_FILE, RUN_FILE
from gshare.agent.service.registry import RUNNER, GpuRequest, TrainerConfig, is_held
from gshare.agent.service.supervise import StopRequest

#: Test hook, as in `gshare finetune`: "module:class" of another engine.
RUNNER_VARIABLE = "GSHARE_TEST_RUNNER"
#: A trainer of an agent that was killed checkpoints and goes; a base of 70 GB takes a while to save beside.
LEFTOVER_SECONDS = 600.0
#: A trainer lets go of a job between two rounds.
RELEASE_SECONDS = 60.0
#: Children that tokenise at once: each takes 300 MiB and a core.
PREPARING_AT_ONCE = 2
_POLL = 0.2  # seconds
#: The answer of the preparation, kept for the next start.
PREPARED = "prepared.json"
#: What an engine's error says when another node may have the memory that this one lacks.
_MEMORY_WORDS = ("out of memory", "does not fit", "can never fit")

_preparing = threading.BoundedSemaphore(PREPARING_AT_ONCE)


@dataclass(frozen=True)
class Outcome:
    """How the attempt ended. `retry`: the node's fault; another try, perhaps elsewhere, may do better.
    `exit`: the pattern of its losses that has stopped it."""

    state: JobStateName
    reason: str
    retry: bool = False
    step: int = 0
    total_steps: int = 0
    exit: Exit | None = None
    parked: bool = False  # as in `AttemptStatus`


class _StopAsked(Exception):
    """Before a trainer had the job."""


class RunningAttempt:
    """`start`, `stop`, `pause` and `resume` may come from any thread, and do not block."""

    def __init__(
        self,
        record: AttemptRecord,
        directory: Path,
        models: Path,
        *,
        on_event: Callable[[Event], None],
        on_position: Callable[[int], None],
        on_end: Callable[[Outcome], None],
        after: RunningAttempt | None = None,
    ) -> None:
        """`after`: an older attempt of the same job, whose end is waited for."""
        self._record = record
        self._directory = directory
        self._models = models
        self._on_event = on_event
        self._on_position = on_position
        self._on_end = on_end
        self._after = after
        self._stop = StopRequest()
        self._paused = record.paused
        self._position = 0
        self._last: JobChanged | None = None
        self._supervisor: AttemptSupervisor | None = None
        self._thread = threading.Thread(target=self._run, name=directory.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Checkpoint and stop; `on_end` comes when it is done."""
        self._stop.exit_code = EXIT_SIGTERM

    def set_paused(self, paused: bool) -> None:
        self._paused = paused

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            outcome = self._attempt()
        except _StopAsked:
            outcome = Outcome("stopped", "stopped before it was started")
        except GshareError as error:
            outcome = Outcome("failed", str(error), retry=True)
        except Exception as error:  # a fault of ours must not take the agent's other attempts with it
            traceback.print_exc()
            reason = f"unexpected error in the agent: {type(error).__name__}: {error}"
            outcome = Outcome("failed", reason, retry=True)
        if self._last is not None:
            outcome = replace(
                outcome, step=self._last.step, total_steps=self._last.total_steps, exit=self._last.exit
            )
        self._on_end(outcome)

    def _attempt(self) -> Outcome:
        if self._after is not None:
            self._wait(lambda: self._after is None or not self._after.alive, None)
            self._after = None
        prepared = self._prepare()
        if isinstance(prepared, NotPrepared):
            return Outcome("failed", prepared.reason, retry=prepared.fault == "node")
        for note in prepared.notes:
            self._take(TrainerMessage(level="info", text=note, job=self._record.name))
        deadline = time.monotonic() + LEFTOVER_SECONDS
        lock = self._directory / "out" / LOCK_FILE
        while True:
            # A trainer whose client was killed saves and leaves; it writes there until it has.
            self._wait(lambda: not is_held(lock), deadline)
            outcome = self._supervise(prepared)
            if outcome is not None:
                return outcome
            if time.monotonic() > deadline:
                return Outcome("failed", f"{lock}: another trainer has been writing there", retry=True)
            self._wait(lambda: False, time.monotonic() + 1.0)

    def _prepare(self) -> PrepareAnswer:
        request = self._record.request
        spec = local_spec(self._record, self._directory)
        asked = PrepareJob(
            run=RunSpec(
                model=model_path(request.model, self._models),
                base_dtype=request.base_dtype,
                schedule=request.schedule,
                max_tokens_per_pass=request.max_tokens_per_pass,
                max_adapters_per_pass=request.max_adapters_per_pass,
                adapters=(spec,),
                source=f"attempt {request.attempt} of {request.job}",
            ),
            resume=(self._directory / "out" / RUN_FILE).exists(),
            on_gpu=bool(request.gpu),
            gpu=request.gpu or "",
        )
        kept = self._directory / PREPARED
        before = _still_prepared(kept)
        if before is not None:
            return before
        while not _preparing.acquire(timeout=_POLL):
            self._check_stop()
        try:
            answer = self._ask_child(asked)
        finally:
            _preparing.release()
        if isinstance(answer, PreparedJob):
            with contextlib.suppress(OSError):  # a full disk: prepared again next time
                write_struct(kept, answer)
        return answer

    def _ask_child(self, asked: PrepareJob) -> PrepareAnswer:
        log = self._directory / "prepare.log"
        with open(log, "wb") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", os.environ.get(PREPARE_VARIABLE) or MODULE],
                cwd=self._directory,  # see `spawn_trainer`
                env={**os.environ, **trainer_environment(), "PYTHONSAFEPATH": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        given: bytes | None = msgspec.json.encode(asked)
        try:
            while True:
                try:
                    answer, _ = child.communicate(given, timeout=_POLL)
                    break
                except subprocess.TimeoutExpired:
                    given = None
                    self._check_stop()
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        try:
            return msgspec.json.decode(answer, type=PrepareAnswer)
        except msgspec.MsgspecError:
            how = f"{_last_line(log) or 'no word'} (exit code {child.returncode})"
            return NotPrepared(reason=f"the job could not be prepared: {how}", fault="node")

    def _supervise(self, prepared: PreparedJob) -> Outcome | None:
        """The outcome; None: another trainer still writes to the directory."""
        job = self._record.name
        asked = self._record.request
        request = msgspec.structs.replace(
            prepared.request,
            resume=(self._directory / "out" / RUN_FILE).exists(),
            early_exit=asked.early_exit,
            pause_at=asked.pause_at,
        )
        self._check_stop()
        supervisor = self._supervisor = AttemptSupervisor(
            config=self._config(prepared, request),
            requests=[request],
            on_event=self._take,
            on_tick=lambda: self._tick(supervisor),
            on_connected=lambda: self._link_log(supervisor.logs[-1]),
            stop=self._stop,
            client=f"{owner_tag(self._record.owner)}:{self._record.request.job}",
        )
        code = supervisor.run()
        status = supervisor.table.get(job)
        assert status is not None
        if status.state == "paused":
            # Its trainer has been left: before anybody reads the files, it writes them no more.
            deadline = time.monotonic() + RELEASE_SECONDS
            while is_held(self._directory / "out" / LOCK_FILE) and time.monotonic() < deadline:
                time.sleep(_POLL)
            return Outcome(
                "stopped", status.reason, step=status.step, total_steps=status.total_steps, parked=True
            )
        if code == EXIT_RETRY and supervisor.ended_with is None:
            self._last = None
            return None
        if status.state == "stopped" and supervisor.ended_with == EXIT_RETRY:
            # Its time in the queue for memory is over: the node's condition, so another node is preferred.
            return Outcome("failed", status.reason, retry=True)
        if status.state == "stopped":
            # Not asked for by us: somebody on the node ended it there, and it may go on elsewhere.
            by_itself = self._last is not None and self._last.exit is not None
            return Outcome("stopped", status.reason, retry=self._stop.exit_code is None and not by_itself)
        if status.state != "failed":
            return Outcome(status.state, status.reason)
        of_node = supervisor.gave_up or self._stop.exit_code is not None
        of_node = of_node or supervisor.ended_with not in (None, EXIT_USAGE)
        of_node = of_node or is_of_machine(status.reason)
        by_words = any(word in status.reason for word in _MEMORY_WORDS)
        return Outcome("failed", status.reason, retry=of_node or by_words)

    def _config(self, prepared: PreparedJob, request: JobRequest) -> TrainerConfig:
        asked = self._record.request
        gpu = None
        if asked.gpu:
            budget_mb = asked.budget_mb if asked.budget_mb is not None else prepared.budget_mb
            assert budget_mb is not None
            gpu = GpuRequest(
                budget_mb=budget_mb,
                gpus=(asked.gpu,),
                task=f"gshare agent: {asked.job}",
                timeout_s=asked.timeout_s,
                may_grow=asked.budget_mb is None,
                part_mb=min(budget_mb, prepared.part_mb),
                resident_mb=min(budget_mb, prepared.resident_mb),
            )
        return TrainerConfig(
            model=asked.model.name,
            model_dir=prepared.model_dir,
            base_dtype=asked.base_dtype,
            schedule=asked.schedule,
            max_tokens_per_pass=asked.max_tokens_per_pass,
            max_adapters_per_pass=asked.max_adapters_per_pass,
            device="auto" if asked.gpu else "cpu",
            gpu=gpu,
            base=prepared.base,
            runner=os.environ.get(RUNNER_VARIABLE) or RUNNER,
        )

    def _take(self, event: Event) -> None:
        if isinstance(event, JobChanged):
            if event.state in ENDED:
                self._last = event  # told as the outcome, when its record is on the disk
                return
            if event.state == "paused" and self._is_parked():
                self._pass(event)  # else it is told as the outcome too
                return
            self._tell_position(0)
        self._on_event(event)

    def _is_parked(self) -> bool:
        return self._supervisor is not None and self._supervisor.is_parked(self._record.name)

    def _pass(self, event: JobChanged) -> None:
        """Where it was to pause, evaluated and saved as if it had; one that was let go on does so."""
        if self._record.request.past and self._supervisor is not None:
            self._supervisor.go_past(event.job)

    def _tick(self, supervisor: AttemptSupervisor) -> None:
        supervisor.wish_paused(self._record.name, self._paused)
        position = supervisor.position(self._record.name)
        if position is not None:
            self._tell_position(position)

    def _tell_position(self, position: int) -> None:
        if position != self._position:
            self._position = position
            self._on_position(position)

    def _link_log(self, log: str) -> None:
        """`trainer.log` leads to the log of the trainer that has the job now."""
        link = self._directory / "trainer.log"
        with contextlib.suppress(OSError):  # it is only for people
            link.unlink(missing_ok=True)
            link.symlink_to(log)

    def _wait(self, condition: Callable[[], bool], deadline: float | None) -> None:
        """Until the condition holds, or the deadline passed."""
        while not condition():
            self._check_stop()
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(_POLL)

    def _check_stop(self) -> None:
        if self._stop.exit_code is not None:
            raise _StopAsked


def _still_prepared(path: Path) -> PreparedJob | None:
    """The answer of an earlier start, when what it names is still there: a restart need not tokenise again.

    What is in there the trainer checks: tokens by their hash, the base by its fingerprint.
    """
    try:
        prepared = read_struct(path, PreparedJob)
    except GshareError:
        return None
    if prepared is None:
        return None
    stores = (prepared.request.train_store, prepared.request.val_store)
    there = all(Path(part).is_dir() for part in (prepared.model_dir, *stores) if part is not None)
    return msgspec.structs.replace(prepared, notes=[]) if there else None


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
