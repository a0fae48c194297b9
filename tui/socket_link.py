"""One connection over a Unix socket to a coordinator or a trainer: hello, requests with replies, events.

    link = await SocketLink.open(path, hello, Welcome, FromCoordinator, on_event, what="the coordinator")
    rows = await link.ask(JobRows, ListClusterJobs)
    reason = await link.wait_gone()

Both protocols have requests with `id`, replies with `reply_to`, and refusals with `reason`. Ten thousand
small messages a second would wake the loop as often: after each read the link leaves the socket alone for
`PAUSE_SECONDS` and takes what has gathered at once. A full socket holds up the sender, not us.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from gshare.agent.errors import GshareError
from gshare.agent.jobs.names import plain
from gshare.agent.service.server import socket_address
from gshare.agent.service.wire import WireError, encode
from gshare.tui.typed_frames import TypedReader

#: Of the 300 ms that a state change may take to the screen.
PAUSE_SECONDS = 0.03
#: Read at once before the loop does something else: about 8 ms of work.
BURST_BYTES = 1 << 20
_READ_BYTES = 1 << 18
HELLO_SECONDS = 20.0
REPLY_SECONDS = 30.0

R = TypeVar("R", bound=msgspec.Struct)


class SocketGone(GshareError):
    """The connection ended, or could not be made. Connect again."""


class SocketLink:
    """Open after `open`. Lives in one loop."""

    def __init__(self, sock: socket.socket, kind: Any, on_event: Callable[[Any], None], what: str) -> None:
        self.what = what  # for people: "the coordinator"
        self.heard = time.monotonic()
        self._socket = sock
        self._reader = TypedReader(kind)
        self._on_event = on_event
        self._hello: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pending: dict[int, tuple[asyncio.Future[Any], Callable[[Any], None]]] = {}
        self._last_id = 0
        self._reading: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        path: Path,
        hello: msgspec.Struct,
        welcome: type[R],
        kind: Any,
        on_event: Callable[[Any], None],
        *,
        what: str,
    ) -> tuple[SocketLink, R]:
        """Connects and exchanges hellos. `on_event` hears of every message that is no reply, in order; what
        it raises ends the connection. `SocketGone`: nobody there; GshareError: refused.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            with socket_address(path) as address:
                await asyncio.get_running_loop().sock_connect(sock, address)
        except OSError as error:
            sock.close()
            raise SocketGone(f"{what} does not answer at {path} ({error.strerror})") from None
        link = cls(sock, kind, on_event, what)
        link._reading = asyncio.create_task(link._read())
        try:
            await link._send(hello)
            answer = await asyncio.wait_for(asyncio.shield(link._hello), HELLO_SECONDS)
        except asyncio.TimeoutError:
            await link.close()
            raise SocketGone(f"{what} did not say hello within {HELLO_SECONDS:.0f} s") from None
        except BaseException:
            await link.close()
            raise
        if not isinstance(answer, welcome):
            await link.close()
            reason = getattr(answer, "reason", f"{type(answer).__name__} instead of a hello")
            raise GshareError(f"{what} refuses: {plain(reason)}")
        return link, answer

    @property
    def is_gone(self) -> bool:
        return self._gone.done()

    async def wait_gone(self) -> str:
        """Why, when the connection has ended."""
        return await asyncio.shield(self._gone)

    async def ask(
        self,
        reply_type: type[R],
        make: type[msgspec.Struct],
        *,
        timeout: float = REPLY_SECONDS,
        then: Callable[[R], None] | None = None,
        **fields: Any,
    ) -> R:
        """Sends `make(id=…, **fields)` and waits. GshareError: refused, late; `SocketGone`.

        `then` gets the reply before any event that was sent after it is told: the caller goes on only when
        all that came in the same read was told, and an old list would take back what is newer.
        """
        if self._gone.done():
            raise SocketGone(self._gone.result())
        self._last_id += 1
        request_id = self._last_id
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def take(reply: Any) -> None:
            if then is not None and isinstance(reply, reply_type):
                then(reply)

        self._pending[request_id] = future, take
        try:
            await self._send(make(id=request_id, **fields))
            reply = await asyncio.wait_for(future, timeout)
        except asyncio.TimeoutError:
            raise GshareError(f"{self.what} did not answer within {timeout:.0f} s") from None
        finally:
            self._pending.pop(request_id, None)
        if not isinstance(reply, reply_type):
            reason = getattr(reply, "reason", None)
            text = plain(reason) if reason else f"{self.what} answered with {type(reply).__name__}"
            raise GshareError(text)
        return reply

    async def close(self) -> None:
        self._end("closed")
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._socket.close()

    async def _send(self, message: msgspec.Struct) -> None:
        async with self._writing:
            try:
                await asyncio.get_running_loop().sock_sendall(self._socket, encode(message))
            except OSError as error:
                self._end(f"{self.what} is gone ({error.strerror})")
                raise SocketGone(self._gone.result()) from None

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        reason = f"{self.what} is gone"
        try:
            while data := await loop.sock_recv(self._socket, _READ_BYTES):
                self.heard = time.monotonic()
                self._take(data)
                taken = len(data)
                while taken < BURST_BYTES and (more := self._more()):
                    self._take(more)
                    taken += len(more)
                await asyncio.sleep(PAUSE_SECONDS)
        except asyncio.CancelledError:
            reason = "closed"
            raise
        except OSError as error:
            reason = f"{self.what} is gone ({error.strerror})"
        except WireError as error:
            reason = f"what {self.what} sent is not the protocol: {plain(str(error))}"
        except GshareError as error:
            reason = plain(str(error))
        finally:
            self._end(reason)

    def _more(self) -> bytes:
        try:
            return self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return b""

    def _take(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            number = getattr(message, "reply_to", None)
            if number is None and self._hello.done():
                self._on_event(message)
            elif not number and not self._hello.done():
                self._hello.set_result(message)
            elif not number:
                raise GshareError(f"{self.what} hangs up: {getattr(message, 'reason', '')}")
            elif (pending := self._pending.get(number)) is not None and not pending[0].done():
                pending[1](message)
                pending[0].set_result(message)

    def _end(self, reason: str) -> None:
        if self._gone.done():
            return
        self._gone.set_result(reason)
        for future in (self._hello, *(future for future, _ in self._pending.values())):
            if not future.done():
                future.set_exception(SocketGone(reason))
                future.exception()  # one that nobody awaits any more is no error of its own
