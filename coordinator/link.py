"""One connection to an agent: hello, requests with their replies, the stream of events.

    link = await AgentLink.open(stream, client=…, owner=…, session=…, on_event=…)
    info = await link.ask(NodeInfo, DescribeNode)
    gap = await link.follow(journal_id, after_seq)
    reason = await link.wait_gone()

It knows nothing of SSH: the stream is whatever `channel.py` opened. What comes from the agent is not trusted:
a frame that is none, a reply that nobody asked for and a second hello end the connection, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.metadata import version
from typing import Protocol, TypeVar

import msgspec
from gshare.agent.errors import GshareError
from gshare.agent.jobs.names import plain, shorten
from gshare.agent.node.protocol import (
    NODE_PROTOCOL_VERSION,
    FollowingNode,
    FollowNode,
    FromNode,
    NodeClientHello,
    NodeEventFrame,
    NodeHello,
    NodeRefused,
)
from gshare.agent.service.wire import FrameReader, WireError, convert, encode
from gshare.coordinator.heard import check_event, check_node_message
from gshare.coordinator.tasks import end_tasks

#: Requests that touch no large file are answered from memory.
REPLY_SECONDS = 30.0
HELLO_SECONDS = 20.0
#: One chunk, on a line that is nearly dead.
DRAIN_SECONDS = 120.0
_READ_BYTES = 65536
#: Text from a node is shown to people, so it is cut to a line of this length.
REASON_LENGTH = 500

R = TypeVar("R", bound=msgspec.Struct)


class Stream(Protocol):
    """What a link needs of `channel.Channel`."""

    async def read(self, most: int = ..., /) -> bytes: ...
    def write(self, data: bytes, /) -> None: ...
    async def drain(self) -> None: ...
    async def close(self) -> None: ...


class StreamPair:
    """An asyncio stream as one object."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, most: int = _READ_BYTES, /) -> bytes:
        return await self._reader.read(most)

    def write(self, data: bytes, /) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        # close() flushes first, and one who does not read would keep the socket for ever.
        asyncio.get_running_loop().call_later(1.0, self._writer.transport.abort)


class LinkGone(GshareError):
    """The connection ended, or what came over it was not the protocol. Connect again."""


class LinkRefused(GshareError):
    """The agent refused a request; `retry`: it may be asked again later."""

    def __init__(self, reason: str, *, retry: bool) -> None:
        super().__init__(reason)
        self.retry = retry


class LinkLate(GshareError):
    """No answer in time. Requests may be asked again: the same ones get the same answer."""


