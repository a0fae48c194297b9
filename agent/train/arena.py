"""The adapter arena: every adapter's A and B matrices, gradients and moments in flat memory.

One flat tensor a purpose, one contiguous slot an adapter, one offset a matrix. Ranks differ freely:
nothing is padded to a common rank. Offsets are multiples of 64 bytes, so that a matrix has the same
alignment in any slot and its bits cannot tell where it lies. All is fp32 but for the copy in compute dtype
and the codes of 8-bit moments (`adamw_8bit_layout.py`).
The arena grows by reallocation, and moves slots to close gaps; views are therefore asked for, never kept over
an allocation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from gshare.agent.base.config import ModelConfig
from gshare.agent.jobs.spec import AdapterSpec
from gshare.kernels.adamw_8bit import Adam8bitState
from gshare.kernels.adamw_8bit_layout import Matrix8bit, state_offsets, state_views

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTS_8BIT = ("codes1", "codes2", "floats1", "floats2")
ALIGN = 16  # fp32 elements: 64 bytes, a cache line and the widest vector


@dataclass(frozen=True)
class MatrixKey:
    """Names one LoRA matrix: side A is (r, in_features), side B is (out_features, r)."""

    layer: int
    linear: str
    side: str  # "A" or "B"

    def peft_name(self) -> str:
        """The tensor's name in PEFT's adapter_model.safetensors."""
        block = "mlp" if self.linear in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        return f"base_model.model.model.layers.{self.layer}.{block}.{self.linear}.lora_{self.side}.weight"


def adapted_layers(spec: AdapterSpec, num_layers: int) -> tuple[int, ...]:
    """The layers an adapter touches, ascending."""
    if spec.layers_to_transform is None:
        return tuple(range(num_layers))
    return tuple(sorted(spec.layers_to_transform))


def adapter_shapes(spec: AdapterSpec, config: ModelConfig) -> dict[MatrixKey, tuple[int, int]]:
    """Every matrix of an adapter in contract order: by layer, by linear as they run, A before B."""
    shapes: dict[MatrixKey, tuple[int, int]] = {}
    for layer in adapted_layers(spec, config.num_layers):
        for linear in spec.targets:
            out_features, in_features = config.linear_shape(linear)
            shapes[MatrixKey(layer, linear, "A")] = (spec.r, in_features)
            shapes[MatrixKey(layer, linear, "B")] = (out_features, spec.r)
    return shapes


@dataclass(frozen=True)
class Slot:
    """Where one adapter lies: start and length in elements, and each matrix's absolute offset."""

    start: int
    length: int
    offsets: dict[MatrixKey, int]

    def moved(self, start: int) -> Slot:
        by = start - self.start
        return Slot(start, self.length, {key: at + by for key, at in self.offsets.items()}) if by else self


def _aligned(elements: int) -> int:
    return -(-elements // ALIGN) * ALIGN


def _first_gap(taken: Sequence[tuple[int, int]], length: int) -> int:
    """Where `length` elements fit first beside what is taken: (start, length) each."""
    at = 0
    for start, other in sorted(taken):
        if start - at >= length:
            return at
        at = start + other
    return at


class _Region:
    """Flat tensors that share one layout of slots. A slot goes to the first gap that is long enough; where
    the free elements are enough but no gap is, the others are moved together, so that what a region takes is
    the most that its slots ever took at once."""

    def __init__(self, device: torch.device, purposes: dict[str, torch.dtype]) -> None:
        self.flat = {name: torch.zeros(0, device=device, dtype=dtype) for name, dtype in purposes.items()}
        self.slots: dict[str, Slot] = {}

    @property
    def capacity(self) -> int:
        return next(iter(self.flat.values())).numel()

    def allocate(self, name: str, offsets: dict[MatrixKey, int], length: int) -> None:
        """A zeroed slot of `length` elements whose matrices lie at `offsets` from its start."""
        assert name not in self.slots
        self.reserve([length])
        start = _first_gap(self._taken(), length)
        for flat in self.flat.values():
            flat[start : start + length].zero_()
        self.slots[name] = Slot(start, length, {key: start + offset for key, offset in offsets.items()})

    def reserve(self, lengths: Sequence[int]) -> None:
        """See that slots of these lengths, allocated in this order, find their place: move others together,
        or grow to what all of them take."""
        taken = self._taken()
        for length in lengths:
            taken.append((_first_gap(taken, length), length))
        if max((start + length for start, length in taken), default=0) <= self.capacity:
            return
        needed = sum(length for _, length in taken)
        if needed > self.capacity:
            self._grow(needed)
        else:
            self._compact()

    def _taken(self) -> list[tuple[int, int]]:
        return [(slot.start, slot.length) for slot in self.slots.values()]

    def rows(self, name: str) -> slice:
        slot = self.slots[name]
        return slice(slot.start, slot.start + slot.length)

    def view(self, purpose: str, name: str, key: MatrixKey, shape: tuple[int, int]) -> torch.Tensor:
        offset = self.slots[name].offsets[key]
        return self.flat[purpose][offset : offset + math.prod(shape)].view(shape)

    def nbytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.flat.values())

    def _compact(self) -> None:
        """Moves every slot to the left, one by one: after an OOM half way all are whole."""
        for name, slot, start in self._compacted():
            if start == slot.start:
                continue
            old = slice(slot.start, slot.start + slot.length)
            moving = {purpose: flat[old].clone() for purpose, flat in self.flat.items()}
            for purpose, values in moving.items():
                self.flat[purpose][start : start + slot.length] = values
            self.slots[name] = slot.moved(start)

    def _grow(self, needed: int) -> None:
        """To `needed` elements, slots without gaps. All or nothing: an OOM leaves everything as it was."""
        grown = {
            purpose: torch.zeros(needed, device=flat.device, dtype=flat.dtype)
            for purpose, flat in self.flat.items()
        }
        places = self._compacted()
        for purpose, flat in self.flat.items():
            for _, slot, start in places:
                old = flat[slot.start : slot.start + slot.length]
                grown[purpose][start : start + slot.length] = old
        self.flat = grown
        self.slots |= {name: slot.moved(start) for name, slot, start in places}

    def _compacted(self) -> list[tuple[str, Slot, int]]:
        """Every slot and where it starts when there are no gaps, from the left."""
        slots = sorted(self.slots.items(), key=lambda one: (one[1].start, one[1].length))
        starts = accumulate((slot.length for _, slot in slots), initial=0)
        return [(name, slot, start) for (name, slot), start in zip(slots, starts, strict=False)]


