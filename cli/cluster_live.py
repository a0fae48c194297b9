"""Follows jobs of a cluster with the views of `gshare finetune`, over restarts of the coordinator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from gshare.agent.errors import EXIT_FAILURE, EXIT_OK, EXIT_SIGINT, GshareError, Stopped
from gshare.agent.jobs.events import ENDED, JobChanged, JobStateName
from gshare.agent.jobs.names import plain
from gshare.cli.live import View, make_view
from gshare.coordinator.api_client import CoordinatorClient, CoordinatorGone, NoCoordinator
from gshare.coordinator.api_protocol import (
    ClusterEvent,
    ClusterMessage,
    JobEnded,
    JobEvent,
    JobMoved,
    JobRow,
    JobRows,
    ListClusterJobs,
    ListNodes,
    NodeChanged,
    NodeRow,
    NodeRows,
)
from gshare.coordinator.node_state import UP_STATES

#: How long a coordinator that went away is waited for: it is being started again, or it was ended.
AWAY_SECONDS = 60.0
#: Between two looks at why jobs wait. Of a node that never came up only the reason changes, not its state: no
#: event tells of it.
WAITS_SECONDS = 5.0


def watch_jobs(
    state_dir: Path, jobs: Sequence[tuple[str, str]], *, json_lines: bool, since: tuple[str, int] = ("", 0)
) -> int:
    """Until all of `jobs` (name, output_dir) have ended: 0 when all completed, 130 when the only ones that
    did not were stopped, else 1. Ctrl-C leaves them running and is exit code 130.

    `since`: (journal_id, seq) of `Submitted`; left out, how the jobs stand now is the beginning. What is
    older may be about an earlier job of the same name.
    """
    view = make_view(jobs, json_lines=json_lines)
    shown = Shown(view, {name for name, _ in jobs})
    watching = _Watching(view, shown, since)
    try:
        with view:
            while not watching.follow(state_dir):
                view.say("the coordinator is gone; jobs run on; waiting for it to come back")
                _wait_for_coordinator(state_dir)
    except KeyboardInterrupt:
        left = len(shown.running)
        raise Stopped(
            f"left {left} {'job' if left == 1 else 'jobs'} running; `gshare jobs --cluster FILE` shows them"
        ) from None
    view.finish()
    states = {row.state for row in view.board.rows.values()}
    if states <= {"completed"}:
        return EXIT_OK
    return EXIT_SIGINT if states <= {"completed", "stopped"} else EXIT_FAILURE


class _Watching:
    def __init__(self, view: View, shown: Shown, since: tuple[str, int]) -> None:
        self._view = view
        self._shown = shown
        self._since = since

    def follow(self, state_dir: Path) -> bool:
        """Shows what happens until all have ended: True; False when the coordinator is gone first."""
        try:
            with CoordinatorClient(state_dir, "gshare watch") as client:
                client.journal_id, client.seq = self._since
                client.follow(sorted(self._view.board.rows), new_only=True)
                for row in client.ask(JobRows, ListClusterJobs).jobs:
                    self._shown.take_row(row)
                while self._shown.running:
                    self._shown.tell_waits(client)
                    for event in client.poll(0.1):
                        self._shown.take(event)
                    self._since = client.journal_id, client.seq
                    self._view.tick()
        except (CoordinatorGone, NoCoordinator):
            return False
        return True


class Shown:
    """Jobs of a cluster in a view of `gshare finetune`. `running`: those that have not ended."""

    def __init__(self, view: View, names: set[str]) -> None:
        self._view = view
        self._nodes: dict[str, str] = {}
        self._waiting: set[str] = set()  # for a place
        self._told_nodes: dict[str, str] = {}  # what was said of each last
        self._no_room: list[str] | None = None  # the nodes of which that was said; None: nobody waited then
        self._next_waits = 0.0
        self.running = names

    def take_row(self, job: JobRow) -> None:
        """How a job stands when we come (back)."""
        row = self._view.board.rows.get(job.job)
        if row is None:
            return
        row.step, row.total_steps = job.step, job.total_steps
        row.loss, row.val_loss, row.best_val_loss = job.loss, job.val_loss, job.best_val_loss
        self._on_node(job.job, job.node)
        self._waits(job.job, job.state)
        if job.state in ENDED:
            self._end(job.job, job.state, job.reason)
        else:
            row.state = job.state

    def take(self, event: ClusterEvent) -> None:
        if isinstance(event, JobEvent):
            self._on_node(event.event.job, event.node)
            # An attempt's end is not its job's: that is told by itself, when the results are at home.
            if not isinstance(event.event, JobChanged) or event.event.state not in ENDED:
                self._view.take(event.event)
        elif isinstance(event, JobMoved):
            self._waits(event.job, event.state)
        elif isinstance(event, JobEnded):
            self._waits(event.job, event.state)
            self._end(event.job, event.state, event.reason)
        elif isinstance(event, ClusterMessage):
            self._view.say(plain(event.text))
        elif isinstance(event, NodeChanged):
            self._tell_node(event.node, event.state, event.reason)

    def tell_waits(self, client: CoordinatorClient) -> None:
        """Why those that wait for a place have none: a line a node, when there is something new to say."""
        if not self._waiting:
            self._no_room = None
        elif time.monotonic() >= self._next_waits:
            self._next_waits = time.monotonic() + WAITS_SECONDS
            try:
                nodes = client.ask(NodeRows, ListNodes).nodes
            except (CoordinatorGone, NoCoordinator):
                raise
            except GshareError:
                return  # a coordinator that is slow: it is asked again
            self._tell_waits(nodes)

    def _tell_waits(self, nodes: Sequence[NodeRow]) -> None:
        for node in nodes:
            if node.state not in UP_STATES or node.state == "degraded":
                self._tell_node(node.node, node.state, node.reason)
        up = [node.node for node in nodes if node.state in UP_STATES]
        if self._no_room is None:
            self._no_room = []  # at the first look after a submission they may be on their way
        elif up and up != self._no_room:
            self._no_room = up
            count = len(self._waiting)
            jobs = "1 job waits" if count == 1 else f"{count} jobs wait"
            where = f"node {up[0]} has none" if len(up) == 1 else f"none of {len(up)} nodes has one"
            self._view.say(plain(f"{jobs} for a place: {where} to give now"))

    def _tell_node(self, node: str, state: str, reason: str) -> None:
        reason = reason.removeprefix(f"node {node}: ")
        line = f"node {node} is {state}" + (f": {reason}" if reason else "")
        if self._told_nodes.get(node) != line:
            self._told_nodes[node] = line
            self._view.say(plain(line))

    def _waits(self, job: str, state: str) -> None:
        if state == "waiting" and job in self.running:
            self._waiting.add(job)
        else:
            self._waiting.discard(job)

    def _on_node(self, job: str, node: str) -> None:
        if node and self._nodes.get(job) != node and job in self._view.board.rows:
            self._nodes[job] = node
            self._view.say(plain(f"{job}: on node {node}"))

    def _end(self, job: str, state: str, reason: str) -> None:
        row = self._view.board.rows.get(job)
        if row is None or job not in self.running:
            return
        self.running.discard(job)
        last: JobStateName = state  # type: ignore[assignment]
        self._view.take(
            JobChanged(job=job, state=last, step=row.step, total_steps=row.total_steps, reason=reason)
        )


def _wait_for_coordinator(state_dir: Path) -> None:
    deadline = time.monotonic() + AWAY_SECONDS
    while time.monotonic() < deadline:
        try:
            CoordinatorClient(state_dir, "gshare watch").close()
            return
        except (NoCoordinator, CoordinatorGone):
            time.sleep(0.5)
    raise GshareError(
        f"no coordinator has run on {state_dir} for {AWAY_SECONDS:.0f} s; jobs run on: start it again with "
        "`gshare coordinator`"
    )
