"""An agent of straw inside the test's process: it speaks `agent/node/protocol.py` and trains nothing.

    async with FakeAgent(tmp_path / "a") as agent:
        link = await agent.connect(owner="o")

State outlives connections, as a real agent's does: blobs, attempts, journal. Faults are attributes that a
test sets: `cut_after_bytes`, `flip_byte_of`, `disk_full`, `mute`. An attempt runs when `advance` says so, or
by itself when `auto` is set: it makes `steps` steps and ends with files that depend on its job alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.jobs.events import CheckpointSaved, Evaluated, Event, JobChanged, Stepped
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.node import protocol as p
from gshare.agent.node.attempts import NOT_HERE
from gshare.agent.service.output_dir import RunRecord
from gshare.agent.service.server import socket_address
from gshare.agent.service.wire import FrameReader, convert, encode
from gshare.coordinator.link import AgentLink, StreamPair


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def weights(job: str, step: int) -> bytes:
    """The adapter of a job after `step` steps, wherever and however often interrupted it ran."""
    return hashlib.sha256(f"{job}/{step}".encode()).digest() * 40


def start_fields(job: str) -> dict[str, Any]:
    """What a `StartAttempt` of that job needs, besides its id."""
    return {
        "job": job,
        "attempt": 1,
        "spec": AdapterSpec(name=job, data="d", output_dir="o"),
        "model": p.ModelRef(name="m", path="/m"),
        "base_dtype": "fp32",
        "data": p.BlobRef(name="d", sha256="0" * 64, size=0),
    }


def run_with_agent(
    tmp_path: Path, test: Callable[[FakeAgent], Awaitable[None]], *, seconds: float = 20.0
) -> None:
    """Runs `test` beside an agent in a loop of its own."""

    async def main() -> None:
        async with FakeAgent(tmp_path / "agent") as agent:
            await asyncio.wait_for(test(agent), seconds)

    asyncio.run(main())


def metrics(steps: int) -> bytes:
    """metrics.jsonl of so many steps."""
    lines = [{"type": "step", "step": step, "loss": 1 / step} for step in range(1, steps + 1)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@dataclass
class FakeAttempt:
    owner: str
    request: p.StartAttempt
    state: str = "queued"
    step: int = 0
    val_loss: float | None = None
    reason: str = ""
    retry: bool = False
    checkpoint_step: int = 0

    def status(self) -> p.AttemptStatus:
        return p.AttemptStatus(
            owner=self.owner,
            job=self.request.job,
            attempt=self.request.attempt,
            state=self.state,  # type: ignore[arg-type]
            step=self.step,
            total_steps=10,
            val_loss=self.val_loss,
            best_val_loss=self.val_loss,
            best_step=self.step or None,
            reason=self.reason,
            retry=self.retry,
            gpu=self.request.gpu,
            checkpoint_step=self.checkpoint_step,
        )


@dataclass
class FakeAgent:
    directory: Path
    steps: int = 6
    auto: bool = False
    step_seconds: float = 0.01
    node_info: dict[str, Any] = field(default_factory=dict)
    leases: dict[str, str] = field(default_factory=dict)  # id of a reservation → why it stays, "": it goes
    cut_after_bytes: int | None = None  # of file contents, in either direction; once
    flip_byte_of: str = ""  # name of a file whose bytes arrive changed, once
    disk_full: bool = False
    mute: bool = False  # reads, answers nothing
    raw_answer: bytes | None = None  # sent in the place of every answer after the hello
    bundle_names: dict[str, str] = field(default_factory=dict)  # right name → what is told instead

    def __post_init__(self) -> None:
        self.blobs: dict[str, bytearray] = {}
        self.complete: set[str] = set()
        self.attempts: dict[tuple[str, str, int], FakeAttempt] = {}
        self.forgotten: list[tuple[str, int]] = []
        self.events: list[p.AttemptEvent] = []
        self.journal_id = "journal-1"
        self.requests: list[msgspec.Struct] = []
        self.bytes_moved = 0
        self.connections = 0
        self._followers: list[tuple[asyncio.StreamWriter, bool]] = []
        self._bundles: dict[str, dict[str, bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.AbstractServer | None = None

    @property
    def socket(self) -> Path:
        return self.directory / "socket"

    async def __aenter__(self) -> FakeAgent:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        with socket_address(self.socket) as address:
            self._server = await asyncio.start_unix_server(self._serve, path=address)

    async def stop(self) -> None:
        """As kill -9 does: nobody is told."""
        if self._server is not None:
            self._server.close()
        self.hang_up()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.socket.unlink(missing_ok=True)

    def hang_up(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def stream(self) -> StreamPair:
        with socket_address(self.socket) as address:
            return StreamPair(*await asyncio.open_unix_connection(address))

    async def connect(
        self, owner: str = "owner", on_event: Callable[[p.NodeEventFrame], None] | None = None
    ) -> AgentLink:
        return await AgentLink.open(
            await self.stream(), client="test", owner=owner, session="s", on_event=on_event
        )

    # --- what a test makes happen

    def publish(self, attempt: FakeAttempt, event: Event) -> None:
        durable = not isinstance(event, Stepped)
        told = p.AttemptEvent(
            owner=attempt.owner, attempt=attempt.request.attempt, event=event, time=time.time()
        )
        seq = 0
        if durable:
            self.events.append(told)
            seq = len(self.events)
        frame = encode(p.NodeEventFrame(journal_id=self.journal_id, seq=seq, event=told))
        for writer, samples in self._followers:
            if durable or samples:
                writer.write(frame)

    def change(self, attempt: FakeAttempt, state: str, reason: str = "", *, retry: bool = False) -> None:
        attempt.state, attempt.reason, attempt.retry = state, reason, retry
        self.publish(
            attempt,
            JobChanged(
                job=attempt.request.job,
                state=state,  # type: ignore[arg-type]
                step=attempt.step,
                total_steps=self.steps,
                reason=reason,
            ),
        )

    def advance(self, attempt: FakeAttempt) -> None:
        """One step; a checkpoint and an evaluation every second one; the end after the last."""
        if attempt.state == "queued":
            self.change(attempt, "running")
        job = attempt.request.job
        attempt.step += 1
        loss = 2.0 / attempt.step
        self.publish(
            attempt,
            Stepped(
                job=job,
                step=attempt.step,
                total_steps=self.steps,
                epoch=0.0,
                loss=loss,
                grad_norm=1.0,
                learning_rate=1e-4,
                tokens=10,
                label_tokens=5,
                seconds=0.01,
                adapters_in_pass=1,
            ),
        )
        if attempt.step % 2 == 0:
            attempt.val_loss, attempt.checkpoint_step = loss, attempt.step
            self.publish(
                attempt, Evaluated(job=job, step=attempt.step, val_loss=loss, label_tokens=5, best=True)
            )
            self.publish(attempt, CheckpointSaved(job=job, step=attempt.step, path="x"))
        if attempt.step >= self.steps:
            self.change(attempt, "completed")

    def running(self, job: str) -> FakeAttempt:
        """The newest attempt of a job."""
        return max(
            (a for a in self.attempts.values() if a.request.job == job), key=lambda a: a.request.attempt
        )

    def files(self, attempt: FakeAttempt, kind: str) -> dict[str, bytes]:
        job, step = attempt.request.job, attempt.step
        if kind == "checkpoint":
            step = attempt.checkpoint_step
            return {
                "adapter.safetensors": weights(job, step),
                "state.json": json.dumps({"step": step}).encode(),
                "metrics.jsonl": metrics(step),
            }
        adapter = {"adapter_config.json": b'{"r": 8}', "adapter_model.safetensors": weights(job, step)}
        if kind == "best":
            best = adapter | {"metadata.json": json.dumps({"val_loss": attempt.val_loss}).encode()}
            return {f"best/{name}": data for name, data in best.items()}
        request = attempt.request
        record = RunRecord(model=request.model.name, base_dtype=request.base_dtype, spec=request.spec)
        return adapter | {"metrics.jsonl": metrics(step), "run.json": msgspec.json.encode(record)}

    # --- the wire

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        frames = FrameReader()
        owner: str | None = None
        try:
            while data := await reader.read(65536):
                for frame in frames.feed(data):
                    message = convert(frame, p.FromNodeClient)
                    if isinstance(message, p.NodeClientHello):
                        owner = message.owner
                        writer.write(encode(self._hello()))
                        continue
                    assert owner is not None
                    self.requests.append(message)
                    if self.mute:
                        continue
                    answer = self._answer(message, owner, writer)
                    if answer is not None:
                        writer.write(self.raw_answer or encode(answer))
                    if self._is_cut():
                        writer.transport.abort()
                        return
                await writer.drain()
        except OSError:
            pass
        finally:
            self._followers = [entry for entry in self._followers if entry[0] is not writer]
            self._writers.discard(writer)
            with contextlib.suppress(OSError):
                writer.close()

    def _hello(self) -> p.NodeHello:
        return p.NodeHello(
            protocol=p.NODE_PROTOCOL_VERSION,
            gshare="0",
            agent_id=self.directory.name,
            journal_id=self.journal_id,
            pid=1,
            hostname=self.directory.name,
        )

    def _is_cut(self) -> bool:
        if self.cut_after_bytes is None or self.bytes_moved < self.cut_after_bytes:
            return False
        self.cut_after_bytes = None
        return True

    def _answer(self, request: Any, owner: str, writer: asyncio.StreamWriter) -> msgspec.Struct | None:
        reply = request.id
        mine = {key: a for key, a in self.attempts.items() if owner in ("", key[0])}  # observers: all
        if isinstance(request, p.DescribeNode):
            return p.NodeInfo(**{**self._info(reply), **self.node_info})
        if isinstance(request, p.HoldBlobs):
            held = {name: len(self.blobs[name]) for name in request.blobs if name in self.blobs}
            complete = [name for name in request.blobs if name in self.complete]
            return p.BlobsHeld(reply_to=reply, bytes_held=held, complete=complete)
        if isinstance(request, p.PutChunk):
            return self._put(request)
        if isinstance(request, p.StartAttempt):
            key = (owner, request.job, request.attempt)
            if key not in self.attempts:
                attempt = self.attempts[key] = FakeAttempt(owner, request)
                if request.checkpoint:
                    names = {ref.name: ref.sha256 for ref in request.checkpoint}
                    attempt.step = json.loads(bytes(self.blobs[names["state.json"]]))["step"]
                if self.auto:
                    self._go(self._run(attempt))
            return p.AttemptAccepted(reply_to=reply)
        if isinstance(request, p.StopAttempts | p.PauseAttempts | p.ResumeAttempts | p.ForgetAttempts):
            return self._command(request, owner)
        if isinstance(request, p.ListAttempts):
            return p.Attempts(reply_to=reply, attempts=[a.status() for a in mine.values()])
        if isinstance(request, p.FollowNode):
            return self._follow(request, writer)
        if isinstance(request, p.PinBundle):
            return self._pin(request, owner)
        if isinstance(request, p.ReadChunk):
            return self._chunk(request)
        if isinstance(request, p.ReadSamples):
            if (request.job, request.attempt) in self.forgotten:
                return p.NodeRefused(reply_to=reply, reason=f"attempt {request.job} is {NOT_HERE}")
            told = [a.event for a in self.events if a.event.job == request.job]
            lines = [
                json.dumps({"type": "eval", "step": e.step, "val_loss": e.val_loss, "best": e.best})
                for e in told
                if isinstance(e, Evaluated) and e.step > request.after_step
            ]
            return p.Samples(reply_to=reply, lines=lines)
        if isinstance(request, p.EndLeases):
            failed = {id: why for id in request.reservations if (why := self.leases.get(id, "is not here"))}
            self.leases = {
                id: why for id, why in self.leases.items() if id not in request.reservations or why
            }
            return p.LeasesEnded(reply_to=reply, failed=failed)
        if isinstance(request, p.ReadLog):
            return p.LogText(reply_to=reply, text=f"log of {request.job or 'the agent'}\n")
        assert isinstance(request, p.ReleaseBundle), request
        self._bundles.pop(request.bundle, None)
        return p.NodeDone(reply_to=reply)

    def _info(self, reply: int) -> dict[str, Any]:
        return {
            "reply_to": reply,
            "hostname": self.directory.name,
            "time": time.time(),
            "uptime_s": 10.0,
            "machine": "x86_64",
            "python": "3.11",
            "torch": "2.13",
            "cpu_cores": 2,
            "ram_mb": 32768,
            "ram_free_mb": 16384,
            "disk_free_mb": 100_000,
        }

    def _put(self, request: p.PutChunk) -> msgspec.Struct:
        if self.disk_full:
            return p.NodeRefused(reply_to=request.id, reason="the node's disk is full", retry=True)
        held = self.blobs.setdefault(request.sha256, bytearray())
        if request.offset > len(held):
            return p.NodeRefused(reply_to=request.id, reason=f"only {len(held)} bytes are there")
        del held[request.offset :]
        held += request.data
        self.bytes_moved += len(request.data)
        if len(held) < request.total:
            return p.Received(reply_to=request.id, bytes_held=len(held))
        if sha(bytes(held)) != request.sha256:
            del self.blobs[request.sha256]
            return p.NodeRefused(reply_to=request.id, reason="the bytes do not have that hash")
        self.complete.add(request.sha256)
        return p.Received(reply_to=request.id, bytes_held=len(held), complete=True)

    def _command(self, request: Any, owner: str) -> msgspec.Struct:
        failed: dict[str, str] = {}
        for job, number in request.attempts:
            attempt = self.attempts.get((owner, job, number))
            if attempt is None:
                failed[f"{job}/{number}"] = "no such attempt"
            elif isinstance(request, p.ForgetAttempts):
                self.forgotten.append((job, number))
                del self.attempts[owner, job, number]
            elif attempt.state not in ("completed", "stopped", "failed"):
                states = {p.StopAttempts: "stopped", p.PauseAttempts: "paused", p.ResumeAttempts: "running"}
                if isinstance(request, p.StopAttempts):
                    attempt.checkpoint_step = attempt.step
                self.change(attempt, states[type(request)], getattr(request, "reason", ""))
        return p.AttemptsDone(reply_to=request.id, failed=failed)

    def _follow(self, request: p.FollowNode, writer: asyncio.StreamWriter) -> None:
        after = request.after_seq if request.journal_id == self.journal_id else 0
        writer.write(
            encode(
                p.FollowingNode(
                    reply_to=request.id, journal_id=self.journal_id, next_seq=after + 1, gap=False
                )
            )
        )
        for seq, event in enumerate(self.events[after:], start=after + 1):
            writer.write(encode(p.NodeEventFrame(journal_id=self.journal_id, seq=seq, event=event)))
        self._followers.append((writer, request.samples))
        # answered before its events

    def _pin(self, request: p.PinBundle, owner: str) -> msgspec.Struct:
        attempt = self.attempts.get((owner, request.job, request.attempt))
        if attempt is None:
            return p.NodeRefused(reply_to=request.id, reason=f"no attempt {request.job}/{request.attempt}")
        files = self.files(attempt, request.kind)
        bundle = f"b{len(self._bundles)}-{request.kind}"
        told = {self.bundle_names.get(name, name): data for name, data in files.items()}
        self._bundles[bundle] = told
        return p.BundleFiles(
            reply_to=request.id,
            bundle=bundle,
            files=[p.BlobRef(name=name, sha256=sha(data), size=len(data)) for name, data in told.items()],
            step=attempt.checkpoint_step if request.kind == "checkpoint" else attempt.step,
            val_loss=attempt.val_loss if request.kind == "best" else None,
        )

    def _chunk(self, request: p.ReadChunk) -> msgspec.Struct:
        data = self._bundles[request.bundle][request.name][request.offset : request.offset + request.length]
        self.bytes_moved += len(data)
        if self.flip_byte_of == request.name:
            self.flip_byte_of = ""
            data = bytes([data[0] ^ 1]) + data[1:]
        return p.Chunk(reply_to=request.id, data=data)

    async def _run(self, attempt: FakeAttempt) -> None:
        while attempt.state in ("queued", "running", "paused"):
            await asyncio.sleep(self.step_seconds)
            if attempt.state != "paused":
                self.advance(attempt)

    def _go(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
