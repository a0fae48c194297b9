"""The messages between an agent and whoever talks to it (coordinator, TUI, command line), version 1.

Frames are those of `agent/service/wire.py`, over the agent's Unix socket, the exec bridge
`gshare agent connect`, or its own SSH server's subsystem `gshare`. Field names are frozen by
tests/test_node_protocol.py.

    client                                        agent
      NodeClientHello  ─────────────────────────►
                       ◄─────────────────────────  NodeHello | NodeRefused (and the connection is closed)
      any request (id = n) ─────────────────────►
                       ◄─────────────────────────  its reply (reply_to = n), or NodeRefused
                       ◄─────────────────────────  NodeEventFrame …        after a FollowNode

An *attempt* is one start of a job: (owner, job, attempt), `owner` being the id of the coordinator's store. An
owner sees and steers its own attempts only; observers (empty owner) see all and steer none.

Durable events carry `seq` ≥ 1 under the agent's `journal_id` and come exactly once, in order, to a client
that says where it stopped, over restarts of the agent too; samples carry `seq` 0 and may be dropped.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from gshare.agent.jobs.early_exit import EarlyExit
from gshare.agent.jobs.events import Event, Exit, JobStateName
from gshare.agent.jobs.spec import AdapterSpec, BaseDtype, ScheduleName

NODE_PROTOCOL_VERSION = 1
DEFAULT_PORT = 7433
SUBSYSTEM = "gshare"
#: Bytes of one chunk of a file: small enough that metrics pass in between on a slow line.
CHUNK_BYTES = 256 * 1024

#: Which files of an attempt: its best checkpoint, its newest one (to go on elsewhere), its final adapter.
BundleKind = Literal["best", "checkpoint", "final"]
Role = Literal["coordinator", "observer"]
#: Of what an agent `knows` beyond the first version of the protocol: the fields `early_exit`, `pause_at` and
#: `past`. One that does not would train such a job to its end without a word.
EARLY_EXIT = "early_exit"


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages; unknown fields are ignored, so a later minor version may add some."""


# --- hello


class NodeClientHello(_Message, frozen=True, kw_only=True, tag="node_client_hello"):
    protocol: int
    gshare: str  # version of the package
    client: str  # a name for people
    role: Role = "observer"
    owner: str = ""  # of a coordinator: its store's id
    session: str = ""  # of a coordinator: drawn anew at each start of its process


class NodeHello(_Message, frozen=True, kw_only=True, tag="node_hello"):
    protocol: int
    gshare: str
    agent_id: str  # drawn when the state directory was made, kept in it
    journal_id: str
    pid: int
    hostname: str
    draining: bool = False
    knows: list[str] = []


# --- requests


class DescribeNode(_Message, frozen=True, kw_only=True, tag="describe"):
    id: int
    models: list[str] = []  # of the node's `models` in cluster.toml: a path that is not there is told


class HoldBlobs(_Message, frozen=True, kw_only=True, tag="hold_blobs"):
    """How many bytes of each blob are there. What is named here is not collected for a day."""

    id: int
    blobs: list[str]  # sha256, hex


class PutChunk(_Message, frozen=True, kw_only=True, tag="put_chunk"):
    """Bytes `offset`… of blob `sha256`. Answered by `Received`; the last chunk's answer follows the check.

    Refused: an offset beyond what is there, a hash that does not fit the whole (the partial file is dropped),
    a disk that is too full (`total` is asked for before the first byte is written).
    """

    id: int
    sha256: str
    offset: int
    total: int
    data: bytes


class BlobRef(msgspec.Struct, frozen=True, kw_only=True):
    """A file by content: `name` is the relative path it gets where it is used, "/" between parts."""

    name: str
    sha256: str
    size: int


class ModelRef(msgspec.Struct, frozen=True, kw_only=True):
    """The base: a path or hub id that the node has (`path`), else files that were pushed (`files`)."""

    name: str  # as the user named it
    path: str = ""
    files: list[BlobRef] = []


class StartAttempt(_Message, frozen=True, kw_only=True, tag="start_attempt"):
    """Run this attempt. Answered by `AttemptAccepted`; asked again with the same attempt: the same answer.

    `spec.data`, `spec.val_data` and `spec.output_dir` are ignored: the data are the blobs `data` and
    `val_data`, the directory is the agent's. `checkpoint`: the files to go on from, empty for none.

    `pause_at`: after so many steps it is evaluated and saved, and the attempt ends `parked`; 0: nowhere.
    `past`: it was let go on from there before; it is evaluated and saved there as ever, and goes on.
    """

    id: int
    job: str
    attempt: int
    spec: AdapterSpec
    model: ModelRef
    base_dtype: BaseDtype
    schedule: ScheduleName = "synchronized"
    max_tokens_per_pass: int = 16384
    max_adapters_per_pass: int = 0
    data: BlobRef
    val_data: BlobRef | None = None
    checkpoint: list[BlobRef] = []
    gpu: str = ""  # UUID; empty: the CPU
    budget_mb: int | None = None  # None: what the estimate says
    timeout_s: float = 3600.0  # in the queue for GPU memory
    early_exit: EarlyExit | None = None  # None: no pattern stops it
    pause_at: int = 0
    past: bool = False


