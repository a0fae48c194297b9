"""The gshare arms of `benchmarks/gpu.py`, and the GEMM floor that they are measured against."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from gpu_workload import LONGEST, Workload
from gshare.agent.base.weights import Base
from gshare.agent.train import adapter as module
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.device_engine import DeviceEngine, Pending, Prepared
from gshare.agent.train.device_optimizer import Verdicts
from gshare.agent.train.device_pass import PassShape, group_shapes
from gshare.agent.train.part import Part
from gshare.kernels.layout import GROUPS, Group, LoraPlan
from gshare.kernels.lora_tables import BLOCK_T, PassAdapter, PassTables, row_blocks
from gshare.kernels.triton_backend import DeviceLora, TritonBackend

#: Blocks of the workload's longest sequence.
LONGEST_BLOCKS = LONGEST // BLOCK_T


@dataclass
class Measured:
    """One arm: steady tokens per second, every step's seconds, and what its jobs became."""

    tokens: int = 0
    seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    losses: dict[str, list[list[float]]] = field(default_factory=dict)
    peak_mb: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def gemm_floor(base: Base, tokens: int) -> float:
    """Seconds that the base GEMMs alone take: forward and dX of every group and of the head, in a CUDA graph.

    Default cuBLAS, each layer's own weights, no recomputation; with a quantised base one dense stand-in per
    group (its weights live in one buffer anyway).
    """
    device = base.device
    inputs: dict[int, torch.Tensor] = {}

    def rows(width: int) -> torch.Tensor:
        if width not in inputs:
            inputs[width] = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
        return inputs[width]

    quantised = base.base_dtype == "nf4"
    stand_in = {name: base.layers[0].groups[name].weight.dense().clone() for name in GROUPS if quantised}

    def weights() -> list[torch.Tensor]:
        found = [
            stand_in[name] if quantised else layer.groups[name].weight.dense()
            for layer in base.layers
            for name in GROUPS
        ]
        return [*found, base.lm_head.dense()]

    every = weights()

    def run() -> None:
        for w in every:
            _ = rows(w.shape[1]) @ w.t()
        for w in reversed(every):
            _ = rows(w.shape[0]) @ w

    with default_cublas():
        return graph_seconds(run)


@contextmanager
def default_cublas() -> Iterator[None]:
    """Products as fast as cuBLAS makes them, whatever their bits."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul.allow_bf16_reduced_precision_reduction = True
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before if isinstance(before, bool) else (False, False)


def graph_seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds of `run`, captured as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return sorted(times)[repeats // 2]


class Trainer:
    """Drives an engine as the runner does: begin, queue, step, and the outcome when the next step is queued.

    The adapters stay from run to run, so that a timed run meets shapes that earlier runs have met.
    """

    def __init__(self, engine: DeviceEngine, load: Workload, numbers: Sequence[int]) -> None:
        self.engine, self.load, self.numbers = engine, load, numbers
        self.done = 0  # optimizer steps
        specs = load.specs()
        self.adapters: list[Adapter] = [engine.new_adapter(specs[n].name, specs[n]) for n in numbers]

    def parts(self, step: int) -> list[Part]:
        found = []
        for number, adapter in zip(self.numbers, self.adapters, strict=True):
            rows = self.load.rows(step, number)
            found.append(Part(adapter, rows, step, sum(row.label_tokens for row in rows)))
        return found

    def step(self, work: Prepared | Sequence[Part]) -> tuple[Pending, Verdicts]:
        optimizer = self.engine.optimizer
        optimizer.begin(self.adapters)
        pending = self.engine.queue(work)
        self.done += 1
        rates = [adapter.spec.learning_rate for adapter in self.adapters]
        return pending, optimizer.step(self.adapters, [self.done] * len(rates), rates)

    def run(self, *, steps: int | None = None, overlap: bool = True) -> Measured:
        """All steps of the workload (or the first `steps`), timed together. `overlap`: a step is queued
        before the last is read; its seconds are those since the last one's results were there."""
        count = steps if steps is not None else self.load.steps
        result = Measured(losses={adapter.name: [] for adapter in self.adapters})
        torch.cuda.reset_peak_memory_stats()
        under_way: deque[tuple[Sequence[Part], Pending, Verdicts]] = deque()

        def queue(step: int) -> None:
            parts = self.parts(step)
            under_way.append((parts, *self.step(parts)))

        torch.cuda.synchronize()
        started = read = time.perf_counter()
        queue(0)
        for step in range(count):
            if overlap and step + 1 < count:
                queue(step + 1)
            parts, pending, verdicts = under_way.popleft()
            losses = pending.losses()
            verdicts.wait()
            before, read = read, time.perf_counter()
            result.step_seconds.append(read - before)
            if not overlap and step + 1 < count:
                queue(step + 1)
            for adapter, values in zip(self.adapters, losses, strict=True):
                result.losses[adapter.name].append(values)
            result.tokens += sum(part.tokens for part in parts)
        torch.cuda.synchronize()
        result.seconds = time.perf_counter() - started
        result.peak_mb = torch.cuda.max_memory_allocated() / 2**20
        return result

    def state(self) -> dict[str, list[torch.Tensor]]:
        """Copies of each adapter's weights and moments, on the device."""
        purposes = ("params", "exp_avg", "exp_avg_sq")
        return {
            a.name: [self.engine.arena.flat(purpose, a.name).clone() for purpose in purposes]
            for a in self.adapters
        }

    def close(self) -> None:
        for adapter in self.adapters:
            adapter.close()


