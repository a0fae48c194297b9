"""The coordinator: owns the store and the cluster machine, feeds the one with events, carries out what comes.

    sessions ──Hearing──►  feed: Cluster.handle, one transaction  ──►  Executor ──► nodes, home
    API      ──events───►                                         ──►  Announcer ──► followers of the API

One asyncio loop does everything, so an event is handled and committed before the next one is looked at. When
the store cannot be written (its disk is full) the coordinator ends with a message: jobs run on, and the next
start goes on from what was committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from importlib.metadata import version
from pathlib import Path

from gshare.agent.errors import GshareError, RetryLater
from gshare.agent.jobs.events import ENDED
from gshare.agent.jobs.names import name_fault, shorten
from gshare.agent.node.protocol import (
    EARLY_EXIT,
    Attempts,
    AttemptsDone,
    BundleFiles,
    ListAttempts,
    PinBundle,
    ReleaseBundle,
    StopAttempts,
)
from gshare.agent.service.wire import encode
from gshare.coordinator import events
from gshare.coordinator.actions import CheckBest, ClusterAction, Ended, Say
from gshare.coordinator.announcing import Announcer, Tell
from gshare.coordinator.api import ApiServer, EventRing
from gshare.coordinator.api_client import SOCKET
from gshare.coordinator.api_protocol import (
    API_PROTOCOL_VERSION,
    ApiRefused,
    ApiWelcome,
    DialIn,
)
from gshare.coordinator.carry_out import Executor
from gshare.coordinator.cluster import Cluster
from gshare.coordinator.config import ClusterConfig, NodeConfig, load_cluster
from gshare.coordinator.expecting import Expecting
from gshare.coordinator.facts import PLACED_STATES
from gshare.coordinator.hearing import Hearing
from gshare.coordinator.home import Home
from gshare.coordinator.link import AgentLink, LinkGone, LinkLate, LinkRefused, StreamPair
from gshare.coordinator.requests import Requests
from gshare.coordinator.session import HEARTBEAT_SECONDS, Connect, NodeSession
from gshare.coordinator.store import Cursor, Store
from gshare.coordinator.tasks import end_tasks

TICK_SECONDS = 1.0
#: For each of two questions to a node that is taken out of the cluster file.
LEAVE_SECONDS = 10.0
#: Cursors that moved without an evaluation, and blobs that nobody needs, are seen to so often.
HOUSEKEEPING_SECONDS = 10.0
#: Nodes that are in no cluster file may dial in; so many of them.
MAX_DIALLED_NODES = 1000


class TooFewWorkers(RetryLater):
    """`--expect-workers`: the time is over."""


class Coordinator:
    def __init__(
        self,
        store: Store,
        config: ClusterConfig,
        connect: Connect,
        tell: Tell,
        *,
        cluster: Cluster | None = None,
        expect_workers: int = 0,
        expect_seconds: float = 600.0,
        tick_seconds: float = TICK_SECONDS,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        """`tell(level, text)` gets a line for people; `connect` opens the bytes to a node."""
        self.store = store
        self.config = config
        self.cluster = cluster or Cluster(store.jobs())
        self.home = Home(store.state_dir)
        self.sessions: dict[str, NodeSession] = {}
        self._connect = connect
        self._tick_seconds = tick_seconds
        self._heartbeat = heartbeat_seconds
        self._session = secrets.token_hex(8)
        self.ring = EventRing(self._session)
        self._requests = Requests(self)
        self._api = ApiServer(
            store.state_dir / SOCKET,
            welcome=self._welcome,
            handle=self._requests.handle,
            dialled=self._dialled,
            ring=self.ring,
        )
        self._announcer = Announcer(tell, self._api, self.cluster.jobs)
        self.say = self._announcer.say
        self._hearing = Hearing(store, self.cluster, self.feed, self._announcer, self._api, self.sessions)
        self.heard, self.losses = self._hearing.heard, self._hearing.losses
        self._executor = Executor(
            owner=store.owner,
            home=self.home,
            job=self.cluster.jobs.get,
            session=self.sessions.get,
            still_wanted=self.cluster.still_wanted,
            feed=lambda event, row: self.feed(event, done=(row,)),
            failed=self._fail,
            say=lambda job, text: self.say("warning", f"{job}: {text}", job=job),
        )
        self._expecting = (
            Expecting(expect_workers, expect_seconds, time.monotonic()) if expect_workers else None
        )
        self._taken = 0  # the last row of the outbox that the executor has
        self._running: dict[str, asyncio.Task[None]] = {}  # sessions
        self._untidy = ""  # what was told last of why something could not be removed
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] | None = None

    # --- life

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Raises what makes going on impossible: StoreError, `TooFewWorkers`.

        A thread may still be placing a result when this returns: close the store after the loop's executor.
        """
        self._failure = asyncio.get_running_loop().create_future()
        for node in self.config.nodes:
            self._add_node(node)
        self.feed(events.Started(now=time.monotonic(), wall=time.time()))
        if self._expecting is not None:
            self.feed(events.HoldPlacement(on=True))
        await self._api.start()
        for node in self.config.nodes:
            self._run_session(node.name)
        ticking = asyncio.create_task(self._tick())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({ticking, stopping, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            for done in (ticking, self._failure):
                if done.done():
                    done.result()
        finally:
            await self._close(ticking, stopping)
            if self._failure.done():
                self._failure.exception()  # looked at: of several failures the first one is raised

    async def _close(self, *others: asyncio.Task[object]) -> None:
        await end_tasks([*others, *self._running.values(), *self._tasks])
        await self._executor.close()
        await self._api.close()
        with contextlib.suppress(GshareError):
            self._hearing.write_cursors()

    def _fail(self, error: BaseException) -> None:
        """Ends `run` with that error."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _tick(self) -> None:
        kept = time.monotonic()
        while True:
            await asyncio.sleep(self._tick_seconds)
            now = time.monotonic()
            self.feed(events.Tick(now=now, wall=time.time()))
            self._look_for_workers(now)
            if now - kept >= HOUSEKEEPING_SECONDS:
                kept = now
                self._hearing.write_cursors()
                self._collect()

    def _look_for_workers(self, now: float) -> None:
        if self._expecting is None:
            return
        nodes = list(self.cluster.nodes.values())
        if self._expecting.ready(nodes):
            count, self._expecting = self._expecting.workers, None
            self.say("info", f"{count} workers are ready")
            self.feed(events.HoldPlacement(on=False))
        elif (message := self._expecting.too_late(nodes, now)) is not None:
            raise TooFewWorkers(message)

    # --- events in, actions out

    def feed(
        self,
        event: events.ClusterEvent | None,
        *more: events.ClusterEvent,
        done: tuple[int, ...] = (),
        cursor: Cursor | None = None,
        evaluation: events.Evaluation | None = None,
    ) -> None:
        """Handles one event and commits it, with the rows of the outbox that it ends.

        `more` are handled after it, in order, and are in the same transaction: all of them happen or none.
        """
        happened = (*(() if event is None else (event,)), *more)
        try:
            actions = [action for one in happened for action in self.cluster.handle(one)]
            changed = self.cluster.take_changed()
            self.store.commit(
                jobs=changed,
                actions=actions,
                done=done,
                cursor=cursor,
                evaluation=evaluation,
            )
        except BaseException as error:
            self._fail(error)  # memory is ahead of the disk now: nothing may be done any more
            raise
        for job in changed:
            self._announcer.job(job)
        for action in actions:
            self._announce(action)
        if any(isinstance(one, _CHANGES_NODES) for one in happened):
            self._announcer.nodes(self.cluster.nodes)
        if actions or isinstance(event, events.Started):  # at the start: what an earlier process left
            self._take_rows()

    def _take_rows(self) -> None:
        rows = self.store.pending(after=self._taken)
        if rows:
            self._taken = rows[-1].id
            self._executor.take(rows)

    def _announce(self, action: ClusterAction) -> None:
        if isinstance(action, Say):
            self.say(action.level, action.text, action.job)
        elif isinstance(action, Ended):
            self._announcer.ended(action)
        elif isinstance(action, CheckBest):
            self._spawn(self._check_best(action))

    def _spawn(self, work) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _check_best(self, action: CheckBest) -> None:
        session = self.sessions.get(action.node)
        link = session.link if session is not None else None
        if link is None:
            return
        with contextlib.suppress(LinkGone, LinkLate, LinkRefused):
            best = await link.ask(BundleFiles, PinBundle, job=action.job, attempt=action.attempt, kind="best")
            link.send(ReleaseBundle, bundle=best.bundle)
            self.feed(
                events.BestSeen(
                    node=action.node,
                    job=action.job,
                    attempt=action.attempt,
                    step=best.step,
                    val_loss=best.val_loss,
                )
            )

    def _collect(self) -> None:
        checkpoints: set[str] = set()
        unplaced: list[tuple[str, int]] = []
        expecting = False
        for name, job in self.cluster.jobs.items():
            # Adoptable: its node was lost, but may come back with the finished attempt.
            expecting |= job.pulling or job.adoptable or job.state == "publishing"
            if job.state in ("publishing", "placing"):
                unplaced.append((name, job.attempt))
            if job.checkpoint is not None and job.state not in ("completed", "diverged"):
                checkpoints |= {sha256 for _, sha256, _ in job.checkpoint.files}
        try:
            self.home.collect(checkpoints, unplaced, expecting=expecting)
        except OSError as error:  # room is lost, nothing else: no reason to end
            if str(error) != self._untidy:
                self._untidy = str(error)
                where = error.filename or self.store.state_dir
                self.say("warning", f"what nobody needs stays: {where}: {error.strerror}; see to it there")

    # --- nodes

    def node_config(self, name: str) -> NodeConfig | None:
        session = self.sessions.get(name)
        return session.node if session is not None else None

    def reload(self) -> list[str]:
        """Reads the cluster file again. UsageError: it is wrong, and everything stays as it was."""
        config = load_cluster(Path(self.config.source))
        wanted = {node.name: node for node in config.nodes}
        for name in [node.name for node in self.config.nodes if node.name not in wanted]:
            self._remove_node(name)
        changed = [node for node in config.nodes if self.node_config(node.name) != node]
        before, self.config = self.config, config
        for node in changed:
            old = before.node(node.name)
            if old is not None and old.address != node.address:
                leaving = self._remove_node(node.name, "is elsewhere in the cluster file now")
                self._add_node(node)
                self._spawn(self._run_after(leaving, node.name))
                continue
            if node.name in self.sessions:
                self._stop_session(node.name)
            self._add_node(node)
            self._run_session(node.name)
        return sorted(wanted)

    async def _run_after(self, leaving: asyncio.Task[None], name: str) -> None:
        """The node's new session, once the one before has told its agent what to stop."""
        session = self.sessions[name]
        await asyncio.wait({leaving})
        if self.sessions.get(name) is session and name not in self._running:
            self._run_session(name)

    def _add_node(self, node: NodeConfig, connect: Connect | None = None, *, dials: bool = False) -> None:
        self.sessions[node.name] = NodeSession(
            node,
            None if dials else connect or self._connect,
            self._hearing,
            owner=self.store.owner,
            session=self._session,
            heartbeat_seconds=self._heartbeat,
        )
        self.feed(events.NodeAdded(config=node))

    def _run_session(self, name: str) -> None:
        task = asyncio.create_task(self.sessions[name].run())
        self._running[name] = task
        task.add_done_callback(self._session_ended)

    def _session_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _stop_session(self, name: str) -> None:
        task = self._running.pop(name, None)
        if task is not None:
            task.cancel()

    def _remove_node(self, name: str, why: str = "was taken out of the cluster file") -> asyncio.Task[None]:
        """Its jobs go elsewhere at once; the connection ends when the node was told to stop its attempts."""
        session, running = self.sessions.pop(name), self._running.pop(name, None)
        self._announcer.forget_node(name)
        here = {
            (job.facts.name, job.attempt)
            for job in self.cluster.jobs.values()
            if job.node == name and job.state in PLACED_STATES
        }
        self.feed(events.NodeRemoved(node=name))
        return self._spawn(self._leave_node(f"node {name} {why}", session.link, running, here))

    async def _leave_node(
        self,
        reason: str,
        link: AgentLink | None,
        running: asyncio.Task[None] | None,
        here: set[tuple[str, int]],
    ) -> None:
        """`here`: what should run there; what else the node says that it runs for us is stopped with it."""
        problem = "it is away"
        try:
            if link is not None:
                listed = (await link.ask(Attempts, ListAttempts, timeout=LEAVE_SECONDS)).attempts
                here |= {
                    (s.job, s.attempt) for s in listed if s.owner == self.store.owner and s.state not in ENDED
                }
                if here:
                    which = sorted(here)
                    fields = {"attempts": which, "reason": reason}
                    await link.ask(AttemptsDone, StopAttempts, timeout=LEAVE_SECONDS, **fields)
                return
        except (LinkGone, LinkLate, LinkRefused) as error:
            problem = str(error)
        finally:
            if running is not None:
                await end_tasks([running])
        if here:
            jobs = ", ".join(sorted(job for job, _ in here))
            self.say(
                "warning",
                f"{reason}, but could not be told to stop its jobs ({problem}): {shorten(jobs, 200)} may go "
                "on training there; put it back as it was until it is connected, or stop them on it",
            )

    async def _dialled(self, hello: DialIn, stream: StreamPair) -> None:
        """An agent has dialled out to us; one that no cluster file names becomes a node too."""
        fault = name_fault(hello.node)
        if fault is None and hello.node not in self.sessions and len(self.sessions) >= MAX_DIALLED_NODES:
            fault = f"there are {len(self.sessions)} nodes already"
        if fault is not None:
            stream.write(encode(ApiRefused(reply_to=0, reason=f"node: {fault}", exit_code=2)))
            return
        if hello.node not in self.sessions:
            self.say("info", f"node {hello.node} has dialled in")
            self._add_node(NodeConfig(name=hello.node), dials=True)
        await self.sessions[hello.node].dialled(stream)

    def _welcome(self) -> ApiWelcome:
        return ApiWelcome(
            protocol=API_PROTOCOL_VERSION,
            gshare=version("gshare"),
            owner=self.store.owner,
            pid=os.getpid(),
            cluster=self.config.source,
            journal_id=self._session,
            knows=[EARLY_EXIT],
        )


_CHANGES_NODES = (
    events.Tick,
    events.Started,
    events.NodeAdded,
    events.NodeUp,
    events.NodeBeat,
    events.NodeDown,
    events.NodeDeploying,
    events.AttemptChanged,
)
