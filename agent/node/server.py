"""What clients of the agent ask, and what they hear: hello, requests, events. The streams are the callers'.

One coordinator an owner: a second session of the same owner is refused while the first one speaks, since two
would undo each other's placements. Owners do not see each other's attempts, observers see all and steer none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, Literal

import msgspec
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.jobs.events import Event
from gshare.agent.jobs.names import plain, shorten
from gshare.agent.node import protocol
from gshare.agent.node.attempts import Attempt, Attempts
from gshare.agent.node.blobs import BlobStore
from gshare.agent.node.bundles import METRICS, Bundles
from gshare.agent.node.checks import check_owner
from gshare.agent.node.connection import (
    GAVE_WAY,
    HELLO_SECONDS,
    HUNG_UP,
    Connection,
    Gone,
    Reader,
    Strangers,
    Writer,
)
from gshare.agent.node.durable import FULL
from gshare.agent.node.health import Devices, Health
from gshare.agent.node.journal import NodeJournal
from gshare.agent.node.protocol import (
    EARLY_EXIT,
    NODE_PROTOCOL_VERSION,
    AttemptEvent,
    FromNodeClient,
    NodeClientHello,
    NodeEventFrame,
    NodeHello,
    NodeMessage,
    NodeRefused,
)
from gshare.agent.node.samples import read_log, read_samples
from gshare.agent.node.state_dir import StateDir
from gshare.agent.service.wire import WireError, convert
from gshare.agent.vram.leases import end_leases

MAX_CLIENTS = 64
#: Of these, so many are for coordinators: who only looks keeps nobody out who steers.
FOR_COORDINATORS = 8
#: A coordinator asks how the node is every 15 s. One that was silent for three of these is a dead connection
#: that TCP has not noticed; a new session may take its place.
SILENT_SECONDS = 45.0
#: A driver that has not answered by then is a problem that is told; 0.1 s is usual, 2 s were seen under load.
DRIVER_SECONDS = 10.0
MAX_TEXT = 200  # of a client's name and session

#: Requests that change something: not for observers.
_STEERING = (
    protocol.HoldBlobs,
    protocol.PutChunk,
    protocol.StartAttempt,
    protocol.StopAttempts,
    protocol.PauseAttempts,
    protocol.ResumeAttempts,
    protocol.ForgetAttempts,
    protocol.DrainNode,
)


class NodeServer:
    """Lives in the agent's loop."""

    def __init__(self, state: StateDir, *, drain: Callable[[], None]) -> None:
        """`drain` is called when a client asks the agent to stop what runs and to exit."""
        self._state = state
        self._drain = drain
        self._identity = state.identity()
        self._connections: set[Connection] = set()
        self._strangers = Strangers()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.journal = NodeJournal(state.journal)
        self.blobs = BlobStore(state.blobs)
        self.bundles = Bundles(state.bundles)
        self.attempts = Attempts(state, self.blobs, self.publish, self.say)
        self._health = Health(state.path)
        self._looker = ThreadPoolExecutor(1, "devices")
        self._looking: asyncio.Future[Devices] | None = None
        self._handlers: dict[type, Callable[[Connection, Any], Awaitable[msgspec.Struct]]] = {
            protocol.DescribeNode: self._describe,
            protocol.HoldBlobs: self._hold,
            protocol.PutChunk: self._put,
            protocol.StartAttempt: self._start,
            protocol.StopAttempts: self._stop,
            protocol.PauseAttempts: self._pause,
            protocol.ResumeAttempts: self._resume,
            protocol.ForgetAttempts: self._forget,
            protocol.ListAttempts: self._list,
            protocol.FollowNode: self._follow,
            protocol.PinBundle: self._pin,
            protocol.ReadChunk: self._read_chunk,
            protocol.ReleaseBundle: self._release,
            protocol.ReadSamples: self._read_samples,
            protocol.ReadLog: self._read_log,
            protocol.EndLeases: self._end_leases,
            protocol.DrainNode: self._drain_node,
        }

    # ------------------------------------------------------------------ events

    def publish(self, owner: str, attempt: int, event: Event, durable: bool) -> None:
        """Tells the followers; what is durable is in the journal first."""
        said = AttemptEvent(owner=owner, attempt=attempt, event=event, time=time.time())
        if durable:
            self.journal.append(said)
        for connection in self._connections:
            if connection.following:
                if not durable and connection.want_samples and connection.owner in ("", owner):
                    connection.samples.append((self.journal.last_seq, said))
                connection.wake.set()

    def say(self, level: Literal["info", "warning", "error"], text: str) -> None:
        """A line for people: in the log, and to everybody who follows."""
        with contextlib.suppress(OSError, ValueError):  # a full disk under the log, a closed terminal
            print(f"{time.strftime('%H:%M:%S')} {level}: {plain(text)}", file=sys.stderr, flush=True)
        self.journal.append(NodeMessage(level=level, text=text, time=time.time()))
        for connection in self._connections:
            connection.wake.set()

    def _next_event(self, connection: Connection) -> NodeEventFrame | None:
        while (durable := self.journal.after(connection.seq)) is not None:
            seq, event = durable
            if connection.samples and connection.samples[0][0] < seq:
                break  # that sample was taken before this event
            connection.seq = seq
            if isinstance(event, NodeMessage) or connection.owner in ("", event.owner):
                return NodeEventFrame(journal_id=self.journal.journal_id, seq=seq, event=event)
        if connection.samples:
            event = connection.samples.popleft()[1]
            return NodeEventFrame(journal_id=self.journal.journal_id, seq=0, event=event)
        return None

    # ------------------------------------------------------------------ connections

    async def serve(
        self, reader: Reader, writer: Writer, peer: str, *, hello_seconds: float = HELLO_SECONDS
    ) -> None:
        """One client, to its end. Never raises for what a client does."""
        task = asyncio.current_task()
        assert task is not None
        connection = Connection(reader, writer, peer)
        self._tasks.add(task)
        self._strangers.add(connection)
        last: msgspec.Struct | None = None
        try:
            if await self._greet(connection, hello_seconds):
                await connection.talk(
                    lambda message: self._handle(connection, message), lambda: self._next_event(connection)
                )
        except WireError as error:
            last = NodeRefused(reply_to=0, reason=f"{error}; the connection is closed")
        except Gone as gone:
            if connection.hello is None and str(gone) != HUNG_UP:
                last = NodeRefused(reply_to=0, reason=str(gone), retry=str(gone) == GAVE_WAY)
        finally:
            self._strangers.remove(connection)
            self._connections.discard(connection)
            self._tasks.discard(task)
            await connection.hang_up(last)

    async def close(self, seconds: float = 2.0) -> None:
        """Sends what is pending to the clients that read, then hangs up on all."""
        for connection in self._connections:
            connection.close()
        tasks = set(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        self.journal.close()

    async def _greet(self, connection: Connection, hello_seconds: float) -> bool:
        hello = convert(await connection.first(hello_seconds), FromNodeClient)
        self._strangers.remove(connection)
        if not isinstance(hello, NodeClientHello):
            raise WireError("the first message must be a hello")
        refusal = self._refusal(hello)
        if refusal is not None:
            connection.send(refusal)
            return False
        connection.hello = hello
        self._connections.add(connection)
        connection.send(
            NodeHello(
                protocol=NODE_PROTOCOL_VERSION,
                gshare=version("gshare"),
                agent_id=self._identity.agent_id,
                journal_id=self.journal.journal_id,
                pid=os.getpid(),
                hostname=socket.gethostname(),
                draining=self.attempts.draining,
                knows=[EARLY_EXIT],
            )
        )
        return True

    def _refusal(self, hello: NodeClientHello) -> NodeRefused | None:
        def no(reason: str, *, retry: bool = False) -> NodeRefused:
            return NodeRefused(reply_to=0, reason=reason, retry=retry)

        if hello.protocol != NODE_PROTOCOL_VERSION:
            return no(
                f"this agent (gshare {version('gshare')}) speaks protocol {NODE_PROTOCOL_VERSION}, "
                f"the client (gshare {shorten(hello.gshare)}) speaks {hello.protocol}; "
                "use the same gshare for both"
            )
        if max(len(hello.client), len(hello.session)) > MAX_TEXT:
            return no(f"client and session: at most {MAX_TEXT} characters")
        room = MAX_CLIENTS - (FOR_COORDINATORS if hello.role == "observer" else 0)
        if len(self._connections) >= room:
            return no(f"this agent has {len(self._connections)} clients already", retry=True)
        if hello.role == "observer":
            return None
        try:
            check_owner(hello.owner)
        except UsageError as error:
            return no(str(error))
        if not hello.session:
            return no("session: a coordinator draws one at each start; it may not be empty")
        for other in list(self._connections):
            assert other.hello is not None
            if other.owner != hello.owner or other.hello.session == hello.session:
                continue
            silent = time.monotonic() - other.heard
            if silent < SILENT_SECONDS:
                return no(
                    f"two coordinators of one owner: {shorten(other.hello.client)} (from {other.peer}) is "
                    f"connected with another session and spoke {silent:.0f} s ago; stop one of the two, "
                    "or give each its own state directory",
                    retry=True,
                )
            other.close()
            self._connections.discard(other)
        return None

    async def _handle(self, connection: Connection, message: dict[str, Any]) -> None:
        request = convert(message, FromNodeClient)
        if isinstance(request, NodeClientHello):
            raise WireError("a second hello")
        reply: msgspec.Struct
        try:
            if isinstance(request, _STEERING) and not connection.owner:
                raise UsageError("observers look and do not steer; connect as a coordinator")
            reply = await self._handlers[type(request)](connection, request)
        except GshareError as error:
            retry = isinstance(error, RetryLater)
            reply = NodeRefused(reply_to=request.id, reason=str(error), retry=retry)
        except OSError as error:
            reason = f"{error.filename or 'the disk'}: {error.strerror}"
            if error.errno in FULL:
                reason = f"the node's disk is full: {reason}; free some there"
            reply = NodeRefused(reply_to=request.id, reason=reason, retry=True)
        connection.send(reply)

    # ------------------------------------------------------------------ requests

    async def _describe(self, connection: Connection, request: protocol.DescribeNode) -> msgspec.Struct:
        self.journal.mend()
        problems = [f"the journal has gaps: {self.journal.problem}"] if self.journal.problem else []
        running = self.attempts.running
        # One look for all who ask meanwhile. Each keeps it for itself: the first who wakes up takes it away.
        looking = self._looking
        if looking is None:
            # A thread of its own: a driver that hangs must not use up those that serve files.
            looking = asyncio.get_running_loop().run_in_executor(self._looker, self._health.devices)
            self._looking = looking
        await asyncio.wait({looking}, timeout=DRIVER_SECONDS)
        devices = None
        if looking.done():
            if self._looking is looking:
                self._looking = None
            devices = looking.result()
        return await asyncio.to_thread(
            self._health.describe,
            request.id,
            devices,
            attempts_running=running,
            problems=problems,
            models=request.models,
        )

    async def _hold(self, connection: Connection, request: protocol.HoldBlobs) -> msgspec.Struct:
        def look() -> dict[str, tuple[int, bool]]:
            return {sha256: self.blobs.held(sha256) for sha256 in request.blobs}

        found = await asyncio.to_thread(look)
        return protocol.BlobsHeld(
            reply_to=request.id,
            bytes_held={sha256: size for sha256, (size, _) in found.items()},
            complete=[sha256 for sha256, (_, complete) in found.items() if complete],
        )

    async def _put(self, connection: Connection, request: protocol.PutChunk) -> msgspec.Struct:
        held, complete = await asyncio.to_thread(
            self.blobs.put, request.sha256, request.offset, request.total, request.data
        )
        return protocol.Received(reply_to=request.id, bytes_held=held, complete=complete)

    async def _start(self, connection: Connection, request: protocol.StartAttempt) -> msgspec.Struct:
        await self.attempts.start(connection.owner, request)
        return protocol.AttemptAccepted(reply_to=request.id)

    async def _stop(self, connection: Connection, request: protocol.StopAttempts) -> msgspec.Struct:
        reason = plain(request.reason)[:500]

        async def stop(attempt: Attempt) -> None:
            self.attempts.stop(attempt, reason)

        return await self._each(connection, request, stop)

    async def _pause(self, connection: Connection, request: protocol.PauseAttempts) -> msgspec.Struct:
        async def pause(attempt: Attempt) -> None:
            self.attempts.set_paused(attempt, True)

        return await self._each(connection, request, pause)

    async def _resume(self, connection: Connection, request: protocol.ResumeAttempts) -> msgspec.Struct:
        async def resume(attempt: Attempt) -> None:
            self.attempts.set_paused(attempt, False)

        return await self._each(connection, request, resume)

    async def _forget(self, connection: Connection, request: protocol.ForgetAttempts) -> msgspec.Struct:
        return await self._each(connection, request, self.attempts.forget)

    async def _each(
        self,
        connection: Connection,
        request: protocol.StopAttempts
        | protocol.PauseAttempts
        | protocol.ResumeAttempts
        | protocol.ForgetAttempts,
        action: Callable[[Attempt], Awaitable[None]],
    ) -> msgspec.Struct:
        failed: dict[str, str] = {}
        for job, number in request.attempts:
            try:
                await action(self.attempts.find(connection.owner, job, number))
            except GshareError as error:
                failed[f"{job}/{number}"] = str(error)
        return protocol.AttemptsDone(reply_to=request.id, failed=failed)

    async def _list(self, connection: Connection, request: protocol.ListAttempts) -> msgspec.Struct:
        return protocol.Attempts(reply_to=request.id, attempts=self.attempts.statuses(connection.owner))

    async def _follow(self, connection: Connection, request: protocol.FollowNode) -> msgspec.Struct:
        seq, gap = self.journal.start_of(request.journal_id, request.after_seq)
        connection.following = True
        connection.want_samples = request.samples
        connection.seq = seq
        connection.samples.clear()
        connection.wake.set()
        return protocol.FollowingNode(
            reply_to=request.id, journal_id=self.journal.journal_id, next_seq=seq + 1, gap=gap
        )

    async def _pin(self, connection: Connection, request: protocol.PinBundle) -> msgspec.Struct:
        attempt = self.attempts.find(connection.owner, request.job, request.attempt)
        bundle = await asyncio.to_thread(
            self.bundles.pin, connection.owner, attempt.out, request.kind, attempt.status.step
        )
        return protocol.BundleFiles(
            reply_to=request.id,
            bundle=bundle.id,
            files=list(bundle.files.values()),
            step=bundle.step,
            val_loss=bundle.val_loss,
        )

    async def _read_chunk(self, connection: Connection, request: protocol.ReadChunk) -> msgspec.Struct:
        data = await asyncio.to_thread(
            self.bundles.read,
            connection.owner,
            request.bundle,
            request.name,
            request.offset,
            request.length,
        )
        return protocol.Chunk(reply_to=request.id, data=data)

    async def _release(self, connection: Connection, request: protocol.ReleaseBundle) -> msgspec.Struct:
        await asyncio.to_thread(self.bundles.release, connection.owner, request.bundle)
        return protocol.NodeDone(reply_to=request.id)

    async def _read_samples(self, connection: Connection, request: protocol.ReadSamples) -> msgspec.Struct:
        attempt = self.attempts.find(connection.owner, request.job, request.attempt)
        lines, more = await asyncio.to_thread(
            read_samples, attempt.out / METRICS, request.after_step, request.limit
        )
        return protocol.Samples(reply_to=request.id, lines=lines, more=more)

    async def _read_log(self, connection: Connection, request: protocol.ReadLog) -> msgspec.Struct:
        if request.job:
            attempt = self.attempts.find(connection.owner, request.job, request.attempt)
            path = attempt.directory / "trainer.log"
        else:
            path = self._state.log
        text = await asyncio.to_thread(read_log, path, request.max_bytes)
        return protocol.LogText(reply_to=request.id, text=text)

    async def _end_leases(self, connection: Connection, request: protocol.EndLeases) -> msgspec.Struct:
        failed = await asyncio.to_thread(end_leases, request.reservations)
        assert connection.hello is not None  # it comes before any request
        for id in request.reservations:
            if id not in failed:
                self.say("info", f"{connection.hello.client} ended the hold {id}")
        return protocol.LeasesEnded(reply_to=request.id, failed=failed)

    async def _drain_node(self, connection: Connection, request: protocol.DrainNode) -> msgspec.Struct:
        others = self.attempts.active_owners() - {connection.owner}
        if request.stop and others:
            raise RetryLater(f"attempts of {len(others)} other owners run here; they must end first")
        self.attempts.draining = True
        if request.stop:
            self._drain()
        return protocol.NodeDone(reply_to=request.id)
