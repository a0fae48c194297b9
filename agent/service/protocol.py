"""The messages between a trainer and its clients, version 1.

Field names are frozen by tests/test_service_protocol.py.

    client                                  trainer
      ClientHello  ───────────────────────►
                   ◄───────────────────────  TrainerHello | Refused (and the connection is closed)
      SubmitJobs, StopJobs, … (id = n) ────►
                   ◄───────────────────────  Done | Refused | WeightsTaken | Jobs | Following (reply_to = n)
                   ◄───────────────────────  EventFrame …            after a Follow

Any number of clients may be connected and each may submit at any time. A client that did not start the
trainer sends `JoinTrainer` first, which makes room for its jobs. A job belongs to the connection that
submitted it: when that connection ends without `Detach`, the job is checkpointed and stopped. Any client (of
the same user: the socket is 0600) may list, follow, stop, pause and resume any job.

Durable events carry `seq` ≥ 1 and come exactly once to a client that says where it stopped; samples
(`Stepped`) carry `seq` 0 and may be dropped when the client reads slowly. A trainer stays for clients
that have brought jobs, not for those that only look.
"""

from __future__ import annotations

import msgspec
from gshare.agent.jobs.events import Event, JobStateName
from gshare.agent.jobs.spec import JobRequest, WarmStart

PROTOCOL_VERSION = 1
#: How the reason of a stop begins that gave none itself: whose word it was follows.
STOPPED_BY = "stopped by "


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Base of all messages; unknown fields are ignored, so a later minor version may add some."""


class ClientHello(_Message, frozen=True, tag="client_hello"):
    """First frame of a client."""

    protocol: int
    gshare: str  # version of the package
    pid: int
    client: str  # a name for people and for fairness between clients


class TrainerHello(_Message, frozen=True, tag="trainer_hello"):
    """First frame of a trainer; `fingerprint` is empty while the base is still being loaded."""

    protocol: int
    gshare: str
    pid: int
    trainer_id: str
    model: str
    base_dtype: str
    schedule: str
    journal_id: str
    ready: bool  # the base is loaded
    fingerprint: dict[str, str] = {}
    last_seq: int = 0  # of the journal: who joins follows from there
    joinable: bool = False  # a `JoinTrainer` is answered at once; else when it is opened, or never
    waiting: str = ""  # where it stands in the queue for GPU memory
    gpu: str = ""  # UUID of the device that it has reserved
    jobs: list[str] = []  # names of those that have not ended


class JoinTrainer(_Message, frozen=True, tag="join"):
    """Make room for this client's jobs: their names, and on a GPU `budget_mb` more in the reservation.

    Answered by `Done`, whose `seq` is where the client follows from, or by `Refused`; a trainer that loads
    its base, waits for memory, or has a job on trial answers afterwards. `resident_mb` of the budget is for
    adapters and optimizer.
    """

    id: int
    jobs: list[str]
    budget_mb: int = 0
    resident_mb: int = 0


class OpenTrainer(_Message, frozen=True, tag="open"):
    """From now on others may join: none of this client's jobs is on trial any more."""

    id: int


class SubmitJobs(_Message, frozen=True, tag="submit"):
    """Admit these jobs, between two rounds. Answered by `Done` with the refused ones in `failed`.

    `names`: of all jobs of a sweep, which come one by one. Nobody else's get them while its client is there.
    """

    id: int
    jobs: list[JobRequest]
    names: list[str] = []  # added


class StopJobs(_Message, frozen=True, tag="stop"):
    """Checkpoint and stop. An empty list: all jobs of this connection."""

    id: int
    jobs: list[str]
    reason: str = ""


class PauseJobs(_Message, frozen=True, tag="pause"):
    id: int
    jobs: list[str]


class ResumeJobs(_Message, frozen=True, tag="resume"):
    """`pause_at`: the next step to pause at, as in `JobRequest`; None: that of the request stays."""

    id: int
    jobs: list[str]
    pause_at: int | None = None  # added; who does not know it trains on


class TakeWeights(_Message, frozen=True, tag="take_weights"):
    """Write the job's weights, as they are between two rounds, into `directory`: a clone starts from them.

    Answered by `WeightsTaken` or `Refused`; the job goes on as if nothing had been asked.
    """

    id: int
    job: str
    directory: str


class ListJobs(_Message, frozen=True, tag="list"):
    id: int


class Follow(_Message, frozen=True, tag="follow"):
    """Send events from now on: the durable ones after `after_seq` of journal `journal_id`, in order.

    Another (or empty) `journal_id` starts at the oldest event kept. `jobs` empty: of all jobs.
    """

    id: int
    journal_id: str = ""
    after_seq: int = 0
    jobs: list[str] = []


class Detach(_Message, frozen=True, tag="detach"):
    """This connection's jobs go on when it ends."""

    id: int


class Shutdown(_Message, frozen=True, tag="shutdown"):
    """Checkpoint and stop all jobs, then exit."""

    id: int


Request = (
    JoinTrainer
    | OpenTrainer
    | SubmitJobs
    | StopJobs
    | PauseJobs
    | ResumeJobs
    | TakeWeights
    | ListJobs
    | Follow
    | Detach
    | Shutdown
)


class Done(_Message, frozen=True, tag="done"):
    """The request was applied; `failed` maps each job it did not apply to onto the reason."""

    reply_to: int
    jobs: list[str] = []
    failed: dict[str, str] = {}
    busy: list[str] = []  # of `failed`: may be asked again when another job has ended
    seq: int = 0  # of the journal when a `JoinTrainer` was granted


class Refused(_Message, frozen=True, tag="refused"):
    """The request (0: the connection) was refused as a whole."""

    reply_to: int
    reason: str


class WeightsTaken(_Message, frozen=True, tag="weights_taken"):
    reply_to: int
    start: WarmStart


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `gshare jobs list`."""

    job: str
    state: JobStateName
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    val_loss: float | None = None
    best_val_loss: float | None = None
    client: str = ""
    output_dir: str = ""
    reason: str = ""
    position: int = 0  # in the queue for GPU memory, from 1 on; 0: waits for none


class Jobs(_Message, frozen=True, tag="jobs"):
    reply_to: int
    jobs: list[JobStatus]
    clients: int = 0  # connected now, those that only look left out


class Following(_Message, frozen=True, tag="following"):
    """`gap`: durable events that the client has not seen are no longer kept (the journal is bounded)."""

    reply_to: int
    journal_id: str
    next_seq: int
    gap: bool


class EventFrame(_Message, frozen=True, tag="event"):
    journal_id: str
    seq: int  # 0: a sample
    event: Event


FromClient = ClientHello | Request
FromTrainer = TrainerHello | Done | Refused | WeightsTaken | Jobs | Following | EventFrame
