"""A sweep on one trainer: carries out what its machine says, and tells it what happens.

A decision is on the disk before it is carried out, so that a sweep killed anywhere goes on from the same one:
what was decided and not done is done again, what was done and not written down comes out the same again.
What ends for a reason that is none of its own (Ctrl-C, a trainer that was told to stop, no memory) is no
decision: it is left to `--resume`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from gshare.agent.data.work import Work
from gshare.agent.errors import EXIT_FAILURE, EXIT_OK
from gshare.agent.jobs.events import ENDED, Evaluated, Event, JobChanged, TrainerMessage
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.jobs.sweep import (
    Action,
    Added,
    Ask,
    Begin,
    Ended,
    Note,
    Paused,
    Resumed,
    Run,
    Stop,
    Sweep,
)
from gshare.agent.jobs.sweep_records import Decision, DecisionLog, Pattern
from gshare.agent.service.protocol import STOPPED_BY
from gshare.agent.service.registry import TrainerConfig
from gshare.agent.service.stopping import StopRequest
from gshare.agent.service.supervise import Supervisor


@dataclass(frozen=True)
class Job:
    """A configuration as it is sent to a trainer, and what it has to do."""

    request: JobRequest
    work: Work


@dataclass
class SweepRun:
    """One life of a sweep. `jobs`: those known so far; `names`: of all, those still to be drawn too, requests
    that say name and output_dir at least. `draw` gives the next ones, with their trials."""

    sweep: Sweep
    jobs: dict[str, Job]
    names: Sequence[JobRequest]
    config: TrainerConfig
    log: DecisionLog
    on_event: Callable[[Event], None]
    on_tick: Callable[[], None] = lambda: None
    on_connected: Callable[[], None] = lambda: None
    draw: Callable[[], tuple[Added, dict[str, Job]]] | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    join: bool = True
    supervisor: Supervisor | None = None

    def run(self) -> int:
        """The exit code: 0 when the sweep is done and nothing failed, 1 when something did, else why it ended
        before (130, 143, 75)."""
        begun: dict[str, JobRequest] = {}
        dropped: list[Stop] = []
        for action in self._written(self.sweep.handle(Begin())):
            if isinstance(action, Run):
                begun[action.job] = self._request(action)
            elif isinstance(action, Stop):
                dropped.append(action)
        if self.sweep.done:
            return self._code(EXIT_OK)
        requests = [begun.get(request.spec.name, request) for request in self.names]
        self.supervisor = Supervisor(
            config=self.config,
            requests=requests,
            on_event=self._take,
            on_tick=self.on_tick,
            on_connected=self.on_connected,
            stop=self.stop,
            join=self.join,
            first=list(begun),
        )
        for stop in dropped:  # no trainer has them
            self.supervisor.drop(stop.job, stop.reason)
        return self._code(self.supervisor.run())

    def _code(self, code: int) -> int:
        if not self.sweep.done:
            return code or EXIT_FAILURE
        failed = any(one.event == "failed" for one in self._last.values())
        return EXIT_FAILURE if failed or self.sweep.winner is None else EXIT_OK

    def __post_init__(self) -> None:
        self._last: dict[str, Decision] = {}  # of this life

    # ------------------------------------------------------------------ events

    def _take(self, event: Event) -> None:
        self.on_event(event)
        assert self.supervisor is not None
        if self.stop.exit_code is not None or self.supervisor.over or event.job not in self.jobs:
            return
        if isinstance(event, Evaluated) and event.best:
            self.sweep.note_best(event.job, event.val_loss)
        elif isinstance(event, JobChanged):
            if event.last is not None and event.last.best_val_loss is not None:
                self.sweep.note_best(event.job, event.last.best_val_loss)
            translated = self._translate(event)
            if translated is not None:
                self._carry_out(self.sweep.handle(translated))

    def _translate(self, event: JobChanged) -> Paused | Resumed | Ended | None:
        """None: nothing that the sweep decides by."""
        assert self.supervisor is not None
        status = self.supervisor.table.get(event.job)
        assert status is not None
        if event.state == "paused":
            val_loss = status.val_loss
            return Paused(event.job, event.step, val_loss) if val_loss is not None else None
        if event.state == "running":
            return Resumed(event.job, event.step)
        if event.state not in ENDED:
            return None
        pattern: Pattern = event.exit.pattern if event.exit is not None else ""
        if event.state == "stopped" and not pattern:
            if not event.reason.startswith(STOPPED_BY):
                return None  # with its trainer, or by our own word
            pattern = "user"
        return Ended(
            event.job,
            event.state,
            event.step,
            val_loss=status.val_loss,
            best_val_loss=status.best_val_loss,
            pattern=pattern,
            reason=event.reason,
            evidence=event.exit.evidence if event.exit is not None else {},
        )

    # ------------------------------------------------------------------ actions

    def _carry_out(self, actions: Sequence[Action]) -> None:
        assert self.supervisor is not None
        for action in self._written(actions):
            if isinstance(action, Run):
                self.supervisor.go_on(self._request(action))
            else:
                assert isinstance(action, Stop), action
                self.supervisor.drop(action.job, action.reason)

    def _written(self, actions: Sequence[Action]) -> Iterable[Run | Stop]:
        """The actions for a trainer, each after what is written down before it."""
        for action in actions:
            if isinstance(action, Note):
                self._note(action)
            elif isinstance(action, Ask):
                assert self.draw is not None
                added, jobs = self.draw()
                self.jobs.update(jobs)
                yield from self._written(self.sweep.handle(added))
            else:
                assert isinstance(action, Run | Stop), action
                yield action

    def _note(self, note: Note) -> None:
        decision = Decision(
            time=time.time(),
            job=note.job,
            event=note.event,
            step=note.step,
            samples=self.jobs[note.job].work.samples(note.step),
            pattern=note.pattern,
            reason=note.reason,
            evidence=note.evidence,
        )
        self.log.append(decision)
        self._last[note.job] = decision
        if note.event == "selected":
            rank = "number {rank} of {of}".format(**note.evidence) if note.evidence else note.reason
            text = f"goes on after its warm-up: {rank}"
            self.on_event(TrainerMessage(level="info", text=text, job=note.job))

    def _request(self, run: Run) -> JobRequest:
        return msgspec.structs.replace(self.jobs[run.job].request, pause_at=run.pause_at)
