"""The optimizer step of a whole round on CUDA: norms, clipping, decision and update without the host.

    A adapters of the round, in the order of `begin`

Whether an adapter may step is decided on the device, from flags that passes set when a token's loss is not
finite and from its gradient norm; the host learns of it when it asks for the outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.arena import Arena
from gshare.agent.train.device_pass import NOBODY
from gshare.kernels.adamw_triton import HYPER_COLUMNS, adamw_, hyper_row
from gshare.kernels.grad_norm_triton import grad_norms
from gshare.kernels.slot_table import slot_tables

#: Most adapters of one round; one more flag takes what padding rows say.
MAX_ADAPTERS = NOBODY


@dataclass
class Verdicts:
    """What became of a round's updates; `wait` before reading."""

    norms: torch.Tensor  # (A,) fp64, pinned
    overflow: torch.Tensor  # (A,) int32, pinned: 1 where a new weight is not finite
    done: torch.cuda.Event | None

    def wait(self) -> Verdicts:
        if self.done is not None:
            self.done.synchronize()
        return self


class DeviceOptimizer:
    """Steps the adapters of a round in three launches. Their moments are the arena's."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.flags = torch.ones(MAX_ADAPTERS + 1, dtype=torch.int32, device=arena.device)
        self._seats: dict[str, int] = {}
        self._tables: tuple[object, torch.Tensor, torch.Tensor] | None = None

    def begin(self, adapters: Sequence[Adapter]) -> None:
        """Gradients to zero, flags to finite; passes find their adapters' seats from here on."""
        assert len(adapters) <= MAX_ADAPTERS, len(adapters)
        self._seats = {adapter.name: seat for seat, adapter in enumerate(adapters)}
        self.flags.fill_(1)
        for adapter in adapters:
            self.arena.zero_grads(adapter.name)

    def seat(self, name: str) -> int:
        """An adapter outside of the round (evaluation) has the seat nobody reads."""
        return self._seats.get(name, MAX_ADAPTERS)

    def norms(self, adapters: Sequence[Adapter]) -> torch.Tensor:
        """(A,) fp64 on the device."""
        slots, blocks = self._slot_tables(adapters)
        return grad_norms(self.arena.whole("grads"), slots, blocks)

    def step(self, adapters: Sequence[Adapter], steps: Sequence[int], rates: Sequence[float]) -> Verdicts:
        """Launch the update of every adapter for its `steps` (from 1) at its learning rate."""
        arena, device = self.arena, self.arena.device
        slots, blocks = self._slot_tables(adapters)
        rows = np.zeros((len(adapters), HYPER_COLUMNS))
        for row, adapter, step, rate in zip(rows, adapters, steps, rates, strict=True):
            spec = adapter.spec
            row[:] = hyper_row(
                lr=rate,
                beta1=spec.adam_beta1,
                beta2=spec.adam_beta2,
                eps=spec.adam_epsilon,
                weight_decay=spec.weight_decay,
                step=step,
                max_grad_norm=spec.max_grad_norm,
            )
        hyper = torch.from_numpy(rows)
        if device.type == "cuda":
            hyper = hyper.pin_memory().to(device, non_blocking=True)
        norms = grad_norms(arena.whole("grads"), slots, blocks)
        overflow = torch.zeros(len(adapters), dtype=torch.int32, device=device)
        compute = arena.whole("compute")
        adamw_(
            arena.whole("params"),
            arena.whole("grads"),
            arena.whole("exp_avg"),
            arena.whole("exp_avg_sq"),
            None if compute.dtype == torch.float32 else compute,
            slots,
            blocks,
            hyper,
            norms,
            self.flags[: len(adapters)],
            overflow=overflow,
        )
        return _fetch(norms, overflow)

    def _slot_tables(self, adapters: Sequence[Adapter]) -> tuple[torch.Tensor, torch.Tensor]:
        """On the device; made anew when the round's adapters or their places change."""
        places = []
        for adapter in adapters:
            weights, moments = self.arena.slot(adapter.name), self.arena.moments_slot(adapter.name)
            places.append((weights.start, moments.start if moments else 0, weights.length))
        key = tuple(places)
        if self._tables is None or self._tables[0] != key:
            slots, blocks = slot_tables(places)
            self._tables = (key, slots.to(self.arena.device), blocks.to(self.arena.device))
        return self._tables[1], self._tables[2]


def _fetch(norms: torch.Tensor, overflow: torch.Tensor) -> Verdicts:
    if not norms.is_cuda:
        return Verdicts(norms, overflow, None)
    host_norms = torch.empty(norms.shape, dtype=norms.dtype, pin_memory=True)
    host_overflow = torch.empty(overflow.shape, dtype=overflow.dtype, pin_memory=True)
    host_norms.copy_(norms, non_blocking=True)
    host_overflow.copy_(overflow, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return Verdicts(host_norms, host_overflow, done)
