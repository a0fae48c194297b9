"""What agents do with the coordinator's actions, how attempts go on, and what goes wrong with nodes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from cluster_sim_nodes import OWN_ENDS, STEPS, Attempt, Node
from gshare.coordinator.actions import Forget, NodeAction, Pause, Publish, PullCheckpoint, Start, Stop
from gshare.coordinator.events import (
    AttemptChanged,
    BroughtHome,
    CheckpointPulled,
    ClusterEvent,
    PublishFailed,
    PullFailed,
)
from gshare.coordinator.facts import CheckpointRef


class World(Protocol):
    """What of the simulation (`cluster_sim_world.World`) the agents live in."""

    random: random.Random
    nodes: dict[str, Node]

    def after(self, delay: float, call: Callable[[], None]) -> None: ...
    def later(self, low: float, high: float, call: Callable[[], None]) -> None: ...
    def tell(self, event: ClusterEvent) -> None: ...
    def disconnect(self, node: Node, reason: str) -> None: ...
    def count(self, what: str) -> None: ...
    def kill_coordinator_when_up(self) -> None: ...


class Agents:
    """Of all nodes."""

    def __init__(self, world: World) -> None:
        self._world = world

    def does(self, node: Node, action: NodeAction) -> ClusterEvent | None:
        """What a node's agent does: the event that becomes of its answer, None for a plain one."""
        key = (action.job, action.attempt)
        attempt = node.attempts.get(key)
        if isinstance(action, Start):
            self._start(node, action)
        elif isinstance(action, Stop):
            if attempt is not None and attempt.state in ("queued", "running", "paused"):
                attempt.state = "stopped"
                return AttemptChanged(node=node.config.name, status=attempt.status())
        elif isinstance(action, Forget):
            node.attempts.pop(key, None)
        elif isinstance(action, PullCheckpoint):
            if attempt is None:
                return PullFailed(job=action.job, attempt=action.attempt, reason="gone")
            checkpoint = CheckpointRef(attempt=action.attempt, step=attempt.step)
            return CheckpointPulled(job=action.job, checkpoint=checkpoint)
        elif isinstance(action, Publish):
            if self._world.random.random() < 0.05:
                self._world.count("disk full at home")
                return PublishFailed(job=action.job, attempt=action.attempt, reason="disk full", retry=True)
            if attempt is None:
                return PublishFailed(job=action.job, attempt=action.attempt, reason="gone", retry=False)
            return BroughtHome(job=action.job, attempt=action.attempt, val_loss=1.0, best_step=attempt.step)
        else:
            assert isinstance(action, Pause)
        return None

    def _start(self, node: Node, action: Start) -> None:
        if (action.job, action.attempt) in node.attempts:
            return
        for (job, number), older in node.attempts.items():
            if job == action.job and number < action.attempt and older.state in ("queued", "running"):
                older.state = "stopped"
        attempt = Attempt(action.job, action.attempt, action.gpu, action.budget_mb or 0)
        attempt.step = action.checkpoint.step if action.checkpoint else 0
        node.attempts[action.job, action.attempt] = attempt
        self._go_on(node, attempt)

    def _go_on(self, node: Node, attempt: Attempt) -> None:
        generation = node.generation
        self._world.later(2, 10, lambda: self._advance(node, attempt, generation))

    def _advance(self, node: Node, attempt: Attempt, generation: int) -> None:
        if generation != node.generation or node.dead or attempt.state not in ("queued", "running"):
            return
        if attempt.state == "queued":
            attempt.state = "running"
            if self._world.random.random() < 0.02:
                self._world.count("attempt failed by its node's fault")
                attempt.state, attempt.retry, attempt.reason = "failed", True, "the GPU fell off the bus"
        else:
            attempt.step += 1
            own_end = OWN_ENDS.get(attempt.job[:3])
            if own_end is not None and attempt.step >= 2:
                attempt.state = own_end
            elif attempt.step >= STEPS:
                attempt.state = "completed"
        if node.connected and not node.cut:
            self._world.tell(AttemptChanged(node=node.config.name, status=attempt.status()))
        if attempt.state == "running":
            self._world.later(60, 240, lambda: self._advance(node, attempt, generation))

    # --- what goes wrong

    def plan_faults(self) -> None:
        nodes = list(self._world.nodes.values())
        draw = self._world.random
        some = lambda part: draw.sample(nodes, max(1, int(len(nodes) * part)))  # noqa: E731
        for node in some(0.05):
            self._world.later(
                300, 3000, lambda node=node: self._crash(node, forget=False, away=draw.uniform(5, 60))
            )
        for node in some(0.03):
            self._world.later(
                300, 3000, lambda node=node: self._crash(node, forget=True, away=draw.uniform(60, 900))
            )
        for node in some(0.02):
            self._world.later(300, 3000, lambda node=node: self._die(node))
        for away in (30.0, 300.0, 900.0, 1500.0):
            for node in some(0.04):
                self._world.later(120, 3000, lambda node=node, away=away: self._cut(node, away))
        for _ in range(5):
            self._world.later(60, 3600, self._world.kill_coordinator_when_up)

    def _crash(self, node: Node, *, forget: bool, away: float) -> None:
        """The agent and its trainers; `forget`: the node comes back with an empty disk."""
        if node.dead:
            return
        self._world.count("node came back empty" if forget else "agent killed")
        node.generation += 1
        node.dead = True
        if forget:
            node.attempts.clear()
        self._world.disconnect(node, "connection lost")
        self._world.after(away, lambda: self._revive(node))

    def _revive(self, node: Node) -> None:
        node.dead = False
        for attempt in node.attempts.values():
            if attempt.state in ("queued", "running"):
                self._go_on(node, attempt)

    def _die(self, node: Node) -> None:
        self._world.count("node died for good")
        node.generation += 1
        node.dead = True
        self._world.disconnect(node, "connection lost")

    def _cut(self, node: Node, away: float) -> None:
        """Silence: nothing arrives any more, and nobody is told; the node itself runs on."""
        self._world.count("partition")
        node.cut = True
        self._world.after(away, lambda: setattr(node, "cut", False))
