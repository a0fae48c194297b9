"""The cluster as a pure machine: `handle(event) -> actions`. No clock, socket, file or thread.

`Attempts` holds the rules for jobs; here are nodes, users and time. The same events in the same order give
the same actions, so a run can be simulated, replayed and tested with any interleaving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gshare.agent.jobs.names import shorten
from gshare.agent.node.protocol import EARLY_EXIT
from gshare.coordinator.actions import CheckBest, ClusterAction, Pause, Resume, Stop
from gshare.coordinator.attempts import Attempts
from gshare.coordinator.config import NodeConfig
from gshare.coordinator.events import (
    AttemptChanged,
    AttemptGone,
    BestSeen,
    BroughtHome,
    CheckpointPulled,
    ClusterEvent,
    Evaluation,
    GivenUp,
    HoldPlacement,
    NodeAdded,
    NodeBeat,
    NodeDeploying,
    NodeDown,
    NodeRemoved,
    NodeUp,
    PauseJob,
    Published,
    PublishFailed,
    PullFailed,
    ResumeJob,
    Started,
    StartFailed,
    StopJob,
    Submit,
    Tick,
)
from gshare.coordinator.facts import ENDED_STATES, PLACED_STATES, JobFacts, JobRecord
from gshare.coordinator.leaderboard import better, same_best
from gshare.coordinator.node_state import Became, NodeMachine
from gshare.coordinator.slots import view_of
from gshare.coordinator.transfers import Limits


class Cluster(Attempts):
    """Nodes and jobs of one owner.

    `jobs` are the records of the store. Order at a start: `NodeAdded` for each configured node, `Started`,
    then whatever happens. After each `handle`, `take_changed` gives the records to be written.
    """

    def __init__(self, jobs: Iterable[JobRecord] = (), limits: Limits | None = None) -> None:
        super().__init__(jobs, limits or Limits())
        self.nodes: dict[str, NodeMachine] = {}
        self.wall = 0.0
        self._configs: dict[str, NodeConfig] = {}
        self._knows: dict[str, tuple[str, ...]] = {}  # node → what its agent knows
        self._order = max((job.order for job in self.jobs.values()), default=0)
        self._hold, self._placing, self._settled_at = False, False, 0.0
        self._untried: list[str] = []  # nodes of the start that were not tried yet, some others among them
        self._best_asked: dict[str, tuple[float | None, int | None]] = {}
        self._best_asked_at: dict[str, float] = {}  # by node
        self._handlers: dict[type, Callable[[Any], None]] = {
            Tick: self._tick,
            Started: self._started,
            HoldPlacement: self._hold_placement,
            NodeAdded: self._node_added,
            NodeRemoved: self._node_removed,
            NodeDeploying: self._node_deploying,
            NodeUp: self._node_up,
            NodeBeat: self._node_beat,
            NodeDown: self._node_down,
            Submit: self._submit,
            StopJob: self._stop_job,
            PauseJob: self._pause_job,
            ResumeJob: self._resume_job,
            AttemptChanged: self._attempt_changed,
            StartFailed: self._start_failed,
            AttemptGone: self._attempt_gone,
            Evaluation: self._evaluation,
            BestSeen: self._best_seen,
            GivenUp: self._given_up,
            CheckpointPulled: self._pulled,
            PullFailed: self._pull_failed,
            BroughtHome: self._brought_home,
            PublishFailed: self._publish_failed,
            Published: lambda event: self._published(event.job, event.attempt),
        }

    def handle(self, event: ClusterEvent) -> list[ClusterAction]:
        """What is to be done because of `event`, in this order (per node)."""
        self._handlers[type(event)](event)
        self._run_timers()
        self._place_if_allowed()
        for name in self._recount:
            node = self.nodes.get(name)
            if node is not None:
                self._became(node.counts(self.now, self._running(name)))
        self._recount.clear()
        out, self._out = self._out, []
        return out

    def take_changed(self) -> list[JobRecord]:
        """The jobs that changed since the last call, to be committed with the actions."""
        changed, self._changed = self._changed, {}
        return list(changed.values())

    # --- time and holding

    def _tick(self, event: Tick) -> None:
        self.now, self.wall = event.now, event.wall
        for node in self.nodes.values():
            if node.due() <= self.now:
                self._became(node.tick(self.now))

    def _started(self, event: Started) -> None:
        self.now, self.wall = event.now, event.wall
        self._settled_at = self.now + self.limits.settle_s
        for job in self.jobs.values():
            name = job.node or (job.last_node if job.pulling else "")
            if name and name not in self.nodes:
                self._node_added(NodeAdded(config=NodeConfig(name=name)))
                self._say("warning", f"{name} is not in cluster.toml any more, but has jobs", node=name)
            if job.pulling:
                self._pulls.setdefault(name, {})[job.facts.name] = None
            if job.node:
                self._put_on_node(job, job.node, running=job.state == "running")
            elif job.state == "waiting":
                self._queue(job)
            if job.adoptable:
                self._adoptable.setdefault(job.last_node, {})[job.facts.name] = None
            if job.publish_again:
                self._publish(job)
        for name, node in self.nodes.items():
            has_jobs = bool(self._on_node.get(name) or self._pulls.get(name))
            self._became(node.restarted(self.now, has_jobs=has_jobs))
        self._untried = sorted(self.nodes, reverse=True)

    def _hold_placement(self, event: HoldPlacement) -> None:
        self._hold = event.on

    def _place_if_allowed(self) -> None:
        """Places what can be placed. After a time of holding, all that wait are looked at in their order."""
        if self._hold or (self.now < self._settled_at and self._undecided()):
            self._placing = False
            return
        if not self._placing:
            self._placing = True
            self._placement.look_again()
        self._decide()

    def _undecided(self) -> bool:
        """Whether a node of the start was not yet tried to the end."""
        while self._untried:
            node = self.nodes.get(self._untried[-1])
            if node is not None and node.undecided:
                return True
            self._untried.pop()
        return False

    # --- nodes

    def _node_added(self, event: NodeAdded) -> None:
        config = event.config
        node = self.nodes.get(config.name)
        if node is None:
            node = self.nodes[config.name] = NodeMachine(
                config.name, lost_after_s=self.limits.lost_after_s, since=self.now
            )
        node.listed = frozenset(gpu.uuid for gpu in config.gpus or ())
        self._configs[config.name] = config
        self._view(node)

    def _node_removed(self, event: NodeRemoved) -> None:
        node = self.nodes.get(event.node)
        if node is not None:
            self._lose_jobs(event.node)
            del self.nodes[event.node], self._configs[event.node]
            self._placement.remove_node(event.node)
            self._agents.pop(event.node, None)
            self._knows.pop(event.node, None)

    def _node_deploying(self, event: NodeDeploying) -> None:
        node = self.nodes.get(event.node)
        if node is not None:
            self._became(node.deploying(self.now, event.text))

    def _node_up(self, event: NodeUp) -> None:
        node = self.nodes.get(event.node)
        if node is None:
            return
        running = self._running(event.node)
        self._knows[event.node] = event.knows
        self._became(node.came_up(self.now, self.wall, event.info, running, event.draining))
        self._view(node)
        here = list(self._on_node.get(event.node, ()))
        self._other_agent(event.node, event.agent, here)
        for status in event.attempts:
            self._status(event.node, status, fresh=True)
        listed = {(status.job, status.attempt) for status in event.attempts}
        for name in here:
            job = self.jobs[name]
            if job.node == event.node and (name, job.attempt) not in listed:
                self._gone(job)
        for name in self._adoptable.pop(event.node, ()):
            job = self.jobs[name]
            if job.adoptable and job.last_node == event.node:  # it came back without the attempt
                job.adoptable = False
                self._touch(job)

    def _other_agent(self, node: str, agent: str, here: list[str]) -> None:
        """Who answers for a node may be another than before: the cluster file was edited, its disk is new.
        What the one before was given may still run there: this one does not get it under the same number."""
        self._agents[node] = agent
        elsewhere = [name for name in here if agent and self.jobs[name].agent not in ("", agent)]
        for name in elsewhere:
            self._lose(self.jobs[name], "is another agent now")
        if elsewhere:
            jobs = shorten(", ".join(elsewhere), 200)
            text = f"{node} is another agent than before: {jobs} may go on training unseen where that one is"
            self._say("warning", text, node=node)

    def _node_beat(self, event: NodeBeat) -> None:
        node = self.nodes.get(event.node)
        if node is None or not node.up:
            return
        self._became(node.beat(self.now, self.wall, event.info, self._running(event.node)))
        self._view(node)
        asked_at = self._best_asked_at.setdefault(event.node, self.now)
        if self.now - asked_at >= self.limits.check_best_s:
            self._best_asked_at[event.node] = self.now
            self._check_best(event.node)

    def _node_down(self, event: NodeDown) -> None:
        node = self.nodes.get(event.node)
        if node is not None:
            self._became(node.went_down(self.now, event.reason))
            self._view(node)

    def _became(self, became: Became | None) -> None:
        """Tells people what a node became, and takes the jobs off one that is lost."""
        if became is None:
            return
        name, why = became.node, f": {became.reason}" if became.reason else ""
        if became.state == "lost":
            jobs = len(self._on_node.get(name, ()))
            self._say("error", f"{name} is lost{why}; {jobs} jobs go on elsewhere", node=name)
            self._lose_jobs(name)
        elif became.state == "unreachable" and became.was != "new":
            self._say("warning", f"{name} cannot be reached{why}", node=name)
        elif became.state == "degraded":
            self._say("warning", f"{name}{why}", node=name)
        elif became.was in ("unreachable", "lost"):
            self._say("info", f"{name} is back", node=name)
        if became.state in ("lost", "unreachable"):
            self._view(self.nodes[name])

    def _lose_jobs(self, node: str) -> None:
        for name in list(self._pulls.pop(node, ())):
            self._pull_ended(self.jobs[name])
        for name in list(self._on_node.get(node, ())):
            self._lose(self.jobs[name])

    def _view(self, node: NodeMachine) -> None:
        config, info = self._configs[node.name], node.info
        knows = EARLY_EXIT in self._knows.get(node.name, ())
        self._placement.set_node(view_of(config, info, placeable=node.placeable, early_exit=knows))

    def _running(self, node: str) -> int:
        return sum(self.jobs[name].state in PLACED_STATES for name in self._on_node.get(node, ()))

    # --- users

    def submit_fault(self, facts: JobFacts) -> str | None:
        """Why this job cannot be submitted now; None when it can, or when it was already."""
        job = self.jobs.get(facts.name)
        if job is None or job.facts.submission == facts.submission or job.state in ENDED_STATES:
            return None
        return f"job {facts.name} is {job.state}: stop it first, or give the new one another name"

    def _submit(self, event: Submit) -> None:
        facts = event.facts
        fault, old = self.submit_fault(facts), self.jobs.get(facts.name)
        if fault is not None:
            self._say("error", fault, job=facts.name)
            return
        if old is not None and old.facts.submission == facts.submission:
            return
        self._order += 1
        job = JobRecord(facts=facts, order=self._order)
        if old is not None:  # attempt numbers go on: a node may still have one of the old job
            job.attempt, job.floor = old.attempt, old.floor
            job.ended_there, job.last_node = old.ended_there, old.last_node
            self._pulls.get(old.last_node, {}).pop(facts.name, None)
        self.jobs[facts.name] = job
        self._not_before.pop(facts.name, None)
        self._touch(job)
        self._queue(job)

    def _stop_job(self, event: StopJob) -> None:
        job = self.jobs.get(event.job)
        if job is None or job.state in ENDED_STATES:
            return
        if self.stop_leaves_results(job):
            self._leave_results(job)
            return
        if job.state in ("publishing", "placing"):
            job.wish = "stop"  # if they do not arrive now, it ends
            self._touch(job)
            self._say("info", f"{event.job} is done already, its files are being fetched", job=event.job)
            return
        job.wish, job.why = "stop", event.reason
        self._touch(job)
        if not job.node:
            self._placement.drop(event.job)
            if job.parked:
                self._end_parked(job)
            else:
                self._end(job, "stopped", event.reason)
            return
        job.stop_sent = True
        args = {"node": job.node, "job": event.job, "attempt": job.attempt}
        self._out.append(Stop(**args, reason=event.reason))

    def _pause_job(self, event: PauseJob) -> None:
        job = self.jobs.get(event.job)
        if job is None or (job.state != "waiting" and job.state not in PLACED_STATES) or job.wish == "stop":
            return
        job.wish = "pause"
        self._touch(job)
        if job.node:
            self._out.append(Pause(node=job.node, job=event.job, attempt=job.attempt))
        else:
            self._placement.drop(event.job)
            job.state = "paused"

    def _resume_job(self, event: ResumeJob) -> None:
        job = self.jobs.get(event.job)
        if job is None:
            return
        if job.state == "stopped" and job.published == job.attempt > 0:
            self._say(
                "info", f"{event.job} was stopped, and its results are in its output_dir", job=event.job
            )
        elif job.state == "stopped" and job.outcome is not None and self._is_up(job.last_node):
            job.state, job.wish, job.reason = "publishing", "run", ""  # it was trained to its end there
            self._put_on_node(job, job.last_node, running=False)
            self._publish(job)
        elif job.state in ("stopped", "failed") or (job.state == "paused" and not job.node):
            job.outcome = None
            if job.parked:
                job.parked, job.past = False, True
            job.why = ""
            job.state, job.wish, job.reason, job.faults, job.avoid = "waiting", "run", "", 0, ()
            self._not_before.pop(event.job, None)
            self._touch(job)
            self._queue(job)
        elif job.state in PLACED_STATES and job.wish != "run":
            # One that was told to stop, and did, goes on under a new attempt, from its checkpoint.
            job.wish = "run"
            self._touch(job)
            self._out.append(Resume(node=job.node, job=event.job, attempt=job.attempt))
        elif job.state == "diverged":
            self._say("info", f"{event.job} diverged: from its checkpoint it would again", job=event.job)

    def _is_up(self, node: str) -> bool:
        return node in self.nodes and self.nodes[node].up

    # --- attempts

    def _attempt_changed(self, event: AttemptChanged) -> None:
        if event.node in self.nodes:
            self._status(event.node, event.status, fresh=False)

    def _start_failed(self, event: StartFailed) -> None:
        job = self._job_on(event.node, event.job, event.attempt)
        if job is not None and job.state == "starting":
            self._failed(job, event.reason, retry=event.retry, checkpoint_step=0)

    def _attempt_gone(self, event: AttemptGone) -> None:
        job = self._job_on(event.node, event.job, event.attempt)
        if job is not None:
            self._gone(job)

    def _pull_failed(self, event: PullFailed) -> None:
        job = self.jobs.get(event.job)
        if job is not None and job.attempt == event.attempt and job.pulling:
            self._pull_ended(job)

    def _given_up(self, event: GivenUp) -> None:
        job = self.jobs.get(event.job)
        if job is None or not self.is_current(event.job, event.attempt):
            return
        if job.node:
            self._leave_node(job)
        job.publish_again = False
        self._end(job, "failed", event.reason)

    def _job_on(self, node: str, name: str, attempt: int) -> JobRecord | None:
        """The job, if this is its current attempt and it is on that node."""
        job = self.jobs.get(name)
        return job if job is not None and job.node == node and self.is_current(name, attempt) else None

    # --- val losses

    def _evaluation(self, event: Evaluation) -> None:
        job = self._job_on(event.node, event.job, event.attempt)
        if job is None or job.state not in PLACED_STATES:
            return
        job.val_loss = event.val_loss
        if better(event.val_loss, job.best_val_loss):
            job.best_val_loss, job.best_step = event.val_loss, event.step
        self._touch(job)

    def _check_best(self, node: str) -> None:
        for name in self._on_node.get(node, ()):
            job = self.jobs[name]
            if job.state == "running" and job.best_step is not None:
                self._best_asked[name] = (job.best_val_loss, job.best_step)
                self._out.append(CheckBest(node=node, job=name, attempt=job.attempt))

    def _best_seen(self, event: BestSeen) -> None:
        """The file wins, unless it only is as old as the question."""
        job = self._job_on(event.node, event.job, event.attempt)
        asked = self._best_asked.pop(event.job, None)
        if job is None or job.state not in PLACED_STATES:
            return
        seen, known = (event.val_loss, event.step), (job.best_val_loss, job.best_step)
        if same_best(seen, known) or (asked is not None and same_best(seen, asked)):
            return
        text = (
            f"{event.job}: best/metadata.json on {event.node} says val loss {event.val_loss} at step "
            f"{event.step}, its events said {known[0]} at step {known[1]}; the file counts"
        )
        self._say("warning", text, job=event.job, node=event.node)
        job.best_val_loss, job.best_step = seen
        self._touch(job)
