"""The gshare arms of `benchmarks/trunk.py`: what they train, timed, and what became of it.

dedicated   one job after another, each alone on the engine
packed      all jobs in one pass; equal rows run once for each job
shared      all jobs in one pass; equal rows run once below the adapters
cached      shared, and their states are kept: the last epoch runs nothing below the adapters
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gpu_arms import default_cublas, graph_seconds
from gpu_workload import make_base
from gshare.agent.base.weights import Base
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.device_engine import DeviceEngine
from gshare.agent.train.engine import Engine, Losses, Verdict, mean_loss
from gshare.agent.train.part import Part
from gshare.agent.train.trunk import TrunkUse
from gshare.agent.train.trunk_cache import TrunkCache
from gshare.kernels.layout import GROUPS
from gshare.kernels.numerics import NUMERICS
from gshare.kernels.reference_backend import ReferenceBackend
from gshare.kernels.triton_backend import TritonBackend
from safetensors.torch import save
from trunk_operations import EACH, HEAD, Product, pass_products
from trunk_workload import Cohort

ARMS = ("dedicated", "packed", "shared", "cached")
#: What an epoch's states need at most: 8 steps × 512 tokens × 32 jobs, were all different, × 8 KiB.
CACHE_BYTES = 1 << 30


class Clock:
    """Seconds of the machine on CUDA. On a CPU seconds of this process on it: others run there too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self) -> float:
        if self._device.type != "cuda":
            return time.process_time()
        torch.cuda.synchronize(self._device)
        return time.monotonic()


@dataclass
class Fate:
    """What became of one job: its losses of every step, and its bytes."""

    losses: list[float] = field(default_factory=list)
    tokens: Any = field(default_factory=hashlib.sha256)  # of every token's loss
    held_out: float = 0.0
    adapter: str = ""
    moments: str = ""

    def told(self) -> dict[str, Any]:
        return {
            "losses": self.losses,
            "token_losses_sha256": self.tokens.hexdigest(),
            "held_out": self.held_out,
            "adapter_sha256": self.adapter,
            "moments_sha256": self.moments,
        }


class Group:
    """Jobs that train together. Each step is queued before the last is read, where the engine does that."""

    def __init__(self, engine: Engine, cohort: Cohort, numbers: Sequence[int]) -> None:
        specs = cohort.specs()
        self.engine, self.cohort, self.numbers = engine, cohort, numbers
        self.adapters: list[Adapter] = [engine.new_adapter(specs[n].name, specs[n]) for n in numbers]
        self.rates = [adapter.spec.learning_rate for adapter in self.adapters]
        self.fates = {adapter.name: Fate() for adapter in self.adapters}
        self.trunk = TrunkUse()  # of the last epoch
        self.done = 0  # optimizer steps

    def epoch(self) -> None:
        under_way: deque[tuple[Sequence[Part], int, Losses, Callable[[], list[Verdict]]]] = deque()
        self.trunk = TrunkUse()
        for step in range(self.cohort.steps):
            parts = self._parts(step)
            self.engine.begin_round(self.adapters)
            running = self.engine.queue(parts)
            self.done += 1
            steps = [self.done] * len(parts)
            verdicts = self.engine.finish_round(self.adapters, steps, self.rates)
            under_way.append((parts, self.done, running, verdicts))
            if len(under_way) > self.engine.queues_ahead:
                self._read(*under_way.popleft())
        while under_way:
            self._read(*under_way.popleft())

    def finish(self) -> dict[str, dict[str, Any]]:
        """Held-out losses and bytes; the adapters are gone then."""
        held_out = [self.cohort.held_out(number) for number in self.numbers]
        parts = [Part(a, rows) for a, rows in zip(self.adapters, held_out, strict=True)]
        for part, losses in zip(parts, self.engine.evaluate(parts), strict=True):
            fate = self.fates[part.adapter.name]
            fate.held_out = mean_loss(losses, sum(row.label_tokens for row in part.rows))
            fate.adapter = _sha256(part.adapter.parameters())
            fate.moments = _sha256(part.adapter.optimizer_tensors())
            part.adapter.close()
        return {name: fate.told() for name, fate in self.fates.items()}

    def _parts(self, step: int) -> list[Part]:
        found = []
        for number, adapter in zip(self.numbers, self.adapters, strict=True):
            rows = self.cohort.rows(step, number)
            found.append(Part(adapter, rows, self.done, sum(row.label_tokens for row in rows)))
        return found

    def _read(
        self, parts: Sequence[Part], step: int, running: Losses, verdicts: Callable[[], list[Verdict]]
    ) -> None:
        self.trunk += running.trunk
        told = zip(parts, running.losses(), verdicts(), self.rates, strict=True)
        for part, losses, verdict, rate in told:
            fate = self.fates[part.adapter.name]
            fate.losses.append(mean_loss(losses, part.label_tokens))
            fate.tokens.update(np.array(losses, dtype="<f8").tobytes())
            if not verdict.committed:
                part.adapter.update(step=step, learning_rate=rate, norm=verdict.norm)