class Arena:
    """Flat storage for all adapters of a trainer, on one device.

    Weights (`params`, `grads`, and `compute` when the compute dtype is not fp32) have one layout of slots.
    Each optimizer's state has its own: fp32 moments (`exp_avg`, `exp_avg_sq`), or 8-bit ones (`codes1`,
    `codes2`, and `floats1`, `floats2` for their scales).
    """

    def __init__(self, device: torch.device, compute_dtype: torch.dtype) -> None:
        self.device = device
        self.compute_dtype = compute_dtype
        purposes = {"params": torch.float32, "grads": torch.float32}
        if compute_dtype != torch.float32:
            # What the kernels multiply with; in fp32 that is the masters themselves.
            purposes["compute"] = compute_dtype
        self._weights = _Region(device, purposes)
        self._moments = _Region(device, dict.fromkeys(MOMENTS, torch.float32))
        self._codes = _Region(device, {"codes1": torch.uint8, "codes2": torch.uint8})
        self._floats = _Region(device, {"floats1": torch.float32, "floats2": torch.float32})
        self._regions = (self._weights, self._moments, self._codes, self._floats)
        self._shapes: dict[str, dict[MatrixKey, tuple[int, int]]] = {}
        #: Goes up whenever a slot comes or goes: what was derived from slots or pointers is good until then.
        self.generation = 0

    def allocate(
        self, name: str, shapes: dict[MatrixKey, tuple[int, int]], *, eight_bit: bool = False
    ) -> None:
        """A zeroed slot for adapter `name`, with fp32 moments or `eight_bit` ones."""
        self.generation += 1
        try:
            for region, place in self._places(shapes, eight_bit=eight_bit):
                region.allocate(name, *place)
        except BaseException:
            self.free(name)
            raise
        self._shapes[name] = dict(shapes)

    def reserve(self, adapters: Sequence[tuple[dict[MatrixKey, tuple[int, int]], bool]]) -> None:
        """Room for adapters that are about to be allocated in this order: (shapes, whether 8-bit) each.

        Growing copies everything: one that grows for each of sixty adapters copies thirty times as much, and
        has old and new beside each other sixty times.
        """
        self.generation += 1
        lengths: dict[_Region, list[int]] = {}
        for shapes, eight_bit in adapters:
            for region, (_, length) in self._places(shapes, eight_bit=eight_bit):
                lengths.setdefault(region, []).append(length)
        for region, some in lengths.items():
            region.reserve(some)

    def _places(
        self, shapes: dict[MatrixKey, tuple[int, int]], *, eight_bit: bool
    ) -> list[tuple[_Region, tuple[dict[MatrixKey, int], int]]]:
        """In which regions such an adapter has slots, and of each its matrices' offsets and its length."""
        sizes = [math.prod(shape) for shape in shapes.values()]
        *starts, length = accumulate(map(_aligned, sizes), initial=0)
        whole = (dict(zip(shapes, starts, strict=True)), length)
        if not eight_bit:
            return [(self._weights, whole), (self._moments, whole)]
        state = state_offsets(sizes)
        codes, floats = (
            dict(zip(shapes, column, strict=True)) for column in zip(*state.matrices, strict=True)
        )
        return [
            (self._weights, whole),
            (self._codes, (codes, state.codes)),
            (self._floats, (floats, state.floats)),
        ]

    def free(self, name: str) -> None:
        """Give the adapter's slots back; freeing twice is harmless."""
        self.generation += 1
        self._shapes.pop(name, None)
        for region in self._regions:
            region.slots.pop(name, None)

    def names(self) -> list[str]:
        return list(self._shapes)

    def slot(self, name: str) -> Slot:
        """Where the adapter's weights lie."""
        return self._weights.slots[name]

    def shape(self, name: str, key: MatrixKey) -> tuple[int, int]:
        return self._shapes[name][key]

    def moments_slot(self, name: str) -> Slot | None:
        """Where the adapter's fp32 moments lie; None for 8-bit ones."""
        return self._moments.slots.get(name)

    def matrices_8bit(self, name: str, adapter: int = 0) -> list[Matrix8bit]:
        """Where the parts of 8-bit matrices lie, in contract order, for the kernel's `adapter`."""
        weights, codes, floats = (
            region.slots[name].offsets for region in (self._weights, self._codes, self._floats)
        )
        return [
            Matrix8bit(adapter, weights[key], math.prod(shape), codes[key], floats[key])
            for key, shape in self._shapes[name].items()
        ]

    def states_8bit(
        self, name: str, flats: Mapping[str, torch.Tensor] | None = None
    ) -> dict[MatrixKey, Adam8bitState]:
        """The 8-bit moments of every matrix, as views; valid until the next `allocate`. Of copies of the
        adapter's `flat`s, by purpose, where they are given."""
        if flats is None:
            flats = {purpose: self.flat(purpose, name) for purpose in MOMENTS_8BIT}
        codes, floats = (region.slots[name].start for region in (self._codes, self._floats))
        return {
            key: state_views(
                matrix._replace(codes=matrix.codes - codes, floats=matrix.floats - floats),
                shape,
                (flats["codes1"], flats["codes2"]),
                (flats["floats1"], flats["floats2"]),
            )
            for matrix, (key, shape) in zip(self.matrices_8bit(name), self._shapes[name].items(), strict=True)
        }

    def whole(self, purpose: str) -> torch.Tensor:
        """All adapters' memory of one purpose ("compute": what kernels multiply with); valid until the
        next `allocate`."""
        if purpose == "compute" and "compute" not in self._weights.flat:
            purpose = "params"
        return self._region(purpose).flat[purpose]

    def has(self, name: str, key: MatrixKey) -> bool:
        return key in self._shapes[name]

    def matrices(self, name: str) -> Iterator[tuple[MatrixKey, tuple[int, int]]]:
        """Keys and shapes in contract order."""
        yield from self._shapes[name].items()

    def view(self, purpose: str, name: str, key: MatrixKey) -> torch.Tensor:
        """The matrix `key` of adapter `name`; valid until the next `allocate`."""
        return self._region(purpose).view(purpose, name, key, self._shapes[name][key])

    def places(self, purpose: str, name: str) -> dict[MatrixKey, tuple[int, tuple[int, int]]]:
        """Where each matrix begins in the adapter's `flat`, and its shape; for as long as it is there."""
        slot = self._region(purpose).slots[name]
        return {key: (slot.offsets[key] - slot.start, shape) for key, shape in self._shapes[name].items()}

    def flat(self, purpose: str, name: str) -> torch.Tensor:
        """The adapter's whole slot as one vector, gaps between matrices (zeros) included."""
        region = self._region(purpose)
        return region.flat[purpose][region.rows(name)]

    def compute_view(self, name: str, key: MatrixKey) -> torch.Tensor:
        """The matrix in compute dtype, as of the last `publish`."""
        purpose = "compute" if "compute" in self._weights.flat else "params"
        return self._weights.view(purpose, name, key, self._shapes[name][key])

    def publish(self, name: str) -> None:
        """Round the adapter's fp32 masters into the compute copy (nothing to do when they are one)."""
        flat = self._weights.flat
        if "compute" in flat:
            rows = self._weights.rows(name)
            flat["compute"][rows].copy_(flat["params"][rows])  # rounds on the way, without a temporary

    def zero_grads(self, name: str) -> None:
        self.flat("grads", name).zero_()

    def nbytes(self) -> int:
        return sum(region.nbytes() for region in self._regions)

    def _region(self, purpose: str) -> _Region:
        return next(region for region in self._regions if purpose in region.flat)