class AgentLink:
    """Open after `open`; every method raises `LinkGone` once the connection has ended."""

    hello: NodeHello

    def __init__(
        self,
        stream: Stream,
        on_event: Callable[[NodeEventFrame], None] | None,
    ) -> None:
        self._stream = stream
        self._on_event = on_event
        self._frames = FrameReader()
        self._pending: dict[int, asyncio.Future[msgspec.Struct]] = {}
        self._last_id = 0
        self._journal_id = ""
        self._seq = 0
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reading: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        stream: Stream,
        *,
        client: str,
        owner: str = "",
        session: str = "",
        on_event: Callable[[NodeEventFrame], None] | None = None,
        hello_seconds: float = HELLO_SECONDS,
    ) -> AgentLink:
        """Says hello and waits for the agent's. With an `owner` as its coordinator, else as an observer.

        `on_event` hears of every event frame, in order, once each; it may not block for long. What it raises
        ends the connection. Raises `LinkRefused` when the agent refuses, `LinkGone` for anything else.
        """
        link = cls(stream, on_event)
        hello = NodeClientHello(
            protocol=NODE_PROTOCOL_VERSION,
            gshare=version("gshare"),
            client=client,
            role="coordinator" if owner else "observer",
            owner=owner,
            session=session,
        )
        try:
            link.hello = await asyncio.wait_for(link._greet(hello), hello_seconds)
        except asyncio.TimeoutError:
            await stream.close()
            raise LinkLate(f"no hello from the agent within {hello_seconds:.0f} s") from None
        except BaseException:
            await stream.close()
            raise
        link._reading = asyncio.create_task(link._read())
        return link

    @property
    def is_gone(self) -> bool:
        return self._gone.done()

    async def wait_gone(self) -> str:
        """Returns why, when the connection has ended."""
        return await asyncio.shield(self._gone)

    async def ask(
        self,
        reply_type: type[R],
        make: type[msgspec.Struct],
        *,
        timeout: float = REPLY_SECONDS,
        **fields: object,
    ) -> R:
        """Sends `make(id=…, **fields)`, waits for the reply: `LinkRefused`, `LinkLate`, `LinkGone`."""
        future = self.send(make, **fields)
        try:
            await self.drain()
            reply = await asyncio.wait_for(future, timeout)
        except asyncio.TimeoutError:
            future.cancel()
            raise LinkLate(f"the agent did not answer {make.__name__} within {timeout:.0f} s") from None
        return self.checked(reply, reply_type)

    def send(self, make: type[msgspec.Struct], **fields: object) -> asyncio.Future[msgspec.Struct]:
        """Sends a request without waiting; several may be under way. Pass what comes to `checked`."""
        if self._gone.done():
            raise LinkGone(self._gone.result())
        self._last_id += 1
        request_id = self._last_id
        future: asyncio.Future[msgspec.Struct] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = future
        future.add_done_callback(lambda _: self._pending.pop(request_id, None))
        try:
            self._stream.write(encode(make(id=request_id, **fields)))
        except (OSError, RuntimeError) as error:
            self._end(f"the connection broke ({error})")
            future.cancel()
            raise LinkGone(self._gone.result()) from None
        return future

    def checked(self, reply: msgspec.Struct, reply_type: type[R]) -> R:
        """The reply as what was asked for. `LinkRefused` for a refusal; another type ends the connection."""
        if isinstance(reply, NodeRefused):
            raise LinkRefused(one_line(reply.reason), retry=reply.retry)
        if not isinstance(reply, reply_type):
            reason = f"the agent answered with {type(reply).__name__} instead of {reply_type.__name__}"
            self._end(reason)
            raise LinkGone(reason)
        return reply

    async def follow(self, journal_id: str, after_seq: int, *, samples: bool = True) -> FollowingNode:
        """Events from now on, after `after_seq` of `journal_id`; `gap` in the answer: some are lost."""
        # The agent may send the first event in the same segment as its answer.
        self._journal_id, self._seq = journal_id, after_seq
        return await self.ask(
            FollowingNode, FollowNode, journal_id=journal_id, after_seq=after_seq, samples=samples
        )

    async def close(self) -> None:
        self._end("closed")
        if self._reading is not None:
            await end_tasks([self._reading])
        if self._closing is not None:
            await asyncio.gather(self._closing, return_exceptions=True)

    async def drain(self) -> None:
        """Until most of what was sent has left. `LinkGone`: nothing was taken for `DRAIN_SECONDS`."""
        try:
            await asyncio.wait_for(self._stream.drain(), DRAIN_SECONDS)
        except asyncio.TimeoutError:
            self._end(f"the agent took nothing for {DRAIN_SECONDS:.0f} s")
            raise LinkGone(self._gone.result()) from None
        except (OSError, RuntimeError, GshareError) as error:
            self._end(f"the connection broke ({error})")
            raise LinkGone(self._gone.result()) from None

    async def _greet(self, hello: NodeClientHello) -> NodeHello:
        try:
            self._stream.write(encode(hello))
            await self._stream.drain()
            messages: list[dict[str, object]] = []
            while not messages:
                data = await self._stream.read(_READ_BYTES)
                if not data:
                    raise LinkGone("the agent hung up before its hello")
                messages = self._frames.feed(data)
            check_node_message(messages[0])
            answer = convert(messages[0], FromNode)
        except WireError as error:
            raise LinkGone(f"what answers is no gshare agent: {one_line(str(error))}") from None
        except (OSError, RuntimeError) as error:
            raise LinkGone(f"the connection broke ({error})") from None
        if isinstance(answer, NodeRefused):
            raise LinkRefused(one_line(answer.reason), retry=answer.retry)
        if not isinstance(answer, NodeHello) or len(messages) > 1:
            raise LinkGone(f"what answers is no gshare agent: {type(answer).__name__} instead of a hello")
        if answer.protocol != NODE_PROTOCOL_VERSION:
            raise LinkRefused(
                f"the agent (gshare {shorten(answer.gshare, 40)}) speaks protocol {answer.protocol}, this "
                f"coordinator (gshare {hello.gshare}) speaks {hello.protocol}; use the same gshare on both",
                retry=False,
            )
        return answer

    async def _read(self) -> None:
        reason = "the agent hung up"
        try:
            while data := await self._stream.read(_READ_BYTES):
                for frame in self._frames.feed(data):
                    check_node_message(frame)
                    self._take(convert(frame, FromNode))
        except asyncio.CancelledError:
            reason = "closed"
            raise
        except WireError as error:
            reason = f"what the agent sent is not the protocol: {one_line(str(error))}"
        except GshareError as error:
            reason = one_line(str(error))
        except Exception as error:  # asyncssh's own types, a broken pipe, a handler that failed
            reason = f"the connection broke ({type(error).__name__}: {error})"
        finally:
            self._end(reason)

    def _take(self, message: FromNode) -> None:
        if isinstance(message, NodeHello):
            raise LinkGone("the agent said hello twice")
        if isinstance(message, NodeEventFrame):
            self._take_event(message)
        elif isinstance(message, NodeRefused) and message.reply_to == 0:
            raise LinkGone(one_line(message.reason))
        else:
            future = self._pending.get(message.reply_to)
            if future is None and not 0 < message.reply_to <= self._last_id:
                raise LinkGone(f"the agent answered request {message.reply_to}, which nobody made")
            if future is not None and not future.done():  # else nobody waits any more
                future.set_result(message)

    def _take_event(self, frame: NodeEventFrame) -> None:
        check_event(frame)
        if frame.seq:
            if frame.journal_id == self._journal_id and frame.seq <= self._seq:
                return  # told again after a reconnection
            self._journal_id, self._seq = frame.journal_id, frame.seq
        if self._on_event is not None:
            self._on_event(frame)

    def _end(self, reason: str) -> None:
        if self._gone.done():
            return
        self._gone.set_result(reason)
        for future in list(self._pending.values()):
            if not future.done():
                future.set_exception(LinkGone(reason))
                future.exception()  # one that nobody awaits any more is no error of its own
        self._closing = asyncio.get_running_loop().create_task(self._stream.close())


def one_line(text: str) -> str:
    """A node's text for a message here: one line, without control characters, bounded."""
    shown = plain(" ".join(text.split()))
    return shown if len(shown) <= REASON_LENGTH else f"{shown[: REASON_LENGTH - 1]}…"
