"""The trainer's socket: a thread with an asyncio loop of its own, so that no client can hold up a round.

What a client asks of the jobs is queued for the main thread; what it wants to read comes from the journal
at its own pace. Per client there is nothing unbounded: durable events stay in the (bounded) journal until
it takes them, samples wait in a ring, and one that floods requests without reading replies is cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from gshare.agent.errors import GshareError
from gshare.agent.jobs.events import Event
from gshare.agent.service.journal import Journal
from gshare.agent.service.protocol import (
    PROTOCOL_VERSION,
    ClientHello,
    Detach,
    Done,
    EventFrame,
    Follow,
    Following,
    FromClient,
    Jobs,
    JobStatus,
    JoinTrainer,
    ListJobs,
    Refused,
    Request,
    SubmitJobs,
    TrainerHello,
)
from gshare.agent.service.wire import FrameReader, WireError, convert, encode

SAMPLES_KEPT = 1024  # per client: half a minute of 16 jobs at two rounds a second
MAX_CLIENTS = 64
MAX_REPLIES = 1024  # that a client has not read yet
HELLO_SECONDS = 10.0
LINGER_SECONDS = 1.0
#: A sockaddr_un holds 108 bytes with the final zero (unix(7)).
SOCKET_PATH_BYTES = 107


@dataclass(eq=False)
class Connection:
    """One client. Lives in the server's thread; the main thread uses `key` and `client` only."""

    key: int
    client: str
    frames: FrameReader = field(default_factory=FrameReader)
    replies: deque[bytes] = field(default_factory=deque)
    samples: deque[tuple[int, Event]] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    following: bool = False
    jobs: frozenset[str] = frozenset()  # empty: all
    seq: int = 0  # the last durable event sent
    detached: bool = False
    brings_jobs: bool = False  # it has submitted some, or asked to; else it only looks
    closed: bool = False  # the client is gone; what it asked for before may still be queued


@dataclass(frozen=True)
class Command:
    """A request for the main thread; None: the client is gone."""

    connection: Connection
    request: Request | None


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address for `bind` or `connect` that fits, however long `path` is (through /proc/self/fd)."""
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def bound_socket(path: Path) -> socket.socket:
    """A stream socket bound to `path`, 0600, not listening yet. Raises `OSError`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_address(path) as address:
            sock.bind(address)
        # Before listen, and inside a directory of mode 0700: nobody can have connected earlier.
        path.chmod(0o600)
    except OSError:
        sock.close()
        raise
    return sock


