"""A cluster, by its coordinator's Unix socket (`coordinator/api_protocol.py`).

    connect ─► follow ─► all jobs with their orders, newest evaluations ─► live: events, and every few seconds
    the nodes (which is also the beat by which a hung coordinator is noticed) and the jobs

What happened before the moment of following is told in the journal only: the lists say how things are now.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.events import CheckpointSaved, Evaluated, Event, JobChanged, Stepped
from gshare.coordinator.api_client import SOCKET
from gshare.coordinator.api_protocol import (
    API_PROTOCOL_VERSION,
    ApiHello,
    ApiWelcome,
    ClusterEvent,
    ClusterEventFrame,
    ClusterMessage,
    EndNodeLeases,
    FollowCluster,
    FollowingCluster,
    FromCoordinator,
    JobEnded,
    JobEvaluations,
    JobEvent,
    JobLog,
    JobMoved,
    JobRow,
    JobRows,
    JobSamples,
    JobsDone,
    ListClusterJobs,
    ListNodes,
    NodeChanged,
    NodeLeasesEnded,
    NodeRow,
    NodeRows,
    PauseClusterJobs,
    ReadEvaluations,
    ReadJobLog,
    ReadJobSamples,
    ReadNodeLog,
    ResumeClusterJobs,
    StopClusterJobs,
)
from gshare.tui import frames as f
from gshare.tui.connected import ConnectedSource, Hopeless, until_gone
from gshare.tui.job_files import curves, list_directory
from gshare.tui.past import past_message
from gshare.tui.socket_link import SocketGone, SocketLink
from gshare.tui.source import ActionName, FileRow

NODES_SECONDS = 3.0
#: What no event tells (positions in queues, reasons of waiting); a list of 1,000 jobs is 0.3 MB.
JOBS_SECONDS = 15.0
#: After an event that makes the list differ: soon, but not for each of a hundred.
AGAIN_SECONDS = 1.0
SPARKLINE = 64  # evaluations of each job that are asked for at once
COMMAND_SECONDS = 120.0
SAMPLE_LINES = 10_000
#: Of one history: two million lines would not fit a plot either.
MAX_SAMPLE_PAGES = 20


class CoordinatorSource(ConnectedSource):
    kind = "coordinator"
    can = frozenset({"stop", "pause", "resume", "release", "retry", "log", "history", "files"})

    def __init__(self, state_dir: Path, *, cluster: Path | None = None, **options: Any) -> None:
        """`cluster`: the file that the coordinator there has to be of; None: any."""
        super().__init__(**options)
        self._cluster = cluster
        self._path = state_dir / SOCKET
        self.title = f"cluster {cluster.stem}" if cluster is not None else "cluster"
        self.detail = str(state_dir)
        self._link: SocketLink | None = None
        self._journal_id = ""
        self._seq = 0
        self._old_seq = 0  # durable events up to here happened before we followed
        self._held: list[ClusterEventFrame] | None = None  # those that came while the lists were asked for
        self._jobs: dict[str, JobRow] = {}
        self._holders: dict[str, str] = {}  # id of a reservation → a node whose ledger has it
        self._refresh = asyncio.Event()
        self._orders_wanted = True

    def last_heard(self) -> float | None:
        return self._link.heard if self._link is not None else None

    async def session(self) -> None:
        hello = ApiHello(protocol=API_PROTOCOL_VERSION, gshare=_version(), client="gshare tui")
        try:
            self._link, welcome = await SocketLink.open(
                self._path,
                hello,
                ApiWelcome,
                FromCoordinator,
                ClusterEventFrame,
                self._take,
                what="the coordinator",
            )
        except SocketGone as error:
            if self.was_live:
                raise
            text = f"no coordinator answers at {self._path} yet: `gshare submit` starts one"
            raise SocketGone(text) from error
        except GshareError as error:
            raise Hopeless(str(error)) from None
        link = self._link
        try:
            if self._cluster is not None and Path(welcome.cluster) != self._cluster:
                raise Hopeless(
                    f"the coordinator at {self._path} is of {welcome.cluster}, not of {self._cluster}; name "
                    "that file with --cluster, or another --state-dir"
                )
            self.title = f"cluster {Path(welcome.cluster).stem}" if welcome.cluster else "cluster"
            self.detail = f"coordinator {welcome.pid}, {welcome.cluster}"
            self.tell_found()
            await self._catch_up(link)
            self.say("live")
            await until_gone(link.wait_gone(), self._poll_nodes(link), self._poll_jobs(link))
        finally:
            self._link = None
            await link.close()

    async def _catch_up(self, link: SocketLink) -> None:
        # Events may come in the same read as the answer that says which of them are old.
        held = self._held = []
        following = await link.ask(
            FollowingCluster, FollowCluster, journal_id=self._journal_id, after_seq=self._seq
        )
        if following.gap and self._journal_id == following.journal_id:
            lost = following.next_seq - 1 - self._seq
            text = f"{lost} events happened while we were away and are no longer kept"
            self.emit(f.Message(**self.now(), level="warning", kind="source", text=text))
        self._journal_id, self._old_seq = following.journal_id, following.last_seq
        self._orders_wanted = True
        await self._ask_jobs(link)
        await self._ask_nodes(link)
        await self._ask_evaluations(link)
        self._held = None
        for message in held:
            self._durable(message)

    # --- what it tells

    def _take(self, message: ClusterEventFrame) -> None:
        event = message.event
        if message.seq == 0:
            if isinstance(event, JobEvent) and isinstance(event.event, Stepped):
                self.coalescer.add(event.event.job, event.event, message.time or time.time())
            return
        if self._held is not None:
            self._held.append(message)
        else:
            self._durable(message)

    def _durable(self, message: ClusterEventFrame) -> None:
        self._seq = message.seq
        moment = self.now(message.time)
        if message.seq <= self._old_seq:
            self.emit(_past(message.event, moment))
        else:
            self._event(message.event, moment)

    def _event(self, event: ClusterEvent, moment: dict[str, Any]) -> None:
        if isinstance(event, JobEvent):
            self._job_event(event, event.event, moment)
        elif isinstance(event, JobMoved):
            self._moved(event, moment)
        elif isinstance(event, JobEnded):
            self.flush(event.job)
            self.emit(f.JobState(**moment, job=event.job, state=event.state, reason=event.reason))
            self._refresh.set()
        elif isinstance(event, NodeChanged):
            self.emit(f.NodeState(**moment, node=event.node, state=event.state, reason=event.reason))
        elif isinstance(event, ClusterMessage):
            self.emit(f.Message(**moment, level=event.level, text=event.text, job=event.job))

    def _job_event(self, outer: JobEvent, event: Event, moment: dict[str, Any]) -> None:
        job = event.job
        if isinstance(event, JobChanged):
            self.flush(job)
            if event.state in f.ENDED:
                # Its attempt's end. What becomes of the job, JobMoved and JobEnded say.
                why = f": {event.reason}" if event.reason else ""
                text = f"attempt {outer.attempt} on {outer.node} is {event.state}{why}"
                level: f.Level = "warning" if event.state == "failed" else "info"
                self.emit(f.Message(**moment, level=level, kind="job", text=text, job=job, node=outer.node))
            else:
                self.emit(
                    f.JobState(
                        **moment,
                        job=job,
                        state=event.state,
                        step=event.step if event.total_steps else None,
                        total_steps=event.total_steps or None,
                        reason=event.reason,
                        node=outer.node,
                        attempt=outer.attempt,
                    )
                )
        elif isinstance(event, Evaluated):
            self.flush(job)
            self.emit(
                f.Evaluation(**moment, job=job, step=event.step, val_loss=event.val_loss, best=event.best)
            )
        elif isinstance(event, CheckpointSaved):
            self.emit(f.Checkpoint(**moment, job=job, step=event.step, path=event.path))
        elif not isinstance(event, Stepped):
            self.emit(f.Message(**moment, level=event.level, text=event.text, job=job, node=outer.node))

    def _moved(self, event: JobMoved, moment: dict[str, Any]) -> None:
        self.flush(event.job)
        if event.job not in self._jobs:  # else the event says all that has changed
            self._orders_wanted = True
            self._refresh.set()
        self.emit(
            f.JobState(
                **moment,
                job=event.job,
                state=_state(event.state, event.position),
                step=event.step if event.total_steps else None,
                total_steps=event.total_steps or None,
                reason=event.reason,
                node=event.node,
                attempt=event.attempt,
            )
        )

    # --- what is asked for

    async def _poll_nodes(self, link: SocketLink) -> None:
        while True:
            await asyncio.sleep(NODES_SECONDS)
            await self._ask_nodes(link)

    async def _poll_jobs(self, link: SocketLink) -> None:
        while True:
            asked = time.monotonic()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._refresh.wait(), JOBS_SECONDS)
            await asyncio.sleep(max(0.0, asked + AGAIN_SECONDS - time.monotonic()))
            await self._ask_jobs(link)

    async def _ask_nodes(self, link: SocketLink) -> None:
        def take(rows: NodeRows) -> None:
            self._holders = {
                held.id: row.node for row in rows.nodes if row.info for held in row.info.reservations
            }
            self.emit(f.Snapshot(**self.now(), nodes=tuple(_node_view(row) for row in rows.nodes)))

        await link.ask(NodeRows, ListNodes, then=take)

    async def _ask_jobs(self, link: SocketLink) -> None:
        self._refresh.clear()
        orders, self._orders_wanted = self._orders_wanted, False

        def take(rows: JobRows) -> None:
            self._jobs = {row.job: row for row in rows.jobs}
            self.emit(f.Snapshot(**self.now(), jobs=tuple(_job_view(row) for row in rows.jobs)))

        await link.ask(JobRows, ListClusterJobs, orders=orders, then=take)

    async def _ask_evaluations(self, link: SocketLink) -> None:
        found = await link.ask(JobEvaluations, ReadEvaluations, newest=SPARKLINE)
        for job, points in found.evaluations.items():
            if job in self._jobs:
                self.emit(f.History(**self.now(), job=job, val=tuple(points)))

    # --- requests of the app

    async def act(self, action: ActionName, targets: list[str]) -> dict[str, str]:
        kinds: dict[str, type[msgspec.Struct]] = {
            "stop": StopClusterJobs,
            "pause": PauseClusterJobs,
            "resume": ResumeClusterJobs,
        }
        if action not in kinds and action != "release":
            return await super().act(action, targets)
        link = self._connected()
        if action == "release":
            return await self._release(link, targets)
        done = await link.ask(JobsDone, kinds[action], jobs=targets, timeout=COMMAND_SECONDS)
        self._refresh.set()
        return done.failed

    async def _release(self, link: SocketLink, targets: list[str]) -> dict[str, str]:
        failed = {id: "no node has it any more" for id in targets}
        by_node: dict[str, list[str]] = {}
        for id in targets:
            if id in self._holders:
                by_node.setdefault(self._holders[id], []).append(id)
        for node, ids in by_node.items():
            ended = await link.ask(NodeLeasesEnded, EndNodeLeases, node=node, reservations=ids)
            for id in ids:
                failed.pop(id)
            failed.update(ended.failed)
        return failed

    async def read_log(self, job: str = "", node: str = "", max_bytes: int = 65536) -> str:
        link = self._connected()
        if job:
            return (await link.ask(JobLog, ReadJobLog, job=job, max_bytes=max_bytes)).text
        return (await link.ask(JobLog, ReadNodeLog, node=node, max_bytes=max_bytes)).text

    async def ask_history(self, job: str) -> None:
        link = self._connected()
        found = await link.ask(JobEvaluations, ReadEvaluations, jobs=[job])
        val = tuple(found.evaluations.get(job, ()))
        lines: list[str] = []
        after = 0
        with contextlib.suppress(GshareError):  # its node is away: the evaluations are here
            for _ in range(MAX_SAMPLE_PAGES):
                got = await link.ask(
                    JobSamples, ReadJobSamples, job=job, after_step=after, limit=SAMPLE_LINES
                )
                lines += got.lines
                steps, evaluations = curves(got.lines)
                after = max([after, *(step for step, _ in (*steps[-1:], *evaluations[-1:]))])
                if not got.more or not got.lines:
                    break
        self.emit(f.History(**self.now(), job=job, train=tuple(curves(lines)[0]), val=val))

    async def list_files(self, job: str) -> list[FileRow]:
        row = self._jobs.get(job)
        if row is None or not row.output_dir:
            raise UsageError(f"{job}: its output directory is not known")
        return await asyncio.to_thread(list_directory, Path(row.output_dir))

    def _connected(self) -> SocketLink:
        if self._link is None:
            raise GshareError("not connected to the coordinator; it is tried again by itself")
        return self._link


def _version() -> str:
    from importlib.metadata import version

    return version("gshare")


def _node_view(row: NodeRow) -> f.NodeView:
    return f.NodeView(
        node=row.node,
        state=row.state,
        reason=row.reason,
        transport=row.transport,
        host=row.host,
        gshare=row.gshare,
        seen_s=row.seen_s,
        jobs=row.jobs,
        info=row.info,
    )


def _state(state: str, position: int) -> str:
    """The coordinator calls a job running that waits for memory on its node."""
    return "queued" if state == "running" and position else state


def _job_view(row: JobRow) -> f.JobView:
    return f.JobView(
        job=row.job,
        state=_state(row.state, row.position),
        node=row.node,
        gpu=row.gpu,
        attempt=row.attempt,
        step=row.step if row.total_steps else None,
        total_steps=row.total_steps or None,
        loss=row.loss,
        val_loss=row.val_loss,
        best_val_loss=row.best_val_loss,
        best_step=row.best_step,
        position=row.position,
        reason=row.reason,
        output_dir=row.output_dir,
        model=row.model,
        base_dtype=row.base_dtype,
        hyper=f.hyper_of(row.spec) if row.spec is not None else {},
    )


def _past(event: ClusterEvent, moment: dict[str, Any]) -> f.Message:
    if isinstance(event, JobEvent):
        return past_message(event.event, moment, node=event.node)
    if isinstance(event, ClusterMessage):
        return f.Message(**moment, level=event.level, text=event.text, job=event.job)
    why = f": {event.reason}" if event.reason else ""
    if isinstance(event, JobEnded | JobMoved):
        return f.Message(**moment, level="info", kind="job", text=f"{event.state}{why}", job=event.job)
    return f.Message(**moment, level="info", kind="node", text=f"{event.state}{why}", node=event.node)
