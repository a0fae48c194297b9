"""The rules for jobs: attempts, where they are placed, what their nodes say of them, how they end.

- An attempt's number is written with the `Start` that sends it, in one transaction, and never used again.
- Only the current attempt may change a job. Older ones are told to stop, and their files may go once they
  ended. A node that was lost and comes back before a newer attempt was started goes on with its own.
- One that has come to its `pause_at` is over, and its job parked: it holds no place, and goes on in a new
  attempt, anywhere, from the checkpoint that came home.
- An attempt that failed by its node's fault is made again elsewhere, a bounded number of times, later each
  time; a job's own failure ends it.
"""

from __future__ import annotations

from gshare.agent.jobs.events import ENDED
from gshare.agent.node.protocol import AttemptStatus
from gshare.coordinator.actions import Forget, Pause, Resume, Start, Stop
from gshare.coordinator.events import BY_USER
from gshare.coordinator.facts import PLACED_STATES, JobOutcome, JobRecord
from gshare.coordinator.placement import Never, Placed
from gshare.coordinator.transfers import Transfers


class Attempts(Transfers):
    """Transitions of jobs."""

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
        job.agent = self._agents.get(placed.node, "")
        job.state, job.reason = "starting", ""
        job.ended_there = job.adoptable = job.stop_sent = job.pulling = False
        job.there_step, job.exit = 0, None
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
        """`fresh`: from the list at a new connection, so wishes that it may have missed are said again."""
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
        elif fresh and job.adoptable and job.last_node == node:
            self._adopt(job)
            self._current(job, status, fresh=True)
        elif job.node != node and not (job.last_node == node and job.state == "placing"):
            self._not_current(job, node, status)

    def _adopt(self, job: JobRecord) -> None:
        """A lost node is back with an attempt that nobody replaced. Nothing was placed there meanwhile, so
        there is room for it."""
        assert job.state in ("waiting", "paused")
        self._placement.drop(job.facts.name)
        job.state, job.reason = "starting", ""
        self._put_on_node(job, job.last_node, running=False)
        job.agent = self._agents.get(job.node, "")
        self._touch(job)

    def _not_current(self, job: JobRecord, node: str, status: AttemptStatus) -> None:
        over = status.state in ENDED
        name, attempt = status.job, status.attempt
        if not over:
            reason = f"attempt {job.attempt} is the current one, the job is {job.state}"
            self._out.append(Stop(node=node, job=name, attempt=attempt, reason=reason))
        elif attempt != job.attempt or job.state in ("completed", "diverged") or job.published == attempt:
            self._out.append(Forget(node=node, job=name, attempt=attempt))
        elif job.state == "stopped" and job.outcome is not None:
            return  # the results, which were not placed: for whoever fetches them
        elif job.state == "stopped" and not job.pulling:
            # What it leaves is brought home before it may go: a user may resume the job.
            job.last_node, job.ended_there = node, True
            self._pull(job, node, status.checkpoint_step, forget=True)
        elif job.parked and job.last_node == node:  # it was away before its checkpoint had come home
            self._pull(job, node, status.checkpoint_step)

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
            self._out.append(Stop(node=node, job=name, attempt=attempt, reason=job.why or BY_USER))
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

    def _stopped(self, job: JobRecord, status: AttemptStatus) -> None:
        node, asked = job.node, job.stop_sent
        if status.parked and not job.past:
            self._park(job, status)
            return
        if status.exit is not None or (
            job.wish == "stop" and job.facts.early_exit and status.checkpoint_step
        ):
            job.exit, job.why = status.exit, status.reason
            self._finish(job, "stopped")
            return
        if job.wish != "stop":
            self._again(job, status.reason or f"stopped on {node}", count=not asked, avoid=False)
            self._pull(job, node, status.checkpoint_step)
            return
        self._leave_node(job)
        job.ended_there = True
        self._end(job, "stopped", status.reason)
        self._pull(job, node, status.checkpoint_step, forget=True)

    def _park(self, job: JobRecord, status: AttemptStatus) -> None:
        """It waits for a word: from its checkpoint, which comes home, it goes on, or ends with that."""
        node = job.node
        self._leave_node(job)
        job.ended_there = job.parked = True
        job.state = "paused"
        self._touch(job)
        self._pull(job, node, status.checkpoint_step)
        if job.wish == "stop":
            self._end_parked(job)

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

    def _lose(self, job: JobRecord, why: str = "was lost") -> None:
        """Its node is lost. The attempt may still run there, so it is not marked as ended."""
        node = job.node
        self._leave_node(job)
        job.ended_there, job.outcome, job.publish_again = False, None, False
        self._touch(job)
        if job.wish == "stop":
            self._end(job, "stopped", f"{node} {why}")
            return
        job.adoptable = True
        self._adoptable.setdefault(node, {})[job.facts.name] = None
        job.state, job.reason = ("paused" if job.wish == "pause" else "waiting"), f"{node} {why}"
        self._queue(job)
