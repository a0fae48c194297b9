"""The optimizer step of a whole round on CUDA: norms, clipping, decision and update without the host.

    A adapters of the round, in the order of `begin`

Whether an adapter may step is decided on the device, from flags that passes set when a token's loss is not
finite and from its gradient norm; the host learns of it when it asks for the outcome. Until then it may queue
more rounds: an adapter that failed in one is left alone by all that follow (`health_triton.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.arena import Arena, Slot
from gshare.agent.train.device_pass import NOBODY
from gshare.kernels.adamw_8bit_layout import lookup_tables, matrix_tables
from gshare.kernels.adamw_8bit_triton import adamw_8bit_
from gshare.kernels.adamw_triton import HYPER_COLUMNS, adamw_, hyper_row
from gshare.kernels.grad_norm_triton import grad_norms
from gshare.kernels.health_triton import note_health_
from gshare.kernels.slot_table import slot_tables
from gshare.kernels.staging import Fetched, Readback, Staging

#: Most adapters of one round; one more flag takes what padding rows say.
MAX_ADAPTERS = NOBODY
#: Sets of adapters whose tables are kept: schedules that take turns come back to the same few.
_MAX_TABLES = 16


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

    slots: torch.Tensor
    blocks: torch.Tensor  # of all adapters
    fp32: torch.Tensor | None  # the rows of `blocks` of those with fp32 moments
    eight_bit: tuple[torch.Tensor, torch.Tensor] | None  # `matrix_tables` of the others
    cells: torch.Tensor  # (A,) int64: each adapter's place in `_Health`


class _Health:
    """A cell on the device for each adapter, from its first round on: 0 once a step of it has failed."""

    def __init__(self, device: torch.device) -> None:
        self.flags = torch.ones(64, dtype=torch.int32, device=device)  # doubled when there are more adapters
        self._cells: dict[str, tuple[Slot, int]] = {}

    def cells(self, arena: Arena, adapters: Sequence[Adapter]) -> list[int]:
        """Their cells; an adapter that is new has a sound one, also where another of its name was before."""
        return [self._cell(arena, adapter.name) for adapter in adapters]

    def _cell(self, arena: Arena, name: str) -> int:
        slot, known = arena.slot(name), self._cells.get(name)
        if known is not None and known[0] is slot:
            return known[1]
        living = set(arena.names())
        self._cells = {n: kept for n, kept in self._cells.items() if n in living and n != name}
        taken = {cell for _, cell in self._cells.values()}
        cell = next(index for index in range(len(taken) + 1) if index not in taken)
        if cell >= len(self.flags):
            self.flags = torch.cat([self.flags, torch.ones_like(self.flags)])
        self.flags[cell : cell + 1].fill_(1)  # in stream order: after what a leaver's last step says there
        self._cells[name] = (slot, cell)
        return cell


class DeviceOptimizer:
    """Steps the adapters of a round in four launches, five where some have 8-bit moments and others not.
    Their moments are the arena's."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.flags = torch.ones(MAX_ADAPTERS + 1, dtype=torch.int32, device=arena.device)
        self._health = _Health(arena.device)
        self._seats: dict[str, int] = {}
        self._fresh: set[str] = set()
        self._tables: OrderedDict[tuple[str, ...], _Tables] = OrderedDict()
        self._generation = -1  # of the arena when they were made
        self._lookup: torch.Tensor | None = None
        self._staging: Staging | None = None
        self._readback = Readback(arena.device)

    def begin(self, adapters: Sequence[Adapter]) -> None:
        """A new round: flags to finite, but for those whose earlier step failed; each adapter's first pass
        starts its gradients at zero."""
        assert len(adapters) <= MAX_ADAPTERS, len(adapters)
        self._seats = {adapter.name: seat for seat, adapter in enumerate(adapters)}
        self._fresh = set(self._seats)
        cells = self._slot_tables(adapters).cells
        torch.index_select(self._health.flags, 0, cells, out=self.flags[: len(adapters)])

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
        """Launch the update of every adapter for its `steps` (from 1) at its learning rate.

        All memory is had before the first update is launched: out of it, nothing has changed.
        """
        arena, count = self.arena, len(adapters)
        tables, staging = self._slot_tables(adapters), self._staging_for(count)
        if tables.eight_bit is not None and self._lookup is None:
            self._lookup = lookup_tables(arena.device)
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
        self._readback.reserve(norms, overflow, flags)
        if tables.fp32 is not None:
            moments = (arena.whole("exp_avg"), arena.whole("exp_avg_sq"))
            adamw_(params, grads, *moments, copy, tables.slots, tables.fp32, *per_adapter, overflow=overflow)
        if tables.eight_bit is not None:
            assert self._lookup is not None
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
        note_health_(self._health.flags, tables.cells, norms, flags, overflow)
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
        """Made anew when adapters come, go or move."""
        if self._generation != self.arena.generation:
            self._generation = self.arena.generation
            self._tables.clear()
        key = tuple(adapter.name for adapter in adapters)
        if key not in self._tables:
            self._tables[key] = self._make_tables(adapters)
            if len(self._tables) > _MAX_TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]

    def _make_tables(self, adapters: Sequence[Adapter]) -> _Tables:
        arena = self.arena
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
            eight_bit = (self._upload(table), self._upload(groups))
        return _Tables(
            self._upload(slots),
            self._upload(blocks),
            self._upload(own) if fp32 else None,
            eight_bit,
            self._upload(torch.tensor(self._health.cells(arena, adapters))),
        )

    def _upload(self, table: torch.Tensor) -> torch.Tensor:
        """In stream order: from memory that is not pinned a copy would wait for the round before."""
        if self.arena.device.type == "cuda":
            table = table.pin_memory()
        return table.to(self.arena.device, non_blocking=True)


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
