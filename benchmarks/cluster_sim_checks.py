"""What must hold in the simulated cluster: limits at every start, and in the end nothing lost or doubled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster_sim_nodes import OWN_ENDS, Node
from gshare.coordinator.actions import Start
from gshare.coordinator.cluster import Cluster
from gshare.coordinator.facts import PLACED_STATES, JobFacts


class Checks:
    def __init__(self, nodes: Mapping[str, Node], orders: Sequence[JobFacts]) -> None:
        self._nodes, self._orders = nodes, orders
        self.placed: dict[str, list[int]] = {}  # job → attempts put into its output directory
        self.started: dict[tuple[str, int], tuple[str, str]] = {}
        self.faults: list[str] = []

    def check_start(self, start: Start, cluster: Cluster) -> None:
        """One place an attempt, and no limit of a node broken by it."""
        where = (start.node, start.gpu)
        if self.started.setdefault((start.job, start.attempt), where) != where:
            self.faults.append(f"attempt {start.attempt} of {start.job} was started in two places")
        config = self._nodes[start.node].config
        here = [job for job in cluster.jobs.values() if job.node == start.node and job.state in PLACED_STATES]
        on_gpu = [job for job in here if job.gpu == start.gpu]
        limits = {gpu.uuid: gpu.max_adapters for gpu in config.gpus or ()}
        most = limits.get(start.gpu)
        if (config.max_adapters is not None and len(here) > config.max_adapters) or (
            most is not None and len(on_gpu) > most
        ):
            self.faults.append(f"too many adapters on {start.node}")
        total = self._nodes[start.node].gpus.get(start.gpu, ("", 64_000))[1]
        if sum(job.budget_mb for job in on_gpu) > total * 0.85:
            self.faults.append(f"{start.node} is over-committed")

    def verdict(self, cluster: Cluster) -> tuple[list[str], list[str]]:
        """(jobs lost, jobs doubled): what did not end as it should, what was placed more than once."""
        lost = []
        for facts in self._orders:
            job = cluster.jobs.get(facts.name)
            should = OWN_ENDS.get(facts.name[:3], "completed")
            home = bool(self.placed.get(facts.name)) or should == "failed"
            if job is None or job.state != should or not home:
                state = "not in the store" if job is None else f"{job.state} ({job.reason})"
                lost.append(f"{facts.name}: {state}")
        return lost, [job for job, attempts in self.placed.items() if len(attempts) > 1]
