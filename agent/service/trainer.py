"""The trainer process: one base, one device, the jobs of any number of clients.

    python -m gshare.agent.service.trainer --dir DIR      (spawned by `client.spawn_trainer`)

The main thread reserves GPU memory, loads the base and runs rounds; commands of the clients are applied
between two rounds, and while it waits for the memory (`waiting.py`). The server's thread owns the socket. The
process ends when its last client and its last job are gone, or on SIGTERM (all jobs are checkpointed first;
exit 143). SIGINT and SIGHUP are ignored: a Ctrl-C goes to the client, which decides. What ends it in any
other way is a crash, for the supervising client to sort out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import queue
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

import msgspec
from gshare.agent.errors import EXIT_FAILURE, EXIT_OK, EXIT_SIGTERM, GshareError, RetryLater
from gshare.agent.jobs.events import (
    DURABLE,
    ENDED,
    Event,
    JobChanged,
    TrainerMessage,
)
from gshare.agent.jobs.names import check_name
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.service.admission import admit, waiting_line
from gshare.agent.service.base_identity import base_identity
from gshare.agent.service.breadcrumb import Breadcrumb
from gshare.agent.service.environment import trainer_environment
from gshare.agent.service.journal import Journal
from gshare.agent.service.log_stream import forgive_output
from gshare.agent.service.output_dir import OutputClaim, RunRecord
from gshare.agent.service.protocol import (
    PROTOCOL_VERSION,
    Done,
    JobStatus,
    PauseJobs,
    ResumeJobs,
    Shutdown,
    StopJobs,
    SubmitJobs,
    TrainerHello,
)
from gshare.agent.service.registry import (
    LOCK,
    SUPERVISOR,
    ExitRecord,
    FinishedJob,
    TrainerConfig,
    append_line,
    is_held,
    not_recorded,
    read_json,
    record_finished,
    remove_trainer_dir,
    take_lock,
    write_json,
)
from gshare.agent.service.server import Command, Connection, Server
from gshare.agent.service.table import JobTable
from gshare.agent.service.traces import trace_path
from gshare.agent.service.waiting import WaitingRoom
from gshare.agent.trace import DISABLED, Tracer
from gshare.agent.trace_file import TraceFile
from gshare.agent.vram.guard import Reservation
from gshare.agent.vram.ledger import Queued

#: How long the main thread sleeps at most when nothing is runnable, seconds.
_IDLE_POLL = 0.05
#: A kill loses at most so many seconds of the trace.
_TRACE_FLUSH = 5.0


class Runner(Protocol):
    """The engine as the trainer drives it; `gshare.agent.train.runner.Runner` is the real one.

    It is made with `reservation` and `may_grow` only where something was reserved, and with `tracer` only
    where a trace was asked for.
    """

    def admit(self, request: JobRequest) -> None: ...
    def stop(self, job: str, reason: str) -> None: ...
    def pause(self, job: str) -> None: ...
    def resume(self, job: str) -> None: ...
    def run_round(self) -> bool: ...
    def close(self) -> None: ...


class _Ended(BaseException):
    """Ends a trainer without a base; no Exception, so that no handler on the way takes it for an error."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Trainer:
    """One life of the process, from loading the base to the exit code of `run`."""

    def __init__(self, directory: Path, config: TrainerConfig) -> None:
        self._directory = directory
        self._config = config
        self._table = JobTable()
        self._owner: dict[str, int | None] = {}  # job → key of its connection; None: detached
        self._claims: dict[str, OutputClaim] = {}
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._crumb = Breadcrumb(directory)
        self._journal = Journal(directory / "journal.jsonl", directory.name)
        self._server = Server(
            directory / "socket",
            self._journal,
            self._hello,
            self._table.listed,
            self._commands,
            self._arrived,
        )
        self._waiting = WaitingRoom(self._ended_waiting)
        self._runner: Runner | None = None
        self._reservation: Reservation | None = None
        self._tracer = Tracer() if config.trace else DISABLED
        self._trace: TraceFile | None = None
        self._flushed = 0.0
        self._alone_since = time.monotonic()  # while it waits for GPU memory
        self._fingerprint: dict[str, str] = {}
        self._base: str | None = None
        self._warned: set[str] = set()
        self._terminating = False
        self._shutdown = False

    def listen(self) -> None:
        """To be called before `run`. Raises `OSError` when the socket cannot be made."""
        self._server.start()

    def run(self) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if self._tracer.enabled:
            self._trace = TraceFile(trace_path(self._directory.name), self._tracer)
        try:
            self._load(self._reserve())
            code, reason = self._work()
        except GshareError as error:
            # Foreseen, and not any one job's doing (those the runner ends by itself): no restart would help.
            self._on_event(TrainerMessage(level="error", text=str(error)))
            code, reason = error.exit_code, str(error)
        except _Ended as end:
            code, reason = end.code, end.reason
        if self._runner is not None:
            self._runner.close()
        return self._leave(code, reason)

    def _reserve(self) -> dict[str, Any]:
        """Memory on a GPU, before torch is there to touch one: what the runner is told of it."""
        config = self._config
        if config.gpu is None:
            return {"device": config.device}
        self._reservation, device = admit(
            config.gpu,
            device=config.device,
            say=self._say,
            on_place=self._on_place,
            on_look=self._while_waiting,
            tracer=self._tracer,
        )
        self._table.waits(0, "")
        return {"device": device, "reservation": self._reservation, "may_grow": config.gpu.may_grow}

    def _on_place(self, queued: Queued) -> None:
        self._table.waits(queued.decision.position, waiting_line(queued))

    def _while_waiting(self) -> None:
        """Between two looks at the queue: serves the clients, and ends the trainer when nobody waits."""
        self._flush_trace()
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.take(self._commands.get_nowait())
        for connection, message in self._waiting.answers():
            self._server.reply(connection, message)
        if self._waiting.over:
            raise _Ended(EXIT_OK, "none of its jobs was left while it waited for GPU memory")
        now = time.monotonic()
        if self._server.clients or self._waiting.jobs:
            self._alone_since = now
        elif self._server.ever_connected:
            if now - self._alone_since >= self._config.idle_seconds:
                raise _Ended(EXIT_OK, "its client left while it waited for GPU memory")
        elif now - self._alone_since >= self._config.first_client_seconds:
            raise _Ended(EXIT_OK, "no client ever connected")

    def _ended_waiting(self, job: JobRequest, client: str, reason: str) -> None:
        """A job that ends before there was an engine: nothing of it was written."""
        name = job.spec.name
        self._table.add(JobStatus(job=name, state="queued", client=client, output_dir=job.spec.output_dir))
        self._table.decided(name)
        self._on_event(JobChanged(job=name, state="stopped", step=0, total_steps=0, reason=reason))

    def _load(self, where: dict[str, Any]) -> None:
        config = self._config
        if self._tracer.enabled:
            where = {**where, "tracer": self._tracer}
        module, _, name = config.runner.partition(":")
        # By name: nothing on this side of the engine may import torch, and the tests bring their own.
        with self._tracer.span("Load", model=config.model):
            make: Callable[..., Runner] = getattr(importlib.import_module(module), name)
            self._runner = make(
                model_dir=Path(config.model_dir),
                base_dtype=config.base_dtype,
                schedule=config.schedule,
                max_tokens_per_pass=config.max_tokens_per_pass,
                max_adapters_per_pass=config.max_adapters_per_pass,
                on_event=self._on_event,
                on_pass=self._crumb.write,
                **where,
            )
        self._base = base_identity(Path(config.model_dir))
        self._fingerprint = {
            str(key): str(value) for key, value in getattr(self._runner, "fingerprint", {}).items()
        }

    def _work(self) -> tuple[int, str]:
        """Rounds until there is nothing left to do: `(exit code, reason)`."""
        assert self._runner is not None
        idle_since = started = time.monotonic()
        busy = False
        for command in self._waiting.kept():
            self._apply(command)
        while True:
            self._flush_trace()
            self._apply_commands(wait=not busy)
            if self._terminating:
                self._stop(self._table.active(), "the trainer was asked to stop (SIGTERM)")
                return EXIT_SIGTERM, "SIGTERM"
            if self._shutdown:
                self._stop(self._table.active(), "the trainer was shut down")
                return EXIT_OK, "shut down by a client"
            busy = self._runner.run_round()
            now = time.monotonic()
            if busy or self._server.clients or self._table.active():
                idle_since = now
            elif self._server.ever_connected:
                if now - idle_since >= self._config.idle_seconds:
                    return EXIT_OK, "no clients and no jobs"
            elif now - started >= self._config.first_client_seconds:
                return EXIT_OK, "no client ever connected"

    def _leave(self, code: int, reason: str) -> int:
        self._crumb.write(())
        for claim in self._claims.values():
            claim.release()
        if self._reservation is not None:
            # What the driver frees only with the process counts as used outside the ledger until then.
            self._reservation.release()
        if self._trace is not None:
            self._trace.close()
        with contextlib.suppress(OSError):  # the exit code says it too
            write_json(self._directory / "exit.json", ExitRecord(code=code, reason=reason))
        self._server.close()
        self._journal.close()
        self._crumb.close()
        if not is_held(self._directory / SUPERVISOR):
            remove_trainer_dir(self._directory)
        return code

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._runner is None:
            raise _Ended(
                EXIT_SIGTERM, "SIGTERM"
            )  # loading may take minutes, and there is nothing to checkpoint yet
        self._terminating = True

    def _hello(self) -> TrainerHello:
        config = self._config
        return TrainerHello(
            protocol=PROTOCOL_VERSION,
            gshare=version("gshare"),
            pid=os.getpid(),
            trainer_id=self._directory.name,
            model=config.model,
            base_dtype=config.base_dtype,
            schedule=config.schedule,
            journal_id=self._journal.journal_id,
            ready=self._runner is not None,
            fingerprint=self._fingerprint,
        )

    def _say(self, level: Literal["info", "warning"], text: str) -> None:
        self._on_event(TrainerMessage(level=level, text=text))

    def _flush_trace(self) -> None:
        if self._trace is None or time.monotonic() - self._flushed < _TRACE_FLUSH:
            return
        self._flushed = time.monotonic()
        known = self._trace.problem
        self._trace.flush()
        if self._trace.problem != known:
            self._say("warning", self._trace.problem)

    def _on_event(self, event: Event) -> None:
        """From the main thread, or from the one that writes checkpoints."""
        status = self._table.update(event)
        if isinstance(event, TrainerMessage):
            print(f"{event.level}: {event.job + ': ' if event.job else ''}{event.text}", flush=True)
        if isinstance(event, JobChanged) and event.state in ENDED and status is not None:
            claim = self._claims.pop(event.job, None)
            if claim is not None:
                claim.release()
            record = FinishedJob(status=status, ended=time.time(), trainer_id=self._directory.name)
            try:
                record_finished(record)
            except OSError as error:
                self._warn(not_recorded(error))
        # Last: who is told that a job ended finds its directory unlocked.
        self._server.publish(self._journal.append(event) if isinstance(event, DURABLE) else 0, event)
        if self._journal.problem:
            self._warn(f"{self._journal.problem}; events of a crash may be lost")

    def _warn(self, text: str) -> None:
        """Once for every text: a full disk costs the records about training, never the training."""
        if text not in self._warned:
            self._warned.add(text)
            self._on_event(TrainerMessage(level="warning", text=text))

    def _arrived(self, request: SubmitJobs, client: str) -> None:
        """From the server's thread: jobs are listed while the base is loaded or a round is computed."""
        for job in request.jobs:
            spec = job.spec
            self._table.arrive(
                JobStatus(job=spec.name, state="queued", client=client, output_dir=spec.output_dir)
            )

    def _apply_commands(self, *, wait: bool) -> None:
        """All commands that are there; with `wait`, up to `_IDLE_POLL` for the first."""
        while True:
            try:
                command = self._commands.get(timeout=_IDLE_POLL) if wait else self._commands.get_nowait()
            except queue.Empty:
                return
            wait = False
            self._apply(command)

    def _apply(self, command: Command) -> None:
        assert self._runner is not None
        runner = self._runner
        connection, request = command.connection, command.request
        if request is None:
            self._client_left(connection)
            return
        done: list[str] = []
        failed: dict[str, str] = {}
        busy: list[str] = []
        if isinstance(request, SubmitJobs):
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
        elif isinstance(request, StopJobs):
            own = [job for job, owner in self._owner.items() if owner == connection.key]
            reason = request.reason or f"stopped by {connection.client}"
            done, failed = self._stop(request.jobs or own, reason)
        elif isinstance(request, PauseJobs):
            for job in request.jobs:
                self._try(job, done, failed, lambda job=job: self._known(job) and runner.pause(job))
        elif isinstance(request, ResumeJobs):
            for job in request.jobs:
                self._try(job, done, failed, lambda job=job: self._known(job) and runner.resume(job))
        elif isinstance(request, Shutdown):
            self._shutdown = True
        self._server.reply(connection, Done(reply_to=request.id, jobs=done, failed=failed, busy=busy))

    def _stop(self, jobs: Sequence[str], reason: str) -> tuple[list[str], dict[str, str]]:
        assert self._runner is not None
        runner = self._runner
        done: list[str] = []
        failed: dict[str, str] = {}
        for job in jobs:
            self._try(job, done, failed, lambda job=job: self._known(job) and runner.stop(job, reason))
        return done, failed

    @staticmethod
    def _try(job: str, done: list[str], failed: dict[str, str], action: Callable[[], object]) -> None:
        try:
            action()
            done.append(job)
        except GshareError as error:
            failed[job] = str(error)

    def _known(self, job: str) -> bool:
        """True for a job that is here and has not ended; else `GshareError`."""
        status = self._table.get(job)
        if status is None:
            raise GshareError(f"job {job} is not in this trainer")
        if status.state in ENDED:
            raise GshareError(f"job {job} has ended: {status.state}")
        return True

    def _admit(self, request: JobRequest, connection: Connection) -> None:
        assert self._runner is not None
        spec = request.spec
        check_name(spec.name, what="job")
        if spec.name in self._table.active():
            raise GshareError(f"job {spec.name}: a job of this name runs in this trainer; choose another")
        claim = OutputClaim(self._run_record(request), resume=request.resume)
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
            self._runner.admit(msgspec.structs.replace(request, client=connection.client))
        except GshareError:
            self._table.remove(spec.name)
            self._claims.pop(spec.name, claim).undo()
            del self._owner[spec.name]
            raise

    def _run_record(self, request: JobRequest) -> RunRecord:
        return RunRecord(
            model=self._config.model,
            base_dtype=self._config.base_dtype,
            base=self._base,
            spec=request.spec,
            train_hash=request.train_hash,
            val_hash=request.val_hash,
        )

    def _client_left(self, connection: Connection) -> None:
        jobs = [job for job, owner in self._owner.items() if owner == connection.key]
        if connection.detached:
            self._owner.update(dict.fromkeys(jobs, None))
            return
        active = set(self._table.active())
        self._stop([job for job in jobs if job in active], "its client left")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gshare-trainer", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="the trainer's directory, with trainer.json")
    parser.add_argument("--lock-fd", type=int, help="an open descriptor that holds the lock of the directory")
    options = parser.parse_args(arguments)
    forgive_output()
    os.environ.update(trainer_environment())  # before the runner loads torch
    if options.lock_fd is not None:
        os.set_inheritable(options.lock_fd, False)
    elif take_lock(options.dir / LOCK) is None:
        print(f"{options.dir}: another trainer runs there", file=sys.stderr)
        return EXIT_FAILURE
    config = read_json(options.dir / "trainer.json", TrainerConfig)
    try:
        trainer = Trainer(options.dir, config)
        trainer.listen()
    except OSError as error:
        print(f"{options.dir}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILURE
    return trainer.run()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        # A crash. Leave as a kill would: threads that still write checkpoints must not publish the state
        # of an engine that has failed, and nobody waits for them.
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(EXIT_FAILURE)
