"""The coordinator's machines against a simulated cluster: what they cost, and nothing lost or doubled.

    python benchmarks/cluster_sim.py                          1 000 nodes, 10 000 jobs
    python benchmarks/cluster_sim.py --nodes 20 --jobs 150
    python benchmarks/cluster_sim.py --no-fencing …           negative control: must fail (doubled)
    python benchmarks/cluster_sim.py --no-outbox …            negative control: must fail (lost)

`coordinator/cluster.py` is the one that the service runs; simulated are nodes, network, time and the disk of
the coordinator (records and outbox as the store keeps them). Meanwhile agents crash and resume, nodes die for
good or come back empty, partitions heal before and after ten minutes, attempts fail by their node's fault,
the disk at home is full, and the coordinator itself is killed with everything that was under way.

In the end every job must have ended as it should, and every completed one must have been put into its output
directory once. Counted as events are those that the machine handled; its time is the time inside `handle`: of
the processor for the rate (one core, whatever else runs on it), of the wall clock for a placement.

Exit code 0 when every gate holds, 1 when one fails.
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
from gshare.agent.jobs.events import JobStateName
from gshare.agent.node.protocol import AttemptStatus, GpuInfo, NodeInfo
from gshare.coordinator.actions import (
    CheckBest,
    ClusterAction,
    Ended,
    Forget,
    NodeAction,
    Pause,
    Place,
    Publish,
    PullCheckpoint,
    Say,
    Start,
    Stop,
    action_key,
)
from gshare.coordinator.cluster import Cluster
from gshare.coordinator.config import GpuConfig, NodeConfig
from gshare.coordinator.events import (
    AttemptChanged,
    BroughtHome,
    CheckpointPulled,
    ClusterEvent,
    NodeAdded,
    NodeBeat,
    NodeDown,
    NodeUp,
    Published,
    PublishFailed,
    PullFailed,
    Started,
    Submit,
    Tick,
)
from gshare.coordinator.facts import (
    ENDED_STATES,
    PLACED_STATES,
    CheckpointRef,
    JobFacts,
    JobRecord,
)

EVENTS_A_SECOND = 10_000
PLACEMENT_P99_MS = 50.0
#: Simulated seconds after which a run that has not ended is given up.
GIVE_UP_S = 4 * 3600.0
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


class Unfenced(Cluster):
    """Negative control: whatever completes is fetched and put into place."""

    def still_wanted(self, action: ClusterAction) -> bool:
        return True

    def _not_current(self, job: JobRecord, node: str, status: AttemptStatus) -> None:
        if status.state == "completed":
            self._out.append(Publish(node=node, job=status.job, attempt=status.attempt))

    def _brought_home(self, event: BroughtHome) -> None:
        super()._brought_home(event)
        self._out.append(Place(job=event.job, attempt=event.attempt))


class World:
    """Nodes, network, clock and the coordinator's disk; `run` drives a machine through it."""

    def __init__(
        self, *, nodes: int, jobs: int, seed: int, machine: type[Cluster] = Cluster, outbox: bool = True
    ) -> None:
        self.random, self.machine, self.keep_outbox = random.Random(seed), machine, outbox
        self.clock, self._count = 0.0, 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self.nodes = {f"n{number:04}": self._make_node(number) for number in range(nodes)}
        self.orders = [self._make_job(number) for number in range(jobs)]
        self.records: dict[str, bytes] = {}  # the store: jobs …
        self.outbox: dict[str, ClusterAction] = {}  # … and actions by key
        self.cluster = machine()
        self.boots = 0
        self.running = False
        self.kills_at_rename = 30
        # What is measured and what must hold.
        self.placed: dict[str, list[int]] = {}  # job → attempts put into its output directory
        self.started: dict[tuple[str, int], tuple[str, str]] = {}
        self.faults: list[str] = []
        self.events, self.machine_s, self.machine_cpu_s = 0, 0.0, 0.0
        self.placements: list[float] = []  # seconds a placement
        self.happened: dict[str, int] = {}

    def _make_node(self, number: int) -> Node:
        name, draw = f"n{number:04}", self.random
        kind = draw.choices((0, 1, 2, 3), weights=(5, 2, 2, 1))[0]
        if kind == 3:
            return Node(NodeConfig(name=name, max_adapters=2), {})
        gpus = {f"GPU-{number}-{i}": GPU_TYPES[kind] for i in range(draw.choice((1, 1, 2)))}
        listed = tuple(GpuConfig(uuid=uuid, max_adapters=draw.choice((2, 3, 4))) for uuid in gpus)
        return Node(NodeConfig(name=name, gpus=listed, max_adapters=6), gpus)

    def _make_job(self, number: int) -> JobFacts:
        draw = self.random
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
        self._plan_faults()
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
        self._count_one("coordinator killed")
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
        new = sum((start.job, start.attempt) not in self.started for start in starts)
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
            self._check_start(start)
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
                self._disconnect(node, "no heartbeat")

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
        self.tell(NodeUp(node=node.config.name, info=self._info(node), attempts=attempts))
        self._work(node)

    def _disconnect(self, node: Node, reason: str) -> None:
        if node.connected:
            node.connected = node.busy = False
            self.tell(NodeDown(node=node.config.name, reason=reason))
            boots = self.boots
            self.later(1, 10, lambda: self._connect(node) if boots == self.boots else None)

    def _beats(self, node: Node) -> None:
        if node.connected and not node.cut and not node.dead:
            self.tell(NodeBeat(node=node.config.name, info=self._info(node)))
        self.after(15, lambda: self._beats(node))

    def _info(self, node: Node) -> NodeInfo:
        used: dict[str, int] = {}
        for attempt in node.attempts.values():
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
            for uuid, (kind, mb) in node.gpus.items()
        ]
        return NodeInfo(
            reply_to=0,
            hostname=node.config.name,
            time=self.clock,
            uptime_s=1.0,
            machine="x86_64",
            python="3.12",
            torch="2.11",
            ram_mb=64_000,
            ram_free_mb=max(0, 60_000 - used.get("", 0)),
            disk_free_mb=100_000,
            gpus=gpus,
        )

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
        attempts = self.placed.setdefault(action.job, [])
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
        reply = self._node_does(node, action)
        if reply is not None:
            self.tell(reply, done=action)
        else:
            self.outbox.pop(action_key(action) or "", None)
        self._work(node)

    def _node_does(self, node: Node, action: NodeAction) -> ClusterEvent | None:
        """What an agent does; the event that the coordinator makes of its answer, None for a plain one."""
        key = (action.job, action.attempt)
        attempt = node.attempts.get(key)
        if isinstance(action, Start):
            self._agent_starts(node, action)
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
            if self.random.random() < 0.05:
                self._count_one("disk full at home")
                return PublishFailed(job=action.job, attempt=action.attempt, reason="disk full", retry=True)
            if attempt is None:
                return PublishFailed(job=action.job, attempt=action.attempt, reason="gone", retry=False)
            return BroughtHome(job=action.job, attempt=action.attempt, val_loss=1.0, best_step=attempt.step)
        else:
            assert isinstance(action, Pause)
        return None

    # --- agents

    def _agent_starts(self, node: Node, action: Start) -> None:
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
        self.later(2, 10, lambda: self._advance(node, attempt, generation))

    def _advance(self, node: Node, attempt: Attempt, generation: int) -> None:
        if generation != node.generation or node.dead or attempt.state not in ("queued", "running"):
            return
        if attempt.state == "queued":
            attempt.state = "running"
            if self.random.random() < 0.02:
                self._count_one("attempt failed by its node's fault")
                attempt.state, attempt.retry, attempt.reason = "failed", True, "the GPU fell off the bus"
        else:
            attempt.step += 1
            own_end = OWN_ENDS.get(attempt.job[:3])
            if own_end is not None and attempt.step >= 2:
                attempt.state = own_end
            elif attempt.step >= STEPS:
                attempt.state = "completed"
        if node.connected and not node.cut:
            self.tell(AttemptChanged(node=node.config.name, status=attempt.status()))
        if attempt.state == "running":
            self.later(60, 240, lambda: self._advance(node, attempt, generation))

    # --- what goes wrong

    def _count_one(self, what: str) -> None:
        self.happened[what] = self.happened.get(what, 0) + 1

    def _plan_faults(self) -> None:
        nodes = list(self.nodes.values())
        draw = self.random
        some = lambda part: draw.sample(nodes, max(1, int(len(nodes) * part)))  # noqa: E731
        for node in some(0.05):
            self.later(300, 3000, lambda node=node: self._crash(node, forget=False, away=draw.uniform(5, 60)))
        for node in some(0.03):
            self.later(
                300, 3000, lambda node=node: self._crash(node, forget=True, away=draw.uniform(60, 900))
            )
        for node in some(0.02):
            self.later(300, 3000, lambda node=node: self._die(node))
        for away in (30.0, 300.0, 900.0, 1500.0):
            for node in some(0.04):
                self.later(120, 3000, lambda node=node, away=away: self._cut(node, away))
        for _ in range(5):
            self.later(60, 3600, self._kill_coordinator_when_up)

    def _kill_coordinator_when_up(self) -> None:
        if self.running:
            self._kill_coordinator()

    def _crash(self, node: Node, *, forget: bool, away: float) -> None:
        """The agent and its trainers; `forget`: the node comes back with an empty disk."""
        if node.dead:
            return
        self._count_one("node came back empty" if forget else "agent killed")
        node.generation += 1
        node.dead = True
        if forget:
            node.attempts.clear()
        self._disconnect(node, "connection lost")
        self.after(away, lambda: self._revive(node))

    def _revive(self, node: Node) -> None:
        node.dead = False
        for attempt in node.attempts.values():
            if attempt.state in ("queued", "running"):
                self._go_on(node, attempt)

    def _die(self, node: Node) -> None:
        self._count_one("node died for good")
        node.generation += 1
        node.dead = True
        self._disconnect(node, "connection lost")

    def _cut(self, node: Node, away: float) -> None:
        """Silence: nothing arrives any more, and nobody is told; the node itself runs on."""
        self._count_one("partition")
        node.cut = True
        self.after(away, lambda: setattr(node, "cut", False))

    # --- what must hold

    def _check_start(self, start: Start) -> None:
        where = (start.node, start.gpu)
        if self.started.setdefault((start.job, start.attempt), where) != where:
            self.faults.append(f"attempt {start.attempt} of {start.job} was started in two places")
        config = self.nodes[start.node].config
        here = [
            job for job in self.cluster.jobs.values() if job.node == start.node and job.state in PLACED_STATES
        ]
        on_gpu = [job for job in here if job.gpu == start.gpu]
        limits = {gpu.uuid: gpu.max_adapters for gpu in config.gpus or ()}
        most = limits.get(start.gpu)
        if (config.max_adapters is not None and len(here) > config.max_adapters) or (
            most is not None and len(on_gpu) > most
        ):
            self.faults.append(f"too many adapters on {start.node}")
        total = self.nodes[start.node].gpus.get(start.gpu, ("", 64_000))[1]
        if sum(job.budget_mb for job in on_gpu) > total * 0.85:
            self.faults.append(f"{start.node} is over-committed")

    def verdict(self) -> tuple[list[str], list[str]]:
        """(jobs lost, jobs doubled): what did not end as it should, what was placed more than once."""
        lost = []
        for facts in self.orders:
            job = self.cluster.jobs.get(facts.name)
            should = OWN_ENDS.get(facts.name[:3], "completed")
            home = bool(self.placed.get(facts.name)) or should == "failed"
            if job is None or job.state != should or not home:
                state = "not in the store" if job is None else f"{job.state} ({job.reason})"
                lost.append(f"{facts.name}: {state}")
        return lost, [job for job, attempts in self.placed.items() if len(attempts) > 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-fencing", action="store_true")
    parser.add_argument("--no-outbox", action="store_true")
    parser.add_argument("--no-speed", action="store_true", help="do not judge speed, for small runs")
    args = parser.parse_args()
    world = World(
        nodes=args.nodes,
        jobs=args.jobs,
        seed=args.seed,
        machine=Unfenced if args.no_fencing else Cluster,
        outbox=not args.no_outbox,
    )
    world.run()
    lost, doubled = world.verdict()
    placements = sorted(world.placements)
    report = {
        "nodes": args.nodes,
        "jobs": args.jobs,
        "seed": args.seed,
        "simulated_s": round(world.clock),
        "events": world.events,
        "events_per_cpu_s": round(world.events / world.machine_cpu_s),
        "events_per_wall_s": round(world.events / world.machine_s),
        "placements": len(placements),
        "placement_p99_ms": round(1000 * placements[int(len(placements) * 0.99)], 3),
        "placement_max_ms": round(1000 * placements[-1], 3),
        "happened": world.happened,
        "lost": len(lost),
        "doubled": len(doubled),
        "broken_limits": len(world.faults),
        "python": platform.python_version(),
    }
    print(json.dumps(report, indent=1))
    for line in (lost + doubled + world.faults)[:20]:
        print(line, file=sys.stderr)
    gates = {
        "0 lost": not lost,
        "0 doubled": not doubled,
        "limits kept": not world.faults,
    }
    if not args.no_speed:
        gates[f"{EVENTS_A_SECOND} events/s"] = report["events_per_cpu_s"] >= EVENTS_A_SECOND
        gates[f"placement p99 {PLACEMENT_P99_MS} ms"] = report["placement_p99_ms"] <= PLACEMENT_P99_MS
    for name, held in gates.items():
        print(f"{name}: {'ok' if held else 'FAILED'}")
    return 0 if all(gates.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
