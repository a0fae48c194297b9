"""Bytes to and from a node's agent, whatever lies between.

    transport "local"    the agent's Unix socket
    transport "ssh"      the exec bridge: `gshare agent connect` there, its stdin and stdout
    transport "agent"    the subsystem `gshare` of the agent's own SSH server

The bridge needs neither TCP nor Unix-socket forwarding, which many servers forbid.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gshare.agent.node.protocol import SUBSYSTEM
from gshare.agent.service.peer import stranger_fault
from gshare.agent.service.server import socket_address
from gshare.coordinator.deploy_plan import Deployed
from gshare.coordinator.node_fault import NodeFault

if TYPE_CHECKING:
    from gshare.coordinator.remote import Remote

OPEN_SECONDS = 20.0
READ_BYTES = 65536
WORDS_KEPT = 4096  # of a bridge's stderr


class Channel(Protocol):
    """A stream in both directions."""

    async def read(self, most: int = READ_BYTES) -> bytes:
        """The next bytes; b"" at the end of the stream. NodeFault "lost" when the connection broke."""
        ...

    def write(self, data: bytes) -> None:
        """Queues bytes; `drain` between large ones, or memory grows. After the end they are dropped."""
        ...

    async def drain(self) -> None:
        """Waits until the other side has taken enough of what was written. NodeFault "lost"."""
        ...

    async def close(self) -> None:
        """Hangs up; idempotent, never raises."""
        ...

    def why_ended(self) -> str:
        """What the bridge said on its stderr (the last 4 KiB), for a message; "" for nothing."""
        ...


class SocketChannel:
    """An asyncio stream pair."""

    def __init__(self, node: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._node = node
        self._reader = reader
        self._writer = writer

    async def read(self, most: int = READ_BYTES) -> bytes:
        try:
            return await self._reader.read(most)
        except OSError as error:
            raise self._lost(error) from None

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        try:
            await self._writer.drain()
        except OSError as error:
            raise self._lost(error) from None

    async def close(self) -> None:
        self._writer.close()
        # OSError: what was not sent is lost, which the caller has decided.
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 2.0)

    def why_ended(self) -> str:
        return ""

    def _lost(self, error: OSError) -> NodeFault:
        return NodeFault(self._node, "lost", f"the connection to its agent broke: {error.strerror or error}")


async def open_socket(node: str, path: Path) -> SocketChannel:
    """A channel to the agent's Unix socket on this machine. NodeFault "no_agent", or "config" when another
    user's process listens there."""
    try:
        with socket_address(path) as address:
            reader, writer = await asyncio.open_unix_connection(address)
    except OSError as error:
        raise NodeFault(node, "no_agent", f"no agent answers at {path}: {error.strerror}") from None
    if fault := stranger_fault(writer.get_extra_info("socket")):
        writer.close()
        raise NodeFault(node, "config", f"{path}: {fault}")
    return SocketChannel(node, reader, writer)


async def open_channel(
    remote: Remote, deployed: Deployed | None = None, *, timeout: float = OPEN_SECONDS
) -> Channel:
    """A channel to the agent of `remote.node`; NodeFault.

    `deployed` is what `deploy` returned: needed for transports "local" and "ssh", None for "agent". The
    agent's hello is the caller's to exchange.
    """
    node = remote.node
    try:
        if node.transport == "agent":
            return await asyncio.wait_for(remote.open_subsystem(SUBSYSTEM), timeout)
        assert deployed is not None, "only an agent with a server of its own is used without being deployed"
        if node.transport == "local":
            return await asyncio.wait_for(
                open_socket(node.name, Path(deployed.state_dir) / "socket"), timeout
            )
        bridge = [*deployed.command, "agent", "connect", "--state-dir", deployed.state_dir]
        return await asyncio.wait_for(remote.start(bridge), timeout)
    except asyncio.TimeoutError:
        raise NodeFault(node.name, "timeout", f"no channel to its agent within {timeout:g} s") from None
