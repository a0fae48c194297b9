"""The trainer process: one base, one device, the jobs of any number of clients.

    python -m gshare.agent.service.trainer --dir DIR      (spawned by `hold.spawn_trainer`)

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
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from gshare.agent.errors import EXIT_FAILURE, EXIT_OK, EXIT_SIGTERM, GshareError
from gshare.agent.jobs.events import DURABLE, ENDED, Event, JobChanged, TrainerMessage
from gshare.agent.service.admission import admit, waiting_line
from gshare.agent.service.base_identity import base_identity
from gshare.agent.service.breadcrumb import Breadcrumb
from gshare.agent.service.desk import Desk, Runner
from gshare.agent.service.environment import trainer_environment
from gshare.agent.service.journal import Journal
from gshare.agent.service.log_stream import forgive_output
from gshare.agent.service.protocol import PROTOCOL_VERSION, JobStatus, SubmitJobs, TrainerHello
from gshare.agent.service.registry import (
    LOCK,
    SUPERVISOR,
    ExitRecord,
    FinishedJob,
    TrainerConfig,
    is_shared,
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
            self._client_left,
        )
        self._desk = Desk(
            directory,
            config,
            self._table,
            reply=self._server.reply,
            on_event=self._on_event,
            warn=self._warn,
            last_seq=lambda: self._journal.last_seq,
        )
        self._waiting = WaitingRoom(self._desk.ended_early, is_open=self._desk.open)
        self._queued = ""  # where it stands in the queue for GPU memory
        self._loading = False
        self._detached = False  # a client has left jobs here that go on without it
        self._reservation: Reservation | None = None
        self._tracer = Tracer() if config.trace else DISABLED
        self._trace: TraceFile | None = None
        self._flushed = 0.0
        self._started = self._alone_since = time.monotonic()  # alone: while it waits for GPU memory
        self._fingerprint: dict[str, str] = {}
        self._warned: set[str] = set()
        self._terminating = False
        self._leaving = False

    def listen(self, bound: socket.socket | None = None) -> None:
        """To be called before `run`; on `bound`, by default a new socket. Raises `OSError`: there is none."""
        self._server.start(bound)

    def run(self) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if self._tracer.enabled:
            self._trace = TraceFile(trace_path(self._directory.name), self._tracer)
        try:
            # Inside: what they raise may come at once.
            signal.signal(signal.SIGTERM, self._on_sigterm)
            signal.signal(signal.SIGUSR1, self._on_nobody_left)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            self._load(self._reserve())
            code, reason = self._work()
        except GshareError as error:
            # Foreseen, and not any one job's doing (those the runner ends by itself): no restart would help.
            self._on_event(TrainerMessage(level="error", text=str(error)))
            code, reason = error.exit_code, str(error)
        except _Ended as end:
            code, reason = end.code, end.reason
        self._leaving = True
        if self._desk.runner is not None:
            self._desk.runner.close()
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
        self._queued = ""
        self._desk.parts.reservation = self._reservation
        return {"device": device, "reservation": self._reservation, "may_grow": config.gpu.may_grow}

    def _on_place(self, queued: Queued) -> None:
        self._queued = waiting_line(queued)
        self._table.waits(queued.decision.position, self._queued)

    def _while_waiting(self) -> None:
        """Between two looks at the queue: serves the clients, and ends the trainer when nobody waits."""
        self._flush_trace()
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.take(self._commands.get_nowait())
        self._waiting.dismiss(late=self._opener_is_late)
        for connection, message in self._waiting.answers():
            self._server.reply(connection, message)
        if self._waiting.over:
            raise _Ended(EXIT_OK, "none of its jobs was left while it waited for GPU memory")
        now = time.monotonic()
        if self._server.holders or self._waiting.jobs:
            self._alone_since = now
        elif self._server.ever_connected:
            if now - self._alone_since >= self._config.idle_seconds:
                raise _Ended(EXIT_OK, "its client left while it waited for GPU memory")
        elif now - self._alone_since >= self._config.first_client_seconds:
            raise _Ended(EXIT_OK, "no client ever connected")

    def _load(self, where: dict[str, Any]) -> None:
        config = self._config
        if self._tracer.enabled:
            where = {**where, "tracer": self._tracer}
        if (config.trunk_cache, config.trunk_cache_host) != ("auto", 0.0):
            caches = {"trunk_cache": config.trunk_cache, "trunk_cache_host": config.trunk_cache_host}
            where = {**where, **caches}
        module, _, name = config.runner.partition(":")
        # By name: nothing on this side of the engine may import torch, and the tests bring their own.
        self._loading = True
        if self._nobody_left:
            raise _Ended(EXIT_OK, "no client was left when its base was to be loaded")
        with self._tracer.span("Load", model=config.model):
            make: Callable[..., Runner] = getattr(importlib.import_module(module), name)
            runner = make(
                model_dir=Path(config.model_dir),
                base_dtype=config.base_dtype,
                schedule=config.schedule,
                max_tokens_per_pass=config.max_tokens_per_pass,
                max_adapters_per_pass=config.max_adapters_per_pass,
                on_event=self._on_event,
                on_pass=self._crumb.write,
                **where,
            )
        self._loading = False
        self._desk.base = base_identity(Path(config.model_dir))
        self._fingerprint = {
            str(key): str(value) for key, value in getattr(runner, "fingerprint", {}).items()
        }
        self._desk.runner = runner

    def _work(self) -> tuple[int, str]:
        """Rounds until there is nothing left to do: `(exit code, reason)`."""
        desk, runner = self._desk, self._desk.runner
        assert runner is not None
        idle_since = started = time.monotonic()
        busy = False
        desk.apply_all(list(self._waiting.kept()))
        while True:
            self._flush_trace()
            self._apply_commands(wait=not busy)
            desk.dismiss(late=self._opener_is_late)
            if self._terminating:
                desk.stop(self._table.active(), "the trainer was asked to stop (SIGTERM)")
                return EXIT_SIGTERM, "SIGTERM"
            if desk.shutdown:
                desk.stop(self._table.active(), "the trainer was shut down")
                return EXIT_OK, "shut down by a client"
            busy = runner.run_round()
            now = time.monotonic()
            if busy or self._server.holders or self._table.active():
                idle_since = now
            elif self._server.ever_connected:
                if now - idle_since >= self._config.idle_seconds:
                    return EXIT_OK, "no clients and no jobs"
            elif now - started >= self._config.first_client_seconds:
                return EXIT_OK, "no client ever connected"

    def _leave(self, code: int, reason: str) -> int:
        self._crumb.write(())
        self._desk.release()
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
        if not is_shared(self._directory / SUPERVISOR):
            remove_trainer_dir(self._directory)
        return code

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._terminating = True
        if self._desk.runner is None:
            # Loading may take minutes, and there is nothing to checkpoint yet.
            self._end_now(EXIT_SIGTERM, "SIGTERM")

    def _client_left(self, connection: Connection) -> None:
        """From the server's thread. The main thread may be loading the base, for minutes and for nobody."""
        self._detached |= connection.detached
        if self._loading and self._nobody_left:
            os.kill(os.getpid(), signal.SIGUSR1)

    def _on_nobody_left(self, number: int, frame: FrameType | None) -> None:
        if self._loading and self._nobody_left:
            self._end_now(EXIT_OK, "its clients left while it loaded the base")

    def _end_now(self, code: int, reason: str) -> None:
        """From a signal's handler, once: what it raises must not come again while the trainer leaves."""
        if not self._leaving:
            self._leaving = True
            raise _Ended(code, reason)

    @property
    def _opener_is_late(self) -> bool:
        """Whether the client that it was started for should have brought its jobs by now."""
        return time.monotonic() - self._started >= self._config.first_client_seconds

    @property
    def _nobody_left(self) -> bool:
        return self._server.owners_left and not self._detached

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
            ready=self._desk.runner is not None,
            fingerprint=self._fingerprint,
            last_seq=self._journal.last_seq,
            joinable=self._desk.open,
            waiting=self._queued,
            gpu=self._reservation.device.uuid if self._reservation is not None else "",
            jobs=[status.job for status in self._table.listed() if status.state not in ENDED],
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
            self._desk.job_ended(event.job)
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
        while commands := self._next_commands(wait=wait):
            self._desk.apply_all(commands)
            wait = False

    def _next_commands(self, *, wait: bool) -> list[Command]:
        commands: list[Command] = []
        with contextlib.suppress(queue.Empty):
            if wait:
                commands.append(self._commands.get(timeout=_IDLE_POLL))
            while True:
                commands.append(self._commands.get_nowait())
        return commands


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gshare-trainer", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="the trainer's directory, with trainer.json")
    parser.add_argument("--lock-fd", type=int, help="an open descriptor that holds the lock of the directory")
    parser.add_argument("--socket-fd", type=int, help="an open descriptor: the bound socket of the directory")
    options = parser.parse_args(arguments)
    forgive_output()
    os.environ.update(trainer_environment())  # before the runner loads torch
    if options.lock_fd is not None:
        os.set_inheritable(options.lock_fd, False)
    elif take_lock(options.dir / LOCK) is None:
        print(f"{options.dir}: another trainer runs there", file=sys.stderr)
        return EXIT_FAILURE
    config = read_json(options.dir / "trainer.json", TrainerConfig)
    # Until `run` handles it: a client that was answered already would take its end for a crash.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    bound = None
    if options.socket_fd is not None:
        bound = socket.socket(fileno=options.socket_fd)
        bound.set_inheritable(False)
    try:
        trainer = Trainer(options.dir, config)
        trainer.listen(bound)
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
