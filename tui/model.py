"""What the screens show, built from frames alone: no clock, no I/O. The same frames give the same state.

    changes = state.apply(frame)

Everything is bounded: curves by `curve.py`, the journal is a ring, jobs and nodes are those of the source.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from gshare.agent.node.protocol import GpuInfo, NodeInfo, ReservationInfo
from gshare.tui.curve import TRAIN_POINTS, VAL_POINTS, Curve
from gshare.tui.frames import (
    ENDED,
    Checkpoint,
    Entry,
    Evaluation,
    Found,
    Frame,
    History,
    HyperValue,
    JobState,
    JobUpdate,
    JobView,
    Journal,
    Level,
    Message,
    NodeState,
    NodeView,
    Reset,
    Sample,
    Samples,
    Snapshot,
    SourceState,
)
from gshare.tui.ranking import rank_key
from gshare.tui.speed import Speed

ENTRIES_KEPT = 20_000
#: States of a job kept for its page; a job that is moved about has a few dozen.
STATES_KEPT = 64
#: Messages are told on one line; what a node sends may be longer.
TEXT_LENGTH = 500


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


class State:
    """Everything that is known. Read it freely; change it by `apply` alone."""

    def __init__(self, entries_kept: int = ENTRIES_KEPT) -> None:
        self.source: SourceState | None = None  # None: nothing was said yet
        self.found: Found | None = None
        self.jobs: dict[str, Job] = {}
        self.nodes: dict[str, Node] = {}
        self.entries: deque[Entry] = deque(maxlen=entries_kept)
        self.last_entry = 0  # the number of the newest entry
        self.time: float | None = None  # the source's clock, by its newest frame
        self.received: float | None = None  # ours, when the newest frame came
        self._ranked: list[Job] | None = None
