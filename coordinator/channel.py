"""Bytes to and from a node's agent, whatever lies between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gshare.coordinator.deploy import Deployed
    from gshare.coordinator.remote import Remote

OPEN_SECONDS = 20.0


class Channel(Protocol):
    """A stream in both directions."""

    async def read(self, most: int = 65536) -> bytes:
        """The next bytes; b"" at the end of the stream. NodeFault "lost" when the connection broke."""
        ...

    def write(self, data: bytes) -> None:
        """Queues bytes; call `drain` between large ones, or memory grows."""
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


async def open_channel(
    remote: Remote, deployed: Deployed | None = None, *, timeout: float = OPEN_SECONDS
) -> Channel:
    """A channel to the agent of `remote.node`; NodeFault.

    `deployed` is what `deploy` returned: needed for transports "local" and "ssh", None for "agent". The
    agent's hello is the caller's to exchange.
    """
    raise NotImplementedError
