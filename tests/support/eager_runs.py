"""Runners whose engine makes its updates at once, as the CUDA engine does, and a log of what they do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from gshare.agent.base.weights import Base
from gshare.agent.jobs.events import Evaluated, Event, JobChanged, Stepped
from gshare.agent.train import runner as runner_module
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.engine import Engine, Verdict
from gshare.agent.train.passes import StepWork
from gshare.agent.train.rounds import Round, Rounds, StepOutcome
from gshare.agent.train.runner import Runner
from toy import make_runner


class EagerEngine(Engine):
    """Makes the updates itself, at once; an adapter whose update it refused is left alone from then on."""

    queues_ahead = True

    def finish_round(
        self, adapters: Sequence[Adapter], steps: Sequence[int], rates: Sequence[float] | None
    ) -> Callable[[], list[Verdict]]:
        assert rates is not None
        failed: set[str] = self.__dict__.setdefault("failed", set())
        verdicts = []
        for adapter, step, rate in zip(adapters, steps, rates, strict=True):
            norm, finite = adapter.gradient_norm(), True
            if math.isfinite(norm) and adapter.name not in failed:
                adapter.update(step=step, learning_rate=rate, norm=norm)
                finite = adapter.is_finite()
            if not (math.isfinite(norm) and finite):
                failed.add(adapter.name)
            verdicts.append(Verdict(norm, committed=True, finite=finite))
        return lambda: verdicts


class Bench:
    """Runners over one base, and what they do, in order: "begin a3", "read a3", "step a3", "eval a3", …"""

    def __init__(self, checkpoint: Path, base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checkpoint, self.base, self.monkeypatch = checkpoint, base, monkeypatch
        self.log: list[str] = []
        self.crumbs: list[list[tuple[str, int]]] = []
        self.events: list[Event] = []
        start, finish = Rounds.start, Rounds.finish

        def told_start(
            rounds: Rounds, work: Sequence[StepWork], rates: Sequence[float] | None = None
        ) -> Round:
            self.log.append(f"begin {names(work)}")
            return start(rounds, work, rates)

        def told_finish(rounds: Rounds, started: Round) -> list[StepOutcome]:
            self.log.append(f"read {names(started.work)}")
            return finish(rounds, started)

        monkeypatch.setattr(Rounds, "start", told_start)
        monkeypatch.setattr(Rounds, "finish", told_finish)

    def runner(self, *, ahead: bool = True, **options: Any) -> Runner:
        self.log, self.crumbs, self.events = [], [], []
        self.monkeypatch.setattr(runner_module, "make_engine", EagerEngine)
        runner = make_runner(self.checkpoint, self.base, self._take, on_pass=self._crumb, **options)
        runner.engine.queues_ahead = ahead
        return runner

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, (Stepped, Evaluated, JobChanged)):
            kind = {Stepped: "step", Evaluated: "eval"}.get(type(event), getattr(event, "state", ""))
            self.log.append(f"{kind} {event.job}{event.step}")

    def _crumb(self, in_flight: Sequence[tuple[str, int]]) -> None:
        self.crumbs.append(list(in_flight))

    def told(self) -> list[dict[str, Any]]:
        """Events as a client sees them, without times and the lag of the thread that writes."""
        return [
            {**{name: getattr(event, name) for name in event.__struct_fields__}, "seconds": 0}
            for event in self.events
            if isinstance(event, (Stepped, Evaluated, JobChanged))
        ]


def names(work: Sequence[StepWork]) -> str:
    """ "a3 bb3": the steps, counted from 1."""
    return " ".join(f"{w.adapter.name.split('#')[0]}{w.step + 1}" for w in work)


def run(runner: Runner) -> None:
    while runner.run_round():
        pass
    runner.close()
