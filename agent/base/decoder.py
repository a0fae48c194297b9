"""The decoder: one explicit forward and backward over a packed batch, driven by ModelConfig.

    T tokens, H hidden, I intermediate, Hq query heads, Hkv key heads, D head size, x_TH a (T, H) tensor

No autograd: the step is a fixed list of ops, weights are frozen, and the only gradients are the
adapters', which `lora_backward` adds to the arena. What the backward needs is kept in `LayerActivations`,
or recomputed from the layer's input when checkpointing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from gshare.agent.base.config import ModelConfig
from gshare.agent.base.rope import rope_tables
from gshare.agent.base.weights import Base, BaseLayer
from gshare.kernels.backend import Backend
from gshare.kernels.layout import Layout, LoraSlot


class LoraPlan(Protocol):
    """Which adapters of the pass touch which linear."""

    def slots(self, layer: int, linear: str) -> Sequence[LoraSlot]:
        """In token order; empty when no adapter of the pass targets it."""
        ...


class NoLora:
    """The bare base."""

    def slots(self, layer: int, linear: str) -> Sequence[LoraSlot]:
        del layer, linear
        return ()


class Attend(Protocol):
    """How one layer attends; training uses the packed op, generation a key/value cache."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


@dataclass
class LayerActivations:
    """What one layer's backward needs. Only `x` is kept under checkpointing."""

    x: torch.Tensor  # (T, H) the layer's input
    rstd_1: torch.Tensor  # (T, 1)
    q: torch.Tensor  # (T, Hq, D) after RoPE
    k: torch.Tensor  # (T, Hkv, D) after RoPE
    v: torch.Tensor  # (T, Hkv, D)
    o: torch.Tensor  # (T, Hq·D) attention output
    x_mid: torch.Tensor  # (T, H) after the attention block
    rstd_2: torch.Tensor  # (T, 1)
    gate: torch.Tensor  # (T, I)
    up: torch.Tensor  # (T, I)
    lora: dict[str, list[torch.Tensor]]  # linear → S of each slot
    qk_pre: (
        tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None
    )  # q, rstd, k, rstd before qk-norm


