"""A client's side of a trainer: start one, connect, ask, follow.

Blocking sockets and short waits, no thread: the caller's loop also serves signals and the screen.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import msgspec
from gshare.agent.errors import GshareError
from gshare.agent.jobs.events import Event
from gshare.agent.service.environment import trainer_environment
from gshare.agent.service.protocol import (
    PROTOCOL_VERSION,
    ClientHello,
    Done,
    EventFrame,
    Follow,
    Following,
    FromTrainer,
    Jobs,
    JobStatus,
    ListJobs,
    Refused,
    TrainerHello,
)
from gshare.agent.service.registry import LOCK, TrainerConfig, create_trainer_dir, is_held, log_path
from gshare.agent.service.server import connect_socket
from gshare.agent.service.wire import FrameReader, convert, encode

Reply = Done | Refused | Jobs | Following
M = TypeVar("M", bound=msgspec.Struct)

#: A reply that no round delays (list, follow, hello) comes at once; this long means that something is wrong.
REPLY_SECONDS = 30.0
#: Interpreter start plus binding the socket is ~0.3 s; a loaded machine has been seen to take 10.
CONNECT_SECONDS = 60.0


class TrainerGone(GshareError):
    """The connection ended: the trainer died or exited."""


class TrainerClient:
    """One connection. `poll` brings events and the replies to `send`; `ask` waits for one reply."""

    def __init__(self, directory: Path, client: str, *, timeout: float = CONNECT_SECONDS) -> None:
        """Connects; waits up to `timeout` s for a trainer that is just starting. `TrainerGone`: none."""
        self.directory = directory
        self.journal_id = ""
        self.seq = 0  # the last durable event received: what `follow` resumes after
        self._frames = FrameReader()
        self._events: deque[Event] = deque()
        self._replies: dict[int, Reply] = {}
        self._last_id = 0
        self._hello: TrainerHello | None = None
        self._socket = _connect(directory, timeout)
        self._socket.settimeout(REPLY_SECONDS)  # for writes to a trainer that hangs; reads wait in `select`
        self._write(
            ClientHello(protocol=PROTOCOL_VERSION, gshare=version("gshare"), pid=os.getpid(), client=client)
        )
        deadline = time.monotonic() + REPLY_SECONDS
        while self._hello is None:
            self._receive(_left(deadline, "say hello"))
        self.hello: TrainerHello = self._hello

    def send(self, make: type[M], **fields: object) -> int:
        """Sends a request and returns its id; the reply comes through `reply`."""
        self._last_id += 1
        self._write(make(id=self._last_id, **fields))
        return self._last_id

    def reply(self, request_id: int) -> Reply | None:
        """The reply to a request, once, if it has come."""
        return self._replies.pop(request_id, None)

    def ask(self, make: type[M], *, timeout: float = REPLY_SECONDS, **fields: object) -> Reply:
        """Sends a request and waits for its reply. Raises `GshareError` when it is refused or late."""
        request_id = self.send(make, **fields)
        deadline = time.monotonic() + timeout
        while (reply := self.reply(request_id)) is None:
            self._receive(_left(deadline, f"answer {make.__name__}"))
        if isinstance(reply, Refused):
            raise GshareError(reply.reason)
        return reply

    def follow(self, jobs: Sequence[str] = (), *, journal_id: str = "", after_seq: int = 0) -> bool:
        """Events from now on, after `after_seq` of `journal_id`. True when some are no longer kept."""
        self.journal_id, self.seq = journal_id, after_seq
        reply = self.ask(Follow, journal_id=journal_id, after_seq=after_seq, jobs=list(jobs))
        assert isinstance(reply, Following), reply
        return reply.gap

    def jobs(self) -> list[JobStatus]:
        reply = self.ask(ListJobs)
        assert isinstance(reply, Jobs), reply
        return reply.jobs

    def poll(self, timeout: float) -> list[Event]:
        """The events that are there; waits up to `timeout` seconds for the first. Raises `TrainerGone`."""
        if not self._events:
            self._receive(timeout)
        return self.pending()

    def pending(self) -> list[Event]:
        """The events received and not yet taken; of a trainer that is gone, too."""
        events = list(self._events)
        self._events.clear()
        return events

    def close(self) -> None:
        self._socket.close()

    def _write(self, message: msgspec.Struct) -> None:
        try:
            self._socket.sendall(encode(message))
        except OSError as error:
            self._drain()
            raise TrainerGone(f"the trainer is gone ({error.strerror})") from None

    def _drain(self) -> None:
        """What a dead trainer had still sent: events of its last rounds, or why it refused us."""
        with contextlib.suppress(GshareError):
            while True:
                self._receive(0.0, drain=True)

    def _receive(self, timeout: float, *, drain: bool = False) -> None:
        readable, _, _ = select.select([self._socket], [], [], max(0.0, timeout))
        if not readable:
            if drain:
                raise TrainerGone("nothing more")
            return
        try:
            data = self._socket.recv(1 << 18)
        except OSError as error:
            raise TrainerGone(f"the trainer is gone ({error.strerror})") from None
        if not data:
            raise TrainerGone("the trainer is gone")
        for frame in self._frames.feed(data):
            self._take(convert(frame, FromTrainer))

    def _take(self, message: FromTrainer) -> None:
        if isinstance(message, EventFrame):
            if message.seq:
                if message.journal_id == self.journal_id and message.seq <= self.seq:
                    return
                self.journal_id, self.seq = message.journal_id, message.seq
            self._events.append(message.event)
        elif isinstance(message, TrainerHello):
            self._hello = message
        elif isinstance(message, Refused) and message.reply_to == 0:
            raise GshareError(message.reason)
        else:
            self._replies[message.reply_to] = message


@dataclass
class Spawned:
    """A trainer that this process started."""

    directory: Path
    process: subprocess.Popen[bytes]
    log: Path
    supervisor_fd: int  # the flock that keeps the directory from being collected

    def wait_dead(self, timeout: float = 10.0) -> int:
        """The exit code (negative: the signal). One that hangs after hanging up is killed."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def how_it_died(self, code: int) -> str:
        """For people: the signal's name or the exit code, and the last line of the log."""
        if code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        else:
            last = _last_line(self.log)
            how = f"exit code {code}" + (f": {last}" if last else "")
        return how

    def release(self) -> None:
        os.close(self.supervisor_fd)


