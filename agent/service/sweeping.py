"""A sweep on one trainer: carries out what its machine says, and tells it what happens.

What ends for a reason that is none of its own (Ctrl-C, a trainer that was told to stop, no memory) is no
decision: it is left to `--resume`. A disk that takes no files fails one configuration after another, and the
rest would be ranked without them: the sweep stops at the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from gshare.agent.errors import EXIT_FAILURE, EXIT_OK
from gshare.agent.jobs.events import ENDED, Evaluated, Event, JobChanged, TrainerMessage, is_of_machine
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.jobs.sweep import Begin, Ended, Paused, Resumed, Run, Stop, Sweep
from gshare.agent.jobs.sweep_records import DecisionLog, Pattern
from gshare.agent.service.deciding import UNRANKED, Deciding, Draw, Job
from gshare.agent.service.protocol import STOPPED_BY
from gshare.agent.service.registry import TrainerConfig
from gshare.agent.service.stopping import StopRequest
from gshare.agent.service.supervise import Supervisor


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
    draw: Draw | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    join: bool = True
    supervisor: Supervisor | None = None

    def run(self) -> int:
        """The exit code: 0 when the sweep is done and nothing failed, 1 when something did, else why it ended
        before (130, 143, 75)."""
        # Ended in an earlier life: what is known of them stands, and no trainer is to keep their names.
        ended = self.sweep.ended
        begun: dict[str, JobRequest] = {}
        dropped: list[Stop] = []
        for action in self._deciding.handle(Begin()):
            if isinstance(action, Run):
                begun[action.job] = self._request(action)
            else:
                dropped.append(action)
        if self.sweep.done:
            return self._code(EXIT_OK)
        requests = [begun.get(one.spec.name, one) for one in self.names if one.spec.name not in ended]
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
        return self._deciding.code

    def __post_init__(self) -> None:
        self._deciding = Deciding(self.sweep, self.jobs, self.log, self.on_event, self.draw)

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
                self._carry_out(translated)

    def _translate(self, event: JobChanged) -> Paused | Resumed | Ended | None:
        """None: nothing that the sweep decides by."""
        assert self.supervisor is not None
        status = self.supervisor.table.get(event.job)
        assert status is not None
        if event.state == "paused":
            val_loss = status.val_loss
            return Paused(event.job, event.step, val_loss) if val_loss is not None else None
        if event.state == "running":
            self._tell_lost(event.job, event.step)
            return Resumed(event.job, event.step)
        if event.state not in ENDED:
            return None
        if event.state == "failed" and is_of_machine(event.reason):
            self._leave(event.job)
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

    def _leave(self, job: str) -> None:
        self.stop.exit_code = EXIT_FAILURE
        self.stop.reason = f"{STOPPED_BY}the sweep, since files of {job} could not be written"
        self.on_event(TrainerMessage(level="error", text=UNRANKED, job=job))

    def _tell_lost(self, job: str, step: int) -> None:
        if reached := self.sweep.lost(job, step):
            how = f"goes on from step {step}" if step else "starts again"
            text = f"its checkpoint of step {reached} is gone: it {how}; its place in the ranking stays"
            self.on_event(TrainerMessage(level="warning", text=text, job=job))

    # ------------------------------------------------------------------ actions

    def _carry_out(self, event: Paused | Resumed | Ended) -> None:
        assert self.supervisor is not None
        for action in self._deciding.handle(event):
            if isinstance(action, Run):
                self.supervisor.go_on(self._request(action))
            else:
                self.supervisor.drop(action.job, action.reason)

    def _request(self, run: Run) -> JobRequest:
        return msgspec.structs.replace(self.jobs[run.job].request, pause_at=run.pause_at)
