"""What is simulated besides the coordinator: nodes with their attempts, and the jobs that are submitted."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from gshare.agent.jobs.events import JobStateName
from gshare.agent.node.protocol import AttemptStatus, GpuInfo, NodeInfo
from gshare.coordinator.config import GpuConfig, NodeConfig
from gshare.coordinator.facts import JobFacts

#: What a job of the simulation ends as, by the beginning of its name.
OWN_ENDS: dict[str, JobStateName] = {"bad": "failed", "div": "diverged"}
GPU_TYPES = (("NVIDIA GeForce RTX 4090", 24564), ("NVIDIA H100 80GB HBM3", 81559), ("Orin", 30000))
STEPS = 5  # evaluations and checkpoints of a job


@dataclass
class Attempt:
    job: str
    number: int
    gpu: str
    budget_mb: int
    step: int = 0
    state: JobStateName = "queued"
    reason: str = ""
    retry: bool = False
    generation: int = 0  # of its agent: a crash ends what was planned

    def status(self) -> AttemptStatus:
        return AttemptStatus(
            owner="sim",
            job=self.job,
            attempt=self.number,
            state=self.state,
            step=self.step,
            total_steps=STEPS,
            reason=self.reason,
            retry=self.retry,
            gpu=self.gpu,
            checkpoint_step=self.step,
        )


@dataclass
class Node:
    config: NodeConfig
    gpus: dict[str, tuple[str, int]]  # UUID → type, MiB
    dead: bool = False
    cut: bool = False  # the network
    connected: bool = False
    busy: bool = False  # an action is under way
    generation: int = 0
    attempts: dict[tuple[str, int], Attempt] = field(default_factory=dict)

    def info(self, clock: float) -> NodeInfo:
        """What its agent says of it."""
        used: dict[str, int] = {}
        for attempt in self.attempts.values():
            if attempt.state in ("running", "paused"):
                used[attempt.gpu] = used.get(attempt.gpu, 0) + attempt.budget_mb
        gpus = [
            GpuInfo(
                uuid=uuid,
                name=kind,
                memory_type="discrete",
                total_mb=mb,
                free_mb=max(0, int(mb * 0.85) - used.get(uuid, 0)),
            )
            for uuid, (kind, mb) in self.gpus.items()
        ]
        return NodeInfo(
            reply_to=0,
            hostname=self.config.name,
            time=clock,
            uptime_s=1.0,
            machine="x86_64",
            python="3.12",
            torch="2.11",
            ram_mb=64_000,
            ram_free_mb=max(0, 60_000 - used.get("", 0)),
            disk_free_mb=100_000,
            gpus=gpus,
        )


def make_node(number: int, draw: random.Random) -> Node:
    name = f"n{number:04}"
    kind = draw.choices((0, 1, 2, 3), weights=(5, 2, 2, 1))[0]
    if kind == 3:
        return Node(NodeConfig(name=name, max_adapters=2), {})
    gpus = {f"GPU-{number}-{i}": GPU_TYPES[kind] for i in range(draw.choice((1, 1, 2)))}
    listed = tuple(GpuConfig(uuid=uuid, max_adapters=draw.choice((2, 3, 4))) for uuid in gpus)
    return Node(NodeConfig(name=name, gpus=listed, max_adapters=6), gpus)


def make_job(number: int, draw: random.Random) -> JobFacts:
    base, base_mb, parameters = draw.choice(
        (("8B", 9000, 8_000_000_000), ("0.5B", 2500, 500_000_000), ("135M", 1500, 135_000_000))
    )
    kind = draw.choices(("job", "bad", "div"), weights=(98, 1, 1))[0]
    return JobFacts(
        name=f"{kind}{number:05}",
        submission=str(number),
        base=base,
        base_mb=base_mb,
        adapter_mb=draw.choice((200, 400, 800, 1600)),
        parameters=parameters,
    )
