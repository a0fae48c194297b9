"""Sweeps on a cluster by discrete events, from measured rates: what scheduling and early exit bring.

Measured (`results/gpu.json`, an H200): tokens a second and peak memory of packed steps of the 8B shape with
1, 4, 16 and 32 adapters, and an adapter's own memory. Between these the time of a pass and its memory are
linear in its tokens; below the first a pass takes no less, above the last the rate stays.

Assumed: a base of another size on g GPUs takes (its parameters / 8.03 · 10⁹) / g of the time and, on each, of
the memory, since none but 8B and less was measured. And who leaves early, and when (`Exits`): warmup and the
part kept are ALTO's defaults, 5 % and 25 %; the rest is chosen so that the samples saved agree with what it
reports for supervised tuning, 72 to 83 %, about two thirds of that by ranking. Pauses, loading and evaluation
take no time.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gshare.coordinator.plan import Task
from gshare.coordinator.planner import Arrived, Ended, Planner

PARAMETERS_8B = 8.03e9
CELLS = ("8b-bf16-n1", "8b-bf16-n4", "8b-bf16-n16", "8b-bf16-n32")
#: Rank of the measured adapters; memory of another is in proportion.
MEASURED_RANK = 16
#: The ledger's part of a card (`gshare gpu`, reserve factor of discrete memory).
RESERVE_FACTOR = 0.85
#: GSM8K's training rows (7,473), of which ALTO trains on 90 %, for 3 epochs.
SAMPLES = round(7473 * 0.9) * 3
#: For each plan; more than it takes, so that the outcome is not a matter of the machine's load.
PLAN_SECONDS = 30.0


class Exits(NamedTuple):
    """Who leaves when. Fractions of a configuration's samples, or of the configurations."""

    warmup: float = 0.05  # ALTO, appendix A.2
    keep: float = 0.25  # the same
    diverging: float = 0.2  # of all, at a moment drawn from the warmup
    overfitting: float = 0.5  # of those kept, at a moment drawn from `overfits`
    overfits: tuple[float, float] = (0.3, 1.0)


