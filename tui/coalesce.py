"""Metrics of many steps made one sample a job: what reaches the app does not grow with the speed of jobs."""

from __future__ import annotations

from gshare.agent.jobs.events import Stepped
from gshare.tui.frames import Sample, Samples

#: Between two frames of metrics. States are never held back.
SAMPLE_SECONDS = 1.0


class Coalescer:
    """`add` each step, `take` once an interval. Bounded by the number of jobs."""

    def __init__(self) -> None:
        self._newest: dict[str, tuple[Stepped, float]] = {}
        self._sums: dict[str, list[int]] = {}  # job → [steps, tokens]

    def add(self, key: str, step: Stepped, time: float) -> None:
        """A step of job `key`, made at `time` (Unix s, the source's clock)."""
        self._newest[key] = step, time
        sums = self._sums.get(key)
        if sums is None:
            self._sums[key] = [1, step.tokens]
        else:
            sums[0] += 1
            sums[1] += step.tokens

    def drop(self, key: str) -> None:
        """What is held of a job whose state says more."""
        self._newest.pop(key, None)
        self._sums.pop(key, None)

    def take_one(self, key: str, time: float, received: float) -> Samples | None:
        """What is held of one job: it goes out before a change of its state, which comes after it."""
        if key not in self._newest:
            return None
        found = self._sample(key)
        self.drop(key)
        return Samples(time=time, received=received, samples=(found,))

    def take(self, time: float, received: float) -> Samples | None:
        """All that is held; None: nothing."""
        if not self._newest:
            return None
        samples = tuple(self._sample(key) for key in self._newest)
        self._newest.clear()
        self._sums.clear()
        return Samples(time=time, received=received, samples=samples)

    def _sample(self, key: str) -> Sample:
        step, time = self._newest[key]
        count, tokens = self._sums[key]
        return Sample(
            job=key,
            step=step.step,
            total_steps=step.total_steps,
            loss=step.loss,
            time=time,
            epoch=step.epoch,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            tokens=tokens / count,
            seconds=step.seconds,
            adapters_in_pass=step.adapters_in_pass,
            count=count,
        )
