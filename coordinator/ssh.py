"""SSH connections to nodes: ssh_config, jump hosts, keys, and every hop's host key checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gshare.coordinator.config import NodeConfig
from gshare.coordinator.host_keys import HostKeys

if TYPE_CHECKING:
    import asyncssh

CONNECT_SECONDS = 20.0
KEEPALIVE_SECONDS = 15.0
KEEPALIVE_COUNT = 3


async def connect(
    node: NodeConfig,
    keys: HostKeys,
    *,
    timeout: float = CONNECT_SECONDS,
    keepalive: tuple[float, int] = (KEEPALIVE_SECONDS, KEEPALIVE_COUNT),
) -> asyncssh.SSHClientConnection:
    """A connection to `node`, through its jump hosts.

    `timeout`: seconds for all hops together, without the time a person takes to confirm a host key.
    NodeFault says what is wrong with which hop.
    """
    raise NotImplementedError