def _sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of the file that safetensors would write."""
    return hashlib.sha256(save(dict(tensors))).hexdigest()


def make_engine(cohort: Cohort, arm: str, device: torch.device) -> Engine:
    base = make_base(cohort.model, cohort.base_dtype, device)
    on_cuda = device.type == "cuda"
    engine = DeviceEngine(base, TritonBackend()) if on_cuda else Engine(base, ReferenceBackend())
    engine.share_trunk = arm != "packed"
    if arm == "cached":
        identity = (base.fingerprint, NUMERICS)
        engine.cache = TrunkCache(device, identity=identity, device_bytes=CACHE_BYTES)
    return engine


@dataclass
class Times:
    """Seconds of the first epoch of all jobs, the making of their adapters included, and of the last."""

    first: float = 0.0
    steady: float = 0.0


def train(
    engine: Engine, cohort: Cohort, groups: Sequence[Sequence[int]], timed: Callable[[bool], None]
) -> tuple[Times, TrunkUse, dict[str, dict[str, Any]]]:
    """Each group of jobs together, the groups one after another. `timed` is told when timing begins and
    ends of a last epoch."""
    clock, times, trunk, fates = Clock(engine.base.device), Times(), TrunkUse(), {}
    for numbers in groups:
        begun = clock()
        group = Group(engine, cohort, numbers)
        group.epoch()
        times.first += clock() - begun
        for _ in range(cohort.epochs - 2):
            group.epoch()
        timed(True)
        begun = clock()
        group.epoch()
        times.steady += clock() - begun
        timed(False)
        trunk += group.trunk
        fates |= group.finish()
    return times, trunk, fates


def solo_floor(base: Base, cohort: Cohort) -> float:
    """Tokens per second of the base products alone that one job's step of average length has to make: no
    LoRA, attention, norm or optimizer; a CUDA graph on CUDA, one by one on a CPU."""
    lengths = [len(row.tokens) for step in range(cohort.steps) for row in cohort.rows(step, 0)]
    middle = sorted(range(len(lengths)), key=lambda step: lengths[step])[len(lengths) // 2]
    rows = cohort.rows(middle, 0)
    products = pass_products(cohort.config, cohort.lowest_layer, rows, EACH)
    inputs: dict[tuple[int, int], torch.Tensor] = {}

    def operand(product: Product, weight: torch.Tensor) -> torch.Tensor:
        shape = (product.rows, weight.shape[0 if product.transposed else 1])
        if shape not in inputs:
            inputs[shape] = torch.randn(shape, device=base.device, dtype=base.compute_dtype)
        return inputs[shape]

    weights = [_weight(base, product) for product in products]
    operands = [operand(product, w) for product, w in zip(products, weights, strict=True)]

    def run() -> None:
        for product, x, w in zip(products, operands, weights, strict=True):
            _ = x @ (w if product.transposed else w.t())

    return lengths[middle] / _median_seconds(run, base.device)


def _weight(base: Base, product: Product) -> torch.Tensor:
    if product.layer == HEAD:
        return base.lm_head.dense()
    layer = base.layers[product.layer]
    for name, linears in GROUPS.items():
        if linears == product.linears:
            return layer.groups[name].weight.dense()
    return torch.cat([layer.linears[linear].weight.dense() for linear in product.linears])


def _median_seconds(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    if device.type == "cuda":
        with default_cublas():
            return graph_seconds(run, repeats)
    clock, times = Clock(device), []
    for _ in range(repeats):
        begun = clock()
        run()
        times.append(clock() - begun)
    return sorted(times)[repeats // 2]
