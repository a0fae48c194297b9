"""Memory and speed of training, measured by synthetic steps over (N adapters, b rows) on the real engine.

    profile = measure_memory(base, backend, key, max_tokens=16384, limit_bytes=0, on_progress=…)

Each configuration is trained as the trainer does it, in one pass: adapters admitted, steps queued and read,
updates made, an evaluation, the tensors of a checkpoint taken. Running out of memory is an answer: that
configuration does not fit. Whatever the data is, the same kernels run over it, so rows are random tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from gshare.agent.base.weights import Base
from gshare.agent.errors import GshareError
from gshare.agent.jobs.memory import ModelShape, estimate_run
from gshare.agent.jobs.memory_grid import Configuration, grid
from gshare.agent.jobs.memory_profile import MemoryProfile, Point, ProfileKey, make_profile
from gshare.agent.jobs.pass_load import PassLoad, pass_load
from gshare.agent.jobs.spec import AdapterSpec, BaseDtype
from gshare.agent.train.engines import make_engine
from gshare.agent.train.memory_meter import Meter
from gshare.agent.train.out_of_memory import is_out_of_memory
from gshare.agent.train.part import Row
from gshare.agent.train.passes import StepWork
from gshare.agent.train.rounds import Rounds
from gshare.kernels.backend import Backend

#: Before the steps that are timed: kernels are built in the first, a CUDA graph is captured in the second.
WARM_STEPS = 2
TIMED_STEPS = 2

#: Ranks and linears that a backend has met.
_WARM: WeakKeyDictionary[Backend, set[tuple[int, tuple[str, ...]]]] = WeakKeyDictionary()

#: What is being measured, how many are done, of how many (0: not known).
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Measured:
    """`without_graph`: passes for whose graph there was no memory, and which were launched instead."""

    peak_bytes: int
    step_seconds: float
    without_graph: int = 0


class Measurer:
    """One base on one device, under one meter."""

    def __init__(self, base: Base, backend: Backend, meter: Meter, *, checkpointing: bool = False) -> None:
        self._base = base
        self._backend = backend
        self._meter = meter
        self._checkpointing = checkpointing
        self._warm = _WARM.setdefault(backend, set())

    def measure(self, what: Configuration) -> Measured | None:
        """None: it runs out of memory, and nothing of it is left."""
        rows = [
            [self._row(adapter, row, what.length) for row in range(what.batch)]
            for adapter in range(what.adapters)
        ]
        return self.measure_rows(what.specs(checkpointing=self._checkpointing), rows)

    def measure_rows(
        self,
        specs: Sequence[AdapterSpec],
        rows: Sequence[Sequence[Row]],
        then: Sequence[Sequence[Row]] = (),
    ) -> Measured | None:
        """As `measure`, of any adapters, each with the rows of its micro-batch. `then`: rows of a second
        pass, trained after the first while its graph is kept, as a trainer's passes are."""
        for spec in specs:
            self._warm_up(spec)
        with self._meter.measuring():
            try:
                seconds, without_graph = self._train(specs, rows, then)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # Its frames hold tensors: they have to be gone when the block ends.
                error.__traceback__ = error.__context__ = None
                return None
        return Measured(self._meter.peak_bytes(), seconds, without_graph)

    def _warm_up(self, spec: AdapterSpec) -> None:
        """Two tokens through an adapter like this one, once: on a CPU products are checked the first time,
        and what that takes is none of a pass's memory. On CUDA they are checked for each number of rows."""
        like = (spec.r, tuple(spec.targets))
        if like in self._warm or self._base.device.type == "cuda":
            return
        self._warm.add(like)
        with self._meter.measuring(), suppress(torch.OutOfMemoryError):
            self._train([spec], [[self._row(0, 0, 2)]], ())

    def load(
        self, specs: Sequence[AdapterSpec], lengths: Sequence[int], *, all_labelled: bool = False
    ) -> PassLoad:
        """What a model is asked of a pass with rows of these lengths. `all_labelled`: of every row all tokens
        but the first are predicted; else nobody knows, as of a run's data."""
        shape = ModelShape.of(self._base.config)
        tokens, longest = sum(lengths), max(lengths)
        base_dtype = cast(BaseDtype, self._base.base_dtype)
        estimate = estimate_run(
            shape,
            specs,
            base_dtype=base_dtype,
            device="cuda" if self._base.device.type == "cuda" else "cpu",
            pass_tokens=tokens,
            longest_row=longest,
        )
        return pass_load(
            shape,
            specs,
            estimate,
            base_dtype=base_dtype,
            pass_tokens=tokens,
            longest_row=longest,
            labels=tokens - len(lengths) if all_labelled else None,
        )

    def point(self, what: Configuration) -> Point | None:
        """None: it runs out of memory, or has none for its graphs: it takes less then, and longer."""
        measured = self.measure(what)
        if measured is None or measured.without_graph:
            return None
        specs = what.specs(checkpointing=self._checkpointing)
        return Point(
            load=self.load(specs, [what.length] * (what.adapters * what.batch), all_labelled=True),
            batch=what.batch,
            length=what.length,
            peak_bytes=measured.peak_bytes,
            step_seconds=measured.step_seconds,
        )

    def largest_batch(
        self, length: int, most: int, on_progress: Progress = lambda what, done, total: None
    ) -> int:
        """The most rows, up to `most`, that one adapter's pass holds; 0 when not even one fits. By
        bisection: what fits with more rows fits with fewer."""
        fits, fails = 0, most + 1
        trying = most
        while fails - fits > 1:
            on_progress(f"whether {trying} rows of {length} tokens fit", 0, 0)
            if self.measure(Configuration(1, trying, length)) is not None:
                fits = trying
            else:
                fails = trying
            trying = (fits + fails) // 2
        return fits

    def _row(self, adapter: int, row: int, length: int) -> Row:
        draw = np.random.default_rng((adapter, row))
        tokens = draw.integers(0, self._base.config.vocab_size, length).astype(np.int32)
        return Row(tokens, np.ones(length, dtype=bool), sample=row)

    def _train(
        self, specs: Sequence[AdapterSpec], rows: Sequence[Sequence[Row]], then: Sequence[Sequence[Row]]
    ) -> tuple[float, int]:
        """Seconds of a step, the mean of the timed ones, and how many passes have no memory for a graph."""
        engine = make_engine(self._base, self._backend)
        engine.expect(specs)
        rounds = Rounds(engine, sum(len(row.tokens) for own in rows for row in own))
        adapters = [engine.new_adapter(spec.name, spec) for spec in specs]
        rates = [spec.learning_rate for spec in specs]

        def train(step: int, rows: Sequence[Sequence[Row]]) -> None:
            work = [StepWork(adapter, step, [own]) for adapter, own in zip(adapters, rows, strict=True)]
            under_way = rounds.start(work, rates)
            if under_way.error is not None:  # `finish` would try with smaller passes
                raise under_way.error
            for outcome, rate in zip(rounds.finish(under_way), rates, strict=True):
                if outcome.error is not None:
                    raise outcome.error
                rounds.update(outcome, rate)
            self._meter.phase_ended()

        started = 0.0
        for step in range(WARM_STEPS + TIMED_STEPS):
            if step == WARM_STEPS:
                self._meter.wait()
                started = time.perf_counter()
            train(step, rows)
        self._meter.wait()
        seconds = (time.perf_counter() - started) / TIMED_STEPS
        if then:
            for step in range(WARM_STEPS):
                train(WARM_STEPS + TIMED_STEPS + step, then)
        evaluated = rounds.evaluate(list(zip(adapters, rows, strict=True)))
        assert len(evaluated) == len(adapters)
        with self._meter.elsewhere():
            for adapter in adapters:  # what a checkpoint takes
                adapter.on_host(optimizer=True).wait()
        self._meter.phase_ended()
        return seconds, engine.without_graph


