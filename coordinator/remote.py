"""A node as a place where programs run: this machine, or one behind SSH.

Nothing of the user's reaches a shell unquoted: a command is a list of arguments, which SSH (whose servers
hand one string to the user's shell) gets joined by `shlex`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import asyncssh
from gshare.coordinator.channel import READ_BYTES, WORDS_KEPT, Channel, SocketChannel
from gshare.coordinator.config import NodeConfig
from gshare.coordinator.host_keys import HostKeys
from gshare.coordinator.node_fault import NodeFault
from gshare.coordinator.ssh import CONNECT_SECONDS, KEEPALIVE_COUNT, KEEPALIVE_SECONDS, close, connect

#: Of stdout and of stderr of a program that is run to its end: pip says less than this, a madman more.
OUTPUT_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True)
class Finished:
    """A program that ended. `code` -1: by a signal, or unknown; 127: a shell did not find it."""

    code: int
    stdout: bytes
    stderr: bytes


class Remote(Protocol):
    """Either of the two; every method raises NodeFault."""

    @property
    def node(self) -> NodeConfig: ...

    async def run(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float) -> Finished:
        """Runs a program to its end. NodeFault "timeout" after `timeout` seconds."""
        ...

    async def start(self, argv: Sequence[str]) -> Channel:
        """Starts a program; the channel is its stdin and stdout."""
        ...

    async def open_subsystem(self, name: str) -> Channel:
        """A subsystem of an SSH server (transport "agent")."""
        ...

    async def closed(self) -> None:
        """Returns when the connection is gone; never for this machine."""
        ...

    async def close(self) -> None:
        """Hangs up; idempotent, never raises."""
        ...


async def reach(
    node: NodeConfig,
    keys: HostKeys,
    *,
    timeout: float = CONNECT_SECONDS,
    keepalive: tuple[float, int] = (KEEPALIVE_SECONDS, KEEPALIVE_COUNT),
) -> Remote:
    """The node's `Remote`; connects when it is another machine. NodeFault."""
    if node.transport == "local":
        return LocalRemote(node)
    return SshRemote(node, await connect(node, keys, timeout=timeout, keepalive=keepalive))


