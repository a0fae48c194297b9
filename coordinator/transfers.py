"""What the rules for jobs stand on: their records, timers, the way home of checkpoints and results.

Publication has two steps: `Publish` brings the files home and checks them; only when the attempt is still the
current one does `Place` put them into the output directory. From then on no node is needed and no newer
attempt can be started, so nothing is published twice.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gshare.coordinator.actions import (
    ClusterAction,
    Ended,
    Forget,
    Pause,
    Place,
    Publish,
    PullCheckpoint,
    Resume,
    Say,
    Start,
    Stop,
)
from gshare.coordinator.events import BY_USER, BroughtHome, CheckpointPulled, PublishFailed
from gshare.coordinator.facts import ENDED_STATES, PLACED_STATES, JobOutcome, JobRecord
from gshare.coordinator.node_state import LOST_AFTER_S
from gshare.coordinator.placement import Placement


@dataclass(frozen=True)
class Limits:
    """Bounds and delays, seconds."""

    lost_after_s: float = LOST_AFTER_S
    #: Attempts that may fail by their nodes' fault before the job is given up.
    faults: int = 5
    #: Before such an attempt is made again: 10, 30, 90, 270 s. A node that fails at once costs no more.
    fault_delay_s: float = 10.0
    #: A publication that failed for now (disk full at home).
    publish_delay_s: float = 30.0
    #: Nothing is placed so long after the start while nodes are still being tried: else the first one that
    #: answers would get everything.
    settle_s: float = 30.0
    #: `best/metadata.json` is compared with what the events said so often.
    check_best_s: float = 300.0


class Transfers:
    """The jobs and what is on its way; `Attempts` adds the rules, `Cluster` nodes, users and time."""

    def __init__(self, jobs: Iterable[JobRecord], limits: Limits) -> None:
        self.limits, self.now = limits, 0.0
        self.jobs: dict[str, JobRecord] = {job.facts.name: job for job in jobs}
        self._placement = Placement()
        self._on_node: dict[str, dict[str, None]] = {}  # jobs with an attempt there that is not at home yet
        self._agents: dict[str, str] = {}  # node → id of the agent that answered there last
        self._pulls: dict[str, dict[str, None]] = {}  # jobs whose checkpoint is being pulled from there
        self._adoptable: dict[str, dict[str, None]] = {}  # by lost node, some others among them
        self._timers: list[tuple[float, int, Literal["queue", "publish"], str, int]] = []
        self._timer_count = 0
        self._not_before: dict[str, float] = {}  # jobs whose next attempt is delayed
        self._changed: dict[str, JobRecord] = {}
        self._recount: dict[str, None] = {}  # nodes whose number of attempts changed
        self._out: list[ClusterAction] = []

    # --- who is current

    def is_current(self, job: str, attempt: int) -> bool:
        """Whether that attempt may still change the job."""
        record = self.jobs.get(job)
        return record is not None and record.attempt == attempt and record.state not in ENDED_STATES

    def still_wanted(self, action: ClusterAction) -> bool:
        """Whether an action of the outbox is to be carried out; one that is not is acknowledged undone."""
        if isinstance(action, (Say, Ended)):
            return True
        job = self.jobs.get(action.job)
        if job is None:
            return isinstance(action, (Stop, Forget))
        current = job.attempt == action.attempt
        if isinstance(action, Place):
            return current and job.state == "placing"
        here = current and job.node == action.node
        if isinstance(action, Start):
            return here and job.state in PLACED_STATES and job.wish != "stop"
        if isinstance(action, Stop):
            return not here or job.wish == "stop" or job.state not in PLACED_STATES
        if isinstance(action, Pause):
            return here and job.wish == "pause"
        if isinstance(action, Resume):
            return here and job.wish == "run"
        if isinstance(action, Publish):
            return here and job.state == "publishing"
        if isinstance(action, PullCheckpoint):
            return current and job.pulling
        return True

    # --- small steps

    def _touch(self, job: JobRecord) -> None:
        self._changed[job.facts.name] = job

    def _say(
        self, level: Literal["info", "warning", "error"], text: str, *, job: str = "", node: str = ""
    ) -> None:
        self._out.append(Say(level=level, text=text, job=job, node=node))

    def _end(self, job: JobRecord, state: JobOutcome, reason: str = "") -> None:
        job.state, job.reason, job.adoptable = state, reason, False
        self._touch(job)
        self._out.append(Ended(job=job.facts.name, state=state, reason=reason))

    def _timer(self, delay: float, kind: Literal["queue", "publish"], job: JobRecord) -> None:
        self._timer_count += 1
        entry = (self.now + delay, self._timer_count, kind, job.facts.name, job.attempt)
        heapq.heappush(self._timers, entry)

    def _run_timers(self) -> None:
        while self._timers and self._timers[0][0] <= self.now:
            _, _, kind, name, attempt = heapq.heappop(self._timers)
            job = self.jobs.get(name)
            if job is None or job.attempt != attempt:
                continue
            if kind == "queue":
                self._queue(job)
            elif job.publish_again:
                self._publish(job)

    def _queue(self, job: JobRecord) -> None:
        """Into the queue, unless it is delayed (its timer calls again), or its newest checkpoint is still on
        its way home: what is there by then is what it goes on from."""
        delayed = self._not_before.get(job.facts.name, self.now) > self.now
        if job.state == "waiting" and not job.pulling and not delayed:
            self._not_before.pop(job.facts.name, None)
            self._placement.add(job.facts, job.order, job.avoid)

    def _leave_node(self, job: JobRecord) -> None:
        """The current attempt no longer counts on its node; `last_node` remembers where it was."""
        name = job.facts.name
        self._placement.vacate(name, job.node, job.gpu)
        self._on_node.get(job.node, {}).pop(name, None)
        self._recount[job.node] = None
        job.last_node, job.node, job.position = job.node, "", 0

    def _put_on_node(self, job: JobRecord, node: str, *, running: bool) -> None:
        """Takes an attempt that is already there into account."""
        job.node, job.last_node, job.adoptable = node, "", False
        self._on_node.setdefault(node, {})[job.facts.name] = None
        self._recount[node] = None
        if job.state in PLACED_STATES:
            args = (job.facts.name, job.facts.base, node, job.gpu, job.budget_mb)
            self._placement.occupy(*args, running=running)

    # --- checkpoints

    def _pull(self, job: JobRecord, node: str, step: int, *, forget: bool = False) -> None:
        """Brings a checkpoint home that is newer than the one there; one at a time. `forget`: the attempt is
        over; without anything to bring home, its files may go at once."""
        have = job.checkpoint.step if job.checkpoint else 0
        action = PullCheckpoint(node=node, job=job.facts.name, attempt=job.attempt)
        if job.pulling:
            return
        if step > have:
            job.pulling = True
            self._pulls.setdefault(node, {})[action.job] = None
            self._touch(job)
            self._out.append(action)
        elif forget:
            self._out.append(Forget(node=node, job=action.job, attempt=job.attempt))

    def _pull_ended(self, job: JobRecord) -> None:
        job.pulling = False
        self._pulls.get(job.node or job.last_node, {}).pop(job.facts.name, None)
        self._touch(job)
        self._queue(job)
        if job.parked and job.state == "paused" and job.wish == "stop":
            self._end_parked(job)

    def _pulled(self, event: CheckpointPulled) -> None:
        job, new = self.jobs.get(event.job), event.checkpoint
        if job is None or job.attempt != new.attempt or not job.pulling:
            return
        if job.checkpoint is None or new.step > job.checkpoint.step:
            job.checkpoint = new
        self._pull_ended(job)
        if job.node and job.state in PLACED_STATES:
            self._pull(job, job.node, job.there_step)
        elif job.state == "stopped" and job.ended_there and job.last_node:
            self._out.append(Forget(node=job.last_node, job=event.job, attempt=job.attempt))

    # --- publication

    def _end_parked(self, job: JobRecord) -> None:
        """A parked job was stopped: its checkpoint at home is its result. One on its way is waited for."""
        if job.pulling:
            return
        if job.checkpoint is not None and job.checkpoint.step == job.facts.pause_at:
            # The wish has come true: one that is said after this, while there is no room at home, is another.
            job.state, job.outcome, job.wish = "placing", "stopped", "run"
            self._publish(job)
        else:
            text = f"its checkpoint has not come home from node {job.last_node}"
            self._end(job, "stopped", f"{job.why or BY_USER}; {text}")

    def _publish(self, job: JobRecord) -> None:
        name = job.facts.name
        job.publish_again = False
        self._touch(job)
        if job.state == "publishing":
            self._out.append(Publish(node=job.node, job=name, attempt=job.attempt))
        elif job.state == "placing":
            self._out.append(Place(job=name, attempt=job.attempt))

    def _brought_home(self, event: BroughtHome) -> None:
        job = self.jobs.get(event.job)
        if job is None or not self.is_current(event.job, event.attempt) or job.state != "publishing":
            return
        node = job.node
        self._on_node.get(node, {}).pop(event.job, None)
        job.last_node, job.node = node, ""
        job.best_val_loss, job.best_step = event.val_loss, event.best_step
        job.state = "placing"
        self._publish(job)

    def _publish_failed(self, event: PublishFailed) -> None:
        job = self.jobs.get(event.job)
        if job is None or not self.is_current(event.job, event.attempt):
            return
        if job.state not in ("publishing", "placing"):
            return
        if (event.retry or job.state == "placing") and job.wish == "stop":
            job.reason = event.reason
            self._leave_results(job)
        elif event.retry or job.state == "placing":
            told = _without_numbers(job.reason) == _without_numbers(event.reason)
            job.publish_again, job.reason = True, event.reason
            self._timer(self.limits.publish_delay_s, "publish", job)
            self._touch(job)
            if not told:  # a disk that is full for a night is told of once, not 3,000 times
                text = f"{event.job}: {event.reason}; nothing is lost, it is tried again"
                self._say("warning", text, job=event.job, node=job.node)
        elif job.outcome == "diverged":
            self._leave_node(job)
            self._end(job, "diverged", event.reason)
        else:
            self._fault(job, event.reason)

    def stop_leaves_results(self, job: JobRecord) -> bool:
        """Whether a stop ends a job that is done while its results are on their way home: not at the first
        word, when they may be there in a moment; but where a try has failed, or when it was said before."""
        return job.state in ("publishing", "placing") and (job.publish_again or job.wish == "stop")

    def _leave_results(self, job: JobRecord) -> None:
        """Ends it without them. They stay on the node: the `outcome` of a stopped job keeps them there."""
        if job.node:
            self._leave_node(job)
        why = f" ({job.reason})" if job.reason else ""
        job.publish_again = False
        self._end(job, "stopped", f"{job.why or BY_USER}; {results_stay(job)}{why}")

    def _published(self, name: str, attempt: int) -> None:
        job = self.jobs.get(name)
        if job is None or not self.is_current(name, attempt) or job.state != "placing":
            return
        job.published, job.publish_again = attempt, False
        stopped = job.outcome == "stopped"
        self._end(job, job.outcome or "completed", job.why if stopped else "")
        if stopped:
            job.outcome = None  # the node keeps nothing that is not here
        self._out.append(Forget(node=job.last_node, job=name, attempt=attempt))

    # --- of Attempts

    def _fault(self, job: JobRecord, reason: str) -> None:
        """The current attempt came to nothing by its node's fault."""
        raise NotImplementedError


def results_stay(job: JobRecord) -> str:
    """For people: where the results of a job are that was stopped before they were placed."""
    where = f"on node {job.node or job.last_node}"
    return f"its results stay {where}, `gshare jobs fetch {job.facts.name} DIR` brings them from there"


def _without_numbers(reason: str) -> str:
    """The same complaint may come with other MiB each time."""
    return re.sub(r"[\d,.]+", "", reason)
