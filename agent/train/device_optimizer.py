"""The optimizer step of a whole round on CUDA: norms, clipping, decision and update without the host.

    A adapters of the round, in the order of `begin`

Whether an adapter may step is decided on the device, from flags that passes set when a token's loss is not
finite and from its gradient norm; the host learns of it when it asks for the outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.arena import Arena
from gshare.agent.train.device_pass import NOBODY
from gshare.kernels.adamw_8bit_layout import lookup_tables, matrix_tables
from gshare.kernels.adamw_8bit_triton import adamw_8bit_
from gshare.kernels.adamw_triton import HYPER_COLUMNS, adamw_, hyper_row
from gshare.kernels.grad_norm_triton import grad_norms
from gshare.kernels.slot_table import slot_tables
from gshare.kernels.staging import Fetched, Readback, Staging

#: Most adapters of one round; one more flag takes what padding rows say.
MAX_ADAPTERS = NOBODY


class Verdicts:
    """What became of a round's updates. Every attribute waits for the device."""

    def __init__(self, fetched: Fetched) -> None:
        self._fetched = fetched

    def wait(self) -> Verdicts:
        self._fetched.read()
        return self

    @property
    def norms(self) -> torch.Tensor:
        """(A,) fp64, before clipping."""
        return self._fetched.read()[0]

    @property
    def overflow(self) -> torch.Tensor:
        """(A,) int32: 1 where a new weight is not finite."""
        return self._fetched.read()[1]

    @property
    def finite(self) -> torch.Tensor:
        """(A,) int32: 0 where a token's loss was not finite."""
        return self._fetched.read()[2]


@dataclass(frozen=True)
class _Tables:
    """Where a round's adapters lie, on the device. None: no adapter of the round has such moments."""

    key: tuple[object, ...]
    slots: torch.Tensor
    blocks: torch.Tensor  # of all adapters
    fp32: torch.Tensor | None  # the rows of `blocks` of those with fp32 moments
    eight_bit: tuple[torch.Tensor, torch.Tensor] | None  # `matrix_tables` of the others


class DeviceOptimizer:
    """Steps the adapters of a round in three launches, four where some have 8-bit moments and others not.
    Their moments are the arena's."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.flags = torch.ones(MAX_ADAPTERS + 1, dtype=torch.int32, device=arena.device)
        self._seats: dict[str, int] = {}
        self._fresh: set[str] = set()
        self._tables: _Tables | None = None
        self._lookup: torch.Tensor | None = None
        self._staging: Staging | None = None
        self._readback = Readback(arena.device)

    def begin(self, adapters: Sequence[Adapter]) -> None:
        """A new round: flags to finite; each adapter's first pass starts its gradients at zero."""
        assert len(adapters) <= MAX_ADAPTERS, len(adapters)
        self._seats = {adapter.name: seat for seat, adapter in enumerate(adapters)}
        self._fresh = set(self._seats)
        self.flags.fill_(1)

    def seat(self, name: str) -> int:
        """An adapter outside of the round (evaluation) has the seat nobody reads."""
        return self._seats.get(name, MAX_ADAPTERS)

    def fresh(self, name: str) -> bool:
        """Whether the round has no gradients of it yet: its next pass must not add to what is there."""
        return name in self._fresh

    def passed(self, names: Sequence[str]) -> None:
        """These have gradients now."""
        self._fresh.difference_update(names)

    def norms(self, adapters: Sequence[Adapter]) -> torch.Tensor:
        """(A,) fp64 on the device."""
        self._zero_unpassed(adapters)
        tables = self._slot_tables(adapters)
        return grad_norms(self.arena.whole("grads"), tables.slots, tables.blocks)

    def step(self, adapters: Sequence[Adapter], steps: Sequence[int], rates: Sequence[float]) -> Verdicts:
        """Launch the update of every adapter for its `steps` (from 1) at its learning rate."""
        arena, count = self.arena, len(adapters)
        tables, staging = self._slot_tables(adapters), self._staging_for(count)
        # Beside the hyper-parameters zeros travel: no weight has overflown yet.
        staging.host()["hyper"][:count] = [
            _hyper(adapter, step, rate) for adapter, step, rate in zip(adapters, steps, rates, strict=True)
        ]
        staging.upload()
        hyper, overflow = (staging.device[name][:count] for name in ("hyper", "overflow"))
        norms, flags = self.norms(adapters), self.flags[:count]
        params, grads, compute = (arena.whole(purpose) for purpose in ("params", "grads", "compute"))
        copy = None if compute.dtype == torch.float32 else compute
        per_adapter = (hyper, norms, flags)
        if tables.fp32 is not None:
            moments = (arena.whole("exp_avg"), arena.whole("exp_avg_sq"))
            adamw_(params, grads, *moments, copy, tables.slots, tables.fp32, *per_adapter, overflow=overflow)
        if tables.eight_bit is not None:
            if self._lookup is None:
                self._lookup = lookup_tables(arena.device)
            adamw_8bit_(
                params,
                grads,
                (arena.whole("codes1"), arena.whole("codes2")),
                (arena.whole("floats1"), arena.whole("floats2")),
                copy,
                self._lookup,
                *tables.eight_bit,
                *per_adapter,
                overflow=overflow,
            )
        return Verdicts(self._readback.fetch(norms, overflow, flags))

    def _zero_unpassed(self, adapters: Sequence[Adapter]) -> None:
        """An adapter that had no pass has the last round's gradients still."""
        for adapter in adapters:
            if adapter.name in self._fresh:
                self.arena.zero_grads(adapter.name)
                self._fresh.discard(adapter.name)

    def _staging_for(self, adapters: int) -> Staging:
        if self._staging is None or self._staging.device["hyper"].shape[0] < adapters:
            rows = 1 << (adapters - 1).bit_length()
            sections = {"hyper": ((rows, HYPER_COLUMNS), "float64"), "overflow": ((rows,), "int32")}
            self._staging = Staging(sections, self.arena.device)
        return self._staging

    def _slot_tables(self, adapters: Sequence[Adapter]) -> _Tables:
        """Made anew when the round's adapters or their places change."""
        key = (self.arena.generation, *(adapter.name for adapter in adapters))
        if self._tables is None or self._tables.key != key:
            arena, device = self.arena, self.arena.device
            places, fp32, matrices = [], [], []
            for index, adapter in enumerate(adapters):
                weights, moments = arena.slot(adapter.name), arena.moments_slot(adapter.name)
                places.append((weights.start, moments.start if moments else 0, weights.length))
                if moments is not None:
                    fp32.append(index)
                else:
                    matrices += arena.matrices_8bit(adapter.name, index)
            slots, blocks = slot_tables(places)
            own = blocks[torch.isin(blocks[:, 0], torch.tensor(fp32))]
            eight_bit = None
            if matrices:
                table, groups = matrix_tables(matrices)
                eight_bit = (table.to(device), groups.to(device))
            self._tables = _Tables(
                key, slots.to(device), blocks.to(device), own.to(device) if fp32 else None, eight_bit
            )
        return self._tables


def _hyper(adapter: Adapter, step: int, rate: float) -> tuple[float, ...]:
    spec = adapter.spec
    return hyper_row(
        lr=rate,
        beta1=spec.adam_beta1,
        beta2=spec.adam_beta2,
        eps=spec.adam_epsilon,
        weight_decay=spec.weight_decay,
        step=step,
        max_grad_norm=spec.max_grad_norm,
    )
