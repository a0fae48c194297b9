"""The simulated cluster around the coordinator's machine: clock, network, and the disk of the coordinator."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable
from functools import partial

import msgspec
from cluster_sim_agents import Agents
from cluster_sim_checks import Checks
from cluster_sim_nodes import Node, make_job, make_node
from gshare.coordinator.actions import CheckBest, ClusterAction, Ended, Place, Say, Start, action_key
from gshare.coordinator.cluster import Cluster
from gshare.coordinator.events import (
    ClusterEvent,
    NodeAdded,
    NodeBeat,
    NodeDown,
    NodeUp,
    Published,
    Started,
    Submit,
    Tick,
)
from gshare.coordinator.facts import ENDED_STATES, JobFacts, JobRecord

#: Simulated seconds after which a run that has not ended is given up.
GIVE_UP_S = 4 * 3600.0


class World:
    """Nodes, network, clock and the coordinator's disk; `run` drives a machine through it."""

    def __init__(
        self, *, nodes: int, jobs: int, seed: int, machine: type[Cluster] = Cluster, outbox: bool = True
    ) -> None:
        self.random, self.machine, self.keep_outbox = random.Random(seed), machine, outbox
        self.clock, self._count = 0.0, 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self.nodes = {f"n{number:04}": make_node(number, self.random) for number in range(nodes)}
        self.orders = [make_job(number, self.random) for number in range(jobs)]
        self.records: dict[str, bytes] = {}  # the store: jobs …
        self.outbox: dict[str, ClusterAction] = {}  # … and actions by key
        self.cluster = machine()
        self.boots = 0
        self.running = False
        self.kills_at_rename = 30
        self.checks = Checks(self.nodes, self.orders)
        self._agents = Agents(self)
        # What is measured.
        self.events, self.machine_s, self.machine_cpu_s = 0, 0.0, 0.0
        self.placements: list[float] = []  # seconds a placement
        self.happened: dict[str, int] = {}

    # --- time

    def after(self, delay: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.clock + delay, self._count, call))

    def later(self, low: float, high: float, call: Callable[[], None]) -> None:
        self.after(self.random.uniform(low, high), call)

    def run(self) -> None:
        for node in self.nodes.values():
            self.later(0, 15, lambda node=node: self._beats(node))
        self._boot()
        for facts in self.orders:
            self.later(0, 600, lambda facts=facts: self._submit(facts))
        self._agents.plan_faults()
        self.after(1, self._tick)
        while self._queue and self.clock < GIVE_UP_S and not self._over():
            self.clock, _, call = heapq.heappop(self._queue)
            call()

    def _over(self) -> bool:
        if not self.running or len(self.cluster.jobs) < len(self.orders) or self._count % 64:
            return False
        return all(job.state in ENDED_STATES for job in self.cluster.jobs.values())

    # --- the coordinator and its disk

    def _boot(self) -> None:
        jobs = [msgspec.msgpack.decode(record, type=JobRecord) for record in self.records.values()]
        self.cluster = self.machine(sorted(jobs, key=lambda job: job.order))
        self.boots += 1
        self.running = True
        for node in self.nodes.values():
            node.connected = node.busy = False
            self.tell(NodeAdded(config=node.config))
        self.tell(Started(now=self.clock, wall=self.clock))
        for node in self.nodes.values():
            self.later(0.1, 3, lambda node=node: self._connect(node))
        self._place_pending()

    def _kill_coordinator(self) -> None:
        self.count("coordinator killed")
        self.running = False
        self.boots += 1  # what was under way finds another number and comes to nothing
        if not self.keep_outbox:
            self.outbox.clear()
        self.after(5, self._boot)

    def tell(self, event: ClusterEvent, done: ClusterAction | None = None) -> None:
        """One event is one transaction: handled, committed, then its actions are begun."""
        if not self.running:
            return
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        actions = self.cluster.handle(event)
        took = time.perf_counter() - begin
        self.events += 1
        self.machine_s += took
        self.machine_cpu_s += time.thread_time() - begin_cpu
        starts = [action for action in actions if isinstance(action, Start)]
        new = sum((start.job, start.attempt) not in self.checks.started for start in starts)
        self.placements += [took / new] * new if new else []
        for job in self.cluster.take_changed():
            self.records[job.facts.name] = msgspec.msgpack.encode(job)
        if done is not None:
            self.outbox.pop(action_key(done) or "", None)
        for action in actions:
            key = action_key(action)
            if key is not None:
                self.outbox.setdefault(key, action)
        for start in starts:
            self.checks.check_start(start, self.cluster)
        for action in actions:
            self._begin(action)

    def _submit(self, facts: JobFacts) -> None:
        if not self.running:
            self.after(1, lambda: self._submit(facts))  # a client asks again
        else:
            self.tell(Submit(facts=facts))

    def _tick(self) -> None:
        self.tell(Tick(now=self.clock, wall=self.clock))
        self.after(1, self._tick)
        for name, node in self.nodes.items():
            if node.connected and self.running and not self.cluster.nodes[name].up:
                self.disconnect(node, "no heartbeat")

    # --- channels

    def _connect(self, node: Node) -> None:
        if not self.running or node.connected:
            return
        if node.dead or node.cut:
            self.tell(NodeDown(node=node.config.name, reason="no route"))
            boots = self.boots
            self.later(10, 60, lambda: self._connect(node) if boots == self.boots else None)
            return
        node.connected, node.busy = True, False
        attempts = tuple(attempt.status() for attempt in node.attempts.values())
        self.tell(NodeUp(node=node.config.name, info=node.info(self.clock), attempts=attempts))
        self._work(node)

    def disconnect(self, node: Node, reason: str) -> None:
        if node.connected:
            node.connected = node.busy = False
            self.tell(NodeDown(node=node.config.name, reason=reason))
            boots = self.boots
            self.later(1, 10, lambda: self._connect(node) if boots == self.boots else None)

    def _beats(self, node: Node) -> None:
        if node.connected and not node.cut and not node.dead:
            self.tell(NodeBeat(node=node.config.name, info=node.info(self.clock)))
        self.after(15, lambda: self._beats(node))

    # --- actions

    def _begin(self, action: ClusterAction) -> None:
        if isinstance(action, Place):
            self._place_pending()
        elif not isinstance(action, (Say, Ended)):
            self._work(self.nodes[action.node])

    def _place_pending(self) -> None:
        """Home's own disk: a rename, done once whatever was interrupted."""
        boots = self.boots
        for action in [action for action in self.outbox.values() if isinstance(action, Place)]:
            self.later(0.05, 1.0, lambda action=action: self._place(action, boots))

    def _place(self, action: Place, boots: int) -> None:
        key = action_key(action)
        if boots != self.boots or key not in self.outbox:
            return
        if not self.cluster.still_wanted(action):
            del self.outbox[key]
            return
        attempts = self.checks.placed.setdefault(action.job, [])
        if action.attempt not in attempts:
            attempts.append(action.attempt)
        if self.kills_at_rename and self.random.random() < 0.02:
            self.kills_at_rename -= 1
            self._kill_coordinator()  # between the rename and its record
        else:
            self.tell(Published(job=action.job, attempt=action.attempt), done=action)

    def _work(self, node: Node) -> None:
        """The next action of the outbox for that node, one at a time, in order."""
        if node.busy or not node.connected or not self.running:
            return
        name = node.config.name
        for key, action in list(self.outbox.items()):
            if isinstance(action, Place) or getattr(action, "node", "") != name:
                continue
            if not self.cluster.still_wanted(action):
                del self.outbox[key]
                continue
            node.busy = True
            self.later(0.1, 2.0, partial(self._do, node, action, self.boots, node.generation))
            return

    def _do(self, node: Node, action: ClusterAction, boots: int, generation: int) -> None:
        if boots != self.boots or generation != node.generation or not node.connected or node.cut:
            return  # it stays in the outbox
        node.busy = False
        assert not isinstance(action, (Place, Say, Ended, CheckBest))
        reply = self._agents.does(node, action)
        if reply is not None:
            self.tell(reply, done=action)
        else:
            self.outbox.pop(action_key(action) or "", None)
        self._work(node)

    def count(self, what: str) -> None:
        self.happened[what] = self.happened.get(what, 0) + 1

    def kill_coordinator_when_up(self) -> None:
        if self.running:
            self._kill_coordinator()
