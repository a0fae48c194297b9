"""One client of the agent: its stream, what waits to be sent to it, and what ends it.

Nothing here is unbounded. Requests are taken one after the other, and the next one is read only when the
replies before it are few: who never reads is not read from either. Durable events stay in the (bounded)
journal until they are sent, samples wait in a ring. A client that takes nothing for `STALL_SECONDS` is cut
off; it may come back and go on where it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
from gshare.agent.node.protocol import AttemptEvent, NodeClientHello, NodeEventFrame
from gshare.agent.service.wire import FrameReader, encode

#: A quarter of a minute of 16 jobs at four rounds a second.
SAMPLES_KEPT = 1024
#: Bytes of replies not sent yet beyond which no further request is read: one of the largest frames.
REPLY_BYTES = 16 << 20
STALL_SECONDS = 60.0
LINGER_SECONDS = 1.0
#: Of what a client may send in one frame: a chunk of a file, or an attempt with thousands of references.
MAX_CLIENT_FRAME = 2 << 20
HELLO_SECONDS = 10.0
#: Connections that have not said hello; more than a loop accepts at once (100), so that a hello which came
#: with its connection is read.
MAX_STRANGERS = 128
_READ = 1 << 16
HUNG_UP = "hung up"
GAVE_WAY = "so many others connected before a hello came that this connection gave way; connect again"


class Reader(Protocol):
    """As much of a stream as is needed: asyncio's and asyncssh's both are one."""

    async def read(self, n: int = -1, /) -> bytes: ...


class Writer(Protocol):
    def write(self, data: bytes, /) -> None: ...
    async def drain(self) -> None: ...
    def close(self) -> None: ...


class Gone(Exception):
    """The client hung up, or was cut off; the text says why, for the log."""


class Connection:
    """Lives in the agent's loop."""

    def __init__(self, reader: Reader, writer: Writer, peer: str) -> None:
        self._reader = reader
        self._writer = writer
        self.peer = peer  # for people: where it comes from
        self.hello: NodeClientHello | None = None
        self.heard = time.monotonic()  # when it last said anything
        self.following = False
        self.want_samples = True
        self.seq = 0  # everything durable up to here was sent, or was not for this client
        self.samples: deque[tuple[int, AttemptEvent]] = deque(maxlen=SAMPLES_KEPT)
        self.wake = asyncio.Event()
        self._frames = FrameReader(MAX_CLIENT_FRAME)
        self._messages: deque[dict[str, Any]] = deque()
        self._replies: deque[bytes] = deque()
        self._reply_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._closing = False
        self._giving_way = asyncio.Event()

    @property
    def owner(self) -> str:
        """Whose attempts it sees; empty: everybody's."""
        return self.hello.owner if self.hello is not None and self.hello.role == "coordinator" else ""

    async def first(self, seconds: float) -> dict[str, Any]:
        """The first message. Gone: none came in time, or before `give_way`."""
        reading = asyncio.create_task(self._next())
        giving_way = asyncio.create_task(self._giving_way.wait())
        try:
            both = {reading, giving_way}
            done, _ = await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if reading in done:
                return reading.result()
            raise Gone(GAVE_WAY if giving_way in done else f"no hello came within {seconds:.0f} s")
        finally:
            for task in (reading, giving_way):
                task.cancel()
            await asyncio.gather(reading, giving_way, return_exceptions=True)

    def give_way(self) -> None:
        """Ends it, unless its first message is there: its place is for one who came later."""
        self._giving_way.set()

    def send(self, message: msgspec.Struct) -> None:
        frame = encode(message)
        self._replies.append(frame)
        self._reply_bytes += len(frame)
        if self._reply_bytes > REPLY_BYTES:
            self._room.clear()
        self.wake.set()

    def close(self) -> None:
        """Sends what is pending, then hangs up."""
        self._closing = True
        self.wake.set()

    async def talk(
        self,
        handle: Callable[[dict[str, Any]], Awaitable[None]],
        next_event: Callable[[], NodeEventFrame | None],
    ) -> None:
        """Until one side ends it: requests to `handle`, one after the other; events when it follows."""
        reading = asyncio.create_task(self._read(handle))
        writing = asyncio.create_task(self._write(next_event))
        try:
            done, _ = await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what ended it
        finally:
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    async def hang_up(self, last: msgspec.Struct | None = None) -> None:
        """Closes the stream; `last` is said if the client takes it at once."""
        with contextlib.suppress(Exception):
            if last is not None:
                self._replies.append(encode(last))
            while self._replies:
                self._writer.write(self._replies.popleft())
            await asyncio.wait_for(self._writer.drain(), LINGER_SECONDS)
        with contextlib.suppress(Exception):
            self._writer.close()
        # A stream that cannot be flushed would stay open, and keep its client, for ever.
        abort = getattr(getattr(self._writer, "transport", None), "abort", None)
        if abort is not None:
            asyncio.get_running_loop().call_later(LINGER_SECONDS, abort)

    async def _read(self, handle: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        while True:
            message = await self._next()
            await self._room.wait()
            await handle(message)

    async def _next(self) -> dict[str, Any]:
        while not self._messages:
            try:
                data = await self._reader.read(_READ)
            except OSError as error:
                raise Gone(str(error)) from None
            if not data:
                raise Gone(HUNG_UP)
            self.heard = time.monotonic()
            self._messages.extend(self._frames.feed(data))
        return self._messages.popleft()

    async def _write(self, next_event: Callable[[], NodeEventFrame | None]) -> None:
        while True:
            frame = self._next_frame(next_event)
            if frame is not None:
                await self._take(frame)
            elif self._closing:
                return
            else:
                self.wake.clear()
                await self.wake.wait()

    async def _take(self, frame: bytes) -> None:
        """Writes a frame. Not `wait_for`: before Python 3.12 it may swallow a cancellation (seen: a client
        that sent nonsense stayed connected)."""
        writing = asyncio.current_task()
        assert writing is not None
        stalled = False

        def cut_off() -> None:
            nonlocal stalled
            stalled = True
            writing.cancel()

        timer = asyncio.get_running_loop().call_later(STALL_SECONDS, cut_off)
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except asyncio.CancelledError:
            if stalled:
                raise Gone(f"has read nothing for {STALL_SECONDS:.0f} s: cut off") from None
            raise
        except OSError as error:
            raise Gone(str(error)) from None
        finally:
            timer.cancel()

    def _next_frame(self, next_event: Callable[[], NodeEventFrame | None]) -> bytes | None:
        """Replies first, then events in the order in which they happened."""
        if self._replies:
            frame = self._replies.popleft()
            self._reply_bytes -= len(frame)
            if self._reply_bytes <= REPLY_BYTES:
                self._room.set()
            return frame
        event = next_event() if self.following else None
        return encode(event) if event is not None else None


class Strangers:
    """Connections that have not said hello yet. Of too many the oldest gives way: they shut nobody out."""

    def __init__(self) -> None:
        self._waiting: dict[Connection, None] = {}  # the oldest first

    def add(self, connection: Connection) -> None:
        self._waiting[connection] = None
        if len(self._waiting) > MAX_STRANGERS:
            oldest = next(iter(self._waiting))
            self.remove(oldest)
            oldest.give_way()

    def remove(self, connection: Connection) -> None:
        """It has said hello, or is gone."""
        self._waiting.pop(connection, None)
