"""The coordinator's Unix socket, for command line and dashboard: requests, replies, events.

Everything happens in the coordinator's one asyncio loop. Per client nothing is unbounded: at most
`MAX_REQUESTS` are worked on at once (then no more are read), events wait in one ring for all clients, samples
in a short queue of each, and a client that takes nothing for `STALL_SECONDS` is cut off. When all places are
taken, one who neither asks nor follows gives his to the next.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import msgspec
from gshare.agent.errors import EXIT_FAILURE, EXIT_RETRY, EXIT_USAGE, GshareError
from gshare.agent.service.server import socket_address
from gshare.agent.service.wire import FrameReader, WireError, convert, encode
from gshare.coordinator.api_protocol import (
    API_PROTOCOL_VERSION,
    ApiHello,
    ApiRefused,
    ApiReply,
    ApiRequest,
    ApiWelcome,
    ClusterEvent,
    ClusterEventFrame,
    DialIn,
    FollowCluster,
    FollowingCluster,
    FromApiClient,
    JobEnded,
    JobEvent,
    JobMoved,
)
from gshare.coordinator.heard import check_numbers
from gshare.coordinator.link import StreamPair
from gshare.coordinator.tasks import end_tasks

#: Durable events kept for clients that come back: an hour of 100 jobs that evaluate every minute.
EVENTS_KEPT = 8192
SAMPLES_KEPT = 1024  # per client
MAX_CLIENTS = 64
MAX_REQUESTS = 32
MAX_REPLIES = 256  # that a client has not read yet
HELLO_SECONDS = 10.0
STALL_SECONDS = 60.0
#: Who has no request under way and does not follow for so long gives way when all places are taken.
IDLE_SECONDS = 10.0


class EventRing:
    """Durable events with sequence numbers from 1; the oldest are dropped."""

    def __init__(self, journal_id: str, keep: int = EVENTS_KEPT) -> None:
        self.journal_id = journal_id
        self._events: deque[tuple[ClusterEvent, float]] = deque(maxlen=keep)
        self.last_seq = 0

    @property
    def first_seq(self) -> int:
        """The oldest number kept; `last_seq + 1` when there is none."""
        return self.last_seq - len(self._events) + 1

    def append(self, event: ClusterEvent) -> int:
        """Its number. It is kept with the time, by which a client that comes back knows how old it is."""
        self._events.append((event, time.time()))
        self.last_seq += 1
        return self.last_seq

    def after(self, seq: int) -> tuple[int, ClusterEvent, float] | None:
        """The oldest kept event with a number above `seq`, its number before it, its Unix time after it."""
        number = max(seq + 1, self.first_seq)
        return (number, *self._events[number - self.first_seq]) if number <= self.last_seq else None


@dataclass(eq=False)
class _Client:
    stream: StreamPair
    task: asyncio.Task[None]
    heard: float = field(default_factory=time.monotonic)  # when it asked last, monotonic s
    replies: deque[bytes] = field(default_factory=deque)
    samples: deque[ClusterEvent] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    working: set[asyncio.Task[None]] = field(default_factory=set)
    following: bool = False
    wants_samples: bool = False
    jobs: frozenset[str] = frozenset()  # empty: all
    seq: int = 0

    @property
    def idle(self) -> bool:
        busy = self.following or self.working or self.replies
        return not busy and time.monotonic() - self.heard >= IDLE_SECONDS

    def wants(self, event: ClusterEvent) -> bool:
        job = job_of(event)
        return not job or not self.jobs or job in self.jobs


def job_of(event: ClusterEvent) -> str:
    """The job an event is about; empty: none in particular."""
    if isinstance(event, JobEvent):
        return event.event.job
    return event.job if isinstance(event, JobEnded | JobMoved) else getattr(event, "job", "")


class ApiServer:
    """`handle` answers every request but `FollowCluster`; a GshareError it raises becomes an `ApiRefused`."""

    def __init__(
        self,
        path: Path,
        *,
        welcome: Callable[[], ApiWelcome],
        handle: Callable[[ApiRequest], Awaitable[ApiReply]],
        dialled: Callable[[DialIn, StreamPair], Awaitable[None]],
        ring: EventRing,
    ) -> None:
        """`dialled` gets the stream of an agent that has dialled out, and keeps it until it returns."""
        self._path = path
        self._welcome = welcome
        self._handle = handle
        self._dialled = dialled
        self._ring = ring
        self._clients: set[_Client] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listens. Only while the state directory's lock is held: a socket that is there is a dead one's."""
        self._path.unlink(missing_ok=True)
        with socket_address(self._path) as address:
            self._server = await asyncio.start_unix_server(self._accepted, path=address)
        self._path.chmod(0o600)  # the directory is 0700: nobody else can have connected before

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await end_tasks(list(self._tasks))
        self._path.unlink(missing_ok=True)

    def publish(self, event: ClusterEvent, *, sample: bool = False) -> None:
        """Tells the followers; a sample is not kept."""
        if not sample:
            self._ring.append(event)
        for client in self._clients:
            if client.following:
                if sample and client.wants_samples and client.wants(event):
                    client.samples.append(event)
                client.wake.set()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        stream = StreamPair(reader, writer)
        try:
            await self._serve(stream)
        except WireError as error:
            stream.write(encode(ApiRefused(reply_to=0, reason=str(error), exit_code=EXIT_USAGE)))
        except (OSError, asyncio.TimeoutError):
            pass  # the client went away, or never said hello
        except asyncio.CancelledError:
            pass  # `close`; before Python 3.12 the stream's own callback logs a cancelled task as an error
        finally:
            self._tasks.discard(task)
            await stream.close()

    async def _serve(self, stream: StreamPair) -> None:
        frames = FrameReader()
        messages: list[dict[str, object]] = []
        while not messages:
            data = await asyncio.wait_for(stream.read(65536), HELLO_SECONDS)
            if not data:
                return
            messages = frames.feed(data)
        hello = _converted(messages[0])
        if isinstance(hello, DialIn):
            if len(messages) > 1:
                raise WireError("a frame after DialIn: the agent waits for a hello there")
            await self._dialled(hello, stream)
            return
        if not isinstance(hello, ApiHello):
            raise WireError(f"{type(hello).__name__} before the hello")
        refusal = self._refusal(hello)
        if refusal is not None:
            stream.write(encode(refusal))
            return
        task = asyncio.current_task()
        assert task is not None
        client = _Client(stream, task)
        client.replies.append(encode(self._welcome()))
        client.wake.set()
        self._clients.add(client)
        try:
            await self._talk(client, frames, messages[1:])
        finally:
            self._clients.discard(client)
            for task in list(client.working):
                task.cancel()

    def _refusal(self, hello: ApiHello) -> ApiRefused | None:
        if hello.protocol != API_PROTOCOL_VERSION:
            reason = (
                f"this coordinator (gshare {version('gshare')}) speaks protocol {API_PROTOCOL_VERSION}, the "
                f"client (gshare {hello.gshare}) speaks {hello.protocol}; use the same gshare for both"
            )
            return ApiRefused(reply_to=0, reason=reason)
        if len(self._clients) >= MAX_CLIENTS and not self._make_way():
            reason = f"the coordinator has {MAX_CLIENTS} clients already"
            return ApiRefused(reply_to=0, reason=reason, exit_code=EXIT_RETRY)
        return None

    def _make_way(self) -> bool:
        """Takes the place of the client that has been idle longest; False: all of them use theirs."""
        idle = min((c for c in self._clients if c.idle), key=lambda client: client.heard, default=None)
        if idle is None:
            return False
        reason = f"idle while all {MAX_CLIENTS} places were taken; connect again"
        idle.stream.write(encode(ApiRefused(reply_to=0, reason=reason, exit_code=EXIT_RETRY)))
        self._clients.discard(idle)
        idle.task.cancel()
        return True

    async def _talk(self, client: _Client, frames: FrameReader, first: list[dict[str, object]]) -> None:
        async def read() -> None:
            for message in first:
                await self._take(client, message)
            while data := await client.stream.read(65536):
                for message in frames.feed(data):
                    await self._take(client, message)

        reading, writing = asyncio.create_task(read()), asyncio.create_task(self._write(client))
        try:
            done, _ = await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what ended it
        finally:
            await end_tasks((reading, writing))

    async def _take(self, client: _Client, message: dict[str, object]) -> None:
        request = _converted(message)
        client.heard = time.monotonic()
        if isinstance(request, ApiHello | DialIn):
            raise WireError("a second hello")
        if len(client.replies) >= MAX_REPLIES:
            raise WireError(f"{MAX_REPLIES} replies not read")
        if isinstance(request, FollowCluster):
            self._reply(client, self._follow(client, request))
            return
        while len(client.working) >= MAX_REQUESTS:
            await asyncio.wait(client.working, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.create_task(self._answer(client, request))
        client.working.add(task)
        task.add_done_callback(client.working.discard)

    async def _answer(self, client: _Client, request: ApiRequest) -> None:
        try:
            reply = await self._handle(request)
        except GshareError as error:
            reply = ApiRefused(reply_to=request.id, reason=str(error), exit_code=error.exit_code)
        except Exception as error:  # a mistake of ours: the client is told, the coordinator lives on
            reason = f"the coordinator failed at this: {type(error).__name__}: {error}"
            reply = ApiRefused(reply_to=request.id, reason=reason, exit_code=EXIT_FAILURE)
        try:
            self._reply(client, reply)
        except WireError as error:
            reason = f"the answer is too large: {error}"
            self._reply(client, ApiRefused(reply_to=request.id, reason=reason, exit_code=EXIT_FAILURE))

    def _reply(self, client: _Client, reply: msgspec.Struct) -> None:
        """WireError: it fits into no frame."""
        client.replies.append(encode(reply))
        client.wake.set()

    async def _write(self, client: _Client) -> None:
        while True:
            frame = self._next(client)
            if frame is None:
                client.wake.clear()
                await client.wake.wait()
                continue
            client.stream.write(frame)
            await asyncio.wait_for(client.stream.drain(), STALL_SECONDS)

    def _next(self, client: _Client) -> bytes | None:
        """Replies before events, durable events before samples."""
        if client.replies:
            return client.replies.popleft()
        while client.following and (found := self._ring.after(client.seq)) is not None:
            client.seq, event, when = found
            if client.wants(event):
                return self._frame(client.seq, event, when)
        return self._frame(0, client.samples.popleft(), time.time()) if client.samples else None

    def _frame(self, seq: int, event: ClusterEvent, when: float) -> bytes:
        return encode(ClusterEventFrame(journal_id=self._ring.journal_id, seq=seq, event=event, time=when))

    def _follow(self, client: _Client, request: FollowCluster) -> FollowingCluster:
        ring = self._ring
        if request.journal_id == ring.journal_id:
            after = request.after_seq
        else:
            after = ring.last_seq if request.new_only else 0
        client.following, client.wants_samples = True, request.samples
        client.jobs = frozenset(request.jobs)
        client.seq = max(min(after, ring.last_seq), ring.first_seq - 1)
        client.samples.clear()
        return FollowingCluster(
            reply_to=request.id,
            journal_id=ring.journal_id,
            next_seq=client.seq + 1,
            gap=after < ring.first_seq - 1,
            last_seq=ring.last_seq,
        )


def _converted(message: dict[str, object]) -> FromApiClient:
    """WireError: it is no message, or holds a number that neither store nor node could take."""
    check_numbers(message)
    return convert(message, FromApiClient)
