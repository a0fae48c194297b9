"""A node as a place where programs run: this machine, or one behind SSH.

Nothing of the user's reaches a shell unquoted: a command is a list of arguments, joined by `shlex` for SSH.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gshare.coordinator.channel import Channel
from gshare.coordinator.config import NodeConfig
from gshare.coordinator.host_keys import HostKeys
from gshare.coordinator.ssh import CONNECT_SECONDS


@dataclass(frozen=True)
class Finished:
    """A program that ended. `code` -1: by a signal, or unknown."""

    code: int
    stdout: bytes
    stderr: bytes


class Remote(Protocol):
    """Either of the two; every method raises NodeFault."""

    node: NodeConfig

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

    async def close(self) -> None: ...


async def reach(node: NodeConfig, keys: HostKeys, *, timeout: float = CONNECT_SECONDS) -> Remote:
    """The node's `Remote`; connects when it is another machine. NodeFault."""
    raise NotImplementedError
