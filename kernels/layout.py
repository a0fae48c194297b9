"""How the sequences of one pass lie in the packed token axis.

T tokens of the pass, all sequences flattened, no padding inside
S sequences; sequence s is tokens[starts[s]:starts[s+1]]
An adapter's sequences are contiguous, so an adapter is a range of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch


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


class KeepMask:
    """Makes the dropout mask of one (adapter, layer, linear): subclassed by the engine."""

    def __call__(self, sequence: int, features: int) -> torch.Tensor:
        """Bool (L, features) of the adapter's `sequence`-th sequence of this pass."""
        raise NotImplementedError