def measure_memory(
    measurer: Measurer,
    key: ProfileKey,
    *,
    max_tokens: int,
    max_length: int,
    limit_bytes: int = 0,
    on_progress: Progress = lambda what, done, total: None,
) -> MemoryProfile:
    """The largest batch by bisection, then every configuration of `grid` below it.

    Args:
        max_tokens: of a pass, as in the run's spec; a trainer makes no larger ones.
        max_length: positions of the model.
        limit_bytes: what the meter allows, for the record.

    GshareError: so little fits that no model can be made of it.
    """
    length = grid(max_tokens, max_length=max_length)[0].length
    largest = measurer.largest_batch(length, max(1, max_tokens // length), on_progress)
    if largest == 0:
        raise GshareError(f"not even one row of {length} tokens fits; reserve more with --vram")
    plan = grid(min(max_tokens, largest * length), max_length=max_length)
    points: list[Point] = []
    for number, what in enumerate(plan):
        on_progress(str(what), number, len(plan))
        point = measurer.point(what)
        if point is not None:
            points.append(point)
    try:
        return make_profile(
            key,
            points,
            length=length,
            largest_batch=largest,
            limit_bytes=limit_bytes,
            refused=len(plan) - len(points),
        )
    except ValueError as error:
        raise GshareError(f"{error}; more fits with a larger --vram or --max-tokens-per-pass") from None
