"""This machine without agent and coordinator: GPUs and ledger, trainers, and the jobs that ended here.

Trainers come and go; each has a connection of its own while it lives (`agent/service/protocol.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.events import CheckpointSaved, Evaluated, JobChanged, Stepped
from gshare.agent.service.output_dir import RUN_FILE, RunRecord
from gshare.agent.service.protocol import (
    PROTOCOL_VERSION,
    ClientHello,
    Done,
    EventFrame,
    Follow,
    Following,
    FromTrainer,
    Jobs,
    JobStatus,
    ListJobs,
    PauseJobs,
    ResumeJobs,
    StopJobs,
    TrainerHello,
)
from gshare.agent.service.registry import finished_jobs, live_trainers, state_dir
from gshare.tui import frames as f
from gshare.tui.connected import ConnectedSource
from gshare.tui.job_files import curves, json_file, list_directory, tail_text
from gshare.tui.machine import LOOK_SECONDS, Machine
from gshare.tui.past import past_message
from gshare.tui.socket_link import SocketLink
from gshare.tui.source import ActionName, FileRow

TRAINERS_SECONDS = 1.0
#: Positions in the queue, which no event tells.
LIST_SECONDS = 5.0
#: Ended jobs that are shown, the newest ones.
ENDED_SHOWN = 50
COMMAND_SECONDS = 600.0  # applied between two rounds, and a stop writes a checkpoint


class _Trainer:
    """One trainer and the jobs it has told of."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.link: SocketLink | None = None
        self.hello: TrainerHello | None = None
        self.jobs: dict[str, JobStatus] = {}
        self.old_seq = 0  # its journal up to here is of before we came
        self.task: asyncio.Task[None] | None = None
        self.problem = ""


