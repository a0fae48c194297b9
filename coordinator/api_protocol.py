"""The messages between a coordinator and those who steer it (command line, dashboard), version 1.

Frames are those of `agent/service/wire.py`, over the Unix socket `<state dir>/socket` (0600). Field names are
frozen by tests/test_coordinator_api.py.

    client                                        coordinator
      ApiHello | DialIn ────────────────────────►
                       ◄─────────────────────────  ApiWelcome | ApiRefused (and the connection is closed)
      any request (id = n) ─────────────────────►
                       ◄─────────────────────────  its reply (reply_to = n), or ApiRefused
                       ◄─────────────────────────  ClusterEventFrame …       after a FollowCluster

After a `DialIn` the roles are turned round: the coordinator says `NodeClientHello` on that connection and the
protocol of `agent/node/protocol.py` goes on from there.

Durable events carry `seq` ≥ 1 under `journal_id`, which is drawn anew at each start of the coordinator: a
client that comes back with another one asks `ListClusterJobs` for what it has missed. Samples carry `seq` 0.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from gshare.agent.jobs.early_exit import EarlyExit
from gshare.agent.jobs.events import Event, Exit
from gshare.agent.jobs.spec import AdapterSpec, BaseDtype, ScheduleName
from gshare.agent.node.protocol import BundleKind, NodeInfo

API_PROTOCOL_VERSION = 1


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages; unknown fields are ignored, so a later minor version may add some."""


# --- hello


class ApiHello(_Message, frozen=True, kw_only=True, tag="api_hello"):
    protocol: int
    gshare: str
    client: str  # a name for people


class DialIn(_Message, frozen=True, kw_only=True, tag="dial_in"):
    """The first and only frame of an agent that has dialled out; then it waits for a `NodeClientHello`."""

    node: str
    gshare: str = ""


class ApiWelcome(_Message, frozen=True, kw_only=True, tag="api_welcome"):
    protocol: int
    gshare: str
    owner: str  # the store's id
    pid: int
    cluster: str  # the file that names the nodes
    journal_id: str
    knows: list[str] = []  # as in `NodeHello`


# --- what a submission consists of


class LocalFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of the submitting machine: `name` is what it gets on the node, "/" between parts."""

    name: str
    path: str  # absolute
    sha256: str
    size: int


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """The base as the user named it, and where its content comes from.

    `files` is empty for a hub id, which each node resolves itself, and for a path that only nodes have.
    """

    name: str
    files: tuple[LocalFile, ...] = ()
    parameters: int = 0  # 0: not known here


class JobSubmission(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter. `base_mb` and `adapter_mb`: the estimate's parts, MiB; 0: not known here.

    `early_exit` and `pause_at` are those of a `JobRequest`: of a configuration of a sweep. After `pause_at`
    steps it is evaluated, its checkpoint comes home, and it holds no place until it is resumed or stopped.
    """

    spec: AdapterSpec  # `seed` and `lora_alpha` filled in, paths absolute
    data: LocalFile
    val_data: LocalFile | None = None
    base_mb: int = 0
    adapter_mb: int = 0
    early_exit: EarlyExit | None = None
    pause_at: int = 0


# --- requests


class SubmitToCluster(_Message, frozen=True, kw_only=True, tag="submit"):
    """All or none. Answered by `Submitted`; asked again with the same `submission`: the same answer."""

    id: int
    submission: str  # drawn by the client
    model: ModelSource
    base_dtype: BaseDtype
    schedule: ScheduleName = "synchronized"
    max_tokens_per_pass: int = 16384
    max_adapters_per_pass: int = 0
    jobs: tuple[JobSubmission, ...]


class ListClusterJobs(_Message, frozen=True, kw_only=True, tag="list_jobs"):
    """`orders`: with model, dtype and spec of each, which never change; about 1 KB a job."""

    id: int
    orders: bool = False


class ListNodes(_Message, frozen=True, kw_only=True, tag="list_nodes"):
    id: int


class ReadLeaderboard(_Message, frozen=True, kw_only=True, tag="leaderboard"):
    id: int


class StopClusterJobs(_Message, frozen=True, kw_only=True, tag="stop"):
    """`reason`: for people; empty: a user's word."""

    id: int
    jobs: list[str]
    reason: str = ""


