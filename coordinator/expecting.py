"""`--expect-workers N`: wait until N nodes are ready, at most so long; else say who is missing, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gshare.coordinator.node_state import NodeMachine


def counted(nodes: int) -> str:
    return f"{nodes} node" if nodes == 1 else f"{nodes} nodes"


@dataclass(frozen=True)
class Expecting:
    """`workers` nodes that may be placed on, within `timeout_s` seconds of `since` (monotonic)."""

    workers: int
    timeout_s: float
    since: float

    def ready(self, nodes: Iterable[NodeMachine]) -> bool:
        return sum(node.placeable for node in nodes) >= self.workers

    def too_late(self, nodes: Iterable[NodeMachine], now: float) -> str | None:
        """What ends the wait, a line for each node that is missing; None: not over, or they are there."""
        nodes = list(nodes)
        if self.ready(nodes) or now - self.since < self.timeout_s:
            return None
        there = sum(node.placeable for node in nodes)
        lines = [f"{there} of {self.workers} workers are ready after {self.timeout_s:.0f} s; missing:"]
        lines += [
            f"  {node.name}: {node.state}, {_why(node)}"
            for node in sorted(nodes, key=lambda node: node.name)
            if not node.placeable
        ]
        if len(nodes) < self.workers:
            lines.append(f"  cluster.toml names {counted(len(nodes))}: add some, or expect fewer workers")
        return "\n".join(lines)


def _why(node: NodeMachine) -> str:
    forbidding = [problem.text for problem in node.problems if problem.forbids]
    if node.up and forbidding:
        return "; ".join(forbidding)
    return node.reason or "it has not answered yet"