class LocalRemote:
    """This machine: subprocesses, and no shell at all."""

    def __init__(self, node: NodeConfig) -> None:
        self.node = node

    async def run(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float) -> Finished:
        process = await self._spawn(argv, stderr=asyncio.subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            stdout, stderr = await asyncio.wait_for(
                _together(
                    _feed(process.stdin, stdin),
                    _read_all(self.node, process.stdout.read),
                    _read_all(self.node, process.stderr.read),
                ),
                timeout,
            )
            return Finished(await process.wait(), stdout, stderr)
        except asyncio.TimeoutError:
            raise _too_slow(self.node, argv, timeout) from None
        finally:
            if process.returncode is None:
                await _end(process)

    async def start(self, argv: Sequence[str]) -> Channel:
        process = await self._spawn(argv, stderr=asyncio.subprocess.DEVNULL)
        assert process.stdin is not None
        assert process.stdout is not None
        return SocketChannel(self.node.name, process.stdout, process.stdin)

    async def _spawn(self, argv: Sequence[str], stderr: int) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr, cwd="/"
            )
        except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
            raise NodeFault(self.node.name, "no_python", f"{argv[0]} cannot be started: {error}") from None

    async def open_subsystem(self, name: str) -> Channel:
        raise NodeFault(self.node.name, "config", f'transport "local" has no subsystem {name}')

    async def closed(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        return


class SshRemote:
    """A machine behind an SSH connection, which it owns."""

    def __init__(self, node: NodeConfig, connection: asyncssh.SSHClientConnection) -> None:
        self.node = node
        self._connection = connection

    async def run(self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float) -> Finished:
        process: asyncssh.SSHClientProcess[bytes] | None = None
        try:
            process = await asyncio.wait_for(self._create(command=shlex.join(argv)), timeout)
            stdout, stderr = await asyncio.wait_for(
                _together(
                    _feed(process.stdin, stdin),
                    _read_all(self.node, process.stdout.read),
                    _read_all(self.node, process.stderr.read),
                ),
                timeout,
            )
            await asyncio.wait_for(process.wait_closed(), timeout)
            if process.exit_status is None and process.exit_signal is None:
                raise NodeFault(self.node.name, "lost", f"the connection broke while {argv[0]} ran there")
            return Finished(-1 if process.exit_status is None else process.exit_status, stdout, stderr)
        except asyncio.TimeoutError:
            raise _too_slow(self.node, argv, timeout) from None
        except (OSError, asyncssh.Error) as error:
            raise _broken(self.node, error) from None
        finally:
            if process is not None:
                process.close()

    async def start(self, argv: Sequence[str]) -> Channel:
        return await self._channel(command=shlex.join(argv))

    async def open_subsystem(self, name: str) -> Channel:
        return await self._channel(subsystem=name)

    async def _channel(self, **what: str) -> Channel:
        try:
            return SshChannel(self.node, await self._create(**what))
        except asyncssh.ChannelOpenError as error:
            wanted = f"the subsystem {what['subsystem']!r}" if "subsystem" in what else "a program to be run"
            raise NodeFault(
                self.node.name,
                "no_agent" if "subsystem" in what else "protocol",
                f"its SSH server refuses {wanted}: {error.reason}; is it the right port?",
            ) from None
        except (OSError, asyncssh.Error) as error:
            raise _broken(self.node, error) from None

    async def _create(self, **what: str) -> asyncssh.SSHClientProcess[bytes]:
        return await self._connection.create_process(encoding=None, request_pty=False, **what)  # pyright: ignore

    async def closed(self) -> None:
        await self._connection.wait_closed()

    async def close(self) -> None:
        await close(self._connection)


class SshChannel:
    """A program or subsystem behind SSH."""

    def __init__(self, node: NodeConfig, process: asyncssh.SSHClientProcess[bytes]) -> None:
        self._node = node
        self._process = process
        self._words = b""
        # Read all the time: a full pipe would stop the bridge.
        self._listening = asyncio.ensure_future(self._listen())

    async def read(self, most: int = READ_BYTES) -> bytes:
        try:
            data = await self._process.stdout.read(most)
        except (OSError, asyncssh.Error) as error:
            raise _broken(self._node, error) from None
        if not data:  # what the bridge said is about to come, or there already
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._listening), 1.0)
        return data

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # closed: the reader is told
            self._process.stdin.write(data)

    async def drain(self) -> None:
        try:
            await self._process.stdin.drain()
        except (OSError, asyncssh.Error) as error:
            raise _broken(self._node, error) from None

    async def close(self) -> None:
        self._process.close()
        with contextlib.suppress(OSError, asyncssh.Error, asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait_closed(), 2.0)
        self._listening.cancel()

    def why_ended(self) -> str:
        return self._words.decode(errors="replace").strip()

    async def _listen(self) -> None:
        with contextlib.suppress(OSError, asyncssh.Error):
            while data := await self._process.stderr.read(READ_BYTES):
                self._words = (self._words + data)[-WORDS_KEPT:]


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kills it. asyncio takes a process for ended when its pipes are, so what they still hold is read."""
    assert process.stdout is not None
    assert process.stderr is not None
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(asyncio.TimeoutError):  # a grandchild may keep them open
        await asyncio.wait_for(asyncio.gather(_discard(process.stdout), _discard(process.stderr)), 2.0)
        await asyncio.wait_for(process.wait(), 2.0)


async def _discard(reader: asyncio.StreamReader) -> None:
    while await reader.read(READ_BYTES):
        pass


async def _together(
    feed: Awaitable[None], out: Awaitable[bytes], err: Awaitable[bytes]
) -> tuple[bytes, bytes]:
    """What both outputs held; when one of the three fails, the others are ended."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(part) for part in (feed, out, err)]
    try:
        await asyncio.gather(*tasks)
        return tasks[1].result(), tasks[2].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Writer(Protocol):
    """What asyncio's and asyncssh's writers have in common."""

    def write(self, data: bytes, /) -> None: ...

    async def drain(self) -> None: ...

    def write_eof(self) -> None: ...


async def _feed(writer: _Writer, data: bytes) -> None:
    """All of stdin, then its end. A program that does not want it has ended: its code says more."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for start in range(0, len(data), READ_BYTES):
            writer.write(data[start : start + READ_BYTES])
            await writer.drain()
        writer.write_eof()


async def _read_all(node: NodeConfig, read: Callable[[int], Awaitable[bytes]]) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := await read(READ_BYTES):
        parts.append(part)
        size += len(part)
        if size > OUTPUT_BYTES:
            raise NodeFault(node.name, "protocol", f"a program there wrote more than {OUTPUT_BYTES} bytes")
    return b"".join(parts)


def _too_slow(node: NodeConfig, argv: Sequence[str], timeout: float) -> NodeFault:
    return NodeFault(node.name, "timeout", f"{argv[0]} did not end there within {timeout:g} s")


def _broken(node: NodeConfig, error: Exception) -> NodeFault:
    why = error.reason if isinstance(error, asyncssh.Error) else getattr(error, "strerror", None)
    return NodeFault(node.name, "lost", f"the connection broke: {why or 'closed by the other side'}")
