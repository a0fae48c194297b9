"""What the coordinator's clients ask for: each request's answer, from the machine's memory or from a node."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.jobs.names import nearest, plain, shorten
from gshare.agent.node.protocol import (
    MAX_LOG_BYTES,
    EndLeases,
    LeasesEnded,
    LogText,
    ReadLog,
    ReadSamples,
    Samples,
)
from gshare.coordinator import events
from gshare.coordinator.api import EventRing
from gshare.coordinator.api_protocol import (
    ApiReply,
    ApiRequest,
    EndNodeLeases,
    Fetched,
    FetchJob,
    JobEvaluations,
    JobLog,
    JobRow,
    JobRows,
    JobSamples,
    JobsDone,
    Leaderboard,
    ListClusterJobs,
    ListNodes,
    NodeLeasesEnded,
    NodeRow,
    NodeRows,
    PauseClusterJobs,
    ReadEvaluations,
    ReadJobLog,
    ReadJobSamples,
    ReadLeaderboard,
    ReadNodeLog,
    ReloadCluster,
    Reloaded,
    ResumeClusterJobs,
    Standing,
    StopClusterJobs,
    Submitted,
    SubmitToCluster,
)
from gshare.coordinator.cluster import Cluster
from gshare.coordinator.facts import ENDED_STATES, JobRecord
from gshare.coordinator.file_transfer import pull_bundle
from gshare.coordinator.heard import REASON_KEPT
from gshare.coordinator.home import Home
from gshare.coordinator.homecoming import come_home
from gshare.coordinator.leaderboard import ranked, row_of
from gshare.coordinator.left_behind import where_instead
from gshare.coordinator.link import AgentLink, LinkGone, LinkLate, LinkRefused
from gshare.coordinator.orders import checkpoint_refs, facts_of, orders_of, read_order
from gshare.coordinator.past_samples import samples_at_home
from gshare.coordinator.results import Result, place_results
from gshare.coordinator.session import NodeSession
from gshare.coordinator.store import Store
from gshare.coordinator.submission_rules import check_submission, directory_fault
from gshare.coordinator.transfers import results_stay

#: Of one answer: 14 bytes each on the wire, far below a frame.
MAX_EVALUATIONS = 500_000

A = TypeVar("A", bound=msgspec.Struct)


class State(Protocol):
    """What of the coordinator (`service.Coordinator`) the answers are made from."""

    store: Store
    cluster: Cluster
    ring: EventRing
    home: Home
    sessions: dict[str, NodeSession]
    heard: dict[str, float]  # node → monotonic s
    losses: dict[str, tuple[int, float]]  # job → (step, loss) of its last sample

    def feed(self, event: events.ClusterEvent | None, *more: events.ClusterEvent) -> None: ...
    def reload(self) -> list[str]: ...


class Requests:
    def __init__(self, state: State) -> None:
        self._it = state

    async def handle(self, request: ApiRequest) -> ApiReply:
        """The answer. A GshareError carries the exit code that the client's command ends with."""
        if isinstance(request, SubmitToCluster):
            return self._submit(request)
        if isinstance(request, ListClusterJobs):
            rows = [self._job_row(job, request.orders) for job in self._jobs()]
            return JobRows(reply_to=request.id, jobs=rows)
        if isinstance(request, ListNodes):
            return NodeRows(reply_to=request.id, nodes=self._node_rows())
        if isinstance(request, ReadLeaderboard):
            return Leaderboard(reply_to=request.id, standings=self._standings())
        if isinstance(request, StopClusterJobs | PauseClusterJobs | ResumeClusterJobs):
            return self._command(request)
        if isinstance(request, ReadJobLog):
            return await self._log(request)
        if isinstance(request, ReadNodeLog):
            return await self._node_log(request)
        if isinstance(request, EndNodeLeases):
            return await self._end_leases(request)
        if isinstance(request, ReadEvaluations):
            return self._evaluations(request)
        if isinstance(request, ReadJobSamples):
            return await self._samples(request)
        if isinstance(request, FetchJob):
            return await self._fetch(request)
        assert isinstance(request, ReloadCluster), request
        return Reloaded(reply_to=request.id, nodes=self._it.reload())

    def _submit(self, request: SubmitToCluster) -> Submitted:
        check_submission(request)
        facts = [facts_of(order, request.submission) for order in orders_of(request)]
        taken = self._outputs()
        for fact, job in zip(facts, request.jobs, strict=True):
            fault = self._it.cluster.submit_fault(fact)
            owner = taken.get(job.spec.output_dir, fact.name)
            if fault is None and owner != fact.name:
                fault = f"output_dir {job.spec.output_dir} is that of job {owner}, which has not ended"
            if fault is not None:
                raise UsageError(fault)
        after_seq = self._it.ring.last_seq
        for fact in facts:
            old = self._it.cluster.jobs.get(fact.name)
            if old is not None and old.facts.submission != fact.submission:
                self._it.losses.pop(fact.name, None)  # of the earlier job of that name
        # In one transaction: of a submission that is half in the store, the client would know nothing, and
        # the same command again would be refused for the names of that half.
        self._it.feed(*(events.Submit(facts=fact) for fact in facts))
        return Submitted(
            reply_to=request.id,
            jobs=[fact.name for fact in facts],
            journal_id=self._it.ring.journal_id,
            after_seq=after_seq,
        )

    def _outputs(self) -> dict[str, str]:
        return {
            read_order(job.facts).job.spec.output_dir: job.facts.name
            for job in self._jobs()
            if job.state not in ENDED_STATES
        }

    # --- rows

    def _jobs(self) -> list[JobRecord]:
        return sorted(self._it.cluster.jobs.values(), key=lambda job: job.order)

    def _job_row(self, job: JobRecord, with_order: bool) -> JobRow:
        name = job.facts.name
        order = read_order(job.facts)
        step, loss = self._it.losses.get(name, (0, math.nan))
        fresh = step > job.step
        return JobRow(
            job=name,
            state=job.state,
            node=job.node or job.last_node,
            gpu=job.gpu,
            attempt=job.attempt,
            step=step if fresh else job.step,
            total_steps=job.total_steps,
            loss=loss if fresh else job.loss,
            val_loss=job.val_loss,
            best_val_loss=job.best_val_loss,
            best_step=job.best_step,
            output_dir=order.job.spec.output_dir,
            reason=job.reason,
            parked=job.parked and job.state == "paused",
            exit=job.exit,
            submission=job.facts.submission,
            placed=bool(job.published) and job.published == job.attempt,
            position=job.position,
            model=order.model.name if with_order else "",
            base_dtype=order.base_dtype if with_order else "",
            spec=order.job.spec if with_order else None,
        )

    def _node_rows(self) -> list[NodeRow]:
        now = time.monotonic()
        counts: dict[str, int] = {}
        for job in self._it.cluster.jobs.values():
            if job.node and job.state not in ENDED_STATES:
                counts[job.node] = counts.get(job.node, 0) + 1
        rows: list[NodeRow] = []
        for name, machine in sorted(self._it.cluster.nodes.items()):
            session = self._it.sessions.get(name)
            config = session.node if session is not None else None
            heard = self._it.heard.get(name)
            hello = session.hello if session is not None else None
            rows.append(
                NodeRow(
                    node=name,
                    transport=config.transport if config is not None else "",
                    host=config.host if config is not None else "",
                    state=machine.state,
                    reason=machine.reason,
                    gshare=hello.gshare if hello is not None else "",
                    seen_s=now - heard if heard is not None else None,
                    jobs=counts.get(name, 0),
                    info=machine.info,
                )
            )
        return rows

    def _standings(self) -> list[Standing]:
        jobs = self._it.cluster.jobs
        return [
            Standing(
                job=row.job,
                node=row.node,
                val_loss=jobs[row.job].val_loss,
                best_val_loss=row.val_loss,
                best_step=row.best_step,
                step=row.step,
                total_steps=row.total_steps,
                state=row.state,
            )
            for row in ranked(row_of(job) for job in jobs.values())
        ]

    # --- commands

    def _command(self, request: StopClusterJobs | PauseClusterJobs | ResumeClusterJobs) -> JobsDone:
        """One transaction, however many: all of them or, when the coordinator is killed meanwhile, none."""
        jobs = {name: self._job(name) for name in request.jobs}  # all of them, before anything is done
        failed: dict[str, str] = {}
        told: dict[str, str] = {}
        why = (request.reason[:REASON_KEPT] if isinstance(request, StopClusterJobs) else "") or events.BY_USER
        wanted: list[events.ClusterEvent] = []
        for name, job in jobs.items():
            if isinstance(request, StopClusterJobs):
                if job.state in ENDED_STATES:
                    failed[name] = f"job {name} has ended: {job.state}"
                elif job.state in ("publishing", "placing"):
                    if self._it.cluster.stop_leaves_results(job):
                        told[name] = f"ended; {results_stay(job)}"
                    else:
                        failed[name] = (
                            f"job {name} is done, its results are being brought home; "
                            "stop it once more to end it without them"
                        )
                    wanted.append(events.StopJob(job=name, reason=why))
                else:
                    wanted.append(events.StopJob(job=name, reason=why))
            elif isinstance(request, PauseClusterJobs):
                if job.state in ENDED_STATES or job.state in ("publishing", "placing"):
                    failed[name] = f"job {name} cannot be paused: it is {job.state}"
                else:
                    if job.wish == "pause":
                        told[name] = "paused already" if job.state == "paused" else "told to pause already"
                    wanted.append(events.PauseJob(job=name))
            elif job.state in ("completed", "diverged", "publishing", "placing"):
                failed[name] = f"job {name} cannot be resumed: it is {job.state}"
            elif job.state == "stopped" and job.published == job.attempt > 0:
                failed[name] = (
                    f"job {name} cannot be resumed: it was stopped, and its results are in "
                    f"{read_order(job.facts).job.spec.output_dir}; submit it anew with another output_dir"
                )
            else:
                wanted.append(events.ResumeJob(job=name))
        if wanted:
            self._it.feed(*wanted)
        return JobsDone(reply_to=request.id, failed=failed, told=told)

    def _job(self, name: str) -> JobRecord:
        job = self._it.cluster.jobs.get(name)
        if job is None:
            near = nearest(name, self._it.cluster.jobs)
            known = ", ".join(list(self._it.cluster.jobs)[:20]) or "none"
            hint = f"did you mean {near}?" if near else f"known: {known}"
            raise UsageError(f"no job named {shorten(name)} in this cluster; {hint}")
        return job

    def _link_of(self, job: JobRecord) -> tuple[str, AgentLink]:
        """The node where the job's files are, connected. `RetryLater` when it is not."""
        node = job.node or job.last_node
        name = job.facts.name
        if not node:
            raise RetryLater(f"job {name} has not been started on any node yet")
        session = self._it.sessions.get(node)
        link = session.link if session is not None else None
        if link is None:
            raise RetryLater(f"job {name}: node {node} is away; try again when it is back")
        return node, link

    async def _log(self, request: ReadJobLog) -> JobLog:
        job = self._job(request.job)
        node, link = self._link_of(job)
        text = await _asked(
            f"job {request.job}: node {node}",
            link.ask(
                LogText,
                ReadLog,
                job=request.job,
                attempt=job.attempt,
                max_bytes=max(1, min(request.max_bytes, MAX_LOG_BYTES)),
            ),
            job,
        )
        return JobLog(reply_to=request.id, node=node, text=text.text)

    async def _node_log(self, request: ReadNodeLog) -> JobLog:
        node = request.node
        link = self._link_to(node)
        size = max(1, min(request.max_bytes, MAX_LOG_BYTES))
        text = await _asked(f"node {node}", link.ask(LogText, ReadLog, max_bytes=size))
        return JobLog(reply_to=request.id, node=node, text=text.text)

    async def _end_leases(self, request: EndNodeLeases) -> NodeLeasesEnded:
        link = self._link_to(request.node)
        asked = link.ask(LeasesEnded, EndLeases, reservations=request.reservations)
        ended = await _asked(f"node {request.node}", asked)
        return NodeLeasesEnded(reply_to=request.id, failed=ended.failed)

    def _link_to(self, node: str) -> AgentLink:
        """UsageError: there is none of that name. RetryLater: it is away."""
        session = self._it.sessions.get(node)
        if session is None:
            raise UsageError(f"no node named {shorten(node)} in this cluster")
        if session.link is None:
            raise RetryLater(f"node {node} is away; try again when it is back")
        return session.link

    def _evaluations(self, request: ReadEvaluations) -> JobEvaluations:
        if request.newest < 0:
            raise UsageError(f"newest: must be 0 or more, not {request.newest}")
        names = [self._job(name).facts.name for name in request.jobs] or list(self._it.cluster.jobs)
        found: dict[str, list[tuple[int, float]]] = {}
        left = MAX_EVALUATIONS
        for name in names:
            if left == 0:
                break
            seen = self._it.store.evaluations(name, newest=min(request.newest or left, left))
            if seen:
                found[name] = [(one.step, one.val_loss) for one in seen]
                left -= len(seen)
        return JobEvaluations(reply_to=request.id, evaluations=found)

    async def _samples(self, request: ReadJobSamples) -> JobSamples:
        """From the node; from home where it is away, has forgotten the job, or has not begun it again yet."""
        job = self._job(request.job)
        away: GshareError | None = None
        got = Samples(reply_to=0, lines=[])
        if not job.published:
            try:
                node, link = self._link_of(job)
                got = await _asked(
                    f"job {request.job}: node {node}",
                    link.ask(
                        Samples,
                        ReadSamples,
                        job=request.job,
                        attempt=job.attempt,
                        after_step=request.after_step,
                        limit=request.limit,
                    ),
                )
            except GshareError as error:
                away = error
        if got.lines:
            return JobSamples(reply_to=request.id, lines=got.lines, more=got.more)
        home = await asyncio.to_thread(
            samples_at_home, job, self._it.home.blobs, request.after_step, request.limit
        )
        if home is None and away is not None:
            raise away
        lines, more = home or ([], False)
        return JobSamples(reply_to=request.id, lines=lines, more=more)

    async def _fetch(self, request: FetchJob) -> Fetched:
        """From the node; a checkpoint that is at home already, from there when the node is away."""
        job = self._job(request.job)
        if fault := directory_fault(request.directory):
            raise UsageError(fault)
        directory = Path(request.directory)
        if directory.exists() and any(directory.iterdir()):
            raise UsageError(f"{directory} is not empty; choose a new directory")
        home = self._it.home
        with home:
            try:
                _, link = self._link_of(job)
                bundle = await pull_bundle(link, request.job, job.attempt, request.kind, home.blobs)
                files, step = list(bundle.files), bundle.step
            except (LinkGone, LinkLate, LinkRefused, RetryLater) as error:
                if request.kind != "checkpoint" or job.checkpoint is None:
                    kind = RetryLater if not isinstance(error, LinkRefused) or error.retry else GshareError
                    gone = where_instead(job, error, "files") if isinstance(error, LinkRefused) else None
                    raise kind(gone or f"job {request.job}: {plain(str(error))}") from None
                files, step = checkpoint_refs(job.checkpoint), job.checkpoint.step
            files = come_home(files, read_order(job.facts), home.blobs)
            results = [Result(f.name, home.blobs.path(f.sha256), f.sha256, f.size) for f in files]
            mark = f"fetch/{request.job}/{directory}"
            await asyncio.to_thread(place_results, directory, results, mark=mark)
        return Fetched(
            reply_to=request.id, directory=str(directory), files=sorted(f.name for f in files), step=step
        )


async def _asked(what: str, answer: Awaitable[A], log_of: JobRecord | None = None) -> A:
    """A node's answer; what goes wrong becomes the client's error, with `what` before it.

    `log_of`: the job whose log was asked for, which its node may have forgotten.
    """
    try:
        return await answer
    except (LinkGone, LinkLate) as error:
        raise RetryLater(f"{what}: {error}") from None
    except LinkRefused as error:
        gone = where_instead(log_of, error, "log") if log_of is not None else None
        raise GshareError(gone or f"{what}: {error}") from None
