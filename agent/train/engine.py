"""The packed step: one forward and backward for the rows of many adapters.

    T tokens of the pass, H hidden, R rows that predict a labelled token, A adapters of the pass

The engine knows nothing of jobs, files or schedules: rows in, per-row losses out, gradients in the arena.
What it computes for an adapter is a function of that adapter's rows alone (kernels/NUMERICS.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from gshare.agent.base.decoder import Decoder
from gshare.agent.base.weights import Base
from gshare.agent.jobs.spec import LINEARS, AdapterSpec
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.arena import Arena, MatrixKey, adapter_shapes
from gshare.kernels.backend import Backend
from gshare.kernels.dropout import keep_mask, keep_scale
from gshare.kernels.layout import KeepMask, Layout, LoraSlot


@dataclass(frozen=True)
class Row:
    """One sequence: `trained[i]` marks token i as a target, predicted from position i − 1."""

    tokens: np.ndarray  # int32 (L,)
    trained: np.ndarray  # bool (L,)
    sample: int = 0  # index among the rows of its optimizer step: keys the dropout mask

    @property
    def label_tokens(self) -> int:
        return int(self.trained[1:].sum())


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
        return self.adapter.spec.scaling * keep_scale(self.adapter.spec.lora_dropout)


class Losses(Protocol):
    """A pass under way."""

    def losses(self) -> list[list[float]]:
        """Each part's token losses; waits for the pass."""
        ...


@dataclass(frozen=True)
class Done:
    """A pass that is over."""

    values: list[list[float]]

    def losses(self) -> list[list[float]]:
        return self.values


@dataclass(frozen=True)
class Verdict:
    """What a round made of one adapter. `committed`: its update is made, if loss and norm were finite."""

    norm: float
    committed: bool = False
    finite: bool = True  # the weights after it


class _Mask(KeepMask):
    def __init__(self, part: Part, layer: int, linear: str, device: torch.device) -> None:
        self._part, self._layer, self._device = part, layer, device
        self._module = LINEARS.index(linear)

    def __call__(self, sequence: int, features: int) -> torch.Tensor:
        row, spec = self._part.rows[sequence], self._part.adapter.spec
        assert spec.seed is not None
        mask = keep_mask(
            seed=spec.seed,
            step=self._part.step,
            sample=row.sample,
            layer=self._layer,
            module=self._module,
            length=len(row.tokens),
            features=features,
            p=spec.lora_dropout,
        )
        return mask.to(self._device)


class PassLora:
    """The pass's adapters as the decoder sees them: slots per (layer, linear), built once."""

    def __init__(self, parts: Sequence[Part], layout: Layout, *, training: bool) -> None:
        self._training = training
        self._cache: dict[tuple[int, str], list[LoraSlot]] = {}
        self._parts: list[tuple[Part, tuple[tuple[int, int], ...]]] = []
        ranges = iter(layout.sequences)
        for part in parts:
            self._parts.append((part, tuple(next(ranges) for _ in part.rows)))

    def slots(self, layer: int, linear: str) -> list[LoraSlot]:
        cached = self._cache.get((layer, linear))
        if cached is None:
            cached = self._cache[layer, linear] = [
                slot for part, ranges in self._parts if (slot := self._slot(part, ranges, layer, linear))
            ]
        return cached

    def _slot(
        self, part: Part, ranges: tuple[tuple[int, int], ...], layer: int, linear: str
    ) -> LoraSlot | None:
        adapter = part.adapter
        a, b = MatrixKey(layer, linear, "A"), MatrixKey(layer, linear, "B")
        if not adapter.arena.has(adapter.name, a):
            return None
        dropping = self._training and adapter.spec.lora_dropout > 0
        return LoraSlot(
            start=ranges[0][0],
            end=ranges[-1][1],
            sequences=ranges,
            a=adapter.arena.compute_view(adapter.name, a),
            b=adapter.arena.compute_view(adapter.name, b),
            grad_a=adapter.arena.view("grads", adapter.name, a) if self._training else None,
            grad_b=adapter.arena.view("grads", adapter.name, b) if self._training else None,
            scaling=adapter.spec.scaling,
            keep_probability=1.0 / keep_scale(adapter.spec.lora_dropout) if dropping else 1.0,
            keep=_Mask(part, layer, linear, adapter.arena.device) if dropping else None,
        )