class PauseClusterJobs(_Message, frozen=True, kw_only=True, tag="pause"):
    id: int
    jobs: list[str]


class ResumeClusterJobs(_Message, frozen=True, kw_only=True, tag="resume"):
    id: int
    jobs: list[str]


class ReadJobLog(_Message, frozen=True, kw_only=True, tag="job_log"):
    """The last bytes of the log of a job's trainer, from the node where it runs or ran last."""

    id: int
    job: str
    max_bytes: int = 65536


class ReadNodeLog(_Message, frozen=True, kw_only=True, tag="node_log"):
    """The last bytes of the log of a node's agent; answered by `JobLog`."""

    id: int
    node: str
    max_bytes: int = 65536


class EndNodeLeases(_Message, frozen=True, kw_only=True, tag="end_node_leases"):
    """End these holds in that node's ledger, as `EndLeases` there; answered by `NodeLeasesEnded`."""

    id: int
    node: str
    reservations: list[str]


class ReadEvaluations(_Message, frozen=True, kw_only=True, tag="read_evaluations"):
    """What the jobs' evaluations gave, by step; answered by `JobEvaluations`."""

    id: int
    jobs: list[str] = []  # empty: all
    newest: int = 0  # only so many of each, the newest; 0: all


class ReadJobSamples(_Message, frozen=True, kw_only=True, tag="read_job_samples"):
    """Lines of metrics.jsonl of the job's current attempt, from its node; as `ReadSamples` there."""

    id: int
    job: str
    after_step: int = 0
    limit: int = 1000


class FetchJob(_Message, frozen=True, kw_only=True, tag="fetch"):
    """Brings the files of a job as they are now into `directory` (absolute, not there yet or empty)."""

    id: int
    job: str
    kind: BundleKind
    directory: str


class FollowCluster(_Message, frozen=True, kw_only=True, tag="follow"):
    id: int
    journal_id: str = ""
    after_seq: int = 0
    jobs: list[str] = []  # empty: all
    samples: bool = True
    new_only: bool = False  # of another journal than `journal_id` nothing that is there already


class ReloadCluster(_Message, frozen=True, kw_only=True, tag="reload"):
    """Read the cluster file again: new nodes join, those that are no longer named get no more jobs."""

    id: int


ApiRequest = (
    SubmitToCluster
    | ListClusterJobs
    | ListNodes
    | ReadLeaderboard
    | StopClusterJobs
    | PauseClusterJobs
    | ResumeClusterJobs
    | ReadJobLog
    | ReadNodeLog
    | EndNodeLeases
    | ReadEvaluations
    | ReadJobSamples
    | FetchJob
    | FollowCluster
    | ReloadCluster
)


# --- replies


class ApiRefused(_Message, frozen=True, kw_only=True, tag="api_refused"):
    """`reply_to` 0: the connection. `exit_code` is what the command exits with (1, 2 or 75)."""

    reply_to: int
    reason: str
    exit_code: int = 1


class Submitted(_Message, frozen=True, kw_only=True, tag="submitted"):
    """`journal_id`, `after_seq`: follow after these to hear of these jobs and of no earlier ones so named."""

    reply_to: int
    jobs: list[str]
    journal_id: str = ""
    after_seq: int = 0


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job as the coordinator knows it. `state`: that of its attempt, or "waiting" for a place."""

    job: str
    state: str
    node: str = ""
    gpu: str = ""
    attempt: int = 0
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    best_step: int | None = None
    output_dir: str = ""
    reason: str = ""
    placed: bool = False  # its results are in output_dir
    position: int = 0  # in its node's queue for GPU memory; 0: waits for none
    model: str = ""  # this and the next two: only when `orders` was asked for
    base_dtype: str = ""
    spec: AdapterSpec | None = None
    parked: bool = False  # paused at its `pause_at`: it holds no place, and goes on where there is one
    exit: Exit | None = None  # of a stopped one: the pattern of its own losses that has stopped it
    submission: str = ""  # the one that it came with


class JobRows(_Message, frozen=True, kw_only=True, tag="job_rows"):
    reply_to: int
    jobs: list[JobRow]


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node: its state, why it is so, and its last description."""

    node: str
    transport: str
    host: str
    state: str
    reason: str = ""
    gshare: str = ""
    seen_s: float | None = None  # since it was last heard, s; None: never
    jobs: int = 0
    info: NodeInfo | None = None


