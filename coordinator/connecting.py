"""How the coordinator gets to a node's agent: reach the machine, deploy where that is ours to do, open the
channel. The connection to the machine lives as long as the channel. Who only looks at an agent uses
`open_running`, which deploys nothing."""

from __future__ import annotations

from collections.abc import Callable

from gshare.agent.node.protocol import SUBSYSTEM
from gshare.coordinator.channel import READ_BYTES, Channel, open_channel
from gshare.coordinator.config import NodeConfig
from gshare.coordinator.deploy import deploy, find_agent
from gshare.coordinator.host_keys import HostKeys
from gshare.coordinator.node_fault import NodeFault
from gshare.coordinator.remote import Remote, reach


class OwnedChannel:
    """A channel that hangs up its connection when it is closed."""

    def __init__(self, channel: Channel, remote: Remote) -> None:
        self._channel = channel
        self._remote = remote

    async def read(self, most: int = READ_BYTES) -> bytes:
        return await self._channel.read(most)

    def write(self, data: bytes) -> None:
        self._channel.write(data)

    async def drain(self) -> None:
        await self._channel.drain()

    async def close(self) -> None:
        await self._channel.close()
        await self._remote.close()

    def why_ended(self) -> str:
        return self._channel.why_ended()


async def open_running(node: NodeConfig, keys: HostKeys) -> OwnedChannel:
    """To the agent that runs on a machine behind SSH: an agent's own server is asked for its subsystem, any
    other for `gshare agent connect`. NodeFault."""
    remote = await reach(node, keys)
    try:
        try:
            channel = await remote.open_subsystem(SUBSYSTEM)
        except NodeFault as fault:
            if fault.kind != "no_agent":
                raise
            channel = await open_channel(remote, await find_agent(remote))
        return OwnedChannel(channel, remote)
    except BaseException:
        await remote.close()
        raise


class Connector:
    """`session.Connect` over SSH and local sockets."""

    def __init__(self, keys: HostKeys) -> None:
        self._keys = keys

    async def __call__(self, node: NodeConfig, say: Callable[[str], None]) -> OwnedChannel:
        """NodeFault says what is wrong and what to do."""
        remote = await reach(node, self._keys)
        try:
            deployed = None
            if node.transport != "agent":
                deployed = await deploy(remote, say=say)
                for text in (*deployed.done, deployed.upgrade_pending):
                    if text:
                        say(text)
            return OwnedChannel(await open_channel(remote, deployed), remote)
        except BaseException:
            await remote.close()
            raise
