"""The decoder: one explicit forward and backward over a packed batch, driven by ModelConfig.

    T tokens, H hidden, I intermediate, Hq query heads, Hkv key heads, D head size, x_TH a (T, H) tensor
    N rows of a stage, R rows that a loss reads

No autograd: the step is a fixed list of ops, weights are frozen, and the only gradients are the
adapters', which `lora_grads` adds to the arena. What the backward needs is kept in `LayerActivations`,
or recomputed from the layer's input when checkpointing.

Nothing runs that no loss needs. A sequence goes once through the layers below the lowest adapter that sees it
(`trunk`, and the shared rows of a `Stage`), and of the top layer only keys and values are made for every row
(`Needed`). Neither changes a bit: rows do not meet, and what is left out would have been multiplied by zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from gshare.agent.base.config import ModelConfig
from gshare.agent.base.rope import rope_tables
from gshare.agent.base.weights import Base
from gshare.kernels.backend import Backend
from gshare.kernels.layout import GROUPS, Group, Heads, Layout, LoraPlan, NoLora, Rotation


class Attend(Protocol):
    """How one layer attends; training uses the packed op, generation a key/value cache."""

    def __call__(self, layer: int, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]: ...


@dataclass(frozen=True)
class Stage:
    """The layers from `first` up to the next stage's, all over the same N rows.

    Rows [0, own) are those of adapters that have matrices here, in the order of the pass, so they are the
    first rows of every later stage too. The others run for adapters that begin further up: one for all that
    have the same content.
    """

    first: int
    layout: Layout  # of the N rows
    own: int
    own_layout: Layout  # of rows [0, own): what the backward runs over
    lora: LoraPlan  # of the same
    gather: torch.Tensor | None = (
        None  # (N,) the row of the stage before that each goes on from; None: its own
    )

    @classmethod
    def whole(cls, layout: Layout, lora: LoraPlan, first: int = 0) -> Stage:
        """The only stage of a pass: every row may have an adapter in every layer from `first` on."""
        return cls(first, layout, layout.tokens, layout, lora)


@dataclass(frozen=True)
class Needed:
    """The rows that a loss reads: of the top layer everything but keys and values is made for them alone."""

    rows: torch.Tensor  # (R,)
    places: torch.Tensor  # (R,) the same; `tokens` for filler, which reads a row but stands for none
    tokens: int  # of the pass
    lora: LoraPlan  # over the R rows

    def pick(self, x_TN: torch.Tensor) -> torch.Tensor:
        """(R, N)."""
        return x_TN.index_select(0, self.rows)

    def spread(self, y_RN: torch.Tensor) -> torch.Tensor:
        """(T, N), zero in all other rows."""
        whole = y_RN.new_zeros(self.tokens + 1, y_RN.shape[1])
        return whole.index_copy_(0, self.places, y_RN)[: self.tokens]


@dataclass
class LayerActivations:
    """What one layer's backward needs. Only `x` is kept under checkpointing.

    In the top layer of a pass with `Needed` what follows attention has R rows.
    """

    x: torch.Tensor  # (T, H) the layer's input
    rstd_1: torch.Tensor
    qkv: torch.Tensor  # (T, (Hq + 2·Hkv)·D) after RoPE
    rope: Any  # before QK-norm, where there is one
    o: torch.Tensor  # (T, Hq·D) attention output
    lse: torch.Tensor | None
    x_mid: torch.Tensor  # (T, H) after the attention block
    rstd_2: torch.Tensor
    gate_up: torch.Tensor  # (T, 2·I)
    lora: dict[str, Any]  # group → S

    def first(self, rows: int) -> LayerActivations:
        """Those of the first rows; `lora` holds no others."""
        if rows == self.x.shape[0]:
            return self
        return LayerActivations(
            x=self.x[:rows],
            rstd_1=self.rstd_1[:rows],
            qkv=self.qkv[:rows],
            rope=None if self.rope is None else tuple(part[:rows] for part in self.rope),
            o=self.o[:rows],
            lse=None if self.lse is None else self.lse[:, :rows].contiguous(),
            x_mid=self.x_mid[:rows],
            rstd_2=self.rstd_2[:rows],
            gate_up=self.gate_up[:rows],
            lora=self.lora,
        )


class Decoder:
    """Runs a `Base` through a `Backend`. Stateless apart from the RoPE tables."""

    def __init__(self, base: Base, backend: Backend) -> None:
        self.base = base
        self.backend = backend
        self.config: ModelConfig = base.config
        self.scale = 1.0 / math.sqrt(self.config.head_dim)
        self.heads = Heads(self.config.num_heads, self.config.num_kv_heads, self.config.head_dim)
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        shape = self.config.linear_shape
        self._groups = [
            {
                name: Group(layer, name, tuple(shape(m)[0] for m in members), shape(members[0])[1])
                for name, members in GROUPS.items()
            }
            for layer in range(self.config.num_layers)
        ]

    # ------------------------------------------------------------------ pieces

    def group(self, layer: int, name: str) -> Group:
        return self._groups[layer][name]

    def rope_tables(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (P, D) in fp32 for at least `positions`; they grow in powers of two."""
        if self._tables is None or self._tables[0].shape[0] < positions:
            rows = min(
                max(256, 1 << (positions - 1).bit_length()),
                max(positions, self.config.max_position_embeddings),
            )
            self._tables = rope_tables(self.config.rope, rows, self.base.device)
        return self._tables

    def rotation(self, layer: int, position_T: torch.Tensor, positions: int) -> Rotation:
        weights = self.base.layers[layer]
        cos, sin = self.rope_tables(positions)
        return Rotation(cos, sin, position_T, weights.q_norm, weights.k_norm, self.config.rms_norm_eps)

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """(T, H) in compute dtype."""
        return self.base.embed[tokens_T].to(self.base.compute_dtype)

    def final_norm(self, x_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, h, rstd = self.backend.add_rms_norm(x_RH, None, self.base.final_norm, self.config.rms_norm_eps)
        return h, rstd

    def logits(self, x_RH: torch.Tensor) -> torch.Tensor:
        """Logits (R, V) of hidden rows before the final norm."""
        return self.backend.linear(self.final_norm(x_RH)[0], self.base.lm_head.dense(), None)

    def _linear(
        self, layer: int, name: str, x: torch.Tensor, lora: LoraPlan, kept: dict[str, Any], own: int | None
    ) -> torch.Tensor:
        linear = self.base.layers[layer].groups[name]
        y = self.backend.linear(x, linear.weight.dense(), linear.bias)
        kept[name] = self.backend.lora_forward(x[:own], y[:own], lora, self._groups[layer][name])
        return y

    def _needed_qkv(
        self, layer: int, h: torch.Tensor, lora: LoraPlan, kept: dict[str, Any], needed: Needed
    ) -> torch.Tensor:
        """qkv (T, (Hq + 2·Hkv)·D) without the base's part of queries that nothing reads."""
        linear, queries = self.base.layers[layer].groups["qkv"], self.heads.query * self.heads.size
        weight, bias = linear.weight.dense(), linear.bias
        if not self.backend.separable(weight, queries):
            return self._linear(layer, "qkv", h, lora, kept, None)
        q_bias, kv_bias = (None, None) if bias is None else (bias[:queries], bias[queries:])
        # One row more than the pass has: filler writes there.
        whole = h.new_empty(needed.tokens + 1, weight.shape[0])
        q = self.backend.linear(needed.pick(h), weight[:queries], q_bias)
        whole[:, :queries].zero_().index_copy_(0, needed.places, q)
        qkv = whole[: needed.tokens]
        qkv[:, queries:] = self.backend.linear(h, weight[queries:], kv_bias)
        kept["qkv"] = self.backend.lora_forward(h, qkv, lora, self._groups[layer]["qkv"])
        return qkv

    def _linear_dx(
        self, layer: int, name: str, dy: torch.Tensor, lora: LoraPlan, *, need_dx: bool = True
    ) -> tuple[torch.Tensor | None, Any]:
        """dx with the adapters' part, and dS."""
        weight = self.base.layers[layer].groups[name].weight
        dx = self.backend.linear_dx(dy, weight.dense()) if need_dx else None
        return dx, self.backend.lora_dx(dy, dx, lora, self._groups[layer][name])

    # ------------------------------------------------------------------ forward

    def layer_forward(
        self,
        index: int,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        rotation: Rotation,
        attend: Attend,
        lora: LoraPlan,
        *,
        own: int | None = None,
        needed: Needed | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, LayerActivations]:
        """One decoder layer over x + delta, (T, H). `lora` speaks of the first `own` rows (None: of all).

        Returns x_mid and the MLP's output, whose sum is the layer's output (the next norm adds them), and
        what the backward needs. With `needed` the output has its rows alone, (R, H).
        """
        be, weights, eps = self.backend, self.base.layers[index], self.config.rms_norm_eps
        kept: dict[str, Any] = {}
        x, h, rstd_1 = be.add_rms_norm(x, delta, weights.input_norm, eps)
        if needed is None:
            qkv = self._linear(index, "qkv", h, lora, kept, own)
        else:
            qkv = self._needed_qkv(index, h, lora, kept, needed)
        before = be.rope(qkv, self.heads, rotation)
        o, lse = attend(index, qkv)
        residual, attended = x, o
        if needed is not None:
            residual, attended, lora = needed.pick(x), needed.pick(o), needed.lora
        x_mid, h, rstd_2 = be.add_rms_norm(
            residual,
            self._linear(index, "o", attended, lora, kept, own),
            weights.post_attention_norm,
            eps,
        )
        gate_up = self._linear(index, "gate_up", h, lora, kept, own)
        out = self._linear(index, "down", be.swiglu(gate_up), lora, kept, own)
        return x_mid, out, LayerActivations(x, rstd_1, qkv, before, o, lse, x_mid, rstd_2, gate_up, kept)

    def packed_attention(self, layout: Layout) -> Attend:
        def attend(layer: int, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            window = self.config.sliding_window[layer]
            return self.backend.attention(qkv, layout, self.heads, scale=self.scale, window=window)

        return attend

    def trunk(self, tokens_N: torch.Tensor, layout: Layout, layers: int) -> torch.Tensor:
        """What layer `layers` gets of the bare base, (N, H): a function of each sequence alone."""
        x, delta = self.embed(tokens_N), None
        position, attend = layout.positions(), self.packed_attention(layout)
        for index in range(layers):
            rotation = self.rotation(index, position, layout.longest)
            # [:2]: what a backward would need is let go before the next layer runs.
            x, delta = self.layer_forward(index, x, delta, rotation, attend, NoLora(), own=0)[:2]
        return x if delta is None else x + delta

    def forward(
        self,
        x: torch.Tensor,
        stages: Sequence[Stage],
        *,
        needed: Needed | None = None,
        keep: bool = False,
        checkpoint: bool = False,
    ) -> tuple[torch.Tensor, list[LayerActivations | torch.Tensor]]:
        """Hidden rows (T, H) before the final norm; with `needed` its rows alone, (R, H).

        `x` is the input of the first stage's first layer, before its gather. With `keep` each layer's
        activations are kept for the backward, or with `checkpoint` only its input.
        """
        delta: torch.Tensor | None = None
        kept: list[LayerActivations | torch.Tensor] = []
        for stage, end in self._spans(stages):
            if stage.gather is not None:
                x, delta = (x if delta is None else x + delta).index_select(0, stage.gather), None
            position, attend = stage.layout.positions(), self.packed_attention(stage.layout)
            for index in range(stage.first, end):
                rotation = self.rotation(index, position, stage.layout.longest)
                x, delta, activations = self.layer_forward(
                    index,
                    x,
                    delta,
                    rotation,
                    attend,
                    stage.lora,
                    own=stage.own,
                    needed=self._in_top(index, needed),
                )
                if keep:
                    own = activations.first(stage.own)
                    kept.append(own.x if checkpoint else own)
                del activations
        assert delta is not None
        return x + delta, kept

    def _spans(self, stages: Sequence[Stage]) -> list[tuple[Stage, int]]:
        """Each stage and the layer that it ends before."""
        return list(zip(stages, [*(s.first for s in stages[1:]), self.config.num_layers], strict=True))

    def _in_top(self, index: int, needed: Needed | None) -> Needed | None:
        return needed if index == self.config.num_layers - 1 else None

    # ------------------------------------------------------------------ backward

    def backward(
        self,
        dx: torch.Tensor,
        kept: list[LayerActivations | torch.Tensor],
        stages: Sequence[Stage],
        *,
        needed: Needed | None = None,
    ) -> None:
        """From the gradient of the rows before the final norm (those that `forward` gave) down to the first
        stage's first layer, into the arena.

        Frees each layer's activations as it goes (`kept` is emptied).
        """
        for stage, end in reversed(self._spans(stages)):
            position, attend = stage.own_layout.positions(), self.packed_attention(stage.own_layout)
            if end < self.config.num_layers:
                dx = dx[: stage.own]
            for index in reversed(range(stage.first, end)):
                rotation = self.rotation(index, position, stage.own_layout.longest)
                activations, top = kept.pop(), self._in_top(index, needed)
                if isinstance(activations, torch.Tensor):
                    activations = self.layer_forward(
                        index, activations, None, rotation, attend, stage.lora, needed=top
                    )[2]
                below = self.layer_backward(
                    index,
                    dx,
                    activations,
                    rotation,
                    stage.own_layout,
                    stage.lora,
                    need_dx=index > stages[0].first,
                    needed=top,
                )
                if below is None:
                    return
                dx = below

    def layer_backward(
        self,
        index: int,
        dy: torch.Tensor,
        act: LayerActivations,
        rotation: Rotation,
        layout: Layout,
        lora: LoraPlan,
        *,
        need_dx: bool,
        needed: Needed | None = None,
    ) -> torch.Tensor | None:
        """dy (T, H), with `needed` (R, H) → dx (T, H), or None when nothing below needs it."""
        be, weights, groups = self.backend, self.base.layers[index], self._groups[index]
        above, o = (lora, act.o) if needed is None else (needed.lora, needed.pick(act.o))

        dm, ds = self._linear_dx(index, "down", dy, above)
        assert dm is not None
        d_gate_up, m = be.swiglu_backward(dm, act.gate_up)
        be.lora_grads(m, dy, act.lora["down"], ds, above, groups["down"])
        del dm, m

        dh, ds = self._linear_dx(index, "gate_up", d_gate_up, above)
        assert dh is not None
        d_mid, h = be.rms_norm_backward_apply(dh, act.x_mid, weights.post_attention_norm, act.rstd_2, dy)
        del dh
        be.lora_grads(h, d_gate_up, act.lora["gate_up"], ds, above, groups["gate_up"])
        del d_gate_up, h

        do, ds = self._linear_dx(index, "o", d_mid, above)
        assert do is not None
        be.lora_grads(o, d_mid, act.lora["o"], ds, above, groups["o"])
        if needed is not None:
            do = needed.spread(do)
        window = self.config.sliding_window[index]
        d_qkv = be.attention_backward(
            do, act.qkv, act.o, act.lse, layout, self.heads, scale=self.scale, window=window
        )
        be.rope_backward(d_qkv, self.heads, rotation, act.rope)

        dh, ds = self._linear_dx(index, "qkv", d_qkv, lora, need_dx=need_dx)
        if dh is None:
            dx, h = None, be.rms_norm_apply(act.x, weights.input_norm, act.rstd_1)
        else:
            skip = d_mid if needed is None else needed.spread(d_mid)
            dx, h = be.rms_norm_backward_apply(dh, act.x, weights.input_norm, act.rstd_1, skip)
        be.lora_grads(h, d_qkv, act.lora["qkv"], ds, lora, groups["qkv"])
        return dx
