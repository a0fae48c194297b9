"""The packed step: one forward and backward for the rows of many adapters.

    T tokens of the pass, H hidden, R rows that predict a labelled token, A adapters of the pass

The engine knows nothing of jobs, files or schedules: rows in, per-row losses out, gradients in the arena.
What it computes for an adapter is a function of that adapter's rows alone (kernels/NUMERICS.md).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import numpy as np
import torch
from gshare.agent.base.decoder import Decoder, Needed, Stage
from gshare.agent.base.weights import Base
from gshare.agent.jobs.spec import LINEARS, AdapterSpec
from gshare.agent.train.adapter import Adapter, InitialWeights, has_8bit_moments
from gshare.agent.train.arena import Arena, MatrixKey, adapter_shapes
from gshare.agent.train.part import Part, Row
from gshare.agent.train.trunk import PassPlan, StagePlan, TrunkUse, gathered, starts_of
from gshare.agent.train.trunk_cache import TrunkCache, fill_states
from gshare.kernels.backend import Backend
from gshare.kernels.dropout import keep_mask, keep_scale
from gshare.kernels.layout import KeepMask, Layout, LoraSlot


class Losses(Protocol):
    """A pass under way."""

    @property
    def trunk(self) -> TrunkUse:
        """What of its jobs' common layers was run."""
        ...

    def losses(self) -> list[list[float]]:
        """Each part's token losses; waits for the pass."""
        ...


@dataclass(frozen=True)
class Done:
    """A pass that is over."""

    values: list[list[float]]
    trunk: TrunkUse

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


@dataclass(frozen=True)
class Labels:
    """What the losses of a pass need. A part's labels are contiguous, row by row."""

    rows: torch.Tensor  # (R,) int64: the tokens that predict a label
    targets: torch.Tensor  # (R,) int64: the labels
    counts: list[int]  # of each part
    places: list[tuple[torch.Tensor, int]]  # of each row of the pass: which of its tokens those are; length


