"""What the screens show, built from frames alone: no clock, no I/O. The same frames give the same state.

    changes = state.apply(frame)

Everything is bounded: curves by `curve.py`, the journal is a ring, jobs and nodes are those of the source.
"""

from __future__ import annotations

import math
from collections import deque

from gshare.agent.node.protocol import ReservationInfo
from gshare.tui.frames import (
    ENDED,
    Checkpoint,
    Entry,
    Evaluation,
    Found,
    Frame,
    History,
    JobState,
    JobView,
    Journal,
    Level,
    Message,
    NodeState,
    NodeView,
    Reset,
    Sample,
    Samples,
    Snapshot,
    SourceState,
)
from gshare.tui.ranking import rank_key
from gshare.tui.rows import Changes, Job, Node, job_view, node_view
from gshare.tui.speed import Speed

ENTRIES_KEPT = 20_000
#: Messages are told on one line; what a node sends may be longer.
TEXT_LENGTH = 500


class State:
    """Everything that is known. Read it freely; change it by `apply` alone."""

    def __init__(self, entries_kept: int = ENTRIES_KEPT) -> None:
        self.source: SourceState | None = None  # None: nothing was said yet
        self.found: Found | None = None
        self.jobs: dict[str, Job] = {}
        self.nodes: dict[str, Node] = {}
        self.entries: deque[Entry] = deque(maxlen=entries_kept)
        self.last_entry = 0  # the number of the newest entry
        self.time: float | None = None  # the source's clock, by its newest frame
        self.received: float | None = None  # ours, when the newest frame came
        self._ranked: list[Job] | None = None

    # --- reading

    def ranked(self) -> list[Job]:
        """All jobs, the best first (`ranking.rank_key`). Computed when something of it has changed."""
        if self._ranked is None:
            self._ranked = sorted(self.jobs.values(), key=rank_key)
        return self._ranked

    def counts(self) -> dict[str, int]:
        """Jobs by state."""
        found: dict[str, int] = {}
        for job in self.jobs.values():
            found[job.state] = found.get(job.state, 0) + 1
        return found

    def reservations(self) -> list[tuple[Node, ReservationInfo]]:
        """Of all nodes, held ones first, each with its node."""
        held = [(node, row) for node in self.nodes.values() for row in node.held()]
        return held + [(node, row) for node in self.nodes.values() for row in node.queue()]

    def age(self, now: float) -> float | None:
        """Seconds since anything was heard, `now` by our clock; None: nothing yet."""
        return None if self.received is None else max(0.0, now - self.received)

    @property
    def is_live(self) -> bool:
        return self.source is not None and self.source.state in ("live", "ended")

    # --- changing

    def apply(self, frame: Frame) -> Changes:
        """Takes one frame in."""
        changes = Changes()
        if isinstance(frame, Samples):  # by far the most
            self._samples(frame, changes)
        elif isinstance(frame, SourceState):
            self._source(frame, changes)
            return changes  # no word of the source: what is shown gets no younger by it
        elif isinstance(frame, Found):
            self.found, changes.source = frame, True
            return changes
        elif isinstance(frame, Reset):
            self._reset(changes)
            return changes
        elif isinstance(frame, Snapshot):
            self._snapshot(frame, changes)
        elif isinstance(frame, JobState):
            self._job_state(frame, changes)
        elif isinstance(frame, Evaluation):
            self._evaluation(frame, changes)
        elif isinstance(frame, Checkpoint):
            job = self._job(frame.job, frame.received, changes)
            job.checkpoint_step = frame.step
            text = f"saved {_saved(frame.path)} of step {frame.step}"
            self._tell(frame, "info", "checkpoint", text, changes)
        elif isinstance(frame, NodeState):
            self._node_state(frame, changes)
        elif isinstance(frame, Message):
            self._tell(frame, frame.level, frame.kind, frame.text, changes)
        elif isinstance(frame, History):
            job = self._job(frame.job, frame.received, changes)
            job.train.merge(frame.train)
            job.val.merge(frame.val)
        else:
            self._journal(frame, changes)
        self.time, self.received = frame.time, frame.received
        return changes

    def dump(self, time: float, received: float) -> list[Frame]:
        """Frames that build this state anew (but for speeds): a keyframe."""
        found: list[Frame] = [Reset(time=time, received=received)]
        if self.found is not None:
            found.append(self.found)
        nodes = tuple(node_view(node, received) for node in self.nodes.values())
        jobs = tuple(job_view(job) for job in self.jobs.values())
        found.append(Snapshot(time=time, received=received, nodes=nodes, jobs=jobs))
        for job in self.jobs.values():
            train, val = tuple(job.train.points()), tuple(job.val.points())
            if train or val:
                found.append(History(time=time, received=received, job=job.job, train=train, val=val))
        if self.source is not None:
            found.append(self.source)
        # Last: what the frames before it have told is in it already.
        found.append(Journal(time=time, received=received, entries=tuple(self.entries)))
        return found

    # --- one method a frame

    def _source(self, frame: SourceState, changes: Changes) -> None:
        before = self.source
        self.source, changes.source = frame, True
        changes.urgent = before is None or before.state != frame.state
        away = ("connecting", "lost")
        # A loss is told once, not with each try that fails for the same reason.
        again = (
            before is not None and before.state in away and frame.state in away and frame.text == before.text
        )
        if changes.urgent and not again and not (before is None and frame.state == "connecting"):
            level: Level = "info" if frame.state in ("live", "ended", "connecting") else "warning"
            text = f"{frame.state}: {frame.text}" if frame.text else frame.state
            self._tell(frame, level, "source", text, changes)

    def _reset(self, changes: Changes) -> None:
        self.jobs.clear()
        self.nodes.clear()
        self.entries.clear()
        self.last_entry = 0
        self.time = self.received = self.source = self.found = None
        self._ranked = None
        changes.reset = changes.rows = changes.urgent = True

    def _snapshot(self, frame: Snapshot, changes: Changes) -> None:
        if frame.nodes is not None:
            for name in self.nodes.keys() - {view.node for view in frame.nodes}:
                del self.nodes[name]
                changes.nodes.add(name)
                changes.rows = True
            for view in frame.nodes:
                self._node_view(view, frame, changes)
        if frame.jobs is not None:
            for key in self.jobs.keys() - {view.job for view in frame.jobs}:
                del self.jobs[key]
                self._ranked = None
                changes.jobs.add(key)
                changes.rows = True
            for view in frame.jobs:
                self._view(view, frame, changes)

    def _node_view(self, view: NodeView, frame: Frame, changes: Changes) -> None:
        node = self._node(view.node, changes)
        changes.urgent |= node.state != view.state
        node.state, node.reason = view.state, _line(view.reason)
        node.transport, node.host, node.gshare = view.transport, view.host, view.gshare
        node.jobs = view.jobs
        if view.info is not None:
            node.info, node.received = view.info, frame.received
        node.heard = None if view.seen_s is None else frame.received - view.seen_s

    def _view(self, view: JobView, frame: Frame, changes: Changes) -> None:
        job = self._job(view.job, frame.received, changes)
        if view.name:
            job.name = view.name
        if job.state != view.state:
            self._enter(job, view.state, view.reason, frame.time, changes)
        job.reason = _line(view.reason)
        job.position = view.position
        job.attempt = view.attempt or job.attempt
        for name in ("node", "gpu", "client", "output_dir", "model", "base_dtype", "hyper"):
            setattr(job, name, getattr(view, name) or getattr(job, name))
        for name in ("total_steps", "val_loss", "best_val_loss", "best_step"):
            value = getattr(view, name)
            setattr(job, name, getattr(job, name) if value is None else value)
        # A list may be older than the samples that came while it was made.
        if view.step is not None and (job.step is None or view.step >= job.step or view.state in ENDED):
            job.step = view.step
            job.loss = job.loss if view.loss is None else view.loss
        self._ranked = None

    def _job_state(self, frame: JobState, changes: Changes) -> None:
        job = self._job(frame.job, frame.received, changes)
        job.node, job.attempt = frame.node or job.node, frame.attempt or job.attempt
        if frame.step is not None:
            if job.step is not None and frame.step < job.step and frame.state not in ENDED:
                job.train.cut(frame.step + 1)  # goes on from a checkpoint
                job.val.cut(frame.step + 1)
            job.step = frame.step
        job.total_steps = frame.total_steps or job.total_steps
        job.reason = _line(frame.reason)
        job.position = 0 if frame.state != "queued" else job.position
        # A coordinator says it, and its node does.
        again = bool(job.states) and (job.state, job.states[-1][2]) == (frame.state, job.reason)
        self._enter(job, frame.state, frame.reason, frame.time, changes)
        if again:
            return
        bad = frame.state in ("failed", "diverged")
        text = f"{frame.state}: {job.reason}" if job.reason else frame.state
        self._tell(frame, "error" if bad else "info", "job", text, changes, node=job.node)

    def _enter(self, job: Job, state: str, reason: str, time: float, changes: Changes) -> None:
        if job.state != state or not job.states:
            job.states.append((time, state, _line(reason)))
            if state != "running":
                job.speed = Speed()
        job.state = state
        changes.urgent = True

    def _samples(self, frame: Samples, changes: Changes) -> None:
        for sample in frame.samples:
            job = self.jobs.get(sample.job)
            if job is None:
                job = self._job(sample.job, frame.received, changes)
            self._sample(job, sample)
            job.received = frame.received
            changes.jobs.add(sample.job)

    def _sample(self, job: Job, sample: Sample) -> None:
        job.step, job.loss = sample.step, sample.loss
        job.total_steps = sample.total_steps or job.total_steps
        job.epoch, job.grad_norm = sample.epoch, sample.grad_norm
        job.learning_rate, job.adapters_in_pass = sample.learning_rate, sample.adapters_in_pass
        job.speed.add(sample)
        job.train.add(sample.step, sample.loss)

    def _evaluation(self, frame: Evaluation, changes: Changes) -> None:
        job = self._job(frame.job, frame.received, changes)
        job.val_loss = frame.val_loss
        job.val.add(frame.step, frame.val_loss)
        best = job.best_val_loss
        finite = math.isfinite(frame.val_loss)
        if frame.best or (finite and (best is None or not math.isfinite(best) or frame.val_loss < best)):
            job.best_val_loss, job.best_step = frame.val_loss, frame.step
        self._ranked = None
        mark = ", the best so far" if job.best_step == frame.step else ""
        text = f"val loss {frame.val_loss:.4f} at step {frame.step}{mark}"
        self._tell(frame, "info", "eval", text, changes, node=job.node)

    def _node_state(self, frame: NodeState, changes: Changes) -> None:
        node = self._node(frame.node, changes)
        node.state, node.reason = frame.state, _line(frame.reason)
        if frame.state not in ("new", "unreachable", "lost"):
            node.heard = frame.received
        changes.urgent = True
        bad = frame.state in ("unreachable", "lost", "degraded")
        text = f"{frame.state}: {node.reason}" if node.reason else frame.state
        self._tell(frame, "warning" if bad else "info", "node", text, changes)

    def _journal(self, frame: Journal, changes: Changes) -> None:
        self.entries.clear()
        self.entries.extend(frame.entries)
        self.last_entry = frame.entries[-1].number if frame.entries else 0
        changes.entries = len(frame.entries)

    # --- helpers

    def _job(self, key: str, received: float, changes: Changes) -> Job:
        job = self.jobs.get(key)
        if job is None:
            job = self.jobs[key] = Job(job=key, name=key)
            self._ranked = None
            changes.rows = True
        job.received = received
        changes.jobs.add(key)
        return job

    def _node(self, name: str, changes: Changes) -> Node:
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = Node(name)
            changes.rows = True
        changes.nodes.add(name)
        return node

    def _own(self, key: str) -> str:
        """The key as the job has it: 20,000 entries need not hold as many copies of a few names."""
        job = self.jobs.get(key)
        return key if job is None else job.job

    def _tell(
        self, frame: Frame, level: Level, kind: str, text: str, changes: Changes, *, node: str = ""
    ) -> None:
        self.last_entry += 1
        self.entries.append(
            Entry(
                number=self.last_entry,
                time=frame.time,
                level=level,
                kind=kind,
                text=_line(text),
                job=self._own(getattr(frame, "job", "")),
                node=node or getattr(frame, "node", ""),
            )
        )
        changes.entries += 1


def _saved(path: str) -> str:
    """What lies there, by the names of a run's files."""
    name = path.rpartition("/")[2]
    if name == "best":
        return "its best adapter,"
    return "a checkpoint" if not name or name.startswith("checkpoint-") else "its adapter,"


def _line(text: str) -> str:
    return text if len(text) <= TEXT_LENGTH else f"{text[: TEXT_LENGTH - 1]}…"
