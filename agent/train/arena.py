"""The adapter arena: every adapter's A and B matrices, gradients and moments in flat fp32 memory.

One flat tensor a purpose, one contiguous slot an adapter, one offset a matrix. Ranks differ freely:
nothing is padded to a common rank. Offsets are multiples of 64 bytes, so that a matrix has the same
alignment in any slot and its bits cannot tell where it lies.
The arena grows by reallocation; views are therefore asked for, never kept over an allocation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gshare.agent.base.config import ModelConfig
from gshare.agent.jobs.spec import AdapterSpec

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


def _aligned(elements: int) -> int:
    return -(-elements // ALIGN) * ALIGN


class _Region:
    """Flat tensors that share one layout of slots: first gap that is long enough, else they grow."""

    def __init__(self, device: torch.device, purposes: dict[str, torch.dtype]) -> None:
        self.flat = {name: torch.zeros(0, device=device, dtype=dtype) for name, dtype in purposes.items()}
        self.slots: dict[str, Slot] = {}

    @property
    def capacity(self) -> int:
        return next(iter(self.flat.values())).numel()

    def allocate(self, name: str, shapes: dict[MatrixKey, tuple[int, int]]) -> None:
        assert name not in self.slots
        length = sum(_aligned(math.prod(shape)) for shape in shapes.values())
        start = self._first_gap(length)
        if start + length > self.capacity:
            self._grow(start + length)
        offsets, at = {}, start
        for key, shape in shapes.items():
            offsets[key] = at
            at += _aligned(math.prod(shape))
        for flat in self.flat.values():
            flat[start : start + length].zero_()
        self.slots[name] = Slot(start, length, offsets)

    def rows(self, name: str) -> slice:
        slot = self.slots[name]
        return slice(slot.start, slot.start + slot.length)

    def view(self, purpose: str, name: str, key: MatrixKey, shape: tuple[int, int]) -> torch.Tensor:
        offset = self.slots[name].offsets[key]
        return self.flat[purpose][offset : offset + math.prod(shape)].view(shape)

    def nbytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.flat.values())

    def _first_gap(self, length: int) -> int:
        at = 0
        for slot in sorted(self.slots.values(), key=lambda s: s.start):
            if slot.start - at >= length:
                return at
            at = slot.start + slot.length
        return at

    def _grow(self, needed: int) -> None:
        # All or nothing: an OOM half way leaves every purpose as it was.
        grown = {
            purpose: torch.zeros(needed, device=flat.device, dtype=flat.dtype)
            for purpose, flat in self.flat.items()
        }
        for purpose, flat in self.flat.items():
            grown[purpose][: flat.numel()] = flat
        self.flat = grown


class Arena:
    """Flat storage for all adapters of a trainer, on one device.

    Two regions, since not every optimizer keeps fp32 moments: weights (`params`, `grads`, and `compute`
    when the compute dtype is not fp32) and moments (`exp_avg`, `exp_avg_sq`).
    """

    def __init__(self, device: torch.device, compute_dtype: torch.dtype) -> None:
        self.device = device
        self.compute_dtype = compute_dtype
        purposes = {"params": torch.float32, "grads": torch.float32}
        if compute_dtype != torch.float32:
            # What the kernels multiply with; in fp32 that is the masters themselves.
            purposes["compute"] = compute_dtype
        self._weights = _Region(device, purposes)
        self._moments = _Region(device, {"exp_avg": torch.float32, "exp_avg_sq": torch.float32})
        self._shapes: dict[str, dict[MatrixKey, tuple[int, int]]] = {}
        #: Goes up whenever a slot comes or goes: what was derived from slots or pointers is good until then.
        self.generation = 0

    def allocate(self, name: str, shapes: dict[MatrixKey, tuple[int, int]], *, moments: bool = True) -> None:
        """A zeroed slot for adapter `name`; without `moments` only weights and gradients."""
        self.generation += 1
        self._weights.allocate(name, shapes)
        try:
            if moments:
                self._moments.allocate(name, shapes)
        except BaseException:
            self.free(name)
            raise
        self._shapes[name] = dict(shapes)

    def free(self, name: str) -> None:
        """Give the adapter's slots back; freeing twice is harmless."""
        self.generation += 1
        self._shapes.pop(name, None)
        self._weights.slots.pop(name, None)
        self._moments.slots.pop(name, None)

    def names(self) -> list[str]:
        return list(self._shapes)

    def slot(self, name: str) -> Slot:
        """Where the adapter's weights lie."""
        return self._weights.slots[name]

    def shape(self, name: str, key: MatrixKey) -> tuple[int, int]:
        return self._shapes[name][key]

    def moments_slot(self, name: str) -> Slot | None:
        """Where the adapter's fp32 moments lie; None for an optimizer that keeps its own."""
        return self._moments.slots.get(name)

    def whole(self, purpose: str) -> torch.Tensor:
        """All adapters' memory of one purpose ("compute": what kernels multiply with); valid until the
        next `allocate`."""
        if purpose == "compute" and "compute" not in self._weights.flat:
            purpose = "params"
        region = self._moments if purpose in self._moments.flat else self._weights
        return region.flat[purpose]

    def has(self, name: str, key: MatrixKey) -> bool:
        return key in self._shapes[name]

    def matrices(self, name: str) -> Iterator[tuple[MatrixKey, tuple[int, int]]]:
        """Keys and shapes in contract order."""
        yield from self._shapes[name].items()

    def view(self, purpose: str, name: str, key: MatrixKey) -> torch.Tensor:
        """The matrix `key` of adapter `name`; valid until the next `allocate`."""
        region = self._moments if purpose in self._moments.flat else self._weights
        return region.view(purpose, name, key, self._shapes[name][key])

    def flat(self, purpose: str, name: str) -> torch.Tensor:
        """The adapter's whole slot as one vector, gaps between matrices (zeros) included."""
        region = self._moments if purpose in self._moments.flat else self._weights
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
        return self._weights.nbytes() + self._moments.nbytes()