class Server:
    """`start` returns when the socket listens; `publish`, `reply` and `close` may come from any thread."""

    def __init__(
        self,
        path: Path,
        journal: Journal,
        hello: Callable[[], TrainerHello],
        job_list: Callable[[], list[JobStatus]],
        commands: queue.SimpleQueue[Command],
        submitted: Callable[[SubmitJobs, str], None] = lambda request, client: None,
        on_left: Callable[[Connection], None] = lambda connection: None,
    ) -> None:
        """`submitted` hears of jobs, and of the client they are of, when they arrive; the command follows.

        `on_left` is called when a client has gone. Both from the server's thread.
        """
        self._path = path
        self._journal = journal
        self._hello = hello
        self._job_list = job_list
        self._commands = commands
        self._submitted = submitted
        self._on_left = on_left
        self._connections: dict[int, Connection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_key = 1
        self._listening = threading.Event()
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self.ever_connected = False
        self._ever_owned = False
        #: The newest durable event that `publish` has told this thread of. The journal may be ahead: what is
        #: there and not told of yet may be younger than a sample that is still on its way here.
        self._told = journal.last_seq

    @property
    def holders(self) -> int:
        """Clients connected now that the trainer stays for: they have brought jobs, or asked to. Before one
        has, any client may be going to."""
        clients = list(self._connections.values())
        return sum(one.brings_jobs for one in clients) if self._ever_owned else len(clients)

    @property
    def owners_left(self) -> bool:
        """Clients have brought jobs, or asked to, and none of them is connected any more."""
        return self._ever_owned and not any(one.brings_jobs for one in list(self._connections.values()))

    def start(self, bound: socket.socket | None = None) -> None:
        """On `bound`, by default a new socket at its path. Raises `OSError` when there can be none."""
        self._socket = bound_socket(self._path) if bound is None else bound
        self._thread.start()
        self._listening.wait()

    def publish(self, seq: int, event: Event) -> None:
        """Tell the followers: `seq` ≥ 1 means that the event is in the journal, 0 that it is a sample."""
        last_seq = seq or self._journal.last_seq
        self._call(self._publish, event if seq == 0 else None, last_seq)

    def reply(self, connection: Connection, message: msgspec.Struct) -> None:
        self._call(self._reply, connection, message)

    def close(self, flush_seconds: float = 2.0) -> None:
        """Sends what is pending to the clients that read, for at most `flush_seconds`, then hangs up."""
        self._call(self._begin_close, flush_seconds)
        self._thread.join(flush_seconds + 5.0)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        server = await asyncio.start_unix_server(self._serve, sock=self._socket)
        self._listening.set()
        await self._stop.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin_close(self, flush_seconds: float) -> None:
        self._closing = True
        for connection in self._connections.values():
            connection.wake.set()
        self._loop.call_later(flush_seconds, self._stop.set)
        self._stop_when_flushed()

    def _stop_when_flushed(self) -> None:
        if self._closing and not self._connections:
            self._stop.set()

    def _publish(self, sample: Event | None, last_seq: int) -> None:
        self._told = max(self._told, last_seq)
        for connection in self._connections.values():
            if connection.following:
                if sample is not None and _wants(connection, sample):
                    connection.samples.append((last_seq, sample))
                connection.wake.set()

    def _reply(self, connection: Connection, message: msgspec.Struct) -> None:
        connection.replies.append(encode(message))
        connection.wake.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection: Connection | None = None
        try:
            connection = await self._greet(reader, writer)
            if connection is not None:
                await self._talk(connection, reader, writer)
        except WireError as error:
            with contextlib.suppress(OSError):
                writer.write(encode(Refused(reply_to=0, reason=str(error))))
        except (OSError, asyncio.TimeoutError):
            pass  # the client went away, or never said hello
        finally:
            if connection is not None:
                del self._connections[connection.key]
                connection.closed = True
                self._commands.put(Command(connection, None))
                self._on_left(connection)
            self._tasks.discard(task)
            writer.close()
            # close() flushes first, and one who does not read would keep the socket, and itself, waiting.
            self._loop.call_later(LINGER_SECONDS, writer.transport.abort)
            self._stop_when_flushed()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Connection | None:
        frames = FrameReader()
        messages: list[dict[str, object]] = []
        while not messages:
            data = await asyncio.wait_for(reader.read(65536), HELLO_SECONDS)
            if not data:
                return None
            messages = frames.feed(data)
        hello = convert(messages[0], ClientHello)
        refusal = self._refusal(hello)
        if refusal is not None:
            writer.write(encode(Refused(reply_to=0, reason=refusal)))
            return None
        connection = Connection(key=self._next_key, client=hello.client, frames=frames)
        self._next_key += 1
        self._connections[connection.key] = connection
        self.ever_connected = True
        self._reply(connection, self._hello())
        for message in messages[1:]:
            self._handle(connection, message)
        return connection

    def _refusal(self, hello: ClientHello) -> str | None:
        ours = self._hello()
        if hello.protocol != PROTOCOL_VERSION:
            return (
                f"this trainer (gshare {ours.gshare}) speaks protocol {PROTOCOL_VERSION}, "
                f"the client (gshare {hello.gshare}) speaks {hello.protocol}; use the same gshare for both"
            )
        if len(self._connections) >= MAX_CLIENTS:
            return f"this trainer has {MAX_CLIENTS} clients already"
        return None

    async def _talk(
        self, connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Reads until the client hangs up; another task writes: who never reads blocks only that."""
        writing = asyncio.create_task(self._write(connection, writer))
        reading = asyncio.create_task(self._read(connection, reader))
        try:
            done, _ = await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what ended it
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    async def _read(self, connection: Connection, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            for message in connection.frames.feed(data):
                self._handle(connection, message)

    async def _write(self, connection: Connection, writer: asyncio.StreamWriter) -> None:
        while True:
            frame = self._next_frame(connection)
            if frame is not None:
                writer.write(frame)
                await writer.drain()
            elif self._closing:
                return
            else:
                connection.wake.clear()
                await connection.wake.wait()

    def _next_frame(self, connection: Connection) -> bytes | None:
        """Replies first, then events in the order in which they happened."""
        if connection.replies:
            return connection.replies.popleft()
        if not connection.following:
            return None
        while (durable := self._journal.after(connection.seq)) is not None and durable[0] <= self._told:
            seq, event = durable
            if connection.samples and connection.samples[0][0] < seq:
                break  # that sample was taken before this event
            connection.seq = seq
            if _wants(connection, event):
                return self._event_frame(seq, event)
        if connection.samples:
            return self._event_frame(0, connection.samples.popleft()[1])
        return None

    def _event_frame(self, seq: int, event: Event) -> bytes:
        return encode(EventFrame(journal_id=self._journal.journal_id, seq=seq, event=event))

    def _handle(self, connection: Connection, message: dict[str, object]) -> None:
        request = convert(message, FromClient)
        if isinstance(request, ClientHello):
            raise WireError("a second hello")
        if len(connection.replies) >= MAX_REPLIES:
            raise WireError(f"{MAX_REPLIES} replies not read")
        if isinstance(request, Follow):
            self._reply(connection, self._follow(connection, request))
        elif isinstance(request, ListJobs):
            jobs = Jobs(reply_to=request.id, jobs=self._job_list(), clients=self.holders)
            self._reply(connection, jobs)
        else:
            if isinstance(request, Detach):
                connection.detached = True
                self._reply(connection, Done(reply_to=request.id))
                return
            if isinstance(request, SubmitJobs | JoinTrainer):
                connection.brings_jobs = self._ever_owned = True
            if isinstance(request, SubmitJobs):
                self._submitted(request, connection.client)
            self._commands.put(Command(connection, request))

    def _follow(self, connection: Connection, request: Follow) -> Following:
        journal = self._journal
        same = request.journal_id == journal.journal_id
        after = request.after_seq if same else 0
        first = journal.first_seq
        connection.following = True
        connection.jobs = frozenset(request.jobs)
        connection.seq = max(min(after, journal.last_seq), first - 1)
        connection.samples.clear()
        connection.wake.set()
        return Following(
            reply_to=request.id,
            journal_id=journal.journal_id,
            next_seq=connection.seq + 1,
            gap=after < first - 1,
        )


def _wants(connection: Connection, event: Event) -> bool:
    """Whether the client follows the event's job; what concerns no job in particular concerns everybody."""
    job = event.job
    return not job or not connection.jobs or job in connection.jobs


def connect_socket(path: Path) -> socket.socket:
    """A connected stream socket. Raises `GshareError` when nobody listens at `path`."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket_address(path) as address:
            sock.connect(address)
    except OSError as error:
        sock.close()
        raise GshareError(f"{path}: no trainer answers there ({error.strerror})") from None
    return sock