class Engine:
    """Runs passes over one base. `before_pass` is a test hook: it may raise to simulate an OOM."""

    #: Whether a round may be queued before the one before it was read: the engine makes the updates itself,
    #: and leaves an adapter alone whose earlier update it refused.
    queues_ahead = False

    def __init__(self, base: Base, backend: Backend) -> None:
        self.base = base
        self.backend = backend
        self.decoder = Decoder(base, backend)
        self.arena = Arena(base.device, base.compute_dtype)
        self.before_pass: Callable[[Sequence[Part]], None] = lambda parts: None
        #: Recompute activations in every pass, not only where an adapter asks for it; never changes bits.
        self.checkpointing = False
        self.passes = 0
        self.most_adapters = 0

    def new_adapter(self, name: str, spec: AdapterSpec) -> Adapter:
        """An adapter with its initial weights, in a slot of the arena."""
        return Adapter(name, spec, self.arena, adapter_shapes(spec, self.base.config))

    def begin_round(self, adapters: Sequence[Adapter]) -> None:
        """Gradients of the round's adapters to zero; passes add to them."""
        for adapter in adapters:
            self.arena.zero_grads(adapter.name)

    def queue(self, work: Sequence[Part]) -> Losses:
        """Start a pass that trains; its losses are asked for when every pass of the round is under way."""
        return Done(self.forward_backward(work))

    def finish_round(
        self, adapters: Sequence[Adapter], steps: Sequence[int], rates: Sequence[float] | None
    ) -> Callable[[], list[Verdict]]:
        """Gradient norms, and each adapter's update for its 1-based step where the engine makes it itself.

        What is returned waits for them. This engine leaves the updates to `Adapter.update`.
        """
        del steps, rates
        verdicts = [Verdict(adapter.gradient_norm()) for adapter in adapters]
        return lambda: verdicts

    @torch.no_grad()
    def forward_backward(self, parts: Sequence[Part]) -> list[list[float]]:
        """Adds every part's gradients to the arena; returns each part's token losses, row by row joined.

        A part's gradient is that of Σ nll / label_tokens over its rows, so the passes of a step add up.
        """
        self._count(parts)
        layout, tokens = self._pack(parts)
        lora = PassLora(parts, layout, training=True)
        lowest = min(part.adapter.lowest_layer for part in parts)
        checkpoint = self.checkpointing or any(p.adapter.spec.gradient_checkpointing for p in parts)
        x, kept = self.decoder.forward(tokens, layout, lora, keep_from=lowest, checkpoint=checkpoint)
        rows, targets, counts = self._targets(parts, layout)
        scale = np.concatenate(
            [
                np.full(count, 1.0 / max(part.label_tokens, 1))
                for part, count in zip(parts, counts, strict=True)
            ]
        )
        x_rows = x[rows]
        h, rstd = self.decoder.final_norm(x_rows)
        nll, dh = self.backend.cross_entropy(
            h, self.base.lm_head.dense(), targets, self._device(scale.astype(np.float32))
        )
        assert dh is not None
        dx = torch.zeros_like(x)
        dx[rows] = self.backend.rms_norm_backward(dh, x_rows, self.base.final_norm, rstd)
        self.decoder.backward(dx, kept, layout, lora, lowest=lowest)
        return _split(nll, counts)

    @torch.no_grad()
    def evaluate(self, parts: Sequence[Part]) -> list[list[float]]:
        """Each part's token losses, without dropout, gradients or kept activations."""
        self._count(parts)
        layout, tokens = self._pack(parts)
        x, _ = self.decoder.forward(tokens, layout, PassLora(parts, layout, training=False))
        rows, targets, counts = self._targets(parts, layout)
        h, _ = self.decoder.final_norm(x[rows])
        nll, _ = self.backend.cross_entropy(h, self.base.lm_head.dense(), targets, None)
        return _split(nll, counts)

    # ------------------------------------------------------------------

    def _count(self, parts: Sequence[Part]) -> None:
        assert parts
        self.before_pass(parts)
        self.passes += 1
        self.most_adapters = max(self.most_adapters, len(parts))

    def _pack(self, parts: Sequence[Part]) -> tuple[Layout, torch.Tensor]:
        rows = [row for part in parts for row in part.rows]
        layout = Layout((0, *accumulate(len(row.tokens) for row in rows)), self.base.device)
        return layout, self._device(np.concatenate([row.tokens for row in rows]).astype(np.int64))

    def _targets(self, parts: Sequence[Part], layout: Layout) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Token indices that predict a label (R,), the labels (R,), and how many belong to each part."""
        rows, targets, counts = [], [], []
        ranges = iter(layout.sequences)
        for part in parts:
            count = 0
            for row in part.rows:
                start, _ = next(ranges)
                where = np.flatnonzero(row.trained[1:])
                rows.append(start + where)
                targets.append(row.tokens[1:][where])
                count += len(where)
            counts.append(count)
        return (
            self._device(np.concatenate(rows).astype(np.int64)),
            self._device(np.concatenate(targets).astype(np.int64)),
            counts,
        )

    def _device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.base.device)


def _split(nll: torch.Tensor, counts: Sequence[int]) -> list[list[float]]:
    flat = nll.cpu().tolist()
    ends = list(accumulate(counts))
    return [flat[end - count : end] for end, count in zip(ends, counts, strict=True)]


def mean_loss(token_losses: Sequence[float], label_tokens: int) -> float:
    """Σ nll / label_tokens with a correctly rounded sum, so that order and grouping cannot matter.

    NaN as soon as one loss is not finite.
    """
    if not all(math.isfinite(loss) for loss in token_losses):
        return math.nan
    return math.fsum(token_losses) / max(label_tokens, 1)
