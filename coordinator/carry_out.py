"""Carries the outbox's actions out, each until it is done or no longer wanted, and tells how it ended.

One task an action. What a node's absence or a full disk delays is tried again; what ends it is an event that
is committed together with the row's end, so that after a kill -9 the action is either done and known or done
again, which does the same.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from gshare.agent.errors import GshareError, UsageError
from gshare.agent.node.checks import check_start
from gshare.agent.node.protocol import (
    AttemptAccepted,
    Attempts,
    AttemptsDone,
    BundleKind,
    ForgetAttempts,
    ListAttempts,
    PauseAttempts,
    ResumeAttempts,
    StartAttempt,
    StopAttempts,
)
from gshare.coordinator import actions, events
from gshare.coordinator.blobs import Damaged, DiskFull
from gshare.coordinator.facts import CheckpointRef, JobRecord
from gshare.coordinator.file_transfer import Bundle, SourceChanged, pull_bundle, push_files
from gshare.coordinator.home import Home
from gshare.coordinator.homecoming import come_home
from gshare.coordinator.link import AgentLink, LinkGone, LinkLate, LinkRefused
from gshare.coordinator.orders import (
    checkpoint_refs,
    model_for,
    read_order,
    sources_for,
    start_fields,
)
from gshare.coordinator.results import OutputTaken
from gshare.coordinator.session import NodeSession
from gshare.coordinator.store import Pending
from gshare.coordinator.tasks import end_tasks

#: An agent answers a command when it has been passed on; a stop writes a checkpoint first only later.
COMMAND_SECONDS = 60.0
#: Between two tries; also how soon an action that is no longer wanted is dropped while its node is away.
FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.5, 15.0
#: Transfers of one file set that arrive damaged in a row before its node is not believed any more.
DAMAGED_TRIES = 3

Outcome = events.ClusterEvent | None
Feed = Callable[[Outcome, int], None]


class Executor:
    def __init__(
        self,
        *,
        owner: str,
        home: Home,
        job: Callable[[str], JobRecord | None],
        session: Callable[[str], NodeSession | None],
        still_wanted: Callable[[actions.ClusterAction], bool],
        feed: Feed,
        failed: Callable[[BaseException], None],
        say: Callable[[str, str], None],
    ) -> None:
        """`feed(event, id)` commits how a row ended; `say(job, text)` tells people why something waits.

        `failed` hears of how a row ended that could not be committed: it stays, the coordinator should end.
        """
        self._owner = owner
        self._home = home
        self._job = job
        self._session = session
        self._still_wanted = still_wanted
        self._feed = feed
        self._failed = failed
        self._say = say
        self._tasks: dict[int, asyncio.Task[None]] = {}
        # One transfer at a time to and from a node: two of the same model would write one partial file.
        self._pushing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._pulling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._placing: set[str] = set()  # jobs; a thread that hangs in a dead disk is not joined by another

    def take(self, rows: list[Pending]) -> None:
        """Begins with the rows that are not under way already."""
        for row in rows:
            if row.id not in self._tasks:
                task = asyncio.create_task(self._carry_out(row))
                self._tasks[row.id] = task
                task.add_done_callback(lambda done, id=row.id: self._ended(id, done))

    async def close(self) -> None:
        await end_tasks(list(self._tasks.values()))

    def _ended(self, row: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(row, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    async def _carry_out(self, row: Pending) -> None:
        action, pause, damaged, told = row.action, FIRST_PAUSE_SECONDS, 0, ""
        while self._still_wanted(action):
            try:
                outcome = await self._once(action, damaged)
            except (LinkGone, LinkLate) as error:
                problem = str(error)
            except Damaged as error:
                problem, damaged = str(error), damaged + 1
            except LinkRefused as error:
                problem = str(error)
            except OSError as error:  # a disk, or no more open files: as with one that is full
                problem = f"{error.filename or 'here'}: {error.strerror or error}"
            except Exception as error:  # whatever it is, it is this job's and not the cluster's
                self._give_up(row, error)
                return
            else:
                self._feed(outcome, row.id)
                return
            if problem != told and not isinstance(action, actions.Forget):
                told = problem
                self._say(action.job, f"{_doing(action)} waits: {problem}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE_SECONDS)
        self._feed(None, row.id)

    def _give_up(self, row: Pending, error: Exception) -> None:
        """What nobody foresaw: the job fails, or goes on without a checkpoint at home or a command."""
        action = row.action
        reason = f"{_doing(action)} failed: {type(error).__name__}: {error}"
        if isinstance(action, actions.PullCheckpoint):
            self._say(action.job, reason)
            self._feed(events.PullFailed(job=action.job, attempt=action.attempt, reason=reason), row.id)
        elif isinstance(action, actions.Start | actions.Publish | actions.Place):
            self._feed(events.GivenUp(job=action.job, attempt=action.attempt, reason=reason), row.id)
        else:
            self._say(action.job, reason)
            self._feed(None, row.id)

    async def _once(self, action: actions.ClusterAction, damaged: int) -> Outcome:
        """One try. LinkGone, LinkLate, Damaged and a refusal with `retry`: try again."""
        if isinstance(action, actions.Place):
            return await self._place(action)
        assert isinstance(action, actions.NodeAction)
        link = await self._link(action.node)
        if isinstance(action, actions.Start):
            return await self._start(link, action)
        if isinstance(action, actions.PullCheckpoint):
            return await self._pull(link, action)
        if isinstance(action, actions.Publish):
            return await self._publish(link, action, damaged)
        return await self._command(link, action)

    async def _link(self, node: str) -> AgentLink:
        session = self._session(node)
        if session is None:
            raise LinkGone(f"node {node} is not in the cluster file any more")
        try:
            return await asyncio.wait_for(session.wait_link(), MOST_PAUSE_SECONDS)
        except asyncio.TimeoutError:
            raise LinkGone(f"node {node} is away") from None

    async def _start(self, link: AgentLink, action: actions.Start) -> Outcome:
        record, session = self._job(action.job), self._session(action.node)
        if record is None or session is None:
            return None
        order = read_order(record.facts)
        model, checkpoint = model_for(order, session.node), checkpoint_refs(action.checkpoint)
        fields = {
            "attempt": action.attempt,
            "gpu": action.gpu,
            "budget_mb": action.budget_mb,
            "past": record.past,
            **start_fields(order, model, checkpoint),
        }
        try:
            # As every agent does; the other reasons of one to refuse are its own, or a number that was used
            # there.
            check_start(StartAttempt(id=0, **fields))
        except UsageError as error:
            return _start_failed(action, str(error), retry=False)
        try:
            async with self._pushing[action.node]:
                await push_files(link, sources_for(order, model, checkpoint, self._home.blobs))
            await link.ask(AttemptAccepted, StartAttempt, timeout=COMMAND_SECONDS, **fields)
        except SourceChanged as error:
            return _start_failed(action, str(error), retry=False)
        except LinkRefused as error:
            return _start_failed(action, f"node {action.node} refuses it: {error}", retry=True)
        session.look()
        return None

    async def _command(self, link: AgentLink, action: actions.NodeAction) -> Outcome:
        make, fields = _command_of(action)
        which = [(action.job, action.attempt)]
        try:
            done = await link.ask(AttemptsDone, make, timeout=COMMAND_SECONDS, attempts=which, **fields)
        except LinkRefused as error:
            if error.retry:
                raise
            self._say(action.job, f"{_doing(action)}: node {action.node} refuses: {error}")
            return None
        session = self._session(action.node)
        if session is not None:
            session.look()
        if done.failed and not isinstance(action, actions.Forget):
            listed = (await link.ask(Attempts, ListAttempts)).attempts
            if not any((it.owner, it.job, it.attempt) == (self._owner, *which[0]) for it in listed):
                return events.AttemptGone(node=action.node, job=action.job, attempt=action.attempt)
        return None

    async def _pull(self, link: AgentLink, action: actions.PullCheckpoint) -> Outcome:
        try:
            bundle = await self._bundle(link, action.node, action.job, action.attempt, "checkpoint")
        except (DiskFull, Damaged, LinkRefused) as error:
            return events.PullFailed(job=action.job, attempt=action.attempt, reason=str(error))
        files = tuple((ref.name, ref.sha256, ref.size) for ref in bundle.files)
        checkpoint = CheckpointRef(attempt=action.attempt, step=bundle.step, files=files)
        return events.CheckpointPulled(job=action.job, checkpoint=checkpoint)

    async def _publish(self, link: AgentLink, action: actions.Publish, damaged: int) -> Outcome:
        record = self._job(action.job)
        if record is None:
            return None
        # One that diverged has no final adapter, nor has one that somebody stopped: its last checkpoint comes
        # instead.
        whole = record.outcome in (None, "completed") or record.exit is not None
        last: BundleKind = "final" if whole else "checkpoint"
        best: Bundle | None = None
        try:
            with self._home:
                files = (await self._bundle(link, action.node, action.job, action.attempt, last)).files
                wanted = {ref.name: ref for ref in files}
                if record.best_step is not None:
                    best = await self._bundle(link, action.node, action.job, action.attempt, "best")
                    wanted |= {ref.name: ref for ref in best.files}
                own = come_home(list(wanted.values()), read_order(record.facts), self._home.blobs)
                self._home.note_brought(action.job, action.attempt, own)
        except DiskFull as error:
            return _publish_failed(action, f"the results stay on node {action.node}: {error}", retry=True)
        except Damaged as error:
            if damaged + 1 < DAMAGED_TRIES:
                raise
            return _publish_failed(action, f"node {action.node}: {error}", retry=False)
        except LinkRefused as error:
            if error.retry:
                raise
            return _publish_failed(action, f"node {action.node}: {error}", retry=False)
        return events.BroughtHome(
            job=action.job,
            attempt=action.attempt,
            val_loss=best.val_loss if best else None,
            best_step=best.step if best else None,
        )

    async def _bundle(self, link: AgentLink, node: str, job: str, attempt: int, kind) -> Bundle:
        async with self._pulling[node]:
            with self._home:
                return await pull_bundle(link, job, attempt, kind, self._home.blobs)

    async def _place(self, action: actions.Place) -> Outcome:
        record = self._job(action.job)
        if record is None:
            return None
        order = read_order(record.facts)
        output_dir = Path(order.job.spec.output_dir)
        mark = f"{self._owner}/{action.job}"
        if action.job in self._placing:
            return _publish_failed(action, f"{output_dir}: an earlier try has not ended there", retry=True)
        self._placing.add(action.job)
        try:
            if record.parked:  # its checkpoint of that step is at home, and its result
                with self._home:
                    files = come_home(checkpoint_refs(record.checkpoint), order, self._home.blobs)
                    self._home.note_brought(action.job, action.attempt, files)
            await asyncio.to_thread(self._home.place, action.job, action.attempt, output_dir, mark)
        except (DiskFull, OutputTaken) as error:
            return _publish_failed(action, str(error), retry=True)
        except GshareError as error:
            return _publish_failed(action, str(error), retry=False)
        finally:
            self._placing.discard(action.job)
        return events.Published(job=action.job, attempt=action.attempt)


def _command_of(action: actions.NodeAction) -> tuple[type, dict[str, str]]:
    if isinstance(action, actions.Stop):
        return StopAttempts, {"reason": action.reason}
    if isinstance(action, actions.Pause):
        return PauseAttempts, {}
    if isinstance(action, actions.Resume):
        return ResumeAttempts, {}
    assert isinstance(action, actions.Forget), action
    return ForgetAttempts, {}


def _start_failed(action: actions.Start, reason: str, *, retry: bool) -> events.StartFailed:
    return events.StartFailed(
        node=action.node, job=action.job, attempt=action.attempt, reason=reason, retry=retry
    )


def _publish_failed(
    action: actions.Publish | actions.Place, reason: str, *, retry: bool
) -> events.PublishFailed:
    return events.PublishFailed(job=action.job, attempt=action.attempt, reason=reason, retry=retry)


def _doing(action: actions.ClusterAction) -> str:
    """What an action is, for people."""
    words = {
        actions.Start: "starting",
        actions.Stop: "stopping",
        actions.Pause: "pausing",
        actions.Resume: "resuming",
        actions.PullCheckpoint: "bringing the checkpoint home",
        actions.Publish: "bringing the results home",
        actions.Place: "placing the results",
    }
    return words.get(type(action), type(action).__name__.lower())
