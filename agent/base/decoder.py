"""The decoder: one explicit forward and backward over a packed batch, driven by ModelConfig.

    T tokens, H hidden, I intermediate, Hq query heads, Hkv key heads, D head size, x_TH a (T, H) tensor

No autograd: the step is a fixed list of ops, weights are frozen, and the only gradients are the
adapters', which `lora_grads` adds to the arena. What the backward needs is kept in `LayerActivations`,
or recomputed from the layer's input when checkpointing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from gshare.agent.base.config import ModelConfig
from gshare.agent.base.rope import rope_tables
from gshare.agent.base.weights import Base
from gshare.kernels.backend import Backend
from gshare.kernels.layout import GROUPS, Group, Heads, Layout, LoraPlan, Rotation


class Attend(Protocol):
    """How one layer attends; training uses the packed op, generation a key/value cache."""

    def __call__(self, layer: int, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]: ...


@dataclass
class LayerActivations:
    """What one layer's backward needs. Only `x` is kept under checkpointing."""

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
        self, layer: int, name: str, x: torch.Tensor, lora: LoraPlan, kept: dict[str, Any]
    ) -> torch.Tensor:
        linear = self.base.layers[layer].groups[name]
        y = self.backend.linear(x, linear.weight.dense(), linear.bias)
        kept[name] = self.backend.lora_forward(x, y, lora, self._groups[layer][name])
        return y

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
    ) -> tuple[torch.Tensor, torch.Tensor, LayerActivations]:
        """One decoder layer over x + delta, (T, H).

        Returns x_mid and the MLP's output, whose sum is the layer's output (the next norm adds them), and
        what the backward needs.
        """
        be, weights, eps = self.backend, self.base.layers[index], self.config.rms_norm_eps
        kept: dict[str, Any] = {}
        x, h, rstd_1 = be.add_rms_norm(x, delta, weights.input_norm, eps)
        qkv = self._linear(index, "qkv", h, lora, kept)
        before = be.rope(qkv, self.heads, rotation)
        o, lse = attend(index, qkv)
        x_mid, h, rstd_2 = be.add_rms_norm(
            x, self._linear(index, "o", o, lora, kept), weights.post_attention_norm, eps
        )
        gate_up = self._linear(index, "gate_up", h, lora, kept)
        out = self._linear(index, "down", be.swiglu(gate_up), lora, kept)
        return x_mid, out, LayerActivations(x, rstd_1, qkv, before, o, lse, x_mid, rstd_2, gate_up, kept)

    def packed_attention(self, layout: Layout) -> Attend:
        def attend(layer: int, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            window = self.config.sliding_window[layer]
            return self.backend.attention(qkv, layout, self.heads, scale=self.scale, window=window)

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
        x, delta = self.embed(tokens_T), None
        position = layout.positions()
        attend = self.packed_attention(layout)
        kept: list[LayerActivations | torch.Tensor] = []
        for index in range(self.config.num_layers):
            rotation = self.rotation(index, position, layout.longest)
            x, delta, activations = self.layer_forward(index, x, delta, rotation, attend, lora)
            if keep_from is not None and index >= keep_from:
                kept.append(activations.x if checkpoint else activations)
            del activations
        assert delta is not None
        return x + delta, kept

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
        position = layout.positions()
        attend = self.packed_attention(layout)
        for index in reversed(range(lowest, self.config.num_layers)):
            rotation = self.rotation(index, position, layout.longest)
            activations = kept.pop()
            if isinstance(activations, torch.Tensor):
                activations = self.layer_forward(index, activations, None, rotation, attend, lora)[2]
            dx = self.layer_backward(
                index, dx_TH, activations, rotation, layout, lora, need_dx=index > lowest
            )
            if dx is None:
                return
            dx_TH = dx

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
    ) -> torch.Tensor | None:
        """dy (T, H) → dx (T, H), or None when nothing below needs it."""
        be, weights, groups = self.backend, self.base.layers[index], self._groups[index]

        dm, ds = self._linear_dx(index, "down", dy, lora)
        assert dm is not None
        d_gate_up, m = be.swiglu_backward(dm, act.gate_up)
        be.lora_grads(m, dy, act.lora["down"], ds, lora, groups["down"])
        del dm, m

        dh, ds = self._linear_dx(index, "gate_up", d_gate_up, lora)
        assert dh is not None
        d_mid, h = be.rms_norm_backward_apply(dh, act.x_mid, weights.post_attention_norm, act.rstd_2, dy)
        del dh
        be.lora_grads(h, d_gate_up, act.lora["gate_up"], ds, lora, groups["gate_up"])
        del d_gate_up, h

        do, ds = self._linear_dx(index, "o", d_mid, lora)
        assert do is not None
        be.lora_grads(act.o, d_mid, act.lora["o"], ds, lora, groups["o"])
        window = self.config.sliding_window[index]
        d_qkv = be.attention_backward(
            do, act.qkv, act.o, act.lse, layout, self.heads, scale=self.scale, window=window
        )
        be.rope_backward(d_qkv, self.heads, rotation, act.rope)

        dh, ds = self._linear_dx(index, "qkv", d_qkv, lora, need_dx=need_dx)
        if dh is None:
            dx, h = None, be.rms_norm_apply(act.x, weights.input_norm, act.rstd_1)
        else:
            dx, h = be.rms_norm_backward_apply(dh, act.x, weights.input_norm, act.rstd_1, d_mid)
        be.lora_grads(h, d_qkv, act.lora["qkv"], ds, lora, groups["qkv"])
        return dx
