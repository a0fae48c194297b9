"""How the sequences of one pass lie in the packed token axis.

T tokens of the pass, all sequences flattened, no padding inside
S sequences; sequence s is tokens[starts[s]:starts[s+1]]
An adapter's sequences are contiguous, so an adapter is a range of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

import torch

#: Linears that read the same input run as one product over their concatenated outputs.
GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


@dataclass(frozen=True)
class Layout:
    """Sequence boundaries of a pass; `starts` has S + 1 entries, first 0, last T."""

    starts: tuple[int, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        assert self.starts[0] == 0
        assert all(a < b for a, b in pairwise(self.starts)), "empty sequence in a pass"

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    @property
    def longest(self) -> int:
        return max(b - a for a, b in self.sequences)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(start, end) of every sequence."""
        return list(pairwise(self.starts))

    def positions(self) -> torch.Tensor:
        """(T,) int64: each token's position within its own sequence."""
        return torch.cat([torch.arange(b - a) for a, b in self.sequences]).to(self.device)


@dataclass(frozen=True)
class LoraSlot:
    """One adapter's share of one linear in one pass.

    A (r, K) and B (N, r) are views of the arena in compute dtype; `grad_a`, `grad_b` are fp32 views of
    the same shapes that the backward adds to. `sequences` are absolute token ranges, in order, and
    cover start:end. `keep` gives the dropout keep mask (L, K) of the i-th of them; None: no dropout.

    `places`: only some rows of each sequence are here (a range may be empty then); the i-th of it holds their
    positions within the sequence, and its length.
    """

    start: int
    end: int
    sequences: tuple[tuple[int, int], ...]
    a: torch.Tensor
    b: torch.Tensor
    grad_a: torch.Tensor | None
    grad_b: torch.Tensor | None
    scaling: float
    keep_probability: float = 1.0
    keep: KeepMask | None = None
    places: tuple[tuple[torch.Tensor, int], ...] | None = None


@dataclass(frozen=True)
class Group:
    """One group of a layer: linear j's outputs are the columns offsets[j] : offsets[j] + sizes[j]."""

    layer: int
    name: str
    sizes: tuple[int, ...]
    inputs: int

    @property
    def linears(self) -> tuple[str, ...]:
        return GROUPS[self.name]

    @property
    def offsets(self) -> tuple[int, ...]:
        return (0, *accumulate(self.sizes[:-1]))

    @property
    def columns(self) -> int:
        return sum(self.sizes)


class LoraPlan(Protocol):
    """Which adapters of a pass touch which linear. A kernel backend may ask a plan for more than this."""

    def slots(self, layer: int, linear: str) -> Sequence[LoraSlot]:
        """In token order; empty when no adapter of the pass targets it."""
        ...


class NoLora:
    """The bare base."""

    def slots(self, layer: int, linear: str) -> Sequence[LoraSlot]:
        del layer, linear
        return ()


@dataclass(frozen=True)
class Heads:
    """How the columns of a fused qkv divide."""

    query: int
    key: int
    size: int

    @property
    def columns(self) -> int:
        return (self.query + 2 * self.key) * self.size


@dataclass(frozen=True)
class Rotation:
    """RoPE of a pass: tables (P, D) in fp32, each token's position (T,), and the QK-norm weights or None."""

    cos: torch.Tensor
    sin: torch.Tensor
    position: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


class KeepMask:
    """Makes the dropout mask of one (adapter, layer, linear): subclassed by the engine."""

    def __call__(self, sequence: int, features: int) -> torch.Tensor:
        """Bool (L, features) of the adapter's `sequence`-th sequence of this pass."""
        raise NotImplementedError
