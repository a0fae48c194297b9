"""What `Cluster.handle` is told. The only clock is `Tick`; events count in the order they are handled.

Whoever runs the machine (`service.py`, the simulation) turns what nodes, users and finished actions say into
these, and commits what comes of each in one transaction (`store.py`).
"""

from __future__ import annotations

import msgspec
from gshare.agent.node.protocol import AttemptStatus, NodeInfo
from gshare.coordinator.config import NodeConfig
from gshare.coordinator.facts import CheckpointRef, JobFacts

#: Why a job was stopped, where nobody says.
BY_USER = "stopped by its user"


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all events."""


# --- time


class Tick(_Event, frozen=True, kw_only=True, tag="tick"):
    """`now`: monotonic seconds of this process; `wall`: Unix time, only compared with the nodes' clocks."""

    now: float
    wall: float


class Started(_Event, frozen=True, kw_only=True, tag="started"):
    """The coordinator runs (again): after the nodes of its configuration were added, before anything else."""

    now: float
    wall: float


class HoldPlacement(_Event, frozen=True, kw_only=True, tag="hold_placement"):
    """Nothing is placed while it is on: `--expect-workers`."""

    on: bool


# --- nodes


class NodeAdded(_Event, frozen=True, kw_only=True, tag="node_added"):
    """A node of the configuration; again with other values: they replace the old ones."""

    config: NodeConfig


class NodeRemoved(_Event, frozen=True, kw_only=True, tag="node_removed"):
    """It is no longer in the configuration: its jobs go elsewhere at once."""

    node: str


class NodeDeploying(_Event, frozen=True, kw_only=True, tag="node_deploying"):
    node: str
    text: str = ""  # what is being done, for people


class NodeUp(_Event, frozen=True, kw_only=True, tag="node_up"):
    """The channel stands and the agent has answered. `attempts`: all of this owner that it knows; `agent`:
    who it is, empty where that is not known; `knows` as in its `NodeHello`."""

    node: str
    info: NodeInfo
    attempts: tuple[AttemptStatus, ...] = ()
    draining: bool = False
    agent: str = ""
    knows: tuple[str, ...] = ()


class NodeBeat(_Event, frozen=True, kw_only=True, tag="node_beat"):
    """A heartbeat (every 15 s)."""

    node: str
    info: NodeInfo


class NodeDown(_Event, frozen=True, kw_only=True, tag="node_down"):
    """The channel broke, or could not be made; `reason` says what to do about it."""

    node: str
    reason: str


# --- users


class Submit(_Event, frozen=True, kw_only=True, tag="submit"):
    """Ask `Cluster.submit_fault` first: a name that is in use is answered with a `Say` only."""

    facts: JobFacts


class StopJob(_Event, frozen=True, kw_only=True, tag="stop_job"):
    job: str
    reason: str = BY_USER


class PauseJob(_Event, frozen=True, kw_only=True, tag="pause_job"):
    job: str


class ResumeJob(_Event, frozen=True, kw_only=True, tag="resume_job"):
    """Also of a stopped or failed job: it goes on from its last checkpoint at home."""

    job: str


# --- attempts


class AttemptChanged(_Event, frozen=True, kw_only=True, tag="attempt_changed"):
    """What the node says of an attempt: at a change of state, a checkpoint, an evaluation."""

    node: str
    status: AttemptStatus


class StartFailed(_Event, frozen=True, kw_only=True, tag="start_failed"):
    """The node refused a `Start`, or what it needs cannot be sent. `retry`: another node may do better."""

    node: str
    job: str
    attempt: int
    reason: str
    retry: bool = True


class AttemptGone(_Event, frozen=True, kw_only=True, tag="attempt_gone"):
    """The node does not know the attempt that it was asked about."""

    node: str
    job: str
    attempt: int


class Evaluation(_Event, frozen=True, kw_only=True, tag="evaluation"):
    """One evaluation of an attempt. `val_loss` may be NaN."""

    node: str
    job: str
    attempt: int
    step: int
    val_loss: float
    label_tokens: int = 0
    best: bool = False
    time: float = 0.0  # Unix s, the node's clock


class BestSeen(_Event, frozen=True, kw_only=True, tag="best_seen"):
    """What `best/metadata.json` says now (the answer to `CheckBest`); where it differs, the file is right."""

    node: str
    job: str
    attempt: int
    step: int
    val_loss: float | None


# --- ends of actions


class GivenUp(_Event, frozen=True, kw_only=True, tag="given_up"):
    """The coordinator itself failed at an action of the job: a defect, or an order that nobody can carry out.
    The job fails; its files stay where they are."""

    job: str
    attempt: int
    reason: str


class CheckpointPulled(_Event, frozen=True, kw_only=True, tag="checkpoint_pulled"):
    job: str
    checkpoint: CheckpointRef


class PullFailed(_Event, frozen=True, kw_only=True, tag="pull_failed"):
    """Tried again at the attempt's next checkpoint."""

    job: str
    attempt: int
    reason: str


class BroughtHome(_Event, frozen=True, kw_only=True, tag="brought_home"):
    """All files of a `Publish` are at home, their hashes checked, fsynced; not yet in the output directory.

    `val_loss`, `best_step`: of `best/metadata.json` as pulled; None: the attempt has no best checkpoint.
    """

    job: str
    attempt: int
    val_loss: float | None = None
    best_step: int | None = None


class PublishFailed(_Event, frozen=True, kw_only=True, tag="publish_failed"):
    """`retry`: later from the same place (disk full at home); else the files are gone or wrong: run again."""

    job: str
    attempt: int
    reason: str
    retry: bool


class Published(_Event, frozen=True, kw_only=True, tag="published"):
    """The end of a `Place`: the files are in the output directory."""

    job: str
    attempt: int


ClusterEvent = (
    Tick
    | Started
    | HoldPlacement
    | NodeAdded
    | NodeRemoved
    | NodeDeploying
    | NodeUp
    | NodeBeat
    | NodeDown
    | Submit
    | StopJob
    | PauseJob
    | ResumeJob
    | AttemptChanged
    | StartFailed
    | AttemptGone
    | Evaluation
    | BestSeen
    | GivenUp
    | CheckpointPulled
    | PullFailed
    | BroughtHome
    | PublishFailed
    | Published
)