class LocalSource(ConnectedSource):
    kind = "machine"
    can = frozenset({"stop", "pause", "resume", "release", "log", "history", "files"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.title = "this machine"
        self._machine = Machine()
        self._trainers: dict[str, _Trainer] = {}
        self._hyper: dict[str, tuple[float, RunRecord]] = {}  # output_dir → mtime, run.json
        self._looked: float | None = None
        self._changed = asyncio.Event()

    def last_heard(self) -> float | None:
        return self._looked

    async def session(self) -> None:
        try:
            await self._look()
            await self._find_trainers()
            await self._list()
            self.say("live")
            await asyncio.gather(self._looking(), self._finding(), self._listing())
        finally:
            self._looked = None
            for trainer in self._trainers.values():
                if trainer.task is not None:
                    trainer.task.cancel()
            tasks = [trainer.task for trainer in self._trainers.values() if trainer.task is not None]
            await asyncio.gather(*tasks, return_exceptions=True)
            self._trainers.clear()

    # --- the machine

    async def _looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self._look()

    async def _look(self) -> None:
        running = sum(job.state == "running" for t in self._trainers.values() for job in t.jobs.values())
        view = await self._machine.look(running)
        self._looked = time.monotonic()
        self.emit(f.Snapshot(**self.now(), nodes=(view,)))

    # --- trainers

    async def _finding(self) -> None:
        while True:
            await asyncio.sleep(TRAINERS_SECONDS)
            await self._find_trainers()

    async def _find_trainers(self) -> None:
        try:
            directories = await asyncio.to_thread(live_trainers)
        except (GshareError, OSError):  # a directory went away in the middle: seen again in a second
            return
        for directory in directories:
            if directory.name not in self._trainers:
                trainer = self._trainers[directory.name] = _Trainer(directory)
                trainer.task = asyncio.create_task(self._follow(trainer))
        if self.detail != (detail := self._describe()):
            self.detail = detail
            self.tell_found()

    def _describe(self) -> str:
        known = [trainer.hello for trainer in self._trainers.values() if trainer.hello is not None]
        if not known:
            return "no trainer runs"
        return ", ".join(f"trainer {hello.pid} of {hello.model}" for hello in known)

    async def _follow(self, trainer: _Trainer) -> None:
        """From its socket to its end; what goes wrong is told, and tried again as long as it lives."""
        hello = ClientHello(
            protocol=PROTOCOL_VERSION, gshare=version("gshare"), pid=os.getpid(), client="gshare tui"
        )
        path = trainer.directory / "socket"
        try:
            trainer.link, trainer.hello = await SocketLink.open(
                path,
                hello,
                TrainerHello,
                FromTrainer,
                EventFrame,
                lambda message: self._take(trainer, message),
                what="the trainer",
            )
            await self._ask_jobs(trainer)
            await self._list()
            # Beyond the newest: the answer says which one that is. Then all that is kept, as the past.
            journal = trainer.hello.journal_id
            newest = await trainer.link.ask(Following, Follow, journal_id=journal, after_seq=1 << 53)
            trainer.old_seq = newest.next_seq - 1
            await trainer.link.ask(Following, Follow)
            self._changed.set()
            await trainer.link.wait_gone()
        except GshareError as error:
            if str(error) != trainer.problem:
                trainer.problem = str(error)
                self.emit(f.Message(**self.now(), level="warning", kind="source", text=trainer.problem))
        finally:
            if trainer.link is not None:
                await trainer.link.close()
            self._trainers.pop(trainer.directory.name, None)
            self._changed.set()

    def _take(self, trainer: _Trainer, message: EventFrame) -> None:
        event, moment = message.event, self.now()
        if isinstance(event, Stepped):
            self.coalescer.add(event.job, event, moment["time"])
            return
        self.flush(event.job)
        if message.seq <= trainer.old_seq:
            self.emit(past_message(event, moment))
        elif isinstance(event, JobChanged):
            if (known := trainer.jobs.get(event.job)) is not None:  # the next list is not older than this
                changed = {"state": event.state, "step": event.step, "reason": event.reason}
                trainer.jobs[event.job] = msgspec.structs.replace(known, **changed)
            self.emit(
                f.JobState(
                    **moment,
                    job=event.job,
                    state=event.state,
                    step=event.step if event.total_steps else None,
                    total_steps=event.total_steps or None,
                    reason=event.reason,
                    node=self._node(),
                )
            )
            self._changed.set()
        elif isinstance(event, Evaluated):
            self.emit(
                f.Evaluation(
                    **moment, job=event.job, step=event.step, val_loss=event.val_loss, best=event.best
                )
            )
        elif isinstance(event, CheckpointSaved):
            self.emit(f.Checkpoint(**moment, job=event.job, step=event.step, path=event.path))
        else:
            self.emit(f.Message(**moment, level=event.level, text=event.text, job=event.job))

    def _node(self) -> str:
        return self._machine.info.hostname if self._machine.info is not None else ""

    # --- all jobs

    async def _listing(self) -> None:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LIST_SECONDS)
            self._changed.clear()
            for trainer in list(self._trainers.values()):
                with contextlib.suppress(GshareError):
                    await self._ask_jobs(trainer)
            await self._list()
            await asyncio.sleep(0.2)

    async def _ask_jobs(self, trainer: _Trainer) -> None:
        def take(reply: Jobs) -> None:
            trainer.jobs = {job.job: job for job in reply.jobs}

        if trainer.link is not None and trainer.hello is not None:
            await trainer.link.ask(Jobs, ListJobs, then=take)

    async def _list(self) -> None:
        views: dict[str, f.JobView] = {}
        for trainer in self._trainers.values():
            for status in trainer.jobs.values():
                views[status.job] = await self._view(status, trainer.hello)
        with contextlib.suppress(GshareError, OSError):
            for ended in (await asyncio.to_thread(finished_jobs))[:ENDED_SHOWN]:
                if ended.status.job not in views:
                    views[ended.status.job] = await self._view(ended.status, None)
        self.emit(f.Snapshot(**self.now(), jobs=tuple(views.values())))

    async def _view(self, status: JobStatus, hello: TrainerHello | None) -> f.JobView:
        record = await asyncio.to_thread(self._record, status.output_dir)
        gpus = self._machine.info.gpus if self._machine.info is not None else []
        return f.JobView(
            job=status.job,
            state=status.state,
            node=self._node(),
            gpu=gpus[0].uuid if len(gpus) == 1 else "",
            client=status.client,
            step=status.step if status.total_steps else None,
            total_steps=status.total_steps or None,
            loss=status.loss,
            val_loss=status.val_loss,
            best_val_loss=status.best_val_loss,
            position=status.position,
            reason=status.reason,
            output_dir=status.output_dir,
            model=hello.model if hello is not None else record.model if record is not None else "",
            base_dtype=hello.base_dtype if hello is not None else record.base_dtype if record else "",
            hyper=f.hyper_of(record.spec) if record is not None else {},
        )

    def _record(self, output_dir: str) -> RunRecord | None:
        path = Path(output_dir) / RUN_FILE
        try:
            changed = path.stat().st_mtime
        except OSError:
            return None
        known = self._hyper.get(output_dir)
        if known is None or known[0] != changed:
            record = json_file(path, RunRecord)
            if record is None:
                return None
            known = self._hyper[output_dir] = changed, record
        return known[1]

    # --- requests of the app

    async def act(self, action: ActionName, targets: list[str]) -> dict[str, str]:
        if action == "release":
            return await self._machine.release(targets)
        kinds: dict[str, type[msgspec.Struct]] = {"stop": StopJobs, "pause": PauseJobs, "resume": ResumeJobs}
        if action not in kinds:
            return await super().act(action, targets)
        failed = {name: f"job {name} has ended with its trainer" for name in targets}
        for trainer in list(self._trainers.values()):
            mine = [name for name in targets if name in trainer.jobs]
            if mine and trainer.link is not None:
                done = await trainer.link.ask(Done, kinds[action], jobs=mine, timeout=COMMAND_SECONDS)
                for name in mine:
                    failed.pop(name, None)
                failed.update(done.failed)
        self._changed.set()
        return failed

    async def read_log(self, job: str = "", node: str = "", max_bytes: int = 65536) -> str:
        for trainer in self._trainers.values():
            if not job or job in trainer.jobs:
                path = state_dir() / "logs" / f"{trainer.directory.name}.log"
                return await asyncio.to_thread(tail_text, path, max_bytes)
        raise UsageError(f"{job}: its trainer has ended" if job else "no trainer runs here")

    async def ask_history(self, job: str) -> None:
        directory = Path(self._directory(job))
        train, val = await asyncio.to_thread(_read_curves, directory / "metrics.jsonl")
        self.emit(f.History(**self.now(), job=job, train=tuple(train), val=tuple(val)))

    async def list_files(self, job: str) -> list[FileRow]:
        return await asyncio.to_thread(list_directory, Path(self._directory(job)))

    def _directory(self, job: str) -> str:
        for trainer in self._trainers.values():
            if job in trainer.jobs:
                return trainer.jobs[job].output_dir
        for ended in finished_jobs():
            if ended.status.job == job and ended.status.output_dir:
                return ended.status.output_dir
        raise UsageError(f"{job}: its output directory is not known")


def _read_curves(path: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    try:
        with open(path, "rb") as file:
            return curves(file)
    except OSError as error:
        raise GshareError(f"{path}: {error.strerror}") from None
