"""What the coordinator knows of a job: what was asked for, and where it stands. Plain data, stored.

A *job* is one adapter; an *attempt* is one start of it on one node. Attempt numbers of a job grow and are
never used twice, whatever becomes of the job, so a node can tell an old attempt from the current one.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from gshare.agent.jobs.events import Exit

#: waiting     for a place; or, after its node was lost, for another one
#: starting    an attempt was written and sent; the node has not said that it runs
#: running     by the node's word (or it waits there for GPU memory)
#: paused      by the user: on its node, or (no node) out of the queue
#: publishing  its attempt is done; the files are being brought home and checked
#: placing     they are home and checked; they are being put into the output directory
#: the others  ended
ClusterJobState = Literal[
    "waiting",
    "starting",
    "running",
    "paused",
    "publishing",
    "placing",
    "completed",
    "stopped",
    "diverged",
    "failed",
]
JobOutcome = Literal["completed", "stopped", "diverged", "failed"]
JobWish = Literal["run", "pause", "stop"]

#: States that only a user leaves again (by `ResumeJob`, or a new submission of that name).
ENDED_STATES: frozenset[str] = frozenset({"completed", "stopped", "diverged", "failed"})
#: States in which the current attempt occupies a place on its node.
PLACED_STATES: frozenset[str] = frozenset({"starting", "running", "paused"})


class JobFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What placement needs to know of a job; the rest of the order is `payload`.

    A first adapter of a base on a GPU needs `base_mb + adapter_mb`, each further one there `adapter_mb`: it
    joins the trainer that has the base.
    """

    name: str
    submission: str  # drawn by the client; the same again is the same order, not a second one
    base: str  # equal for jobs that can share a trainer: model, its content, base dtype
    base_mb: int = 0  # MiB: base, context, largest pass; 0, and `adapter_mb` 0: not known, the node says
    adapter_mb: int = 0  # MiB that one more adapter adds
    parameters: int | None = None  # of the model; None: unknown, so not for CPU-only nodes
    model: str = ""  # as the user named it
    sendable: bool = True  # False: only nodes whose `models` name it can have it
    early_exit: bool = False  # of a sweep: needs an agent that knows it, and ends with results when stopped
    pause_at: int = 0  # after so many steps it leaves its node until it is resumed; 0: nowhere
    payload: bytes = b""  # the whole order, for whoever starts it; opaque here


class CheckpointRef(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is at home: `files` is (relative name, sha256, bytes) each."""

    attempt: int
    step: int
    files: tuple[tuple[str, str, int], ...] = ()


class JobRecord(msgspec.Struct, kw_only=True):
    """Where a job stands. Changed by `Cluster` alone; a row of the store."""

    facts: JobFacts
    order: int  # place in the queue: the number of the submission
    state: ClusterJobState = "waiting"
    wish: JobWish = "run"
    attempt: int = 0  # the newest number used; 0: none yet
    node: str = ""  # of the current attempt; empty: none
    agent: str = ""  # id of the agent that has the current attempt; empty: not known
    gpu: str = ""  # UUID; empty: CPU
    budget_mb: int = 0
    last_node: str = ""  # where the current attempt was, when `node` is empty
    ended_there: bool = False  # the node said that the current attempt ended
    #: Its node was lost: if it comes back with the attempt before a newer one was started, the job goes on
    #: with it.
    adoptable: bool = False
    stop_sent: bool = False
    #: Of the attempt that is being published. Of a stopped job: the node keeps results that were not placed.
    outcome: JobOutcome | None = None
    publish_again: bool = False  # a publication failed for now and is to be tried again
    faults: int = 0  # attempts that failed by their node's fault since the last word of the user
    avoid: tuple[str, ...] = ()  # nodes that had such a fault
    checkpoint: CheckpointRef | None = None
    pulling: bool = False
    there_step: int = 0  # of the newest checkpoint that the node has
    floor: int = 0  # a number above `attempt` was seen (an older store was put back): go on above it
    published: int = 0  # the attempt whose files are in the output directory; 0: none
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    position: int = 0  # in the node's queue for GPU memory
    reason: str = ""
    parked: bool = False  # it has come to its `pause_at`, and was not resumed yet
    past: bool = False  # it was: the next attempts only evaluate and save there
    exit: Exit | None = None  # the pattern of its own losses that has stopped it
    why: str = ""  # it is stopped, while its results are on their way home
