"""A small cluster around the coordinator's machine, moved by hand: for tests that choose every interleaving.

Agents obey as `agent/node/protocol.py` says; the coordinator's disk (records, outbox) is what the store
keeps. Nothing happens by itself: an action is carried out by `work` or `place`, its answer waits in `mail`
until it is delivered, in any order, late, or twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from gshare.agent.jobs.events import ENDED, Exit, JobStateName
from gshare.agent.node.protocol import EARLY_EXIT, AttemptStatus, GpuInfo, NodeInfo
from gshare.coordinator.actions import (
    CheckBest,
    ClusterAction,
    Ended,
    Forget,
    Pause,
    Place,
    Publish,
    PullCheckpoint,
    Resume,
    Say,
    Start,
    Stop,
    action_key,
)
from gshare.coordinator.cluster import Cluster
from gshare.coordinator.config import GpuConfig, NodeConfig
from gshare.coordinator.events import (
    AttemptChanged,
    AttemptGone,
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
    Tick,
)
from gshare.coordinator.facts import PLACED_STATES, CheckpointRef, JobFacts, JobRecord
from gshare.coordinator.transfers import Limits

STEPS = 3
#: Where jobs of a sweep pause.
BOUNDARY = 2
TOTAL_MB = 24_000


def facts(name: str, **changes: object) -> JobFacts:
    """A job of 3 GB on an empty GPU, 1 GB beside others of its base."""
    values = {
        "submission": "first",
        "base": "base",
        "base_mb": 2000,
        "adapter_mb": 1000,
        "parameters": 1_000_000_000,
    }
    return JobFacts(name=name, **{**values, **changes})  # pyright: ignore[reportArgumentType]


def node_info(hostname: str = "n", *, gpus: tuple[str, ...] = (), **changes: object) -> NodeInfo:
    """A node in good health; each GPU has 24,000 MiB of which 20,400 are free."""
    values: dict[str, object] = {
        "reply_to": 0,
        "hostname": hostname,
        "time": 0.0,
        "uptime_s": 1.0,
        "machine": "x86_64",
        "python": "3.12",
        "torch": "2.11",
        "ram_mb": 64_000,
        "ram_free_mb": 60_000,
        "disk_free_mb": 100_000,
        "gpus": [
            GpuInfo(
                uuid=uuid,
                name="NVIDIA GeForce RTX 4090",
                memory_type="discrete",
                total_mb=TOTAL_MB,
                free_mb=int(TOTAL_MB * 0.85),
            )
            for uuid in gpus
        ],
    }
    return NodeInfo(**{**values, **changes})  # pyright: ignore[reportArgumentType]


def gpu_node(name: str, *, gpus: int = 1, max_adapters: int = 2, **changes: object) -> NodeConfig:
    listed = tuple(GpuConfig(uuid=f"GPU-{name}-{i}", max_adapters=max_adapters) for i in range(gpus))
    return NodeConfig(name=name, gpus=listed, **changes)  # pyright: ignore[reportArgumentType]


@dataclass
class Attempt:
    """As its agent knows it."""

    job: str
    number: int
    gpu: str
    first_step: int
    step: int = 0
    state: JobStateName = "queued"
    retry: bool = False
    reason: str = ""
    pause_at: int = 0
    past: bool = False
    exits: bool = False  # it is of a sweep, and may be stopped by its own losses
    exit: Exit | None = None
    parked: bool = False

    def status(self) -> AttemptStatus:
        return AttemptStatus(
            owner="me",
            job=self.job,
            attempt=self.number,
            state=self.state,
            step=self.step,
            total_steps=STEPS,
            reason=self.reason,
            retry=self.retry,
            gpu=self.gpu,
            checkpoint_step=self.step,
            exit=self.exit,
            parked=self.parked,
        )


@dataclass
class Letter:
    """An answer on its way; `done`: the action that it ends, if it arrives in the same life and channel."""

    event: ClusterEvent
    done: ClusterAction | None = None
    life: tuple[int, int] = (0, 0)

    def about(self, node: str) -> bool:
        return node in (getattr(self.event, "node", ""), getattr(self.done, "node", ""))


@dataclass
class Model:
    """`tell` is a transaction of the coordinator; the other methods are the world."""

    configs: list[NodeConfig]
    limits: Limits = field(default_factory=lambda: Limits(settle_s=0.0, fault_delay_s=1.0))
    machine: type[Cluster] = Cluster
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.outbox: dict[str, ClusterAction] = {}
        self.agents: dict[str, dict[tuple[str, int], Attempt]] = {c.name: {} for c in self.configs}
        self.connected: dict[str, int] = {}  # node → number of the connection
        self.busy: dict[str, bool] = {}
        self.mail: list[Letter] = []
        self.placed: dict[tuple[str, str], list[int]] = {}  # (job, submission) → attempts at home
        self.starts: dict[tuple[str, int], str] = {}  # (job, attempt) → node
        self.said: list[str] = []
        self.ended: list[tuple[str, str]] = []
        self.boots = self.connections = 0
        self.boot()

    # --- the coordinator

    def boot(self) -> None:
        """(Again) from what is on its disk."""
        jobs = [msgspec.msgpack.decode(record, type=JobRecord) for record in self.records.values()]
        self.cluster = self.machine(sorted(jobs, key=lambda job: job.order), self.limits)
        self.boots += 1
        self.connected.clear()
        self.busy.clear()
        for config in self.configs:
            self.tell(NodeAdded(config=config))
        self.tell(Started(now=self.now, wall=self.now))

    def tell(self, event: ClusterEvent, done: ClusterAction | None = None) -> list[ClusterAction]:
        actions = self.cluster.handle(event)
        for job in self.cluster.take_changed():
            self.records[job.facts.name] = msgspec.msgpack.encode(job)
        if done is not None:
            self.outbox.pop(action_key(done) or "", None)
        for action in actions:
            key = action_key(action)
            if key is not None:
                self.outbox.setdefault(key, action)
            elif isinstance(action, Say):
                self.said.append(action.text)
            elif isinstance(action, Ended):
                self.ended.append((action.job, action.state))
            if isinstance(action, Start):
                self.note_start(action)
        return actions

    def note_start(self, start: Start) -> None:
        """An attempt has one place, and a new one a new number."""
        key = (start.job, start.attempt)
        if key not in self.starts:
            older = [number for job, number in self.starts if job == start.job]
            assert start.attempt > max(older, default=0), f"{key} after {older}"
            self.starts[key] = start.node
        assert self.starts[key] == start.node, f"{key} in two places"

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.tell(Tick(now=self.now, wall=self.now))
        for name, node in self.cluster.nodes.items():
            if name in self.connected and not node.up:
                self.disconnect(name)

    def state(self, job: str) -> str:
        return self.cluster.jobs[job].state

    # --- channels

    def info(self, name: str) -> NodeInfo:
        config = next(config for config in self.configs if config.name == name)
        return node_info(name, gpus=tuple(gpu.uuid for gpu in config.gpus or ()), time=self.now)

    def connect(self, name: str) -> None:
        self.connections += 1
        self.connected[name], self.busy[name] = self.connections, False
        attempts = tuple(attempt.status() for attempt in self.agents[name].values())
        knows = (EARLY_EXIT,)
        self.tell(NodeUp(node=name, info=self.info(name), attempts=attempts, knows=knows))

    def disconnect(self, name: str) -> None:
        if self.connected.pop(name, None) is not None:
            self.tell(NodeDown(node=name, reason="connection lost"))

    def beat(self, name: str) -> None:
        self.tell(NodeBeat(node=name, info=self.info(name)))

    def deliver(self, letter: Letter) -> None:
        """Late or in a later life, an answer is heard, but ends no action."""
        self.tell(letter.event, done=letter.done if letter.life == self._life(letter) else None)
        if letter.done is not None and letter.life == self._life(letter):
            self.busy[getattr(letter.done, "node", "")] = False

    def _life(self, letter: Letter) -> tuple[int, int]:
        return self.boots, self.connected.get(getattr(letter.done, "node", ""), 0)

    # --- actions

    def pending(self, node: str) -> list[ClusterAction]:
        return [action for action in self.outbox.values() if getattr(action, "node", "") == node]

    def work(self, node: str) -> bool:
        """The next action for that node; False: there is none, or one is under way."""
        if node not in self.connected or self.busy.get(node):
            return False
        for action in self.pending(node):
            if not self.cluster.still_wanted(action):
                del self.outbox[action_key(action) or ""]
                continue
            event = self._agent_does(node, action)
            if event is None:
                del self.outbox[action_key(action) or ""]
            else:
                self.busy[node] = True
                self.mail.append(Letter(event, action, (self.boots, self.connected[node])))
            return True
        return False

    def place(self) -> bool:
        """The next rename at home; done again, it finds itself done."""
        for action in list(self.outbox.values()):
            if isinstance(action, Place):
                if not self.cluster.still_wanted(action):
                    del self.outbox[action_key(action) or ""]
                    continue
                job = self.cluster.jobs[action.job]
                attempts = self.placed.setdefault((action.job, job.facts.submission), [])
                if action.attempt not in attempts:
                    attempts.append(action.attempt)
                event = Published(job=action.job, attempt=action.attempt)
                self.mail.append(Letter(event, action, (self.boots, 0)))
                return True
        return False

    def _agent_does(self, node: str, action: ClusterAction) -> ClusterEvent | None:
        assert not isinstance(action, (Place, Say, Ended, CheckBest))
        agent, key = self.agents[node], (action.job, action.attempt)
        attempt = agent.get(key)
        if isinstance(action, Start):
            for (job, number), older in agent.items():
                if job == action.job and number < action.attempt and older.state not in ENDED:
                    older.state = "stopped"
            step = action.checkpoint.step if action.checkpoint else 0
            job = self.cluster.jobs[action.job]
            attempt = Attempt(action.job, action.attempt, action.gpu, step, step, past=job.past)
            attempt.pause_at, attempt.exits = job.facts.pause_at, job.facts.early_exit
            agent.setdefault(key, attempt)
            return None
        if isinstance(action, Forget):
            assert attempt is None or attempt.state in ENDED, "files of a running attempt were forgotten"
            agent.pop(key, None)
            return None
        if isinstance(action, PullCheckpoint):
            if attempt is None or not attempt.step:
                return PullFailed(job=action.job, attempt=action.attempt, reason="gone")
            checkpoint = CheckpointRef(attempt=action.attempt, step=attempt.step)
            return CheckpointPulled(job=action.job, checkpoint=checkpoint)
        if isinstance(action, Publish):
            whole = attempt is not None and attempt.exits and attempt.state == "stopped" and attempt.step
            if attempt is None or not (whole or attempt.state in ("completed", "diverged")):
                return PublishFailed(job=action.job, attempt=action.attempt, reason="gone", retry=False)
            return BroughtHome(job=action.job, attempt=action.attempt, val_loss=1.0, best_step=1)
        if attempt is None:
            return AttemptGone(node=node, job=action.job, attempt=action.attempt)
        if attempt.state not in ENDED:
            attempt.state = (
                "stopped"
                if isinstance(action, Stop)
                else "paused"
                if isinstance(action, Pause)
                else "running"
            )
            assert isinstance(action, (Stop, Pause, Resume))
        self.mail.append(Letter(AttemptChanged(node=node, status=attempt.status())))
        return None

    # --- attempts

    def advance(
        self,
        node: str,
        attempt: Attempt,
        end: JobStateName | None = None,
        exit: Exit | None = None,
        **how: object,
    ) -> None:
        """A step further, or to an end (of its own losses: `exit`); what it says waits in the mail."""
        if attempt.state == "queued":
            attempt.state = "running"
        elif attempt.state == "running":
            attempt.step += 1
            if attempt.step >= STEPS:
                attempt.state = "completed"
            # Nobody trains past the end of a warm-up without a word.
            assert attempt.past or not attempt.pause_at or attempt.step <= attempt.pause_at
        if attempt.state == "running" and 0 < attempt.pause_at == attempt.step and not attempt.past:
            attempt.state, attempt.parked = "stopped", True
            attempt.reason = "where it was to pause"
        elif end is not None:
            attempt.state, attempt.exit = end, exit
        for name, value in how.items():
            setattr(attempt, name, value)
        self.mail.append(Letter(AttemptChanged(node=node, status=attempt.status())))

    def settle(self, rounds: int = 200) -> None:
        """Everybody does what is to be done until nothing is: connections that stand stay, others do not."""
        for _ in range(rounds):
            moved = False
            for node in list(self.connected):
                moved = self.work(node) or moved
                for attempt in list(self.agents[node].values()):
                    if attempt.state in ("queued", "running"):
                        self.advance(node, attempt)
                        moved = True
            moved = self.place() or moved
            while self.mail:
                self.deliver(self.mail.pop(0))
                moved = True
            self.tick(10)
            for node in list(self.connected):
                self.beat(node)
            if not moved and not self.cluster._timers:
                return

    # --- what must always hold

    def check(self) -> None:
        for key, attempts in self.placed.items():
            assert len(attempts) <= 1, f"{key} was published twice: {attempts}"
        for config in self.configs:
            here = [
                job
                for job in self.cluster.jobs.values()
                if job.node == config.name and job.state in PLACED_STATES
            ]
            if config.max_adapters is not None:
                assert len(here) <= config.max_adapters
            for gpu in config.gpus or ():
                on_gpu = [job for job in here if job.gpu == gpu.uuid]
                assert gpu.max_adapters is None or len(on_gpu) <= gpu.max_adapters
                assert sum(job.budget_mb for job in on_gpu) <= TOTAL_MB * 0.85
        placement = self.cluster._placement
        held = {
            (job, slot.node, slot.view.gpu)
            for node in placement._nodes.values()
            for slot in node.slots.values()
            for job in slot.held
        }
        placed = {
            (name, job.node, job.gpu)
            for name, job in self.cluster.jobs.items()
            if job.state in PLACED_STATES and job.node
        }
        assert held == placed
        waiting = {name for name, job in self.cluster.jobs.items() if job.state == "waiting"}
        assert set(placement._waiting) <= waiting
        delayed = {job for _, _, _, job, _ in self.cluster._timers}
        for name in waiting - set(placement._waiting):
            assert self.cluster.jobs[name].pulling or name in delayed, f"{name} waits for nothing"
