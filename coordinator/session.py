"""One node, for as long as the coordinator runs: connect, deploy, hello, list, follow, heartbeat; again.

A session knows nothing of jobs. It tells its `Hooks` what the node says and offers the link while there is
one. All nodes' sessions run side by side, so a node that does not answer costs the others nothing.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from gshare.agent.errors import GshareError
from gshare.agent.node.protocol import (
    Attempts,
    AttemptStatus,
    DescribeNode,
    ListAttempts,
    NodeEventFrame,
    NodeHello,
    NodeInfo,
)
from gshare.coordinator.config import NodeConfig
from gshare.coordinator.link import AgentLink, LinkGone, LinkLate, LinkRefused, Stream, one_line
from gshare.coordinator.reconnect import Backoff
from gshare.coordinator.tasks import end_tasks

HEARTBEAT_SECONDS = 15.0
#: A heartbeat that is not answered in this time ends the connection: three of them make a node unreachable.
BEAT_SECONDS = 45.0
#: Events of a node that come close together are looked at together: one list for all of them.
LOOK_SECONDS = 0.05
LOOK_GAP_SECONDS = 0.2


class Hooks(Protocol):
    """What a session tells. Called in the coordinator's loop; what one raises ends the connection."""

    def deploying(self, node: str, text: str) -> None: ...
    def greeted(self, node: str, hello: NodeHello) -> None:
        """Before anything is asked of it. What it raises ends the connection with that reason."""
        ...

    def up(self, node: str, hello: NodeHello, info: NodeInfo, attempts: list[AttemptStatus]) -> None: ...
    def beat(self, node: str, info: NodeInfo) -> None: ...
    def listed(self, node: str, attempts: list[AttemptStatus]) -> None: ...
    def event(self, node: str, frame: NodeEventFrame) -> bool:
        """True when what happened is to be looked up with `ListAttempts`."""
        ...

    def down(self, node: str, reason: str) -> None: ...
    def cursor(self, node: str) -> tuple[str, int]:
        """(journal_id, seq) after which events are wanted."""
        ...


#: Opens the bytes to a node's agent; `say` hears of long steps. Raises GshareError with what to do.
Connect = Callable[[NodeConfig, Callable[[str], None]], Awaitable[Stream]]


class NodeSession:
    def __init__(
        self,
        node: NodeConfig,
        connect: Connect | None,
        hooks: Hooks,
        *,
        owner: str,
        session: str,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        backoff: Backoff | None = None,
    ) -> None:
        """`connect` None: the node dials in, see `dialled`."""
        self.node = node
        self._models = sorted(node.models.values())
        self.hello: NodeHello | None = None
        self._connect = connect
        self._hooks = hooks
        self._owner = owner
        self._session = session
        self._heartbeat = heartbeat_seconds
        self._backoff = backoff or Backoff(random.Random())
        self._link: AgentLink | None = None
        self._linked = asyncio.Event()
        self._dirty = asyncio.Event()
        self._try_now = asyncio.Event()
        self._told_down = ""
        self._talking = asyncio.Lock()

    @property
    def link(self) -> AgentLink | None:
        """The link, when there is one that has not ended."""
        return self._link if self._link is not None and not self._link.is_gone else None

    async def wait_link(self) -> AgentLink:
        """The link, as soon as the node is up."""
        while True:
            await self._linked.wait()
            if (link := self.link) is not None:
                return link
            await asyncio.sleep(0.05)  # it has just ended, and `run` has not noticed yet

    def look(self) -> None:
        """Ask the node for its attempts soon."""
        self._dirty.set()

    def try_now(self) -> None:
        """Do not wait for the backoff."""
        self._try_now.set()

    async def run(self) -> None:
        """Until cancelled."""
        if self._connect is None:
            await asyncio.Event().wait()
        while True:
            started = time.monotonic()
            await self._once()
            self._backoff.connected(time.monotonic() - started)
            self._try_now.clear()
            try:
                await asyncio.wait_for(self._try_now.wait(), self._backoff.next_delay())
            except asyncio.TimeoutError:
                continue

    async def dialled(self, stream: Stream) -> None:
        """The agent has dialled out: talks with it until the connection ends. It takes the place of ours."""
        if self._link is not None:
            await self._link.close()
        await self._talk(stream)

    async def _once(self) -> None:
        assert self._connect is not None
        if self.link is not None:
            await self.link.wait_gone()  # it has dialled in meanwhile
            return
        try:
            stream = await self._connect(self.node, lambda text: self._hooks.deploying(self.node.name, text))
        except GshareError as error:
            self._down(one_line(str(error)))
            return
        except OSError as error:
            self._down(f"cannot be reached: {error.strerror or error}")
            return
        await self._talk(stream)

    async def _talk(self, stream: Stream) -> None:
        async with self._talking:
            try:
                await self._conversation(stream)
            except (LinkGone, LinkLate, LinkRefused) as error:
                self._down(str(error))
            finally:
                self._linked.clear()
                if self._link is not None:
                    await self._link.close()
                self._link = None

    async def _conversation(self, stream: Stream) -> None:
        name, hooks = self.node.name, self._hooks

        def on_event(frame: NodeEventFrame) -> None:
            if hooks.event(name, frame):
                self._dirty.set()

        link = await AgentLink.open(
            stream, client="coordinator", owner=self._owner, session=self._session, on_event=on_event
        )
        self._link, self.hello = link, link.hello
        hooks.greeted(name, link.hello)
        # Followed before the list: of what happens in between an event comes, and the list is read again.
        journal_id, seq = hooks.cursor(name)
        following = await link.follow(journal_id, seq)
        info = await link.ask(NodeInfo, DescribeNode, models=self._models)
        attempts = (await link.ask(Attempts, ListAttempts)).attempts
        if following.gap:
            self._dirty.set()
        hooks.up(name, link.hello, info, attempts)
        self._told_down = ""
        self._linked.set()
        beating = asyncio.create_task(self._beat(link))
        looking = asyncio.create_task(self._look(link))
        gone = asyncio.create_task(link.wait_gone())
        try:
            done, _ = await asyncio.wait({beating, looking, gone}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {gone}:
                task.result()
            raise LinkGone(await gone)
        finally:
            await end_tasks((beating, looking, gone))

    async def _beat(self, link: AgentLink) -> None:
        while True:
            await asyncio.sleep(self._heartbeat)
            info = await link.ask(NodeInfo, DescribeNode, timeout=BEAT_SECONDS, models=self._models)
            self._hooks.beat(self.node.name, info)

    async def _look(self, link: AgentLink) -> None:
        while True:
            await self._dirty.wait()
            await asyncio.sleep(LOOK_SECONDS)
            self._dirty.clear()
            self._hooks.listed(self.node.name, (await link.ask(Attempts, ListAttempts)).attempts)
            await asyncio.sleep(LOOK_GAP_SECONDS)

    def _down(self, reason: str) -> None:
        """Told once a reason: a node that is away for a night is not told of every minute."""
        if reason != self._told_down:
            self._told_down = reason
            self._hooks.down(self.node.name, reason)
