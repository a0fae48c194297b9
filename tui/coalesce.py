"""Metrics of many steps made one sample a job: what reaches the app does not grow with the speed of jobs."""

from __future__ import annotations

from gshare.agent.jobs.events import Stepped
from gshare.tui.frames import Sample, Samples

#: Between two frames of metrics. States are never held back.
SAMPLE_SECONDS = 1.0


class _Held:
    """The newest step of a job, and sums over those before it."""

    __slots__ = ("count", "step", "time", "tokens")

    def __init__(self, step: Stepped, time: float) -> None:
        self.step = step
        self.time = time
        self.count = 1
        self.tokens = step.tokens

    def sample(self, key: str) -> Sample:
        step = self.step
        return Sample(
            job=key,
            step=step.step,
            total_steps=step.total_steps,
            loss=step.loss,
            time=self.time,
            epoch=step.epoch,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            tokens=self.tokens / self.count,
            seconds=step.seconds,
            adapters_in_pass=step.adapters_in_pass,
            count=self.count,
        )


class Coalescer:
    """`add` each step, `take` once an interval. Bounded by the number of jobs."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def add(self, key: str, step: Stepped, time: float) -> None:
        """A step of job `key`, made at `time` (Unix s, the source's clock)."""
        held = self._held.get(key)
        if held is None:
            self._held[key] = _Held(step, time)
            return
        held.step = step
        held.time = time
        held.count += 1
        held.tokens += step.tokens

    def take_one(self, key: str, time: float, received: float) -> Samples | None:
        """What is held of one job: it goes out before a change of its state, which comes after it."""
        held = self._held.pop(key, None)
        if held is None:
            return None
        return Samples(time=time, received=received, samples=(held.sample(key),))

    def take(self, time: float, received: float) -> Samples | None:
        """All that is held; None: nothing."""
        if not self._held:
            return None
        samples = tuple(held.sample(key) for key, held in self._held.items())
        self._held.clear()
        return Samples(time=time, received=received, samples=samples)