class Decoder:
    """Runs a `Base` through a `Backend`. Stateless apart from the RoPE tables."""

    def __init__(self, base: Base, backend: Backend) -> None:
        self.base = base
        self.backend = backend
        self.config: ModelConfig = base.config
        self.scale = 1.0 / math.sqrt(self.config.head_dim)
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    # ------------------------------------------------------------------ pieces

    def rope(self, position_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (T, D) in fp32, from a table that grows in powers of two."""
        needed = int(position_T.max()) + 1
        if self._tables is None or self._tables[0].shape[0] < needed:
            rows = min(
                max(256, 1 << (needed - 1).bit_length()), max(needed, self.config.max_position_embeddings)
            )
            self._tables = rope_tables(self.config.rope, rows, self.base.device)
        cos, sin = self._tables
        return cos[position_T], sin[position_T]

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """(T, H) in compute dtype."""
        return self.base.embed[tokens_T].to(self.base.compute_dtype)

    def final_norm(self, x_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.backend.rms_norm(x_RH, self.base.final_norm, self.config.rms_norm_eps)

    def logits(self, x_RH: torch.Tensor) -> torch.Tensor:
        """Logits (R, V) of hidden rows before the final norm."""
        return self.backend.linear(self.final_norm(x_RH)[0], self.base.lm_head.dense(), None)

    def _linear(
        self, layer: int, name: str, x: torch.Tensor, lora: LoraPlan, kept: dict[str, list[torch.Tensor]]
    ) -> torch.Tensor:
        linear = self.base.layers[layer].linears[name]
        y = self.backend.linear(x, linear.weight.dense(), linear.bias)
        slots = lora.slots(layer, name)
        if slots:
            kept[name] = self.backend.lora_forward(x, y, slots)
        return y

    def _linear_backward(
        self,
        layer: int,
        name: str,
        x: torch.Tensor,
        dy: torch.Tensor,
        lora: LoraPlan,
        kept: dict[str, list[torch.Tensor]],
        *,
        need_dx: bool = True,
    ) -> torch.Tensor | None:
        weight = self.base.layers[layer].linears[name].weight
        dx = self.backend.linear_dx(dy, weight.dense()) if need_dx else None
        slots = lora.slots(layer, name)
        if slots:
            self.backend.lora_backward(x, dy, dx, slots, kept[name])
        return dx

    # ------------------------------------------------------------------ forward

    def layer_forward(
        self,
        index: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        lora: LoraPlan,
    ) -> tuple[torch.Tensor, LayerActivations]:
        """One decoder layer: x (T, H) → (T, H), and what its backward needs."""
        c, be, weights = self.config, self.backend, self.base.layers[index]
        tokens = x.shape[0]
        kept: dict[str, list[torch.Tensor]] = {}
        h, rstd_1 = be.rms_norm(x, weights.input_norm, c.rms_norm_eps)
        q = self._linear(index, "q_proj", h, lora, kept).view(tokens, c.num_heads, c.head_dim)
        k = self._linear(index, "k_proj", h, lora, kept).view(tokens, c.num_kv_heads, c.head_dim)
        v = self._linear(index, "v_proj", h, lora, kept).view(tokens, c.num_kv_heads, c.head_dim)
        qk_pre = None
        if weights.q_norm is not None and weights.k_norm is not None:
            q_pre, k_pre = q, k
            q, q_rstd = be.rms_norm(q_pre, weights.q_norm, c.rms_norm_eps)
            k, k_rstd = be.rms_norm(k_pre, weights.k_norm, c.rms_norm_eps)
            qk_pre = (q_pre, q_rstd, k_pre, k_rstd)
        q, k = be.rope(q, cos, sin), be.rope(k, cos, sin)
        o = attend(index, q, k, v).reshape(tokens, c.num_heads * c.head_dim)
        x_mid = x + self._linear(index, "o_proj", o, lora, kept)
        h, rstd_2 = be.rms_norm(x_mid, weights.post_attention_norm, c.rms_norm_eps)
        gate = self._linear(index, "gate_proj", h, lora, kept)
        up = self._linear(index, "up_proj", h, lora, kept)
        y = x_mid + self._linear(index, "down_proj", be.swiglu(gate, up), lora, kept)
        return y, LayerActivations(x, rstd_1, q, k, v, o, x_mid, rstd_2, gate, up, kept, qk_pre)

    def packed_attention(self, layout: Layout) -> Attend:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            window = self.config.sliding_window[layer]
            return self.backend.attention(q, k, v, layout, scale=self.scale, window=window)

        return attend

    def forward(
        self,
        tokens_T: torch.Tensor,
        layout: Layout,
        lora: LoraPlan,
        *,
        keep_from: int | None = None,
        checkpoint: bool = False,
    ) -> tuple[torch.Tensor, list[LayerActivations | torch.Tensor]]:
        """Hidden rows (T, H) before the final norm.

        `keep_from` is the lowest layer that the backward will visit (None: no backward). From there on
        each layer's activations are kept, or with `checkpoint` only its input.
        """
        x = self.embed(tokens_T)
        cos, sin = self.rope(layout.positions())
        attend = self.packed_attention(layout)
        kept: list[LayerActivations | torch.Tensor] = []
        for index in range(self.config.num_layers):
            y, activations = self.layer_forward(index, x, cos, sin, attend, lora)
            if keep_from is not None and index >= keep_from:
                kept.append(x if checkpoint else activations)
            x = y
        return x, kept

    # ------------------------------------------------------------------ backward

    def backward(
        self,
        dx_TH: torch.Tensor,
        kept: list[LayerActivations | torch.Tensor],
        layout: Layout,
        lora: LoraPlan,
        *,
        lowest: int,
    ) -> None:
        """From the gradient of the rows before the final norm down to layer `lowest`, into the arena.

        Frees each layer's activations as it goes (`kept` is emptied).
        """
        cos, sin = self.rope(layout.positions())
        attend = self.packed_attention(layout)
        for index in reversed(range(lowest, self.config.num_layers)):
            activations = kept.pop()
            if isinstance(activations, torch.Tensor):
                activations = self.layer_forward(index, activations, cos, sin, attend, lora)[1]
            dx = self.layer_backward(
                index, dx_TH, activations, cos, sin, layout, lora, need_dx=index > lowest
            )
            if dx is None:
                return
            dx_TH = dx

    def layer_backward(
        self,
        index: int,
        dy: torch.Tensor,
        act: LayerActivations,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layout: Layout,
        lora: LoraPlan,
        *,
        need_dx: bool,
    ) -> torch.Tensor | None:
        """dy (T, H) → dx (T, H), or None when nothing below needs it."""
        c, be, weights = self.config, self.backend, self.base.layers[index]
        tokens = dy.shape[0]
        down_input = be.swiglu(act.gate, act.up)
        dm = self._linear_backward(index, "down_proj", down_input, dy, lora, act.lora)
        assert dm is not None
        d_gate, d_up = be.swiglu_backward(dm, act.gate, act.up)
        h = be.rms_norm_apply(act.x_mid, weights.post_attention_norm, act.rstd_2)
        dh = self._linear_backward(index, "gate_proj", h, d_gate, lora, act.lora)
        d_from_up = self._linear_backward(index, "up_proj", h, d_up, lora, act.lora)
        assert dh is not None
        assert d_from_up is not None
        dh += d_from_up
        d_mid = be.rms_norm_backward(dh, act.x_mid, weights.post_attention_norm, act.rstd_2)
        d_mid += dy

        do = self._linear_backward(index, "o_proj", act.o, d_mid, lora, act.lora)
        assert do is not None
        dq, dk, dv = be.attention_backward(
            do.view(tokens, c.num_heads, c.head_dim),
            act.q,
            act.k,
            act.v,
            act.o.view(tokens, c.num_heads, c.head_dim),
            layout,
            scale=self.scale,
            window=c.sliding_window[index],
        )
        dq, dk = be.rope_backward(dq, cos, sin), be.rope_backward(dk, cos, sin)
        if act.qk_pre is not None and weights.q_norm is not None and weights.k_norm is not None:
            q_pre, q_rstd, k_pre, k_rstd = act.qk_pre
            dq = be.rms_norm_backward(dq, q_pre, weights.q_norm, q_rstd)
            dk = be.rms_norm_backward(dk, k_pre, weights.k_norm, k_rstd)
        return self._qkv_backward(index, (dq, dk, dv), d_mid, act, weights, lora, need_dx=need_dx)

    def _qkv_backward(
        self,
        index: int,
        d_qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        d_mid: torch.Tensor,
        act: LayerActivations,
        weights: BaseLayer,
        lora: LoraPlan,
        *,
        need_dx: bool,
    ) -> torch.Tensor | None:
        tokens = d_mid.shape[0]
        h = self.backend.rms_norm_apply(act.x, weights.input_norm, act.rstd_1)
        dh: torch.Tensor | None = None
        for name, d in zip(("q_proj", "k_proj", "v_proj"), d_qkv, strict=True):
            part = self._linear_backward(
                index, name, h, d.reshape(tokens, -1), lora, act.lora, need_dx=need_dx
            )
            dh = part if dh is None or part is None else dh.add_(part)
        if dh is None:
            return None
        dx = self.backend.rms_norm_backward(dh, act.x, weights.input_norm, act.rstd_1)
        dx += d_mid
        return dx
