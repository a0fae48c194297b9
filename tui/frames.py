"""What flows from a source to the app: one vocabulary, whether it comes from a coordinator, an agent, local
trainers, this machine or a file. A recording is exactly this stream (`recording.py`).

    Source.run(emit) ──Frame──► State.apply ──Changes──► screens
                        └─────► Recorder.write

Every frame has `time`, by the source's clock, and `received`, by ours (Unix s both); a source whose messages
carry no time of their own puts the moment of receipt into both. None is "not known", never 0.

Names and texts are what users and nodes wrote: nothing here is safe to be printed or parsed as markup.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from gshare.agent.jobs.names import shorten
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.node.protocol import NodeInfo

#: Of the frames' meaning. A recording of a newer one is refused.
SCHEMA = 1

SourceStateName = Literal["connecting", "live", "stale", "lost", "ended"]
Level = Literal["info", "warning", "error"]
HyperValue = str | int | float | bool | None

#: Job states that a job does not leave by itself, whatever the source.
ENDED = frozenset({"completed", "stopped", "diverged", "failed"})
#: Fields of a spec that name files rather than parameters.
_NO_PARAMETERS = frozenset({"name", "data", "val_data", "output_dir"})


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all frames; unknown fields are ignored, so a later minor version may add some."""

    time: float
    received: float


# --- the source itself


class SourceState(_Frame, frozen=True, kw_only=True, tag="source"):
    """How the source is. All but "live" and "ended": what is shown may be old.

    connecting  nothing has come yet, or it is being tried again
    live        what is shown is how it is
    stale       connected, but nothing was heard for longer than the source's beat
    lost        the connection ended; tried again after `retry_in` s (None: it is not tried again)
    ended       a replay or a followed run is at its end
    """

    state: SourceStateName
    text: str = ""  # for people: what is wrong and what is done about it
    since: float  # Unix s, our clock; tries in between do not end a loss
    retry_in: float | None = None


class Found(_Frame, frozen=True, kw_only=True, tag="found"):
    """What the source is: `title` such as "cluster lab", `kind` such as "coordinator".

    `can`: the requests of `source.Source` that this one answers.
    """

    kind: str
    title: str
    detail: str = ""
    can: tuple[str, ...] = ()


class Reset(_Frame, frozen=True, kw_only=True, tag="reset"):
    """Forget everything: what follows builds the state anew (a seek in a recording)."""


# --- how things are


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node. `seen_s`: since it was last heard, as of the frame's time; None: never, or not known."""

    node: str
    state: str
    reason: str = ""
    transport: str = ""
    host: str = ""
    gshare: str = ""
    seen_s: float | None = None
    jobs: int | None = None
    info: NodeInfo | None = None  # GPUs, reservations and queue, CPU, RAM, disk, problems


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job, as far as the source knows it. `job` is unique within the source; `name` is what is shown.

    None and "" are "the source does not say": what was known before stays.
    """

    job: str
    name: str = ""  # empty: the same as `job`
    state: str
    node: str = ""
    gpu: str = ""
    client: str = ""
    attempt: int = 0
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    position: int = 0  # in the queue for GPU memory; 0: waits for none
    reason: str = ""
    output_dir: str = ""
    model: str = ""
    base_dtype: str = ""
    hyper: dict[str, HyperValue] = {}  # empty: not known


class Snapshot(_Frame, frozen=True, kw_only=True, tag="snapshot"):
    """All nodes or all jobs (one that is not named any more is gone); None: nothing is said of them."""

    nodes: tuple[NodeView, ...] | None = None
    jobs: tuple[JobView, ...] | None = None


# --- what happens


class JobState(_Frame, frozen=True, kw_only=True, tag="job_state"):
    """A job entered `state`. `node` and `attempt` as in `JobView`."""

    job: str
    state: str
    step: int | None = None
    total_steps: int | None = None
    reason: str = ""
    node: str = ""
    attempt: int = 0


class Sample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The newest step of a job among `count` that were coalesced; `tokens` is their mean a step."""

    job: str
    step: int
    total_steps: int
    loss: float
    time: float  # of the newest step, the source's clock
    epoch: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens: float | None = None
    seconds: float | None = None  # wall time of the round that the newest step was part of
    adapters_in_pass: int | None = None
    count: int = 1


class Samples(_Frame, frozen=True, kw_only=True, tag="samples"):
    """The metrics of an interval (0.5–1 s), at most one sample a job."""

    samples: tuple[Sample, ...]


class Evaluation(_Frame, frozen=True, kw_only=True, tag="evaluation"):
    job: str
    step: int
    val_loss: float
    best: bool = False


class Checkpoint(_Frame, frozen=True, kw_only=True, tag="checkpoint"):
    job: str
    step: int
    path: str = ""


class NodeState(_Frame, frozen=True, kw_only=True, tag="node_state"):
    node: str
    state: str
    reason: str = ""


class Message(_Frame, frozen=True, kw_only=True, tag="message"):
    """A line of the journal; `job` and `node` when it is about one.

    `kind` is another than "message" for what happened before we came: it is told, and changes nothing.
    """

    level: Level
    text: str
    kind: str = "message"
    job: str = ""
    node: str = ""


class History(_Frame, frozen=True, kw_only=True, tag="history"):
    """Earlier points of a job's curves, (step, loss) by step, in the place of what lies between them."""

    job: str
    train: tuple[tuple[int, float], ...] = ()
    val: tuple[tuple[int, float], ...] = ()


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A line of the journal (the Events screen). `number` grows by one an entry."""

    number: int
    time: float
    level: Level
    kind: str  # "job", "eval", "checkpoint", "node", "message", "source"
    text: str
    job: str = ""
    node: str = ""


class Journal(_Frame, frozen=True, kw_only=True, tag="journal"):
    """The journal as it was, in a keyframe of a recording."""

    entries: tuple[Entry, ...]


Frame = (
    SourceState
    | Found
    | Reset
    | Snapshot
    | JobState
    | Samples
    | Evaluation
    | Checkpoint
    | NodeState
    | Message
    | History
    | Journal
)


def hyper_of(spec: AdapterSpec | Mapping[str, Any]) -> dict[str, HyperValue]:
    """The hyper-parameters of a spec, by the names of the job spec; lists become one string."""
    fields: dict[str, Any] = dict(spec) if isinstance(spec, Mapping) else msgspec.structs.asdict(spec)
    found: dict[str, HyperValue] = {}
    for name, value in fields.items():
        if name in _NO_PARAMETERS:
            continue
        if isinstance(value, list | tuple):
            found[name] = " ".join(str(part) for part in value)
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            found[name] = shorten(value)  # JSON has such; MessagePack, and so a recording, has not
        elif value is None or isinstance(value, str | int | float | bool):
            found[name] = value
    return found
