"""Agents in processes of their own, and a blocking client that talks to them: for tests of the node."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.errors import RetryLater
from gshare.agent.jobs.events import ENDED, JobChanged
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.node import protocol
from gshare.agent.node.bridge import connect_agent
from gshare.agent.node.protocol import (
    CHUNK_BYTES,
    NODE_PROTOCOL_VERSION,
    AttemptEvent,
    AttemptStatus,
    BlobRef,
    FromNode,
    ModelRef,
    NodeClientHello,
    NodeEventFrame,
    NodeHello,
    NodeRefused,
)
from gshare.agent.service.registry import live_trainers
from gshare.agent.service.wire import FrameReader, convert, encode

SUPPORT = Path(__file__).parent
OWNER = "owner-one"
SECONDS = 180.0


class NodeClient:
    """One connection. `ask` returns the reply, `events` what has come."""

    def __init__(
        self, path: Path, *, owner: str = OWNER, session: str = "s1", role: str = "coordinator"
    ) -> None:
        self.socket = connect_agent(path)
        self.frames = FrameReader()
        self.events: list[NodeEventFrame] = []
        self.replies: dict[int, Any] = {}
        self.last_id = 0
        self.hello: Any = None
        self.write(
            NodeClientHello(
                protocol=NODE_PROTOCOL_VERSION,
                gshare=version("gshare"),
                client=f"test {session}",
                role=role,  # type: ignore[arg-type]
                owner=owner if role == "coordinator" else "",
                session=session,
            )
        )
        self.until(lambda: self.hello is not None)

    def write(self, message: msgspec.Struct) -> None:
        self.socket.sendall(encode(message))

    def ask(self, make: type[msgspec.Struct], **fields: Any) -> Any:
        self.last_id += 1
        self.write(make(id=self.last_id, **fields))
        self.until(lambda: self.last_id in self.replies)
        return self.replies.pop(self.last_id)

    def until(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            self.receive(deadline - time.monotonic())

    def receive(self, timeout: float) -> None:
        assert timeout > 0, "nothing came in time"
        readable, _, _ = select.select([self.socket], [], [], timeout)
        assert readable, "nothing came in time"
        data = self.socket.recv(1 << 18)
        if not data:
            raise ConnectionResetError("the agent hung up")
        for frame in self.frames.feed(data):
            message = convert(frame, FromNode)
            if isinstance(message, NodeHello) or (isinstance(message, NodeRefused) and message.reply_to == 0):
                self.hello = message
            elif isinstance(message, NodeEventFrame):
                self.events.append(message)
            else:
                self.replies[message.reply_to] = message

    def close(self) -> None:
        self.socket.close()

    # ------------------------------------------------------------------ whole requests

    def push(self, data: bytes, name: str) -> BlobRef:
        digest = hashlib.sha256(data).hexdigest()
        for offset in range(0, max(1, len(data)), CHUNK_BYTES):
            chunk = data[offset : offset + CHUNK_BYTES]
            reply = self.ask(protocol.PutChunk, sha256=digest, offset=offset, total=len(data), data=chunk)
            assert isinstance(reply, protocol.Received), reply
        return BlobRef(name=name, sha256=digest, size=len(data))

    def start(self, job: str, script: str, *, attempt: int = 1, **fields: Any) -> Any:
        """Starts a job of the engine of straw; the reply."""
        asked: dict[str, Any] = {
            "job": job,
            "attempt": attempt,
            "spec": AdapterSpec(name=job, data="ignored", output_dir="ignored", val_fraction=0.0),
            "model": ModelRef(name="fake", path="fake"),
            "base_dtype": "fp32",
            "data": self.push(script.encode(), f"{job}.jsonl") if "data" not in fields else None,
        }
        return self.ask(protocol.StartAttempt, **{**asked, **fields})

    def follow(self, journal_id: str = "", after_seq: int = 0, *, samples: bool = True) -> Any:
        return self.ask(protocol.FollowNode, journal_id=journal_id, after_seq=after_seq, samples=samples)

    def status(self, job: str, attempt: int = 1) -> AttemptStatus:
        attempts = self.ask(protocol.ListAttempts).attempts
        return next(one for one in attempts if (one.job, one.attempt) == (job, attempt))

    def wait(self, job: str, condition: Callable[[AttemptStatus], bool], attempt: int = 1) -> AttemptStatus:
        deadline = time.monotonic() + SECONDS
        while not condition(status := self.status(job, attempt)):
            assert time.monotonic() < deadline, status
            time.sleep(0.05)
        return status

    def wait_end(self, job: str, attempt: int = 1) -> AttemptStatus:
        return self.wait(job, lambda status: status.state in ENDED, attempt)

    def pull(self, job: str, kind: str, attempt: int = 1) -> dict[str, bytes]:
        """The files of a bundle, each checked against its hash."""
        bundle = self.ask(protocol.PinBundle, job=job, attempt=attempt, kind=kind)
        assert isinstance(bundle, protocol.BundleFiles), bundle
        files: dict[str, bytes] = {}
        for ref in bundle.files:
            data = b""
            while len(data) < ref.size:
                chunk = self.ask(
                    protocol.ReadChunk,
                    bundle=bundle.bundle,
                    name=ref.name,
                    offset=len(data),
                    length=CHUNK_BYTES,
                )
                assert chunk.data
                data += chunk.data
            assert hashlib.sha256(data).hexdigest() == ref.sha256
            files[ref.name] = data
        self.ask(protocol.ReleaseBundle, bundle=bundle.bundle)
        return files

    def states(self, job: str, last: str) -> list[str]:
        """The states that the job has gone through, once `last` has come: the answer that tells of an end may
        come before the end's event."""
        self.until(lambda: [change.state for change in self.changes(job)][-1:] == [last])
        return [change.state for change in self.changes(job)]

    def changes(self, job: str) -> list[JobChanged]:
        """The changes of state that have come, in order."""
        return [
            frame.event.event
            for frame in self.events
            if isinstance(frame.event, AttemptEvent)
            and isinstance(frame.event.event, JobChanged)
            and frame.event.event.job == job
        ]


@dataclass
class AgentProcess:
    """`gshare agent` on a state directory. What it says on stderr is in `log`."""

    state: Path
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.state / "socket"

    @property
    def log(self) -> Path:
        return self.state.with_name(self.state.name + ".log")

    def start(self) -> None:
        command = [sys.executable, "-m", "gshare.cli.main", "agent", "--state-dir", str(self.state)]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*command, *self.arguments],
                cwd="/",
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + SECONDS
        while not self._answers():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "the agent does not listen"
            time.sleep(0.02)

    def connect(self, **options: Any) -> NodeClient:
        return NodeClient(self.socket, **options)

    def kill(self) -> None:
        """SIGKILL, as the kernel does it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)

    def _answers(self) -> bool:
        try:
            connect_agent(self.socket).close()
        except RetryLater:
            return False
        return True


def wait_no_trainers() -> None:
    deadline = time.monotonic() + 30
    while live_trainers():
        assert time.monotonic() < deadline, "a trainer outlived its client"
        time.sleep(0.05)


@contextlib.contextmanager
def running_agent(state: Path, *arguments: str, **environment: str) -> Iterator[AgentProcess]:
    """An agent, killed at the end if it still runs."""
    agent = AgentProcess(state, arguments, environment)
    agent.start()
    try:
        yield agent
    finally:
        if agent.process is not None and agent.process.poll() is None:
            agent.kill()
