"""A client's side of a trainer: connect, ask, follow. How one is started or joined is in `hold.py`.

Blocking sockets and short waits, no thread: the caller's loop also serves signals and the screen.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

import msgspec
from gshare.agent.errors import GshareError
from gshare.agent.jobs.events import Event
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
    WeightsTaken,
)
from gshare.agent.service.registry import LOCK, is_held
from gshare.agent.service.server import connect_socket
from gshare.agent.service.wire import FrameReader, convert, encode

Reply = Done | Refused | WeightsTaken | Jobs | Following
M = TypeVar("M", bound=msgspec.Struct)

#: A reply that no round delays (list, follow, hello) comes at once; this long means that something is wrong.
REPLY_SECONDS = 30.0
#: Interpreter start plus binding the socket is ~0.3 s; a loaded machine has been seen to take 10.
CONNECT_SECONDS = 60.0


class TrainerGone(GshareError):
    """The connection ended: the trainer died or exited."""


class TrainerClient:
    """One connection. `poll` brings events and the replies to `send`; `ask` waits for one reply."""

    def __init__(
        self,
        directory: Path,
        client: str,
        *,
        timeout: float = CONNECT_SECONDS,
        reply_seconds: float = REPLY_SECONDS,
    ) -> None:
        """Connects; waits up to `timeout` s for a trainer that is just starting. `TrainerGone`: none.

        `reply_seconds` is how long one that hangs is waited for: for its hello, and for each reply.
        """
        self.directory = directory
        self.journal_id = ""
        self.seq = 0  # the last durable event received: what `follow` resumes after
        self._frames = FrameReader()
        self._events: deque[Event] = deque()
        self._replies: dict[int, Reply] = {}
        self._last_id = 0
        self._hello: TrainerHello | None = None
        self._socket = _connect(directory, timeout)
        self._reply_seconds = reply_seconds
        self._socket.settimeout(reply_seconds)  # for writes to a trainer that hangs; reads wait in `select`
        self._write(
            ClientHello(protocol=PROTOCOL_VERSION, gshare=version("gshare"), pid=os.getpid(), client=client)
        )
        deadline = time.monotonic() + reply_seconds
        try:
            while self._hello is None:
                self._receive(_left(deadline, "say hello"))
        except GshareError:
            self._socket.close()
            raise
        self.hello: TrainerHello = self._hello

    def send(self, make: type[M], **fields: object) -> int:
        """Sends a request and returns its id; the reply comes through `reply`."""
        self._last_id += 1
        self._write(make(id=self._last_id, **fields))
        return self._last_id

    def reply(self, request_id: int) -> Reply | None:
        """The reply to a request, once, if it has come."""
        return self._replies.pop(request_id, None)

    def ask(self, make: type[M], *, timeout: float | None = None, **fields: object) -> Reply:
        """Sends a request and waits for its reply. Raises `GshareError` when it is refused or late."""
        request_id = self.send(make, **fields)
        deadline = time.monotonic() + (self._reply_seconds if timeout is None else timeout)
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
        return self._list().jobs

    def others(self) -> int:
        """How many other clients the trainer stays for."""
        return max(0, self._list().clients - 1)

    def _list(self) -> Jobs:
        reply = self.ask(ListJobs)
        assert isinstance(reply, Jobs), reply
        return reply

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
