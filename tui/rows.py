"""The rows of the state: jobs and nodes as they are known now, and what a frame changed of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gshare.agent.node.protocol import GpuInfo, NodeInfo, ReservationInfo
from gshare.tui.curve import TRAIN_POINTS, VAL_POINTS, Curve
from gshare.tui.frames import ENDED, HyperValue, JobView, NodeView
from gshare.tui.speed import Speed

#: States of a job kept for its page; a job that is moved about has a few dozen.
STATES_KEPT = 64


@dataclass(slots=True, eq=False)
class Job:
    """One line of the leaderboard. None and "": not known, shown as "—"."""

    job: str  # the key
    name: str
    state: str = ""
    node: str = ""
    gpu: str = ""
    client: str = ""
    attempt: int = 0
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None  # the newest
    best_val_loss: float | None = None
    best_step: int | None = None
    epoch: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None  # of the newest step
    adapters_in_pass: int | None = None
    position: int = 0  # in the queue for GPU memory; 0: waits for none
    reason: str = ""  # why it waits, or why it ended
    output_dir: str = ""
    model: str = ""
    base_dtype: str = ""
    hyper: dict[str, HyperValue] = field(default_factory=dict)
    checkpoint_step: int | None = None
    received: float = 0.0  # when anything of it was last heard, our clock
    speed: Speed = field(default_factory=Speed)
    train: Curve = field(default_factory=lambda: Curve(TRAIN_POINTS, reserve=True))
    val: Curve = field(default_factory=lambda: Curve(VAL_POINTS))
    states: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=STATES_KEPT))

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def tokens_per_s(self) -> float | None:
        """None where it makes no steps, or none was seen."""
        return self.speed.tokens_per_s if self.state == "running" else None

    @property
    def eta_s(self) -> float | None:
        """Seconds to its last step at its present speed; None: not known, or it makes no steps."""
        rate = self.speed.steps_per_s
        if self.state != "running" or not rate or self.step is None or not self.total_steps:
            return None
        return max(0, self.total_steps - self.step) / rate

    @property
    def gap(self) -> float | None:
        """Validation loss above the training loss, both the newest."""
        if self.loss is None or self.val_loss is None:
            return None
        return self.val_loss - self.loss


@dataclass(slots=True, eq=False)
class Node:
    """One node. `received`: when its description came, our clock; `heard`: when it last said anything."""

    node: str
    state: str = ""
    reason: str = ""
    transport: str = ""
    host: str = ""
    gshare: str = ""
    jobs: int | None = None
    info: NodeInfo | None = None
    received: float = 0.0
    heard: float | None = None  # None: never, or not known

    @property
    def gpus(self) -> list[GpuInfo]:
        return self.info.gpus if self.info is not None else []

    def held(self, gpu_uuid: str | None = None) -> list[ReservationInfo]:
        """Reservations of that GPU (None: of all), the oldest first."""
        return sorted(self._rows("held", gpu_uuid), key=lambda row: row.created)

    def queue(self, gpu_uuid: str | None = None) -> list[ReservationInfo]:
        """What waits there, by position."""
        return sorted(self._rows("waiting", gpu_uuid), key=lambda row: row.position)

    def _rows(self, state: str, gpu_uuid: str | None) -> list[ReservationInfo]:
        rows = self.info.reservations if self.info is not None else []
        return [row for row in rows if row.state == state and gpu_uuid in (None, row.gpu_uuid)]


@dataclass(slots=True)
class Changes:
    """What a frame changed: keys of jobs and nodes, and whether it has to be shown at once.

    `rows`: jobs or nodes came or went. `reset`: everything is another. `urgent`: a state, not a measure.
    """

    jobs: set[str] = field(default_factory=set)
    nodes: set[str] = field(default_factory=set)
    entries: int = 0  # new ones in the journal
    source: bool = False
    rows: bool = False
    reset: bool = False
    urgent: bool = False

    def add(self, other: Changes) -> None:
        self.jobs |= other.jobs
        self.nodes |= other.nodes
        self.entries += other.entries
        self.source |= other.source
        self.rows |= other.rows
        self.reset |= other.reset
        self.urgent |= other.urgent

    def __bool__(self) -> bool:
        return bool(self.jobs or self.nodes or self.entries or self.source or self.rows or self.reset)


def node_view(node: Node, received: float) -> NodeView:
    """The node as a source would tell it, as of `received`."""
    return NodeView(
        node=node.node,
        state=node.state,
        reason=node.reason,
        transport=node.transport,
        host=node.host,
        gshare=node.gshare,
        seen_s=None if node.heard is None else received - node.heard,
        jobs=node.jobs,
        info=node.info,
    )


def job_view(job: Job) -> JobView:
    """The job as a source would tell it."""
    names = [name for name in JobView.__struct_fields__ if name not in ("job", "name")]
    return JobView(job=job.job, name=job.name, **{name: getattr(job, name) for name in names})