def spawn_trainer(config: TrainerConfig) -> Spawned:
    """Starts a trainer in a session of its own, so that the terminal's signals do not reach it."""
    directory, lock, supervisor = create_trainer_dir(config)
    log = log_path(directory.name)
    try:
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gshare.agent.service.trainer"),
                    *("--dir", str(directory), "--lock-fd", str(lock)),
                ],
                # `-m` puts the working directory on sys.path (Python 3.10 has no PYTHONSAFEPATH), and in a
                # clone of gshare the room `kernels` would hide the package that transformers imports.
                cwd=directory,
                env={**os.environ, **trainer_environment(), "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(lock,),
            )
    finally:
        os.close(lock)  # the trainer has its own copy, and must be the only one who keeps it locked
    return Spawned(directory, process, log, supervisor)


def _connect(directory: Path, timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
    path = directory / "socket"
    while True:
        if path.exists():
            with contextlib.suppress(GshareError):  # bound, but not listening yet
                return connect_socket(path)
        if not is_held(directory / LOCK):
            raise TrainerGone(f"trainer {directory.name} is gone")
        if time.monotonic() > deadline:
            raise GshareError(f"trainer {directory.name} did not answer within {timeout:.0f} s ({path})")
        time.sleep(0.02)


def _left(deadline: float, what: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise GshareError(f"the trainer did not {what} in time")
    return left


def _last_line(log: Path) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
    except OSError:
        return ""
    return next((line[:300] for line in reversed(lines) if line), "")
