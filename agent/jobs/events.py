"""What the runner reports about its jobs: the vocabulary of the wire, the journal, the live table.

Two kinds of traffic (architecture, *Wire*): `JobChanged`, `Evaluated`, `CheckpointSaved` and
`TrainerMessage` are durable (journalled, numbered, delivered once); `Stepped` is a sample (lossy on
the wire, complete in `metrics.jsonl`).
"""

from __future__ import annotations

import errno
import os
from typing import Any, Literal

import msgspec

JobStateName = Literal["queued", "running", "paused", "completed", "stopped", "diverged", "failed"]

#: States that a job does not leave by itself. `stopped` and `failed` can be resumed by the user.
ENDED: frozenset[str] = frozenset({"completed", "stopped", "diverged", "failed"})
#: In the reason of a failed job whose files could not be written.
NOT_SAVED = "not saved: "
#: What the system says of a disk that takes or gives no files, whichever file of a job it was.
_OF_THE_MACHINE = (
    NOT_SAVED,
    "disk full",
    "not writable",
    *map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)),
    *map(os.strerror, (errno.EMFILE, errno.ENFILE)),
)


def is_of_machine(reason: str) -> bool:
    """Whether a job failed by its machine's fault and none of its own, where that is its files or handles.

    Not memory: what does not fit may be the job's own size.
    """
    return any(words in reason for words in _OF_THE_MACHINE)


class LastLosses(msgspec.Struct, frozen=True, kw_only=True):
    """A job's losses as of its checkpoint; None: it has had none."""

    loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job was stopped before its last step; `evidence`: the numbers that show it, by name."""

    pattern: Literal["divergence", "overfitting", "underperformance"]
    step: int
    evidence: dict[str, Any] = {}


class JobChanged(msgspec.Struct, frozen=True, kw_only=True, tag="job"):
    """A job entered `state`; `reason` is one line for a person, empty when there is nothing to say.

    `last`: of a job that goes on from a checkpoint, once, when it is admitted: the steps that gave these
    losses are not made again, so no other event tells them. `exit`: of one that its own losses have stopped.
    """

    job: str
    state: JobStateName
    step: int
    total_steps: int
    reason: str = ""
    last: LastLosses | None = None
    exit: Exit | None = None


class Stepped(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One optimizer step of one job. `loss` is the mean over the step's label tokens."""

    job: str
    step: int  # 1-based: the number of optimizer steps done
    total_steps: int
    epoch: float
    loss: float
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int  # all tokens of the step's rows
    label_tokens: int  # tokens that the loss is over
    seconds: float  # wall time of the step's round, without what passed before the last round was there
    adapters_in_pass: int  # how many jobs shared that round
    trunk_shared: float = 0.0  # of its work below the jobs' lowest adapted layers, the part not run: 0 … 1


class Evaluated(msgspec.Struct, frozen=True, kw_only=True, tag="eval"):
    """Mean loss over the label tokens of the job's whole validation split after `step` steps."""

    job: str
    step: int
    val_loss: float
    label_tokens: int
    best: bool


class CheckpointSaved(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint"):
    job: str
    step: int
    path: str


class TrainerMessage(msgspec.Struct, frozen=True, kw_only=True, tag="message"):
    """A line of the trainer for people: base loaded, pass made smaller after OOM, resumed, …"""

    level: Literal["info", "warning", "error"]
    text: str
    job: str = ""


Event = JobChanged | Stepped | Evaluated | CheckpointSaved | TrainerMessage
DURABLE = (JobChanged, Evaluated, CheckpointSaved, TrainerMessage)