class Measured:
    """Seconds and MiB of a packed pass, by its tokens; piecewise linear through what was measured."""

    def __init__(self, path: Path) -> None:
        """`path`: results of `benchmarks/gpu.py`, whose gates must have passed."""
        results = json.loads(path.read_text(encoding="utf-8"))
        cells = [results[name] for name in CELLS]
        assert all(cell["gate"] for cell in cells), "rates of a run whose gate failed"
        self.adapter_mb = results["8b-bf16-memory"]["must_mb"]
        counts = [int(name.rsplit("n", 1)[1]) for name in CELLS]
        self.row_tokens = cells[-1]["tokens_per_step"] / counts[-1]
        self.seconds_at = [
            (cell["tokens_per_step"], cell["tokens_per_step"] / cell["packed"]) for cell in cells
        ]
        self.mb_at = [
            (cell["tokens_per_step"], cell["peak_mb"] - count * self.adapter_mb)
            for cell, count in zip(cells, counts, strict=True)
        ]
        self.hardware = cells[-1]["versions"]["gpu"]

    def seconds(self, tokens: float) -> float:
        if tokens > self.seconds_at[-1][0]:
            return tokens * self.seconds_at[-1][1] / self.seconds_at[-1][0]
        return _between(self.seconds_at, tokens)

    def mb(self, tokens: float, ranks: Iterable[int]) -> float:
        return _between(self.mb_at, tokens) + self.adapter_mb * sum(ranks) / MEASURED_RANK


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear between points; flat before the first, on along the last piece after them."""
    if x <= points[0][0]:
        return points[0][1]
    index = next((i for i, point in enumerate(points) if x <= point[0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass
class Configuration:
    """One adapter of a sweep; progress in samples."""

    rank: int
    batch: int
    stops_at: float = SAMPLES  # by divergence or overfitting; all of them otherwise
    kept: bool = True  # when ranked at the warmup boundary
    done: float = 0.0


@dataclass
class Sweep:
    """A task of the cluster: a base on some GPUs, and the grid that is tried on it."""

    name: str
    parameters: float
    gpus: int
    rates: tuple[float, ...]
    ranks: tuple[int, ...]
    batches: tuple[int, ...]
    saved: dict[str, float] = field(default_factory=dict)  # samples, by pattern

    @property
    def scale(self) -> float:
        """Time and memory on each GPU, as parts of those of the 8B shape on one."""
        return self.parameters / PARAMETERS_8B / self.gpus

    def grid(self) -> list[Configuration]:
        return [Configuration(r, b) for _ in self.rates for r in self.ranks for b in self.batches]


def paper_tasks() -> list[Sweep]:
    """11 tasks of four model scales on 8 GPUs, as in ALTO's figure 12.

    Its grids (appendix A.4): 60 configurations on one GPU, 64 on more. It says "varied batch sizes" and not
    which; here four tasks have all of theirs, the others some.
    """
    one = {"rates": (1e-5, 5e-5, 2e-4, 3e-4, 5e-4), "ranks": (16, 32, 64)}
    more = {"rates": (1e-5, 5e-5, 1e-4, 3e-4), "ranks": (16, 32, 64, 128)}
    return [
        Sweep("70b-all", 70.6e9, 4, **more, batches=(1, 2, 4, 8)),
        Sweep("70b-small", 70.6e9, 4, **more, batches=(1, 2)),
        Sweep("32b-all", 32.8e9, 2, **more, batches=(1, 2, 4, 8)),
        Sweep("32b-mid", 32.8e9, 2, **more, batches=(2, 4)),
        Sweep("32b-large", 32.8e9, 2, **more, batches=(8,)),
        Sweep("8b-all", 8.03e9, 1, **one, batches=(1, 2, 4, 8)),
        Sweep("8b-small", 8.03e9, 1, **one, batches=(1, 2)),
        Sweep("8b-one", 8.03e9, 1, **one, batches=(1,)),
        Sweep("7b-all", 7.62e9, 1, **one, batches=(1, 2, 4, 8)),
        Sweep("7b-mid", 7.62e9, 1, **one, batches=(4, 8)),
        Sweep("7b-large", 7.62e9, 1, **one, batches=(8,)),
    ]


class Executor:
    """One sweep on its GPUs, pass after pass; every adapter in it makes one step a pass."""

    def __init__(self, sweep: Sweep, measured: Measured, card_mb: float, *, backfill: bool) -> None:
        """`backfill`: the scheduler in a sweep. Without it, groups that fit, in the order of the grid, each
        run until its last member is done."""
        self._sweep, self._measured, self._backfill = sweep, measured, backfill
        self._room_mb = card_mb * RESERVE_FACTOR

    def run(self, exits: Exits | None, draw: random.Random) -> float:
        """Seconds of the whole sweep; sets what it saved."""
        grid = self._sweep.grid()
        self._sweep.saved = dict.fromkeys(("divergence", "underperformance", "overfitting"), 0.0)
        if exits is None:
            return self._train([(one, SAMPLES) for one in grid])
        self._draw(grid, exits, draw)
        boundary = exits.warmup * SAMPLES
        took = self._train([(one, min(boundary, one.stops_at)) for one in grid])
        kept = [one for one in grid if one.kept]
        took += self._train([(one, one.stops_at) for one in kept])
        for one in grid:
            early = "divergence" if one.stops_at <= boundary else "overfitting"
            self._sweep.saved[early if one.kept or early == "divergence" else "underperformance"] += (
                SAMPLES - one.done
            )
        return took

    def _draw(self, grid: list[Configuration], exits: Exits, draw: random.Random) -> None:
        """Which configurations end how: nothing is trained here, so it is drawn."""
        order = draw.sample(grid, len(grid))
        diverging = round(exits.diverging * len(grid))
        for one in order[:diverging]:
            one.stops_at, one.kept = draw.uniform(0, exits.warmup) * SAMPLES, False
        kept = math.ceil(exits.keep * len(grid))
        for one in order[diverging + kept :]:
            one.kept = False
        for one in order[diverging : diverging + kept]:
            if draw.random() < exits.overfitting:
                one.stops_at = draw.uniform(*exits.overfits) * SAMPLES

    def _train(self, work: list[tuple[Configuration, float]]) -> float:
        """Seconds until each has done so many samples."""
        waiting = [(one, until) for one, until in work if one.done < until]
        if self._backfill:
            waiting.sort(key=lambda item: -item[0].batch)
        active: list[tuple[Configuration, float]] = []
        seconds = 0.0
        gone = 0  # the batch size of who left last
        while waiting or active:
            if self._backfill or not active:
                self._admit(active, waiting, gone)
            tokens = sum(one.batch for one, _ in active) * self._measured.row_tokens
            passes = min(math.ceil((until - one.done) / one.batch) for one, until in active)
            seconds += passes * self._measured.seconds(tokens) * self._sweep.scale
            for one, until in active:
                one.done = min(until, one.done + passes * one.batch)
            gone = next(one.batch for one, until in active if one.done >= until)
            active = [(one, until) for one, until in active if one.done < until]
        return seconds

    def _admit(
        self,
        active: list[tuple[Configuration, float]],
        waiting: list[tuple[Configuration, float]],
        gone: int,
    ) -> None:
        """With the scheduler: first those of the batch size that left, then any that fits. Else in order."""
        order = sorted(waiting, key=lambda item: item[0].batch != gone) if self._backfill else list(waiting)
        for item in order:
            if active and not self._fits([*active, item]):
                if not self._backfill:
                    return
                continue
            active.append(item)
            waiting.remove(item)

    def _fits(self, active: Sequence[tuple[Configuration, float]]) -> bool:
        tokens = sum(one.batch for one, _ in active) * self._measured.row_tokens
        return self._measured.mb(tokens, (one.rank for one, _ in active)) * self._sweep.scale <= self._room_mb


def in_turn(durations: Sequence[tuple[Sweep, float]], gpus: int) -> float:
    """Seconds until all are done, begun in their order as soon as enough GPUs are free; none overtakes."""
    ends: list[tuple[float, int]] = []
    free, now, last = gpus, 0.0, 0.0
    for sweep, seconds in durations:
        while free < sweep.gpus:
            now, back = heapq.heappop(ends)
            free += back
        free -= sweep.gpus
        heapq.heappush(ends, (now + seconds, sweep.gpus))
        last = max(last, now + seconds)
    return last


def planned(
    durations: Sequence[tuple[Sweep, float]],
    said: Sequence[float],
    gpus: int,
    handled: Callable[[float], None],
    clock: Callable[[], float],
) -> float:
    """The same by `Planner`, which is told `said` (seconds) and hears of each end; `handled` gets the time
    that each plan took by `clock`."""
    planner = Planner([str(i) for i in range(gpus)], seconds=PLAN_SECONDS)
    takes = {sweep.name: math.ceil(1000 * seconds) for sweep, seconds in durations}
    tasks = tuple(
        Task(sweep.name, math.ceil(1000 * seconds), sweep.gpus)
        for (sweep, _), seconds in zip(durations, said, strict=True)
    )
    events: list[tuple[int, str]] = []
    now, event = 0, Arrived(0, tasks)
    while True:
        begin = clock()
        plan = planner.handle(event)
        handled(clock() - begin)
        for one in plan.starts:
            heapq.heappush(events, (now + takes[one.task], one.task))
        if not events:
            return now / 1000
        now, name = heapq.heappop(events)
        event = Ended(now, name)
