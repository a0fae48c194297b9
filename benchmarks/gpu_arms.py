"""The gshare arms of `benchmarks/gpu.py`, and the GEMM floor that they are measured against."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_workload import Workload
from gshare.agent.base.weights import Base
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.device_engine import DeviceEngine, Pending, Prepared
from gshare.agent.train.device_optimizer import Verdicts
from gshare.agent.train.device_pass import group_shapes
from gshare.agent.train.engine import Part
from gshare.kernels.layout import GROUPS, Group, LoraPlan
from gshare.kernels.lora_tables import PassAdapter, PassTables
from gshare.kernels.triton_backend import DeviceLora, TritonBackend


@dataclass
class Measured:
    """One arm: steady tokens per second, every step's seconds, and what its jobs became."""

    tokens: int = 0
    seconds: float = 0.0
    cold_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
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

    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul.allow_bf16_reduced_precision_reduction = True
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

    try:
        return graph_seconds(run)
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
    """Drives an engine as the runner does: begin, queue, step, and the outcome while the next is prepared."""

    def __init__(self, engine: DeviceEngine, load: Workload, numbers: Sequence[int]) -> None:
        self.engine, self.load, self.numbers = engine, load, numbers
        specs = load.specs()
        self.adapters: list[Adapter] = [engine.new_adapter(specs[n].name, specs[n]) for n in numbers]

    def parts(self, step: int) -> list[Part]:
        found = []
        for number, adapter in zip(self.numbers, self.adapters, strict=True):
            rows = self.load.rows(step, number)
            found.append(Part(adapter, rows, step, sum(row.label_tokens for row in rows)))
        return found

    def step(self, step: int, work: Prepared | Sequence[Part]) -> tuple[Pending, Verdicts]:
        optimizer = self.engine.optimizer
        optimizer.begin(self.adapters)
        pending = self.engine.queue(work)
        rates = [adapter.spec.learning_rate for adapter in self.adapters]
        return pending, optimizer.step(self.adapters, [step + 1] * len(rates), rates)

    def run(self, warm: int, *, overlap: bool = True) -> Measured:
        """All steps; those from `warm` on are timed together."""
        result = Measured(losses={adapter.name: [] for adapter in self.adapters})
        torch.cuda.reset_peak_memory_stats()
        following = self.engine.prepare(self.parts(0))
        started = time.perf_counter()
        for step in range(self.load.steps):
            if step == warm:
                torch.cuda.synchronize()
                result.cold_seconds = time.perf_counter() - started
                started = time.perf_counter()
            prepared = following
            begun = time.perf_counter()
            pending, verdicts = self.step(step, prepared)
            if overlap and step + 1 < self.load.steps:
                following = self.engine.prepare(self.parts(step + 1))
            losses = pending.losses()
            verdicts.wait()
            if not overlap and step + 1 < self.load.steps:
                following = self.engine.prepare(self.parts(step + 1))
            for adapter, values in zip(self.adapters, losses, strict=True):
                result.losses[adapter.name].append(values)
            if step >= warm:
                result.tokens += sum(part.tokens for part in prepared.parts)
                result.step_seconds.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
        result.seconds = time.perf_counter() - started
        result.peak_mb = torch.cuda.max_memory_allocated() / 2**20
        result.hashes = {adapter.name: fingerprint(adapter) for adapter in self.adapters}
        return result

    def close(self) -> None:
        for adapter in self.adapters:
            adapter.close()


def fingerprint(adapter: Adapter) -> str:
    """sha256 over the adapter's weights and moments."""
    digest = hashlib.sha256()
    for tensors in (adapter.parameters(), adapter.optimizer_tensors()):
        for name in sorted(tensors):
            digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def packed(engine: DeviceEngine, load: Workload, warm: int, *, overlap: bool = True) -> Measured:
    """All adapters in one pass. Steady: call it twice, since a shape's first two passes are slower."""
    trainer = Trainer(engine, load, range(load.adapters))
    try:
        return trainer.run(warm, overlap=overlap)
    finally:
        trainer.close()


def solo(engine: DeviceEngine, load: Workload, warm: int) -> Measured:
    """The same jobs one after another; rates over all of them."""
    total = Measured()
    for number in range(load.adapters):
        trainer = Trainer(engine, load, [number])
        try:
            one = trainer.run(warm)
        finally:
            trainer.close()
        total.tokens += one.tokens
        total.seconds += one.seconds
        total.cold_seconds += one.cold_seconds
        total.step_seconds += one.step_seconds
        total.peak_mb = max(total.peak_mb, one.peak_mb)
        total.hashes |= one.hashes
        total.losses |= one.losses
    return total


class UngroupedBackend(TritonBackend):
    """One LoRA launch an adapter and op instead of one for all: what grouping buys."""

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
        assert isinstance(lora, DeviceLora)
        return [
            DeviceLora(tables, lora.flat, lora.grads, lora.workspace, lora.active) for tables in self.tables
        ]

    tables: list[PassTables]


class UngroupedEngine(DeviceEngine):
    """Fills one table an adapter beside the pass's own."""

    def queue(self, work: Prepared | Sequence[Part]) -> Pending:
        backend = self.backend
        assert isinstance(backend, UngroupedBackend)
        if not isinstance(work, Prepared):
            work = self.prepare(work)
        shape, cache = work.key[0], self.__dict__.setdefault("_ungrouped", {})
        if work.key not in cache:
            cache[work.key] = [
                PassTables(
                    group_shapes(self.base.config),
                    self.base.device,
                    max_adapters=1,
                    max_sequences=1,
                    max_blocks=8,
                    max_rank=shape.rank,
                )
                for _ in range(shape.adapters)
            ]
        backend.tables = cache[work.key][: len(work.parts)]
        start = 0
        for part, tables in zip(work.parts, backend.tables, strict=True):
            span = ((start, start + part.tokens),)
            fresh = self.optimizer.fresh(part.adapter.name)
            tables.refresh([PassAdapter(span, part.scale, self._table(part))], [fresh])
            start += part.tokens
        return super().queue(work)
