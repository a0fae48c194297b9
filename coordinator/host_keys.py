"""Host keys: which are known, what to do with a new one, and never a changed one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostKeyUnknown(Exception):
    """No known_hosts file has a key of this host. `hop`: "node desk" or "jump host gate of node desk"."""

    host: str
    port: int
    fingerprint: str  # SHA256:…, as ssh-keygen -l prints it
    key_type: str  # ssh-ed25519, …
    hop: str


@dataclass(frozen=True)
class HostKeyChanged(Exception):
    """A known_hosts file has another key of this host, or has revoked this one. Never accepted."""

    host: str
    port: int
    fingerprint: str
    key_type: str
    hop: str
    file: str
    line: int


#: Shows the fingerprint and returns whether the person confirmed it.
Ask = Callable[[HostKeyUnknown], Awaitable[bool]]


class HostKeys:
    """The known hosts of one user.

    New keys: `ask` decides when given; else `accept_new` accepts; else they are refused. Accepted ones are
    appended to `file`. One question at a time, whatever number of nodes connect.
    """

    def __init__(
        self,
        file: Path | None = None,
        *,
        also_read: tuple[Path, ...] | None = None,
        ask: Ask | None = None,
        accept_new: bool = False,
    ) -> None:
        """`file`: default `~/.ssh/known_hosts`. `also_read`: default `/etc/ssh/ssh_known_hosts`."""
        raise NotImplementedError
