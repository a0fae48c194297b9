"""What the coordinator hears from its nodes: `session.Hooks`, turned into events of the machine.

Samples and cursors are kept in memory here; an evaluation is written with its cursor in one transaction.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from gshare.agent.jobs.events import CheckpointSaved, Evaluated, JobChanged, Stepped
from gshare.agent.node.protocol import (
    AttemptEvent,
    AttemptStatus,
    NodeEventFrame,
    NodeHello,
    NodeInfo,
    NodeMessage,
)
from gshare.agent.service.wire import WireError
from gshare.coordinator import events
from gshare.coordinator.announcing import Announcer
from gshare.coordinator.api import ApiServer
from gshare.coordinator.api_protocol import JobEvent
from gshare.coordinator.cluster import Cluster
from gshare.coordinator.config import same_agent
from gshare.coordinator.heard import checked_attempts
from gshare.coordinator.link import LinkGone, LinkRefused, one_line
from gshare.coordinator.session import NodeSession
from gshare.coordinator.store import Cursor, Store


class Feed(Protocol):
    def __call__(
        self,
        event: events.ClusterEvent,
        *,
        cursor: Cursor | None = None,
        evaluation: events.Evaluation | None = None,
    ) -> None: ...


class Hearing:
    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        feed: Feed,
        announcer: Announcer,
        api: ApiServer,
        sessions: Mapping[str, NodeSession],
    ) -> None:
        self.heard: dict[str, float] = {}  # node → monotonic s
        self.losses: dict[str, tuple[int, float]] = {}  # job → its last step and loss, by its samples
        self._store, self._cluster, self._feed = store, cluster, feed
        self._announcer, self._api, self._sessions = announcer, api, sessions
        self._cursors: dict[str, Cursor] = {}
        self._moved: set[str] = set()  # nodes whose cursor is not written yet
        #: What each node said last of its attempts: what is the same is not handled (and written) again.
        self._listed: dict[str, dict[tuple[str, int], AttemptStatus]] = {}

    def deploying(self, node: str, text: str) -> None:
        self._announcer.tell("info", f"{node}: {text}")
        self._feed(events.NodeDeploying(node=node, text=text))

    def greeted(self, node: str, hello: NodeHello) -> None:
        """LinkRefused: another node's agent is the same one. Each would stop the other's attempts."""
        for name, session in self._sessions.items():
            if name == node or session.link is None or session.hello is None:
                continue
            if session.hello.agent_id == hello.agent_id:
                raise LinkRefused(same_agent(name), retry=True)

    def up(self, node: str, hello: NodeHello, info: NodeInfo, attempts: list[AttemptStatus]) -> None:
        self.heard[node] = time.monotonic()
        mine = tuple(self._mine(attempts))
        self._listed[node] = {(status.job, status.attempt): status for status in mine}
        self._feed(
            events.NodeUp(
                node=node,
                info=info,
                attempts=mine,
                draining=hello.draining,
                agent=hello.agent_id,
                knows=tuple(hello.knows),
            )
        )

    def beat(self, node: str, info: NodeInfo) -> None:
        self.heard[node] = time.monotonic()
        self._feed(events.NodeBeat(node=node, info=info))

    def listed(self, node: str, attempts: list[AttemptStatus]) -> None:
        before = self._listed.get(node, {})
        mine = {(s.job, s.attempt): s for s in self._mine(attempts)}
        self._listed[node] = mine
        for key, status in mine.items():
            if status != before.get(key):
                self._feed(events.AttemptChanged(node=node, status=status))

    def _mine(self, attempts: list[AttemptStatus]) -> list[AttemptStatus]:
        """Those of this store. LinkGone: what no agent says."""

        def known(job: str) -> int:
            record = self._cluster.jobs.get(job)
            return max(record.attempt, record.floor) if record is not None else 0

        try:
            return checked_attempts([s for s in attempts if s.owner == self._store.owner], known)
        except WireError as error:
            raise LinkGone(f"what the agent sent is not the protocol: {error}") from None

    def down(self, node: str, reason: str) -> None:
        self._feed(events.NodeDown(node=node, reason=reason))

    def cursor(self, node: str) -> tuple[str, int]:
        found = self._cursors.get(node) or self._store.cursor(node)
        return found.journal_id, found.seq

    def event(self, node: str, frame: NodeEventFrame) -> bool:
        self.heard[node] = time.monotonic()
        cursor = None
        if frame.seq:
            cursor = self._cursors[node] = Cursor(node, frame.journal_id, frame.seq)
            self._moved.add(node)
        told = frame.event
        if isinstance(told, NodeMessage):
            self._announcer.say(told.level, f"{node}: {one_line(told.text)}")
            return False
        if told.owner != self._store.owner or not self._is_current(node, told):
            return isinstance(told.event, JobChanged)
        job, inner = told.event.job, told.event
        if isinstance(inner, Stepped):
            self.losses[job] = (inner.step, inner.loss)
        elif isinstance(inner, Evaluated):
            evaluation = events.Evaluation(
                node=node,
                job=job,
                attempt=told.attempt,
                step=inner.step,
                val_loss=inner.val_loss,
                label_tokens=inner.label_tokens,
                best=inner.best,
                time=told.time,
            )
            self._feed(evaluation, cursor=cursor, evaluation=evaluation)
            self._moved.discard(node)
        shown = JobEvent(node=node, attempt=told.attempt, event=inner)
        self._api.publish(shown, sample=isinstance(inner, Stepped))
        return isinstance(inner, JobChanged | CheckpointSaved)

    def write_cursors(self) -> None:
        """Those that moved without an evaluation."""
        for node in sorted(self._moved):
            self._store.commit(cursor=self._cursors[node])
        self._moved.clear()

    def _is_current(self, node: str, told: AttemptEvent) -> bool:
        job = self._cluster.jobs.get(told.event.job)
        return job is not None and job.attempt == told.attempt and job.node in ("", node)