class PassLora:
    """The pass's adapters as the decoder sees them: slots per (layer, linear), built once.

    `sequences`: where each row of the pass lies. `places`: only those tokens of each are there.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        sequences: Sequence[tuple[int, int]],
        *,
        training: bool,
        places: Sequence[tuple[torch.Tensor, int]] | None = None,
    ) -> None:
        self._training = training
        self._cache: dict[tuple[int, str], list[LoraSlot]] = {}
        self._parts: list[tuple[Part, slice]] = []
        self._sequences, self._places = tuple(sequences), None if places is None else tuple(places)
        at = 0
        for part in parts:
            self._parts.append((part, slice(at, at + len(part.rows))))
            at += len(part.rows)

    def slots(self, layer: int, linear: str) -> list[LoraSlot]:
        cached = self._cache.get((layer, linear))
        if cached is None:
            cached = self._cache[layer, linear] = [
                slot for part, rows in self._parts if (slot := self._slot(part, rows, layer, linear))
            ]
        return cached

    def _slot(self, part: Part, rows: slice, layer: int, linear: str) -> LoraSlot | None:
        adapter, ranges = part.adapter, self._sequences[rows]
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
            places=None if self._places is None else self._places[rows],
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
        self._initial_weights = InitialWeights()
        self.before_pass: Callable[[Sequence[Part]], None] = lambda parts: None
        #: Recompute activations in every pass, not only where an adapter asks for it; never changes bits.
        self.checkpointing = False
        #: Rows of the same content run once below the adapters; never changes bits. False is for measuring.
        self.share_trunk = True
        #: Trunk states of earlier passes; None: they are made anew every time. Never changes bits.
        self.cache: TrunkCache | None = None
        #: The highest rank that the kernels take.
        self.most_rank = sys.maxsize
        #: CUDA graphs for which there was no memory, or that were given up for it.
        self.without_graph = 0
        self.passes = 0
        self.most_adapters = 0

    def give_up_graphs(self) -> bool:
        """Free what captured passes keep, and capture smaller ones only; False when there is nothing to
        free."""
        return False

    def expect(self, specs: Sequence[AdapterSpec]) -> None:
        """Room for the adapters that `new_adapter` is about to be asked for; out of memory, as it was."""
        config = self.base.config
        self.arena.reserve([(adapter_shapes(spec, config), has_8bit_moments(spec)) for spec in specs])

    def new_adapter(self, name: str, spec: AdapterSpec, *, initial: bool = True) -> Adapter:
        """An adapter in a slot of the arena, with its `initial` weights or with zeros, to be loaded."""
        if self.cache is not None:
            self.cache.age()
        shapes = adapter_shapes(spec, self.base.config)
        return Adapter(name, spec, self.arena, shapes, initial=self._initial_weights if initial else None)

    def begin_round(self, adapters: Sequence[Adapter]) -> None:
        """Gradients of the round's adapters to zero; passes add to them."""
        for adapter in adapters:
            self.arena.zero_grads(adapter.name)

    def queue(self, work: Sequence[Part]) -> Losses:
        """Start a pass that trains; its losses are asked for when every pass of the round is under way."""
        return self._forward_backward(work)

    def finish_round(
        self, adapters: Sequence[Adapter], steps: Sequence[int], rates: Sequence[float] | None
    ) -> Callable[[], list[Verdict]]:
        """Gradient norms, and each adapter's update for its 1-based step where the engine makes it itself.

        What is returned waits for them. This engine leaves the updates to `Adapter.update`.
        """
        del steps, rates
        verdicts = [Verdict(adapter.gradient_norm()) for adapter in adapters]
        return lambda: verdicts

    def forward_backward(self, parts: Sequence[Part]) -> list[list[float]]:
        """Adds every part's gradients to the arena; returns each part's token losses, row by row joined.

        A part's gradient is that of Σ nll / label_tokens over its rows, so the passes of a step add up.
        """
        return self._forward_backward(parts).losses()

    @torch.no_grad()
    def _forward_backward(self, parts: Sequence[Part]) -> Done:
        self._count(parts)
        plan = PassPlan.of(parts, share=self.share_trunk)
        x, kept_tokens, stages, needed, labels = self._lay_out(plan, training=True)
        checkpoint = self.checkpointing or any(p.adapter.spec.gradient_checkpointing for p in parts)
        x_rows, kept = self.decoder.forward(x, stages, needed=needed, keep=True, checkpoint=checkpoint)
        del x
        scale = np.concatenate(
            [
                np.full(count, 1.0 / max(part.label_tokens, 1))
                for part, count in zip(plan.parts, labels.counts, strict=True)
            ]
        )
        h, rstd = self.decoder.final_norm(x_rows)
        nll, dh = self.backend.cross_entropy(
            h, self.base.lm_head.dense(), labels.targets, self._device(scale.astype(np.float32))
        )
        assert dh is not None
        dx = self.backend.rms_norm_backward(dh, x_rows, self.base.final_norm, rstd)
        self.decoder.backward(dx, kept, stages, needed=needed)
        return Done(plan.in_order(_split(nll, labels.counts)), plan.use(kept_tokens))

    def evaluate(self, parts: Sequence[Part]) -> list[list[float]]:
        """Each part's token losses, without dropout, gradients or kept activations."""
        return self.queue_evaluation(parts).losses()

    @torch.no_grad()
    def queue_evaluation(self, parts: Sequence[Part]) -> Losses:
        """Start a pass that evaluates; its losses are asked for when every pass is under way."""
        self._count(parts)
        plan = PassPlan.of(parts, share=self.share_trunk)
        x, kept_tokens, stages, needed, labels = self._lay_out(plan, training=False)
        h, _ = self.decoder.final_norm(self.decoder.forward(x, stages, needed=needed)[0])
        nll, _ = self.backend.cross_entropy(h, self.base.lm_head.dense(), labels.targets, None)
        return Done(plan.in_order(_split(nll, labels.counts)), plan.use(kept_tokens))

    # ------------------------------------------------------------------

    def _count(self, parts: Sequence[Part]) -> None:
        assert parts
        self.before_pass(parts)
        self.passes += 1
        self.most_adapters = max(self.most_adapters, len(parts))

    def _lay_out(
        self, plan: PassPlan, *, training: bool
    ) -> tuple[torch.Tensor, int, list[Stage], Needed, Labels]:
        """What the decoder is given of a pass: its input (and how many tokens of that were kept from earlier
        passes), its stages, the rows that its losses read."""
        whole = self._layout(plan.stages[-1].rows)
        lora = PassLora(plan.parts, whole.sequences, training=training)
        labels = self._labels(plan)
        ends = accumulate((len(places) for places, _ in labels.places), initial=0)
        at_labels = PassLora(plan.parts, list(pairwise(ends)), training=training, places=labels.places)
        needed = Needed(labels.rows, labels.rows, whole.tokens, at_labels)
        kept_tokens = 0
        if plan.trunk:
            base, tokens = self.base, sum(len(row.tokens) for row in plan.trunk)
            x = torch.empty(tokens, base.config.hidden_size, dtype=base.compute_dtype, device=base.device)
            kept_tokens = fill_states(self.cache, plan, x, self._run_rows)
        else:
            x = self.decoder.embed(self._tokens(plan.stages[0].rows))
        befores = [plan.trunk, *(stage.rows for stage in plan.stages)]
        stages = [
            self._stage(stage, before, lora) for stage, before in zip(plan.stages, befores, strict=False)
        ]
        return x, kept_tokens, stages, needed, labels

    def _run_rows(
        self, rows: Sequence[Row], layers: int, states: torch.Tensor, places: Sequence[int]
    ) -> None:
        """Run rows through the trunk; their states go to `states`, each row's from its place on."""
        x = self.decoder.trunk(self._tokens(rows), self._layout(rows), layers)
        for row, place, start in zip(rows, places, starts_of(rows), strict=False):
            states[place : place + len(row.tokens)] = x[start : start + len(row.tokens)]

    def _stage(self, stage: StagePlan, before: Sequence[Row], lora: PassLora) -> Stage:
        gather = None
        if stage.source != tuple(range(len(before))):
            gather = self._device(gathered(stage.source, starts_of(before), stage.rows))
        own = self._layout(stage.rows[: stage.own])
        return Stage(stage.first, self._layout(stage.rows), own.tokens, own, lora, gather)

    def _layout(self, rows: Sequence[Row]) -> Layout:
        return Layout(tuple(starts_of(rows)), self.base.device)

    def _tokens(self, rows: Sequence[Row]) -> torch.Tensor:
        return self._device(np.concatenate([row.tokens for row in rows]).astype(np.int64))

    def _labels(self, plan: PassPlan) -> Labels:
        rows = plan.stages[-1].rows
        where = [np.flatnonzero(row.trained[1:]) for row in rows]
        starts = starts_of(rows)
        ends = list(accumulate((len(part.rows) for part in plan.parts), initial=0))
        return Labels(
            self._device(np.concatenate([start + at for start, at in zip(starts, where, strict=False)])),
            self._device(
                np.concatenate([row.tokens[1:][at] for row, at in zip(rows, where, strict=True)]).astype(
                    np.int64
                )
            ),
            [sum(len(at) for at in where[a:b]) for a, b in pairwise(ends)],
            [(self._device(at), len(row.tokens)) for row, at in zip(rows, where, strict=True)],
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