#: An adapter's losses by step, and its weights and moments.
Outcome = tuple[list[list[float]], list[torch.Tensor]]


def outcomes(engine: DeviceEngine, load: Workload, numbers: Sequence[int]) -> dict[str, Outcome]:
    """What becomes of fresh adapters that train together."""
    trainer = Trainer(engine, load, numbers)
    try:
        losses = trainer.run().losses
        return {name: (losses[name], state) for name, state in trainer.state().items()}
    finally:
        trainer.close()


def outcomes_alone(engine: DeviceEngine, load: Workload) -> dict[str, Outcome]:
    """The same jobs, one after another."""
    found: dict[str, Outcome] = {}
    for number in range(load.adapters):
        found |= outcomes(engine, load, [number])
    return found


def differing(alone: dict[str, Outcome], other: dict[str, Outcome]) -> list[str]:
    """Names of the adapters of which a loss or a byte differs."""
    return [
        name
        for name, (losses, state) in alone.items()
        if other[name][0] != losses
        or not all(
            torch.equal(a.view(torch.int32), b.view(torch.int32))
            for a, b in zip(state, other[name][1], strict=True)
        )
    ]


def remember_initial_weights() -> None:
    """Draw each adapter's first weights once: sixteen rank-16 adapters of 8B take the host six seconds."""
    module.initial_a = lru_cache(maxsize=None)(module.initial_a)


class UngroupedBackend(TritonBackend):
    """One LoRA launch an adapter and op instead of one for all: what grouping buys. For `UngroupedEngine`."""

    name = "triton-ungrouped"

    def lora_forward(self, x: torch.Tensor, y: torch.Tensor, lora: LoraPlan, group: Group) -> Any:
        return [TritonBackend.lora_forward(self, x, y, one, group) for one in self._each(lora)]

    def lora_dx(self, dy: torch.Tensor, dx: torch.Tensor | None, lora: LoraPlan, group: Group) -> Any:
        return [TritonBackend.lora_dx(self, dy, dx, one, group) for one in self._each(lora)]

    def lora_grads(
        self, x: torch.Tensor, dy: torch.Tensor, s: Any, ds: Any, lora: LoraPlan, group: Group
    ) -> None:
        for one, its_s, its_ds in zip(self._each(lora), s, ds, strict=True):
            TritonBackend.lora_grads(self, x, dy, its_s, its_ds, one, group)

    def _each(self, lora: LoraPlan) -> list[DeviceLora]:
        """The same plan over each adapter's own rows: its tokens, or those of the top layer that a loss
        reads. The pass's table of these serves all, since it goes by the tokens' places in the pass."""
        if not isinstance(lora, DeviceLora):
            return []  # the bare base
        assert lora.masks is None, "the workload has no dropout"
        rows = lora.tables.rows
        return [
            DeviceLora(
                tables if rows is None else tables.over(tables.staging.device["label_blocks"], rows),
                lora.flat,
                lora.grads,
                lora.workspace,
                lora.active,
            )
            for tables in self.tables
        ]

    tables: list[PassTables]


class UngroupedEngine(DeviceEngine):
    """Fills one table an adapter beside the pass's own. For jobs of one sequence a pass that begin at the
    same layer."""

    def __init__(self, base: Base, backend: UngroupedBackend) -> None:
        super().__init__(base, backend)
        self._one_by_one: dict[Any, list[PassTables]] = {}

    def queue(self, work: Prepared | Sequence[Part]) -> Pending:
        backend = self.backend
        assert isinstance(backend, UngroupedBackend)
        if not isinstance(work, Prepared):
            work = self.prepare(work)
        shape, plan = work.key[0], work.plan
        assert isinstance(shape, PassShape)
        assert not shape.lower, "a lower stage has rows of some adapters only"
        if work.key not in self._one_by_one:
            self._one_by_one[work.key] = [self._tables_of_one(shape) for _ in range(shape.adapters)]
        backend.tables = self._one_by_one[work.key][: len(plan.parts)]
        start = label = 0
        for part, count, tables in zip(plan.parts, work.counts, backend.tables, strict=True):
            blocks = row_blocks([(label, label + count)])
            host = tables.staging.host()["label_blocks"]
            host[:] = -1
            host[: len(blocks)] = np.array(blocks, dtype=np.int32).reshape(-1, 3)
            span = ((start, start + part.tokens),)
            fresh = self.optimizer.fresh(part.adapter.name)
            tables.refresh([PassAdapter(span, part.scale, self._table(part))], [fresh])
            start, label = start + part.tokens, label + count
        return super().queue(work)

    def _tables_of_one(self, shape: PassShape) -> PassTables:
        """For one adapter with one sequence, of `LONGEST` tokens at most."""
        return PassTables(
            group_shapes(self.base.config),
            self.base.device,
            max_adapters=1,
            max_sequences=1,
            max_blocks=LONGEST_BLOCKS,
            max_rank=shape.rank,
            extra={"label_blocks": ((LONGEST_BLOCKS, 3), "int32")},
        )
