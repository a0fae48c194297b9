"""A simulated engine under a sweep's machine: arbitrary loss curves, capacity, order of events, and kills."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from gshare.agent.jobs.early_exit import SweepExit
from gshare.agent.jobs.packing import Packing
from gshare.agent.jobs.sweep import Action, Begin, Ended, Event, Note, Paused, Run, Stop, Sweep, Trial
from gshare.agent.jobs.sweep_records import Decision


class Killed(Exception):
    """The sweep's process was killed here."""


@dataclass(frozen=True)
class Curve:
    """What a job does whoever is beside it: its validation loss by step, and where its own losses end it."""

    losses: tuple[float, ...]  # after step 1, 2, …; as many as it has steps
    exit_at: int = 0  # a pattern stops it there; 0: none does
    nan_at: int = 0  # it diverges there
    batch: int = 1


@dataclass
class Engine:
    """Runs jobs one step at a time, in random order; what is written down survives kills."""

    curves: dict[str, Curve]
    settings: SweepExit
    most: int
    kills: int
    seed: int
    sweep_type: type[Sweep] = Sweep
    forgets: bool = False  # a kill takes some jobs' checkpoints with it
    decisions: list[Decision] = field(default_factory=list)
    saved: dict[str, int] = field(default_factory=dict)  # step of a job's newest checkpoint
    steps_done: dict[str, list[int]] = field(default_factory=dict)  # every step made, again ones included
    at_once: int = 0
    passed_over: list[str] = field(default_factory=list)  # made the step of their boundary without a pause

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.trials = [
            Trial.of(name, batch=curve.batch, total_steps=len(curve.losses), warmup=self.settings.warmup)
            for name, curve in self.curves.items()
        ]

    def run(self) -> Sweep:
        """To the sweep's end, started again after each kill."""
        while True:
            try:
                return self._life()
            except Killed:
                self.kills -= 1
                for name in sorted(self.saved) if self.forgets else ():
                    if self._random.random() < 0.5:
                        del self.saved[name]

    def _life(self) -> Sweep:
        sweep = self.sweep_type(self.trials, self.settings, Packing(lambda names: True, most=self.most))
        # Through JSON, as a resumed sweep reads them.
        sweep.replay([msgspec.json.decode(msgspec.json.encode(one), type=Decision) for one in self.decisions])
        running: dict[str, tuple[int, int]] = {}  # job: (step, where to pause)
        self._carry_out(sweep, sweep.handle(Begin()), running)
        while not sweep.done:
            assert running, "nothing runs, and the sweep is not done"
            name = self._random.choice(sorted(running))
            event = self._step(sweep, name, running)
            if event is not None:
                del running[name]
                self._carry_out(sweep, sweep.handle(event), running)
            elif self._random.random() < 0.3:
                self.saved[name] = running[name][0]
            self._perhaps_kill(0.05)
        assert not running
        return sweep

    def _step(self, sweep: Sweep, name: str, running: dict[str, tuple[int, int]]) -> Event | None:
        """One step of a job: the event when it was its last for now."""
        curve, (step, pause_at) = self.curves[name], running[name]
        if step == pause_at and step:  # saved there, and killed before that was written down
            return Paused(name, step, curve.losses[step - 1])
        step += 1
        running[name] = (step, pause_at)
        self.steps_done.setdefault(name, []).append(step)
        boundary = next(trial.boundary for trial in self.trials if trial.name == name)
        if step == boundary != pause_at:
            self.passed_over.append(name)
        best = min(curve.losses[:step])
        if step == curve.nan_at:
            return Ended(name, "diverged", step, None, best, reason="not finite")
        if best == curve.losses[step - 1]:
            sweep.note_best(name, best)
        if step == curve.exit_at:
            return Ended(name, "stopped", step, curve.losses[step - 1], best, "overfitting", "its gap")
        if step == len(curve.losses):
            return Ended(name, "completed", step, curve.losses[step - 1], best)
        if step == pause_at:
            self.saved[name] = step
            return Paused(name, step, curve.losses[step - 1])
        return None

    def _carry_out(
        self, sweep: Sweep, actions: Sequence[Action], running: dict[str, tuple[int, int]]
    ) -> None:
        for action in actions:
            self._perhaps_kill(0.05)
            if isinstance(action, Note):
                self.decisions.append(
                    Decision(
                        time=0.0,
                        job=action.job,
                        event=action.event,
                        step=action.step,
                        pattern=action.pattern,
                        reason=action.reason,
                        evidence=action.evidence,
                    )
                )
            elif isinstance(action, Run):
                assert action.job not in running, action
                step = self.saved.get(action.job, 0)
                running[action.job] = (step, action.pause_at)
                if step:  # as a trainer says of a job that goes on from a checkpoint (`JobChanged.last`)
                    sweep.note_best(action.job, min(self.curves[action.job].losses[:step]))
                self.at_once = max(self.at_once, len(running))
            else:
                assert isinstance(action, Stop), action
                assert action.job not in running, action

    def _perhaps_kill(self, chance: float) -> None:
        if self.kills > 0 and self._random.random() < chance:
            raise Killed
