"""What configurations of a sweep may train at once, by predicted memory.

`predicted_mb` is the one place that predicts; by the measured model where there is one (`choose_estimate`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import psutil
from gshare.agent.errors import UsageError
from gshare.agent.jobs.memory import MemoryEstimate, ModelShape, largest_pass
from gshare.agent.jobs.memory_choice import choose_estimate
from gshare.agent.jobs.spec import AdapterSpec, RunSpec, cache_bytes
from gshare.agent.jobs.spec_rules import check_ranks
from gshare.agent.jobs.sweep_spec import SweepFile
from gshare.agent.service.base_identity import base_identity
from gshare.agent.vram.budget import parse_budget, show_mb, with_allowance
from gshare.cli.gpu_plan import GpuPlan, room_mb
from gshare.kernels.limits import MAX_RANK

#: Of the main memory that is free, on a CPU run: what else runs wants some too.
CPU_SHARE = 0.8


@dataclass(frozen=True)
class Memory:
    """`budget_mb`: what those that train at once may take together, MiB."""

    run: RunSpec
    shape: ModelShape
    specs: dict[str, AdapterSpec]  # a sampler adds to them
    on_gpu: bool
    budget_mb: int
    base: str | None = None  # its `base_identity`
    cards: tuple[str, ...] = ()  # names of the GPUs that it may be on

    def fits(self, names: Sequence[str]) -> bool:
        return self.predicted_mb(names) <= self.budget_mb

    def predicted_mb(self, names: Sequence[str]) -> int:
        """Peak of training these at once, evaluation and saves included, MiB."""
        estimate = self._of([self.specs[name] for name in names])
        if self.on_gpu:
            return with_allowance(estimate.total, estimate.fragmentation)
        return math.ceil(estimate.total / 2**20)

    def estimate(self) -> MemoryEstimate:
        """Of all of them at once: what is asked for is bounded by `budget_mb`."""
        return self._of(list(self.specs.values()))

    def _of(self, specs: Sequence[AdapterSpec]) -> MemoryEstimate:
        tokens, longest = largest_pass(msgspec.structs.replace(self.run, adapters=tuple(specs)))
        return choose_estimate(
            self.shape,
            specs,
            base_dtype=self.run.base_dtype,
            device="cuda" if self.on_gpu else "cpu",
            pass_tokens=tokens,
            longest_row=longest,
            base=lambda: self.base,
            cards=self.cards,
            trunk_cache=cache_bytes(self.run.trunk_cache) or 0,
            trunk_cache_host=int(self.run.trunk_cache_host * 2**30),
        )


def check_for_gpu(source: SweepFile) -> None:
    """UsageError: a configuration has a rank, or may be drawn with one, that no GPU trains. Before any data
    is read."""
    spec = source.spec()
    check_ranks(spec.run.adapters)
    space = spec.sampled
    if space is not None and (highest := space.highest("r")) > MAX_RANK:
        raise UsageError(
            f"{space.source}: [sweep.ranges], r: up to {highest:g}, and {MAX_RANK} is the most that the CUDA "
            "kernels take; lower it, or train on the CPU"
        )


def memory_of(
    run: RunSpec,
    model_dir: Path,
    adapters: Sequence[AdapterSpec],
    plan: GpuPlan | None,
    vram: str | None,
) -> Memory:
    """The budget: `--vram`, or what all need, or as much of it as can be had now (or at all, where no
    configuration fits into what can be had now).

    UsageError naming the configuration when one fits into no budget that there can be.
    """
    from gshare.agent.base.config import read_config

    if plan is not None:
        check_ranks(adapters)  # a sampled sweep's, whose template has the rank, are not known before
    specs = {spec.name: spec for spec in adapters}
    shape = ModelShape.of(read_config(model_dir))
    cards = plan.cards if plan is not None else ()
    memory = Memory(run, shape, specs, plan is not None, 0, base_identity(model_dir), cards)
    alone = {name: memory.predicted_mb([name]) for name in specs}
    largest = max(alone, key=lambda name: alone[name])
    if vram is not None:
        now = ever = parse_budget(vram)
    elif plan is not None:
        now, ever = room_mb(plan)
    else:
        now = int(psutil.virtual_memory().available * CPU_SHARE) >> 20
        ever = max(now, alone[largest])  # an estimate is no reason to refuse what may be tried
    if alone[largest] > ever:
        raise UsageError(
            f"{run.source}: configuration {largest} needs {show_mb(alone[largest])} alone, and "
            f"{show_mb(ever)} can be had{' (--vram)' if vram is not None else ''}; lower max_length, "
            "per_device_train_batch_size or r, or take a smaller base_dtype"
        )
    room = now if now >= alone[largest] else ever
    # What all of them need is seldom more than a part of a large device; the rest is left to others.
    budget = min(room, memory.predicted_mb(list(specs)))
    return replace(memory, budget_mb=budget)
