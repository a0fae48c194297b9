"""One node, by its agent (`agent/node/protocol.py`): over its Unix socket, or through SSH.

As an observer: it sees the attempts of all coordinators, and steers none of them. The user's own holds on GPU
memory it can end.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.events import CheckpointSaved, Evaluated, JobChanged, Stepped
from gshare.agent.node.protocol import (
    DEFAULT_PORT,
    AttemptEvent,
    Attempts,
    AttemptStatus,
    DescribeNode,
    EndLeases,
    LeasesEnded,
    ListAttempts,
    LogText,
    NodeEventFrame,
    NodeInfo,
    NodeMessage,
    ReadLog,
    ReadSamples,
    Samples,
)
from gshare.coordinator.node_fault import NodeFault
from gshare.tui import frames as f
from gshare.tui.connected import ConnectedSource, Hopeless, until_gone
from gshare.tui.job_files import curves
from gshare.tui.past import past_message
from gshare.tui.source import ActionName

if TYPE_CHECKING:
    from gshare.coordinator.config import NodeConfig
    from gshare.coordinator.host_keys import HostKeys
    from gshare.coordinator.link import AgentLink, Stream

NODE_SECONDS = 3.0
ATTEMPTS_SECONDS = 10.0
SAMPLE_LINES = 10_000
MAX_SAMPLE_PAGES = 20
#: Lists asked for in a row while attempts keep changing; the last one is taken as it is.
MAX_LISTS = 5
_ADDRESS = re.compile(
    r"(?:(?P<user>[^@/:]+)@)?(?P<host>\[[0-9A-Fa-f:.]+\]|[^@/:\[\]]+)(?::(?P<port>\d{1,5}))?\Z"
)


class AgentSource(ConnectedSource):
    kind = "agent"
    can = frozenset({"release", "retry", "log", "history"})

    def __init__(self, address: Path | str, **options: Any) -> None:
        """`address`: the agent's socket (a Path), or `[USER@]HOST[:PORT]`. UsageError: neither."""
        super().__init__(is_local=isinstance(address, Path), **options)
        self._address = address
        self._remote = parse_address(address) if isinstance(address, str) else None
        self.title = f"agent {address}" if self._remote else "agent of this machine"
        self.detail = str(address)
        self._link: AgentLink | None = None
        self._heard = 0.0
        self._node = ""
        self._journal_id = ""
        self._seq = 0
        self._old = 0.0  # events of before this (the node's clock) are told, and change nothing
        self._attempts: dict[str, AttemptStatus] = {}  # by key
        self._info: NodeInfo | None = None
        self._moves = 0  # changes of state that were told

    def last_heard(self) -> float | None:
        return self._heard if self._link is not None else None

    async def session(self) -> None:
        from gshare.coordinator.link import AgentLink, LinkRefused

        try:
            stream = await self._open()
        except NodeFault as fault:
            text = str(fault) if self._remote else fault.text
            raise (GshareError if self.was_live or fault.transient else Hopeless)(text) from None
        try:
            link = await AgentLink.open(stream, client="gshare tui", on_event=self._take)
        except LinkRefused as error:
            raise GshareError(str(error)) if error.retry else Hopeless(str(error)) from None
        self._link, self._heard = link, time.monotonic()
        try:
            self._node = link.hello.hostname
            self.title = f"agent {self._node}"
            self.tell_found()
            await self._ask_node(link)
            await self._ask_attempts(link)
            assert self._info is not None
            self._old = self._info.time
            following = await link.follow(self._journal_id, self._seq)
            if following.gap and self._journal_id == following.journal_id:
                text = "events that happened while we were away are no longer kept"
                self.emit(f.Message(**self.now(), level="warning", kind="source", text=text))
            self.say("live")
            await until_gone(link.wait_gone(), self._poll(link))
        finally:
            self._link = None
            await link.close()

    async def _open(self) -> Stream:
        """The bytes to the agent. GshareError: there is none, or it cannot be reached."""
        if self._remote is None:
            from gshare.coordinator.channel import open_socket

            return await open_socket("here", Path(self._address))
        from gshare.coordinator.connecting import open_running
        from gshare.coordinator.host_keys import HostKeys

        return await open_running(self._node_config(), HostKeys())  # a new key was asked about in `meet`

    @property
    def is_remote(self) -> bool:
        return self._remote is not None

    async def meet(self, keys: HostKeys) -> None:
        """Reaches the machine once, while `keys` can still ask about a new host key on the terminal.

        NodeFault: what only a person mends. A machine that is away is waited for by `run`.
        """
        from gshare.coordinator.remote import reach

        try:
            remote = await reach(self._node_config(), keys)
        except NodeFault as fault:
            if not fault.transient:
                raise
        else:
            await remote.close()

    def _node_config(self) -> NodeConfig:
        from gshare.coordinator.config import NodeConfig

        assert self._remote is not None
        user, host, port = self._remote
        return NodeConfig(name=host, host=host, user=user, port=port)

    # --- what it tells

    def _take(self, frame: NodeEventFrame) -> None:
        self._heard = time.monotonic()
        told = frame.event
        moment = self.now(told.time)
        if frame.seq:
            self._journal_id, self._seq = frame.journal_id, frame.seq
        if isinstance(told, NodeMessage):
            self.emit(f.Message(**moment, level=told.level, text=told.text, node=self._node))
            return
        key = self._key(told.owner, told.event.job)
        if isinstance(told.event, Stepped):
            self.coalescer.add(key, told.event, told.time)
        elif told.time < self._old:
            self.emit(past_message(told.event, moment, job=key, node=self._node))
        else:
            self._event(key, told, moment)

    def _event(self, key: str, told: AttemptEvent, moment: dict[str, Any]) -> None:
        event = told.event
        self.flush(key)
        if isinstance(event, JobChanged):
            self._moves += 1
            self.emit(
                f.JobState(
                    **moment,
                    job=key,
                    state=event.state,
                    step=event.step if event.total_steps else None,
                    total_steps=event.total_steps or None,
                    reason=event.reason,
                    node=self._node,
                    attempt=told.attempt,
                )
            )
        elif isinstance(event, Evaluated):
            self.emit(
                f.Evaluation(**moment, job=key, step=event.step, val_loss=event.val_loss, best=event.best)
            )
        elif isinstance(event, CheckpointSaved):
            self.emit(f.Checkpoint(**moment, job=key, step=event.step, path=event.path))
        elif not isinstance(event, Stepped):
            self.emit(f.Message(**moment, level=event.level, text=event.text, job=key, node=self._node))

    # --- what is asked for

    async def _poll(self, link: AgentLink) -> None:
        listed = time.monotonic()
        while True:
            await asyncio.sleep(NODE_SECONDS)
            await self._ask_node(link)
            if time.monotonic() - listed >= ATTEMPTS_SECONDS:
                listed = time.monotonic()
                await self._ask_attempts(link)

    async def _ask_node(self, link: AgentLink) -> None:
        info = self._info = await link.ask(NodeInfo, DescribeNode)
        self._heard = time.monotonic()
        state = "degraded" if info.problems else "busy" if info.attempts_running else "ready"
        view = f.NodeView(
            node=self._node,
            state=state,
            reason="; ".join(info.problems),
            transport="ssh" if self._remote else "local",
            host=self._remote[1] if self._remote else "",
            gshare=link.hello.gshare,
            seen_s=0.0,
            jobs=info.attempts_running,
            info=info,
        )
        self.emit(f.Snapshot(**self.now(info.time), nodes=(view,)))

    async def _ask_attempts(self, link: AgentLink) -> None:
        listed: list[AttemptStatus] = []
        for _ in range(MAX_LISTS):
            before = self._moves
            listed = (await link.ask(Attempts, ListAttempts)).attempts
            if self._moves == before:  # else it may be older than what was told meanwhile
                break
        self._heard = time.monotonic()
        newest: dict[tuple[str, str], AttemptStatus] = {}
        for status in listed:
            before = newest.get((status.owner, status.job))
            if before is None or before.attempt < status.attempt:
                newest[status.owner, status.job] = status
        self._attempts = {}
        for status in sorted(newest.values(), key=lambda status: (status.job, status.owner)):
            key = status.job if status.job not in self._attempts else f"{status.job} of {status.owner[:8]}"
            self._attempts[key] = status
        views = tuple(self._view(key, status) for key, status in self._attempts.items())
        self.emit(f.Snapshot(**self.now(), jobs=views))

    def _view(self, key: str, status: AttemptStatus) -> f.JobView:
        return f.JobView(
            job=key,
            state=status.state,
            node=self._node,
            gpu=status.gpu,
            client=status.owner[:8],
            attempt=status.attempt,
            step=status.step if status.total_steps else None,
            total_steps=status.total_steps or None,
            loss=status.loss,
            val_loss=status.val_loss,
            best_val_loss=status.best_val_loss,
            best_step=status.best_step,
            position=status.position,
            reason=status.reason,
        )

    def _key(self, owner: str, job: str) -> str:
        status = self._attempts.get(job)
        other = f"{job} of {owner[:8]}"
        return other if status is not None and status.owner != owner and other in self._attempts else job

    # --- requests of the app

    async def act(self, action: ActionName, targets: list[str]) -> dict[str, str]:
        if action != "release":
            return await super().act(action, targets)
        link = self._connected()
        ended = await link.ask(LeasesEnded, EndLeases, reservations=targets)
        await self._ask_node(link)
        return ended.failed

    async def read_log(self, job: str = "", node: str = "", max_bytes: int = 65536) -> str:
        name, attempt = "", 0
        if job:
            status = self._status(job)
            name, attempt = status.job, status.attempt
        asked = self._connected().ask(LogText, ReadLog, job=name, attempt=attempt, max_bytes=max_bytes)
        return (await asked).text

    async def ask_history(self, job: str) -> None:
        link, status = self._connected(), self._status(job)
        lines: list[str] = []
        after = 0
        for _ in range(MAX_SAMPLE_PAGES):
            fields = {"job": status.job, "attempt": status.attempt, "after_step": after}
            got = await link.ask(Samples, ReadSamples, limit=SAMPLE_LINES, **fields)
            lines += got.lines
            steps, evaluations = curves(got.lines)
            after = max([after, *(step for step, _ in (*steps[-1:], *evaluations[-1:]))])
            if not got.more or not got.lines:
                break
        train, val = curves(lines)
        self.emit(f.History(**self.now(), job=job, train=tuple(train), val=tuple(val)))

    def _status(self, job: str) -> AttemptStatus:
        with contextlib.suppress(KeyError):
            return self._attempts[job]
        raise UsageError(f"{job} is not known to this agent (any more)")

    def _connected(self) -> AgentLink:
        if self._link is None:
            raise GshareError("not connected to the agent; it is tried again by itself")
        return self._link


def parse_address(text: str) -> tuple[str | None, str, int | None]:
    """`[USER@]HOST[:PORT]` as user (None: ssh_config's), host, port. UsageError.

    Without a port: with a user that of the machine's SSH server (None: ssh_config's or 22), else the agent's.
    """
    found = _ADDRESS.match(text)
    port = int(found["port"]) if found and found["port"] else None
    if found is None or (port is not None and not 0 < port < 65536):
        raise UsageError(
            f"--agent {text}: write USER@HOST[:PORT] of a machine with an SSH login where an agent runs, or "
            "HOST:PORT of an agent that was started with --bind, such as jetson:7433"
        )
    if port is None and found["user"] is None:
        port = DEFAULT_PORT
    return found["user"], found["host"].strip("[]"), port
