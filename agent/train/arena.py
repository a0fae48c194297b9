"""The adapter arena: every adapter's A and B matrices, gradients and moments in flat fp32 memory.

One flat tensor a purpose (`params`, `grads`, `exp_avg`, `exp_avg_sq`), one contiguous slot an adapter,
one offset a matrix. Ranks differ freely: nothing is padded to a common rank. Offsets are multiples of
64 bytes, so that a matrix has the same alignment in any slot and its bits cannot tell where it lies.
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
PURPOSES = ("params", "grads", "exp_avg", "exp_avg_sq")


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
    shapes: dict[MatrixKey, tuple[int, int]]


def _aligned(elements: int) -> int:
    return -(-elements // ALIGN) * ALIGN


class Arena:
    """Flat storage for all adapters of a trainer, on one device."""

    def __init__(self, device: torch.device, compute_dtype: torch.dtype) -> None:
        self.device = device
        self.compute_dtype = compute_dtype
        self._flat = {purpose: torch.zeros(0, device=device) for purpose in PURPOSES}
        # What the kernels multiply with: the fp32 masters themselves, or their copy in compute dtype.
        self._compute = torch.zeros(0, device=device, dtype=compute_dtype)
        self._slots: dict[str, Slot] = {}

    @property
    def capacity(self) -> int:
        """Elements of one purpose."""
        return self._flat["params"].numel()

    def names(self) -> list[str]:
        return list(self._slots)

    def slot(self, name: str) -> Slot:
        return self._slots[name]

    def allocate(self, name: str, shapes: dict[MatrixKey, tuple[int, int]]) -> Slot:
        """A zeroed slot: the first gap that is long enough, else the arena grows."""
        assert name not in self._slots
        length = sum(_aligned(math.prod(shape)) for shape in shapes.values())
        start = self._first_gap(length)
        if start + length > self.capacity:
            self._grow(start + length)
        offsets, at = {}, start
        for key, shape in shapes.items():
            offsets[key] = at
            at += _aligned(math.prod(shape))
        slot = self._slots[name] = Slot(start, length, offsets, dict(shapes))
        for flat in self._flat.values():
            flat[start : start + length].zero_()
        return slot

    def free(self, name: str) -> None:
        del self._slots[name]

    def view(self, purpose: str, name: str, key: MatrixKey) -> torch.Tensor:
        """The matrix `key` of adapter `name`; valid until the next `allocate`."""
        return self._view(self._flat[purpose], self._slots[name], key)

    def compute_view(self, name: str, key: MatrixKey) -> torch.Tensor:
        """The matrix in compute dtype, as of the last `publish`."""
        flat = self._flat["params"] if self._shares_params() else self._compute
        return self._view(flat, self._slots[name], key)

    def publish(self, name: str) -> None:
        """Round the adapter's fp32 masters into the compute copy (nothing to do when they are one)."""
        if not self._shares_params():
            slot = self._slots[name]
            rows = slice(slot.start, slot.start + slot.length)
            self._compute[rows] = self._flat["params"][rows].to(self.compute_dtype)

    def zero_grads(self, name: str) -> None:
        slot = self._slots[name]
        self._flat["grads"][slot.start : slot.start + slot.length].zero_()

    def matrices(self, name: str) -> Iterator[tuple[MatrixKey, tuple[int, int]]]:
        yield from self._slots[name].shapes.items()

    def nbytes(self) -> int:
        total = sum(flat.numel() * flat.element_size() for flat in self._flat.values())
        return total + (0 if self._shares_params() else self._compute.numel() * self._compute.element_size())

    # ------------------------------------------------------------------

    def _shares_params(self) -> bool:
        return self.compute_dtype == torch.float32

    @staticmethod
    def _view(flat: torch.Tensor, slot: Slot, key: MatrixKey) -> torch.Tensor:
        shape = slot.shapes[key]
        offset = slot.offsets[key]
        return flat[offset : offset + math.prod(shape)].view(shape)

    def _first_gap(self, length: int) -> int:
        at = 0
        for slot in sorted(self._slots.values(), key=lambda s: s.start):
            if slot.start - at >= length:
                return at
            at = slot.start + slot.length
        return at

    def _grow(self, needed: int) -> None:
        for purpose, flat in self._flat.items():
            grown = torch.zeros(needed, device=self.device)
            grown[: flat.numel()] = flat
            self._flat[purpose] = grown
        if self._shares_params():
            return
        grown = torch.zeros(needed, device=self.device, dtype=self.compute_dtype)
        grown[: self._compute.numel()] = self._compute
        self._compute = grown