class NodeRows(_Message, frozen=True, kw_only=True, tag="node_rows"):
    reply_to: int
    nodes: list[NodeRow]


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the leaderboard; NaN and never evaluated last."""

    job: str
    node: str
    val_loss: float | None
    best_val_loss: float | None
    best_step: int | None
    step: int
    total_steps: int
    state: str


class Leaderboard(_Message, frozen=True, kw_only=True, tag="standings"):
    reply_to: int
    standings: list[Standing]


class JobsDone(_Message, frozen=True, kw_only=True, tag="jobs_done"):
    """`failed`: job → why. `told`: job → what became of it, where that is not what was asked for in short."""

    reply_to: int
    failed: dict[str, str] = {}
    told: dict[str, str] = {}


class NodeLeasesEnded(_Message, frozen=True, kw_only=True, tag="node_leases_ended"):
    """`failed`: id of a reservation → why it stays."""

    reply_to: int
    failed: dict[str, str] = {}


class JobLog(_Message, frozen=True, kw_only=True, tag="job_log_text"):
    reply_to: int
    node: str
    text: str


class JobEvaluations(_Message, frozen=True, kw_only=True, tag="job_evaluations"):
    """Job → (step, validation loss), by step."""

    reply_to: int
    evaluations: dict[str, list[tuple[int, float]]]


class JobSamples(_Message, frozen=True, kw_only=True, tag="job_samples"):
    """Lines as they are in the file, oldest first; `more`: there are others after the last."""

    reply_to: int
    lines: list[str]
    more: bool = False


class Fetched(_Message, frozen=True, kw_only=True, tag="fetched"):
    reply_to: int
    directory: str
    files: list[str]
    step: int


class FollowingCluster(_Message, frozen=True, kw_only=True, tag="following"):
    """`gap`: durable events that the client has not seen are no longer kept."""

    reply_to: int
    journal_id: str
    next_seq: int
    gap: bool
    last_seq: int = 0  # the newest there is: what comes up to it is older than this answer


class Reloaded(_Message, frozen=True, kw_only=True, tag="reloaded"):
    reply_to: int
    nodes: list[str]


ApiReply = (
    ApiRefused
    | Submitted
    | JobRows
    | NodeRows
    | Leaderboard
    | JobsDone
    | NodeLeasesEnded
    | JobLog
    | JobEvaluations
    | JobSamples
    | Fetched
    | FollowingCluster
    | Reloaded
)


# --- events


class JobEvent(_Message, frozen=True, kw_only=True, tag="job_event"):
    """What happened to a job on a node; `event.job` is its name."""

    node: str
    attempt: int
    event: Event


class JobMoved(_Message, frozen=True, kw_only=True, tag="job_moved"):
    """A job that has not ended entered `state`, was placed on another node, or began another attempt."""

    job: str
    state: str  # as in `JobRow`
    node: str = ""
    attempt: int = 0
    step: int = 0
    total_steps: int = 0
    position: int = 0
    reason: str = ""


class JobEnded(_Message, frozen=True, kw_only=True, tag="job_ended"):
    """The job has its last state. For one that completed, its results are in its output_dir now."""

    job: str
    state: str
    reason: str = ""


class NodeChanged(_Message, frozen=True, kw_only=True, tag="node_changed"):
    node: str
    state: str
    reason: str = ""


class ClusterMessage(_Message, frozen=True, kw_only=True, tag="cluster_message"):
    """A line for people; `job` when it is about one."""

    level: Literal["info", "warning", "error"]
    text: str
    job: str = ""


ClusterEvent = JobEvent | JobMoved | JobEnded | NodeChanged | ClusterMessage


class ClusterEventFrame(_Message, frozen=True, kw_only=True, tag="cluster_event"):
    journal_id: str
    seq: int  # 0: a sample
    event: ClusterEvent
    time: float = 0.0  # when the coordinator heard of it, its clock, Unix s


FromApiClient = ApiHello | DialIn | ApiRequest
FromCoordinator = ApiWelcome | ApiReply | ClusterEventFrame
