"""What a pass is made of: sequences, and the adapters that they are for. No torch, as `passes.py`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gshare.agent.train.adapter import Adapter


@dataclass(frozen=True)
class Row:
    """One sequence: `trained[i]` marks token i as a target, predicted from position i − 1."""

    tokens: np.ndarray  # int32 (L,)
    trained: np.ndarray  # bool (L,)
    sample: int = 0  # index among the rows of its optimizer step: keys the dropout mask

    @property
    def label_tokens(self) -> int:
        return int(self.trained[1:].sum())

    @cached_property
    def content(self) -> bytes:
        """Hash of the tokens."""
        return hashlib.blake2b(self.tokens.astype("<i4", copy=False).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class Part:
    """One adapter's rows in one pass."""

    adapter: Adapter
    rows: Sequence[Row]
    step: int = 0  # 0-based optimizer step: keys the dropout mask
    label_tokens: int = 1  # of the adapter's whole optimizer step: the loss's normaliser

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def scale(self) -> float:
        """s / p of the adapter: its LoRA scaling over the keep probability (training only)."""
        from gshare.kernels.dropout import keep_scale  # imports torch, which who trains has

        return self.adapter.spec.scaling * keep_scale(self.adapter.spec.lora_dropout)
