"""The plain-PyTorch references behind the `Backend` protocol, on any device."""

from __future__ import annotations

from collections import Counter

import torch
from gshare.kernels.attention import attention_backward_reference, attention_reference
from gshare.kernels.cross_entropy import cross_entropy_reference
from gshare.kernels.gemm import RowInvariantGemm
from gshare.kernels.grouped_lora import lora_dx_reference, lora_forward_reference, lora_grads_reference
from gshare.kernels.layout import Group, Heads, Layout, LoraPlan, Rotation
from gshare.kernels.rms_norm import (
    rms_norm_apply_reference,
    rms_norm_backward_reference,
    rms_norm_reference,
)
from gshare.kernels.rope import rope_backward_reference, rope_reference
from gshare.kernels.swiglu import swiglu_backward_reference, swiglu_reference

#: S or dS of each slot of each linear of a group, in order.
PerLinear = list[list[torch.Tensor]]
#: q and k before QK-norm, with their rstd.
BeforeNorm = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class ReferenceBackend:
    """`exact=False` breaks row invariance on purpose (negative control)."""

    name = "reference"

    def __init__(self, *, exact: bool = True) -> None:
        self.calls: Counter[str] = Counter()
        self.gemm = RowInvariantGemm(exact=exact)

    def linear(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.calls["linear"] += 1
        y = self.gemm.linear(x, w)
        return y if bias is None else y.add_(bias.to(y.dtype))

    def linear_dx(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        self.calls["linear_dx"] += 1
        return self.gemm.linear_dx(dy, w)

    def separable(self, w: torch.Tensor, at: int) -> bool:
        return self.gemm.separable(w, at)

    # ------------------------------------------------------------------ LoRA

    def lora_forward(
        self, x: torch.Tensor, y: torch.Tensor, lora: LoraPlan, group: Group
    ) -> PerLinear | None:
        slots_of = [lora.slots(group.layer, name) for name in group.linears]
        if not any(slots_of):
            return None
        self.calls["lora_forward"] += 1
        return [
            lora_forward_reference(x, part, slots, self.gemm.thin)
            for part, slots in zip(y.split(group.sizes, dim=1), slots_of, strict=True)
        ]

    def lora_dx(
        self, dy: torch.Tensor, dx: torch.Tensor | None, lora: LoraPlan, group: Group
    ) -> PerLinear | None:
        slots_of = [lora.slots(group.layer, name) for name in group.linears]
        if not any(slots_of):
            return None
        self.calls["lora_dx"] += 1
        return [
            lora_dx_reference(part, dx, slots, self.gemm.thin)
            for part, slots in zip(dy.split(group.sizes, dim=1), slots_of, strict=True)
        ]

    def lora_grads(
        self,
        x: torch.Tensor,
        dy: torch.Tensor,
        s: PerLinear | None,
        ds: PerLinear | None,
        lora: LoraPlan,
        group: Group,
    ) -> None:
        if s is None or ds is None:
            return
        self.calls["lora_grads"] += 1
        for part, name, s_of, ds_of in zip(dy.split(group.sizes, dim=1), group.linears, s, ds, strict=True):
            lora_grads_reference(x, part, lora.slots(group.layer, name), s_of, ds_of)

    # ------------------------------------------------------------------ attention

    def rope(self, qkv: torch.Tensor, heads: Heads, rotation: Rotation) -> BeforeNorm | None:
        q, k, _ = split_heads(qkv, heads)
        kept = None
        q_in, k_in = q, k
        if rotation.q_norm is not None and rotation.k_norm is not None:
            q_pre, k_pre = q.clone(), k.clone()
            q_in, q_rstd = rms_norm_reference(q_pre, rotation.q_norm, rotation.eps)
            k_in, k_rstd = rms_norm_reference(k_pre, rotation.k_norm, rotation.eps)
            kept = (q_pre, q_rstd, k_pre, k_rstd)
        cos, sin = rotation.cos[rotation.position], rotation.sin[rotation.position]
        q.copy_(rope_reference(q_in, cos, sin))
        k.copy_(rope_reference(k_in, cos, sin))
        return kept

    def rope_backward(
        self, d_qkv: torch.Tensor, heads: Heads, rotation: Rotation, kept: BeforeNorm | None
    ) -> None:
        dq, dk, _ = split_heads(d_qkv, heads)
        cos, sin = rotation.cos[rotation.position], rotation.sin[rotation.position]
        new_q, new_k = rope_backward_reference(dq, cos, sin), rope_backward_reference(dk, cos, sin)
        if kept is not None and rotation.q_norm is not None and rotation.k_norm is not None:
            q_pre, q_rstd, k_pre, k_rstd = kept
            new_q = rms_norm_backward_reference(new_q, q_pre, rotation.q_norm, q_rstd)
            new_k = rms_norm_backward_reference(new_k, k_pre, rotation.k_norm, k_rstd)
        dq.copy_(new_q)
        dk.copy_(new_k)

    def attention(
        self, qkv: torch.Tensor, layout: Layout, heads: Heads, *, scale: float, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.calls["attention"] += 1
        o = attention_reference(*split_heads(qkv, heads), layout, scale=scale, window=window)
        return o.view(qkv.shape[0], -1), None

    def attention_backward(
        self,
        do: torch.Tensor,
        qkv: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor | None,
        layout: Layout,
        heads: Heads,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        del lse
        self.calls["attention_backward"] += 1
        shape = (qkv.shape[0], heads.query, heads.size)
        q, k, v = split_heads(qkv, heads)
        parts = attention_backward_reference(
            do.view(shape), q, k, v, o.view(shape), layout, scale=scale, window=window
        )
        return torch.cat([part.reshape(qkv.shape[0], -1) for part in parts], dim=1)

    # ------------------------------------------------------------------ rows

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, w: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.calls["rms_norm"] += 1
        if delta is not None:
            x = x + delta
        h, rstd = rms_norm_reference(x, w, eps)
        return x, h, rstd

    def rms_norm_apply(self, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
        return rms_norm_apply_reference(x, w, rstd)

    def rms_norm_backward(
        self,
        dh: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor,
        rstd: torch.Tensor,
        skip: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls["rms_norm_backward"] += 1
        dx = rms_norm_backward_reference(dh, x, w, rstd)
        return dx if skip is None else dx.add_(skip)

    def rms_norm_backward_apply(
        self, dh: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor, skip: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rms_norm_backward(dh, x, w, rstd, skip), self.rms_norm_apply(x, w, rstd)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        self.calls["swiglu"] += 1
        return swiglu_reference(*gate_up.chunk(2, dim=1))

    def swiglu_backward(self, dm: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = gate_up.chunk(2, dim=1)
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = swiglu_backward_reference(dm, gate, up)
        d_gate_up[:, : gate.shape[1]] = d_gate
        d_gate_up[:, gate.shape[1] :] = d_up
        return d_gate_up, swiglu_reference(gate, up)

    def cross_entropy(
        self, h: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.calls["cross_entropy"] += 1
        return cross_entropy_reference(h, head, targets, scale, self.gemm)

    def plan_cross_entropy(self, rows: int, head: torch.Tensor, *, training: bool) -> None:
        """Its chunks are small."""


def split_heads(qkv: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views q (T, Hq, D), k and v (T, Hkv, D) of qkv (T, (Hq + 2·Hkv)·D)."""
    q, k, v = qkv.unflatten(1, (-1, heads.size)).split((heads.query, heads.key, heads.key), dim=1)
    return q, k, v
