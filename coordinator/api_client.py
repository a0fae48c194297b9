"""A client's side of the coordinator's socket: connect, ask, follow. Blocking, no thread, like
`agent/service/client.py`: the caller's loop also serves signals and the screen."""

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
from gshare.agent.errors import EXIT_RETRY, EXIT_USAGE, GshareError, RetryLater, UsageError
from gshare.agent.service.peer import stranger_fault
from gshare.agent.service.server import socket_address
from gshare.agent.service.wire import FrameReader, convert, encode
from gshare.agent.xdg import xdg_dir
from gshare.coordinator.api_protocol import (
    API_PROTOCOL_VERSION,
    ApiHello,
    ApiRefused,
    ApiReply,
    ApiWelcome,
    ClusterEvent,
    ClusterEventFrame,
    FollowCluster,
    FollowingCluster,
    FromCoordinator,
)

SOCKET = "socket"
#: What is answered from memory comes at once; the loop may be writing to a slow disk meanwhile.
REPLY_SECONDS = 30.0

R = TypeVar("R", bound=msgspec.Struct)


class CoordinatorGone(GshareError):
    """The connection ended: the coordinator died or was stopped. Jobs run on."""


class NoCoordinator(RetryLater):
    """None runs on that state directory."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(
            f"no coordinator runs on {state_dir}; start one with `gshare coordinator`, or submit something"
        )


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/gshare/coordinator`, by default in `~/.local/state`."""
    return xdg_dir("XDG_STATE_HOME", ".local/state") / "coordinator"


def connect_coordinator(state_dir: Path) -> socket.socket:
    """A connected socket to the coordinator of that state directory. `NoCoordinator` when there is none,
    GshareError when another user's process listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_address(state_dir / SOCKET) as address:
            sock.connect(address)
    except OSError:
        sock.close()
        raise NoCoordinator(state_dir) from None
    if fault := stranger_fault(sock):
        sock.close()
        raise GshareError(f"{state_dir / SOCKET}: {fault}")
    return sock


class CoordinatorClient:
    """One connection. `ask` waits for one reply; `poll` brings events."""

    def __init__(self, state_dir: Path, client: str, *, reply_seconds: float = REPLY_SECONDS) -> None:
        """Connects and says hello. `NoCoordinator`, or `GshareError` when it refuses or does not answer."""
        self.journal_id = ""
        self.seq = 0  # the last durable event received: what `follow` resumes after
        self._reply_seconds = reply_seconds
        self._frames = FrameReader()
        self._events: deque[ClusterEvent] = deque()
        self._replies: dict[int, ApiReply] = {}
        self._last_id = 0
        self._welcome: ApiWelcome | None = None
        self._socket = connect_coordinator(state_dir)
        self._socket.settimeout(reply_seconds)  # for writes to one that hangs; reads wait in `select`
        try:
            self._write(
                ApiHello(
                    protocol=API_PROTOCOL_VERSION, gshare=version("gshare"), client=f"{client} {os.getpid()}"
                )
            )
            deadline = time.monotonic() + reply_seconds
            while self._welcome is None:
                self._receive(_left(deadline, "say hello"))
        except GshareError:
            self._socket.close()
            raise
        self.welcome: ApiWelcome = self._welcome

    def __enter__(self) -> CoordinatorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def ask(
        self,
        reply_type: type[R],
        make: type[msgspec.Struct],
        *,
        timeout: float | None = None,
        **fields: object,
    ) -> R:
        """Sends `make(id=…, **fields)` and waits. A refusal is raised with the exit code it came with."""
        self._last_id += 1
        self._write(make(id=self._last_id, **fields))
        deadline = time.monotonic() + (self._reply_seconds if timeout is None else timeout)
        while self._last_id not in self._replies:
            self._receive(_left(deadline, f"answer {make.__name__}"))
        reply = self._replies.pop(self._last_id)
        if isinstance(reply, ApiRefused):
            raise refusal(reply)
        if not isinstance(reply, reply_type):
            raise GshareError(f"the coordinator answered with {type(reply).__name__}")
        return reply

    def follow(
        self, jobs: Sequence[str] = (), *, samples: bool = True, new_only: bool = False
    ) -> FollowingCluster:
        """Events from now on, after what this client has seen. `gap` in the answer: some are lost.

        `new_only`: a client that has seen none of this journal gets none that it has kept so far.
        """
        following = self.ask(
            FollowingCluster,
            FollowCluster,
            journal_id=self.journal_id,
            after_seq=self.seq,
            jobs=list(jobs),
            samples=samples,
            new_only=new_only,
        )
        if following.journal_id != self.journal_id:
            self.journal_id, self.seq = following.journal_id, following.next_seq - 1
        return following

    def poll(self, timeout: float) -> list[ClusterEvent]:
        """The events that are there; waits up to `timeout` s for the first. Raises `CoordinatorGone`."""
        if not self._events:
            self._receive(timeout)
        events = list(self._events)
        self._events.clear()
        return events

    def _write(self, message: msgspec.Struct) -> None:
        try:
            self._socket.sendall(encode(message))
        except OSError as error:
            with contextlib.suppress(CoordinatorGone):
                self._receive(0.0)  # it may have said why
            raise CoordinatorGone(f"the coordinator is gone ({error.strerror}); jobs run on") from None

    def _receive(self, timeout: float) -> None:
        readable, _, _ = select.select([self._socket], [], [], max(0.0, timeout))
        if not readable:
            return
        try:
            data = self._socket.recv(1 << 18)
        except OSError as error:
            raise CoordinatorGone(f"the coordinator is gone ({error.strerror}); jobs run on") from None
        if not data:
            raise CoordinatorGone("the coordinator is gone; jobs run on")
        for frame in self._frames.feed(data):
            self._take(convert(frame, FromCoordinator))

    def _take(self, message: FromCoordinator) -> None:
        if isinstance(message, ClusterEventFrame):
            if message.seq:
                self.journal_id, self.seq = message.journal_id, message.seq
            self._events.append(message.event)
        elif isinstance(message, ApiWelcome):
            self._welcome = message
        elif isinstance(message, ApiRefused) and message.reply_to == 0:
            raise refusal(message)
        else:
            self._replies[message.reply_to] = message


def refusal(reply: ApiRefused) -> GshareError:
    """The error that exits with the code the coordinator meant."""
    kind = {EXIT_USAGE: UsageError, EXIT_RETRY: RetryLater}.get(reply.exit_code, GshareError)
    return kind(reply.reason)


def _left(deadline: float, what: str) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise GshareError(f"the coordinator did not {what} in time")
    return left
