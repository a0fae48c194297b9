"""What `Cluster.handle` asks for. Actions with a key (`action_key`) go through the store's outbox.

All are idempotent. A row of the outbox is carried out until it is acknowledged, over restarts, and only while
`Cluster.still_wanted` says so: the world may have moved on while a node was away.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from gshare.coordinator.facts import CheckpointRef, JobOutcome


class _Action(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all actions."""


class Start(_Action, frozen=True, kw_only=True, tag="start"):
    """Send model, data and checkpoint, then `StartAttempt`. Ends with its acceptance, or `StartFailed`.

    `budget_mb` None: not known here, the node's estimate counts. `checkpoint` None: from the beginning.
    """

    node: str
    gpu: str  # UUID; empty: CPU
    job: str
    attempt: int
    budget_mb: int | None
    checkpoint: CheckpointRef | None = None


class Stop(_Action, frozen=True, kw_only=True, tag="stop"):
    node: str
    job: str
    attempt: int
    reason: str


class Pause(_Action, frozen=True, kw_only=True, tag="pause"):
    node: str
    job: str
    attempt: int


class Resume(_Action, frozen=True, kw_only=True, tag="resume"):
    node: str
    job: str
    attempt: int


class PullCheckpoint(_Action, frozen=True, kw_only=True, tag="pull_checkpoint"):
    """Bring the newest checkpoint home: `CheckpointPulled` or `PullFailed`."""

    node: str
    job: str
    attempt: int


class Publish(_Action, frozen=True, kw_only=True, tag="publish"):
    """Bring best and final files home into a staging directory of (job, attempt), check and fsync them:
    `BroughtHome` or `PublishFailed`. Nothing is put into the output directory yet."""

    node: str
    job: str
    attempt: int


class Place(_Action, frozen=True, kw_only=True, tag="place"):
    """Rename what was brought home into the output directory: `Published`, or `PublishFailed(retry=True)`.

    No node is needed. Done before: the same answer.
    """

    job: str
    attempt: int


class Forget(_Action, frozen=True, kw_only=True, tag="forget"):
    """The node may delete the files of this ended attempt."""

    node: str
    job: str
    attempt: int


class CheckBest(_Action, frozen=True, kw_only=True, tag="check_best"):
    """Ask what `best/metadata.json` of the attempt says: `BestSeen`, or nothing. Not in the outbox: a lost
    one is asked again five minutes later."""

    node: str
    job: str
    attempt: int


class Ended(_Action, frozen=True, kw_only=True, tag="ended"):
    """For people and followers: the job is over. Kept as news, not in the outbox."""

    job: str
    state: JobOutcome
    reason: str


class Say(_Action, frozen=True, kw_only=True, tag="say"):
    """A line for people, naming node or job and what to do. Kept as news, not in the outbox."""

    level: Literal["info", "warning", "error"]
    text: str
    job: str = ""
    node: str = ""


ClusterAction = (
    Start | Stop | Pause | Resume | PullCheckpoint | Publish | Place | Forget | CheckBest | Ended | Say
)
NodeAction = Start | Stop | Pause | Resume | PullCheckpoint | Publish | Forget


def action_key(action: ClusterAction) -> str | None:
    """Equal for actions of which one is enough: of two, the pending one stays. None: not for the outbox."""
    if isinstance(action, (CheckBest, Ended, Say)):
        return None
    node = "" if isinstance(action, Place) else action.node
    kind = type(action).__name__.lower()
    return f"{kind}:{node}:{action.job}:{action.attempt}"