class StopAttempts(_Message, frozen=True, kw_only=True, tag="stop_attempts"):
    """Checkpoint and stop; answered by `AttemptsDone` once they are asked to, the end comes as an event."""

    id: int
    attempts: list[tuple[str, int]]  # (job, attempt)
    reason: str = ""


class PauseAttempts(_Message, frozen=True, kw_only=True, tag="pause_attempts"):
    id: int
    attempts: list[tuple[str, int]]


class ResumeAttempts(_Message, frozen=True, kw_only=True, tag="resume_attempts"):
    id: int
    attempts: list[tuple[str, int]]


class ForgetAttempts(_Message, frozen=True, kw_only=True, tag="forget_attempts"):
    """The files of these ended attempts are no longer needed."""

    id: int
    attempts: list[tuple[str, int]]


class ListAttempts(_Message, frozen=True, kw_only=True, tag="list_attempts"):
    id: int


class FollowNode(_Message, frozen=True, kw_only=True, tag="follow_node"):
    """Events from now on: the durable ones after `after_seq` of `journal_id`.

    Another (or empty) `journal_id` starts at the oldest event kept.
    """

    id: int
    journal_id: str = ""
    after_seq: int = 0
    samples: bool = True


class PinBundle(_Message, frozen=True, kw_only=True, tag="pin_bundle"):
    """Keeps the files of that kind as they are now, for reading, until `ReleaseBundle` or for an hour."""

    id: int
    job: str
    attempt: int
    kind: BundleKind


class ReadChunk(_Message, frozen=True, kw_only=True, tag="read_chunk"):
    id: int
    bundle: str
    name: str
    offset: int
    length: int  # at most CHUNK_BYTES


class ReleaseBundle(_Message, frozen=True, kw_only=True, tag="release_bundle"):
    id: int
    bundle: str


class ReadSamples(_Message, frozen=True, kw_only=True, tag="read_samples"):
    """Lines of the attempt's metrics.jsonl with step > `after_step`, at most `limit`: what a gap left out."""

    id: int
    job: str
    attempt: int
    after_step: int = 0
    limit: int = 1000


#: Of one `ReadLog`. As text each byte may become three (U+FFFD), so that 12 of a frame's 16 MiB are filled.
MAX_LOG_BYTES = 4 << 20


class ReadLog(_Message, frozen=True, kw_only=True, tag="read_log"):
    """The last `max_bytes` (1 to `MAX_LOG_BYTES`) of the log of an attempt, or (empty job) of the agent."""

    id: int
    job: str = ""
    attempt: int = 0
    max_bytes: int = 65536


class EndLeases(_Message, frozen=True, kw_only=True, tag="end_leases"):
    """End these holds (`gshare gpu hold`) in the node's ledger; answered by `LeasesEnded`.

    Observers may: whoever is connected is the agent's own user, whose holds alone are ended.
    """

    id: int
    reservations: list[str]  # `ReservationInfo.id`


class DrainNode(_Message, frozen=True, kw_only=True, tag="drain"):
    """Start nothing new. `stop`: checkpoint and stop what runs, and exit when all has ended."""

    id: int
    stop: bool = False


NodeRequest = (
    DescribeNode
    | HoldBlobs
    | PutChunk
    | StartAttempt
    | StopAttempts
    | PauseAttempts
    | ResumeAttempts
    | ForgetAttempts
    | ListAttempts
    | FollowNode
    | PinBundle
    | ReadChunk
    | ReleaseBundle
    | ReadSamples
    | ReadLog
    | EndLeases
    | DrainNode
)


# --- replies


class NodeRefused(_Message, frozen=True, kw_only=True, tag="node_refused"):
    """`reply_to` 0: the connection. `retry`: may be asked again later (disk full, draining, busy)."""

    reply_to: int
    reason: str
    retry: bool = False


class GpuInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as the node's ledger and driver see it; None: unknown, never 0. MiB, percent, °C, W."""

    uuid: str
    name: str
    memory_type: Literal["discrete", "unified"]
    total_mb: int | None = None
    used_mb: int | None = None  # by the driver
    reserved_mb: int | None = None  # Σ max(budget, peak) of the ledger
    peak_mb: int | None = None  # Σ of the peaks seen
    outside_mb: int | None = None  # used by processes outside the ledger
    free_mb: int | None = None  # what the ledger would grant now
    load_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    problem: str = ""


class ReservationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the node's ledger, or (state "waiting") of its queue."""

    id: str
    gpu_uuid: str
    budget_mb: int
    peak_mb: int | None
    task: str
    pid: int
    user: str
    created: float  # Unix time, s
    state: Literal["held", "waiting"]
    position: int = 0
    reason: str = ""
    clients: dict[str, int] = {}  # client → its part, MiB
    lease: bool | None = None  # a hold, which `EndLeases` ends; None: not said


class NodeInfo(_Message, frozen=True, kw_only=True, tag="node_info"):
    """How the node is; None: unknown. `problems`: what is wrong, each with what to do."""

    reply_to: int
    hostname: str
    time: float  # the node's clock, Unix s
    uptime_s: float
    machine: str  # x86_64, aarch64
    python: str
    torch: str = ""  # empty: not installed
    driver: str = ""
    cpu_cores: int = 0
    cpu_percent: float | None = None
    ram_mb: int = 0
    ram_free_mb: int | None = None
    disk_free_mb: int | None = None  # where the state directory is
    linger: bool | None = None  # whether user services outlive the login
    gpus: list[GpuInfo] = []
    reservations: list[ReservationInfo] = []
    problems: list[str] = []
    attempts_running: int = 0


class BlobsHeld(_Message, frozen=True, kw_only=True, tag="blobs_held"):
    reply_to: int
    bytes_held: dict[str, int]  # sha256 → bytes there, of partial files too
    complete: list[str]


class Received(_Message, frozen=True, kw_only=True, tag="received"):
    reply_to: int
    bytes_held: int
    complete: bool = False


class AttemptAccepted(_Message, frozen=True, kw_only=True, tag="attempt_accepted"):
    reply_to: int


class AttemptsDone(_Message, frozen=True, kw_only=True, tag="attempts_done"):
    """`failed`: "job/attempt" → why."""

    reply_to: int
    failed: dict[str, str] = {}


class AttemptStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as the agent knows it."""

    owner: str
    job: str
    attempt: int
    state: JobStateName
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    reason: str = ""
    retry: bool = False  # of an ended one: the node's fault or memory, another try may do better
    gpu: str = ""
    position: int = 0  # in the queue for GPU memory; 0: waits for none
    checkpoint_step: int = 0  # the newest checkpoint that can be pulled; 0: none
    exit: Exit | None = None  # of a stopped one: the pattern of its own losses that has stopped it
    parked: bool = False  # of a stopped one: it has come to its `pause_at`, and waits there without memory


class LeasesEnded(_Message, frozen=True, kw_only=True, tag="leases_ended"):
    """`failed`: id of a reservation → why it stays."""

    reply_to: int
    failed: dict[str, str] = {}


class Attempts(_Message, frozen=True, kw_only=True, tag="attempts"):
    reply_to: int
    attempts: list[AttemptStatus]


class FollowingNode(_Message, frozen=True, kw_only=True, tag="following_node"):
    """`gap`: durable events that the client has not seen are no longer kept: ask `ListAttempts`."""

    reply_to: int
    journal_id: str
    next_seq: int
    gap: bool


class BundleFiles(_Message, frozen=True, kw_only=True, tag="bundle_files"):
    """`step` is what the files are of; `val_loss` of a best checkpoint, by its metadata."""

    reply_to: int
    bundle: str
    files: list[BlobRef]
    step: int
    val_loss: float | None = None


class Chunk(_Message, frozen=True, kw_only=True, tag="chunk"):
    reply_to: int
    data: bytes


class Samples(_Message, frozen=True, kw_only=True, tag="samples"):
    """Lines of metrics.jsonl as they are, oldest first; `more`: there are others after the last."""

    reply_to: int
    lines: list[str]
    more: bool = False


class LogText(_Message, frozen=True, kw_only=True, tag="log_text"):
    reply_to: int
    text: str


class NodeDone(_Message, frozen=True, kw_only=True, tag="node_done"):
    reply_to: int


NodeReply = (
    NodeRefused
    | NodeInfo
    | BlobsHeld
    | Received
    | AttemptAccepted
    | AttemptsDone
    | Attempts
    | FollowingNode
    | BundleFiles
    | Chunk
    | Samples
    | LogText
    | LeasesEnded
    | NodeDone
)


# --- events


class AttemptEvent(_Message, frozen=True, kw_only=True, tag="attempt_event"):
    """What happened to an attempt. `event.job` is the job's name; durable unless the event is a sample."""

    owner: str
    attempt: int
    event: Event
    time: float  # the node's clock, Unix s


class NodeMessage(_Message, frozen=True, kw_only=True, tag="node_message"):
    """A line of the agent for people."""

    level: Literal["info", "warning", "error"]
    text: str
    time: float


class NodeEventFrame(_Message, frozen=True, kw_only=True, tag="node_event"):
    journal_id: str
    seq: int  # 0: a sample
    event: AttemptEvent | NodeMessage


FromNodeClient = NodeClientHello | NodeRequest
FromNode = NodeHello | NodeReply | NodeEventFrame
