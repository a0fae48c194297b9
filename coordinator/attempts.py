"""The jobs' half of the cluster machine: attempts, what nodes say of them, checkpoints, publication.

Rules:
- An attempt's number is written with the `Start` that sends it, in one transaction, and never used again.
- Only the current attempt may change a job. Older ones are told to stop, and their files may go once they
  ended. A node that was lost and comes back before a newer attempt was started goes on with its own.
- Publication has two steps: `Publish` brings the files home and checks them; only when the attempt is still
  the current one does `Place` put them into the output directory. From then on no node is needed and no
  newer attempt can be started, so nothing is published twice.
- An attempt that failed by its node's fault is made again elsewhere, a bounded number of times, later each
  time; a job's own failure ends it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gshare.agent.jobs.events import ENDED
from gshare.agent.node.protocol import AttemptStatus
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
from gshare.coordinator.events import BroughtHome, CheckpointPulled, PublishFailed
from gshare.coordinator.facts import ENDED_STATES, PLACED_STATES, JobOutcome, JobRecord
from gshare.coordinator.node_state import LOST_AFTER_S
from gshare.coordinator.placement import Never, Placed, Placement


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


class Attempts:
    """State of all jobs and their transitions; `Cluster` adds nodes, users and time."""

    def __init__(self, jobs: Iterable[JobRecord], limits: Limits) -> None:
        self.limits, self.now = limits, 0.0
        self.jobs: dict[str, JobRecord] = {job.facts.name: job for job in jobs}
        self._placement = Placement()
        self._on_node: dict[str, dict[str, None]] = {}  # jobs with an attempt there that is not at home yet
        self._pulls: dict[str, dict[str, None]] = {}  # jobs whose checkpoint is being pulled from there
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
        job.state, job.reason = state, reason
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
        job.node, job.last_node = node, ""
        self._on_node.setdefault(node, {})[job.facts.name] = None
        self._recount[node] = None
        if job.state in PLACED_STATES:
            args = (job.facts.name, job.facts.base, node, job.gpu, job.budget_mb)
            self._placement.occupy(*args, running=running)

    # --- placing

    def _decide(self) -> None:
        while decisions := list(self._placement.decide()):
            for decision in decisions:
                job = self.jobs[decision.job]
                if isinstance(decision, Never):
                    self._cannot_place(job, decision)
                else:
                    self._start(job, decision)

    def _cannot_place(self, job: JobRecord, never: Never) -> None:
        if job.avoid:  # rather there than nowhere
            job.avoid = ()
            self._touch(job)
            self._queue(job)
        else:
            self._end(job, "failed", never.reason)

    def _start(self, job: JobRecord, placed: Placed) -> None:
        name = job.facts.name
        if job.ended_there and job.last_node:
            self._out.append(Forget(node=job.last_node, job=name, attempt=job.attempt))
        job.attempt = max(job.attempt, job.floor) + 1
        job.node, job.gpu, job.budget_mb, job.last_node = placed.node, placed.gpu, placed.budget_mb, ""
        job.state, job.reason = "starting", ""
        job.ended_there = job.stop_sent = job.pulling = False
        job.there_step = 0
        self._on_node.setdefault(placed.node, {})[name] = None
        self._recount[placed.node] = None
        self._send_start(job)

    def _send_start(self, job: JobRecord) -> None:
        known = job.facts.base_mb + job.facts.adapter_mb > 0
        self._out.append(
            Start(
                node=job.node,
                gpu=job.gpu,
                job=job.facts.name,
                attempt=job.attempt,
                budget_mb=job.budget_mb if known else None,
                checkpoint=job.checkpoint,
            )
        )
        self._touch(job)

    # --- what nodes say

    def _status(self, node: str, status: AttemptStatus, *, fresh: bool) -> None:
        """`fresh`: from the list at a new connection, so wishes that the node may have missed are repeated."""
        job = self.jobs.get(status.job)
        if job is None:
            if status.state not in ENDED:
                text = (
                    f"{node} runs a job {status.job} that is not in the store: it is stopped, its files stay"
                )
                self._say("warning", text, node=node)
                self._out.append(Stop(node=node, job=status.job, attempt=status.attempt, reason=text))
            return
        if status.attempt > max(job.attempt, job.floor):
            job.floor = status.attempt
            self._touch(job)
            text = (
                f"{node} has a newer attempt of {status.job} than the store knows: was an old one put back?"
            )
            self._say("warning", text, job=status.job, node=node)
        if not self.is_current(status.job, status.attempt):
            self._not_current(job, node, status)
        elif job.node == node and job.state in PLACED_STATES:
            self._current(job, status, fresh=fresh)
        elif not job.node and job.last_node == node and not job.ended_there and self._adopts(job):
            self._current(job, status, fresh=True)
        elif job.node != node and not (job.last_node == node and job.state in ("placing", "publishing")):
            self._not_current(job, node, status)

    def _adopts(self, job: JobRecord) -> bool:
        """A lost node is back with an attempt that nobody replaced."""
        if job.state not in ("waiting", "paused"):
            return False
        self._placement.drop(job.facts.name)
        job.state, job.reason = "starting", ""
        self._put_on_node(job, job.last_node, running=False)
        self._touch(job)
        return True

    def _not_current(self, job: JobRecord, node: str, status: AttemptStatus) -> None:
        over = status.state in ENDED
        name, attempt = status.job, status.attempt
        if not over:
            reason = f"attempt {job.attempt} is the current one, the job is {job.state}"
            self._out.append(Stop(node=node, job=name, attempt=attempt, reason=reason))
        elif attempt != job.attempt or job.state in ("completed", "diverged"):
            self._out.append(Forget(node=node, job=name, attempt=attempt))
        elif job.state == "stopped" and not job.pulling:
            # What it leaves is brought home before it may go: a user may resume the job.
            job.last_node, job.ended_there = node, True
            self._pull(job, node, status.checkpoint_step, forget=True)

    def _current(self, job: JobRecord, status: AttemptStatus, *, fresh: bool) -> None:
        self._touch(job)
        job.step, job.total_steps, job.position = status.step, status.total_steps, status.position
        job.loss, job.reason = status.loss, status.reason
        if status.val_loss is not None:
            job.val_loss = status.val_loss
        if status.best_val_loss is not None:
            job.best_val_loss, job.best_step = status.best_val_loss, status.best_step
        job.there_step = max(job.there_step, status.checkpoint_step)
        node = job.node
        if status.state in ("completed", "diverged"):
            self._finish(job, status.state)
        elif status.state == "stopped":
            self._stopped(job, status)
        elif status.state == "failed":
            self._failed(job, status.reason, retry=status.retry, checkpoint_step=status.checkpoint_step)
        else:
            job.state = "starting" if status.state == "queued" else status.state
            if status.state != "queued":
                self._placement.runs(status.job, node, job.gpu)
            if fresh:
                self._repeat_wish(job, status)
            self._pull(job, node, status.checkpoint_step)

    def _repeat_wish(self, job: JobRecord, status: AttemptStatus) -> None:
        name, attempt, node = status.job, status.attempt, job.node
        if job.wish == "stop":
            self._out.append(Stop(node=node, job=name, attempt=attempt, reason="stopped by its user"))
        elif job.wish == "pause" and status.state != "paused":
            self._out.append(Pause(node=node, job=name, attempt=attempt))
        elif job.wish == "run" and status.state == "paused":
            self._out.append(Resume(node=node, job=name, attempt=attempt))

    def _gone(self, job: JobRecord) -> None:
        """The node does not know the attempt that should be on it."""
        node = job.node
        if job.state == "publishing":
            self._fault(job, f"{node} no longer has its files")
        elif job.wish == "stop":
            self._leave_node(job)
            job.ended_there = True
            self._end(job, "stopped")
        else:
            job.state = "starting"
            self._send_start(job)
            if job.wish == "pause":
                self._out.append(Pause(node=node, job=job.facts.name, attempt=job.attempt))

    # --- ends of attempts

    def _finish(self, job: JobRecord, outcome: JobOutcome) -> None:
        self._placement.vacate(job.facts.name, job.node, job.gpu)
        self._recount[job.node] = None
        job.outcome, job.ended_there = outcome, True
        job.state = "publishing"
        self._publish(job)

    def _publish(self, job: JobRecord) -> None:
        name = job.facts.name
        job.publish_again = False
        self._touch(job)
        if job.state == "publishing":
            self._out.append(Publish(node=job.node, job=name, attempt=job.attempt))
        elif job.state == "placing":
            self._out.append(Place(job=name, attempt=job.attempt))

    def _stopped(self, job: JobRecord, status: AttemptStatus) -> None:
        node, asked = job.node, job.stop_sent
        if job.wish != "stop":
            self._again(job, status.reason or f"stopped on {node}", count=not asked, avoid=False)
            self._pull(job, node, status.checkpoint_step)
            return
        self._leave_node(job)
        job.ended_there = True
        self._end(job, "stopped", status.reason)
        self._pull(job, node, status.checkpoint_step, forget=True)

    def _failed(self, job: JobRecord, reason: str, *, retry: bool, checkpoint_step: int) -> None:
        node = job.node
        if retry:
            self._fault(job, reason)
            self._pull(job, node, checkpoint_step)
        else:
            self._leave_node(job)
            job.ended_there = True
            self._end(job, "failed", reason)

    def _fault(self, job: JobRecord, reason: str) -> None:
        self._again(job, reason, count=True, avoid=True)

    def _again(self, job: JobRecord, reason: str, *, count: bool, avoid: bool) -> None:
        """The current attempt is over, the job is not."""
        node = job.node
        self._leave_node(job)
        job.ended_there, job.outcome, job.publish_again = True, None, False
        self._touch(job)
        if job.wish == "stop":
            self._end(job, "stopped", reason)
            return
        if count:
            job.faults += 1
            if job.faults >= self.limits.faults:
                text = f"{job.faults} attempts failed by their nodes' fault, the last on {node}: {reason}"
                self._end(job, "failed", text)
                return
            name = job.facts.name
            self._say("warning", f"attempt {job.attempt} of {name} on {node}: {reason}", job=name, node=node)
        if avoid:
            avoided = (*job.avoid, node) if node not in job.avoid else job.avoid
            job.avoid = avoided if self._placement.can_ever(job.facts, avoided) else ()
        job.state, job.reason = ("paused" if job.wish == "pause" else "waiting"), reason
        if job.state == "waiting":
            delay = self.limits.fault_delay_s * 3 ** (job.faults - 1) if count else 0.0
            self._not_before[job.facts.name] = self.now + delay
            self._timer(delay, "queue", job)

    def _lose(self, job: JobRecord) -> None:
        """Its node is lost. The attempt may still run there, so it is not marked as ended."""
        node = job.node
        self._leave_node(job)
        job.ended_there, job.outcome, job.publish_again = False, None, False
        self._touch(job)
        if job.wish == "stop":
            self._end(job, "stopped", f"{node} was lost")
            return
        job.state, job.reason = ("paused" if job.wish == "pause" else "waiting"), f"{node} was lost"
        self._queue(job)

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
        if event.retry or job.state == "placing":
            job.publish_again, job.reason = True, event.reason
            self._timer(self.limits.publish_delay_s, "publish", job)
            self._touch(job)
            text = f"{event.job}: {event.reason}; nothing is lost, it is tried again"
            self._say("warning", text, job=event.job, node=job.node)
        elif job.outcome == "diverged":
            self._leave_node(job)
            self._end(job, "diverged", event.reason)
        else:
            self._fault(job, event.reason)

    def _published(self, name: str, attempt: int) -> None:
        job = self.jobs.get(name)
        if job is None or not self.is_current(name, attempt) or job.state != "placing":
            return
        job.published, job.publish_again = attempt, False
        self._end(job, job.outcome or "completed")
        self._out.append(Forget(node=job.last_node, job=name, attempt=attempt))
