"""The CUDA backend: Triton kernels and cuBLAS behind the `Backend` protocol.

What it needs of a pass beyond the protocol is in `DeviceLayout` and `DeviceLora`: tables in device memory
that stay where they are, so that one captured CUDA graph serves every pass of the same capacities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from gshare.kernels.attention_backward_triton import attention_backward
from gshare.kernels.attention_triton import attention_forward
from gshare.kernels.bias_triton import add_bias_
from gshare.kernels.cross_entropy_triton import linear_cross_entropy
from gshare.kernels.gemm_cuda import CudaGemm
from gshare.kernels.grouped_lora_backward_triton import lora_ds, lora_dx
from gshare.kernels.grouped_lora_grads_triton import lora_grads
from gshare.kernels.grouped_lora_triton import lora_expand, lora_shrink
from gshare.kernels.layout import GROUPS, Group, Heads, Layout, LoraPlan, LoraSlot, Rotation
from gshare.kernels.logit_chunks import chunk_rows
from gshare.kernels.lora_tables import LoraWorkspace, PassTables
from gshare.kernels.rms_norm_triton import (
    add_rms_norm,
    rms_norm_apply,
    rms_norm_backward,
    rms_norm_backward_apply,
)
from gshare.kernels.rope_triton import rope_qk_, rope_qk_backward_
from gshare.kernels.swiglu_triton import swiglu, swiglu_backward

_GROUP_INDEX = {name: index for index, name in enumerate(GROUPS)}
#: Makes the keep masks (J, T, K) of a group; None where no adapter of the pass drops.
Masks = Callable[[Group], torch.Tensor]


@dataclass(frozen=True)
class DeviceLayout(Layout):
    """A layout whose tables lie on the device. `starts` holds the padded end only: no op reads it."""

    position: torch.Tensor | None = None  # (T,) int32
    blocks: torch.Tensor | None = None  # attention's block table
    table_rows: int = 0  # rows of the RoPE tables

    def positions(self) -> torch.Tensor:
        assert self.position is not None
        return self.position

    @property
    def longest(self) -> int:
        return self.table_rows


@dataclass
class DeviceLora:
    """The adapters of a pass as kernels see them. Groups that none of them adapts are skipped."""

    tables: PassTables
    flat: torch.Tensor  # the arena's compute copy
    grads: torch.Tensor  # the arena's gradients, fp32
    workspace: LoraWorkspace
    active: frozenset[str]  # names of groups
    masks: Masks | None = None

    def mask(self, group: Group) -> torch.Tensor | None:
        """Keep masks (J, T, K) uint8 of a group, or None where nobody drops."""
        return self.masks(group) if self.masks is not None else None

    def slots(self, layer: int, linear: str) -> Sequence[LoraSlot]:
        raise NotImplementedError("the CUDA backend reads tables, not slots")


def _device(lora: LoraPlan, group: Group) -> DeviceLora | None:
    """None for the bare base, and for a group that no adapter of the pass touches."""
    if not isinstance(lora, DeviceLora):
        assert not lora.slots(group.layer, group.linears[0]), "this backend needs a DeviceLora"
        return None
    return lora if group.name in lora.active else None


def _index(group: Group) -> int:
    return group.layer * len(GROUPS) + _GROUP_INDEX[group.name]


class TritonBackend:
    """bf16 and fp32 on CUDA. `exact=False` breaks row invariance on purpose (negative control); `plans` is
    the file in which GEMM plans are kept between processes."""

    name = "triton"

    def __init__(self, *, exact: bool = True, plans: Path | None = None) -> None:
        self.calls: Counter[str] = Counter()
        self.gemm = CudaGemm(exact=exact, plans=plans)

    def linear(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.calls["linear"] += 1
        y = self.gemm.linear(x, w)
        return y if bias is None else add_bias_(y, bias)

    def linear_dx(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        self.calls["linear_dx"] += 1
        return self.gemm.linear_dx(dy, w)

    def separable(self, w: torch.Tensor, at: int) -> bool:
        return self.gemm.separable(w, at)

    # ------------------------------------------------------------------ LoRA

    def lora_forward(
        self, x: torch.Tensor, y: torch.Tensor, lora: LoraPlan, group: Group
    ) -> torch.Tensor | None:
        plan = _device(lora, group)
        if plan is None:
            return None
        self.calls["lora_forward"] += 1
        s = lora_shrink(x, plan.flat, plan.tables, _index(group), plan.workspace, plan.mask(group))
        lora_expand(y, s, plan.flat, plan.tables, _index(group))
        return s

    def lora_dx(
        self, dy: torch.Tensor, dx: torch.Tensor | None, lora: LoraPlan, group: Group
    ) -> torch.Tensor | None:
        plan = _device(lora, group)
        if plan is None:
            return None
        self.calls["lora_dx"] += 1
        ds = lora_ds(dy, plan.flat, plan.tables, _index(group), plan.workspace)
        if dx is not None:
            lora_dx(dx, ds, plan.flat, plan.tables, _index(group), plan.mask(group))
        return ds

    def lora_grads(
        self,
        x: torch.Tensor,
        dy: torch.Tensor,
        s: torch.Tensor | None,
        ds: torch.Tensor | None,
        lora: LoraPlan,
        group: Group,
    ) -> None:
        if s is None or ds is None:
            return
        plan = _device(lora, group)
        assert plan is not None
        self.calls["lora_grads"] += 1
        lora_grads(x, dy, s, ds, plan.grads, plan.tables, _index(group), plan.mask(group))

    # ------------------------------------------------------------------ attention

    def rope(
        self, qkv: torch.Tensor, heads: Heads, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        return rope_qk_(
            qkv,
            rotation.cos,
            rotation.sin,
            rotation.position,
            heads=heads.query,
            kv_heads=heads.key,
            q_norm=rotation.q_norm,
            k_norm=rotation.k_norm,
            eps=rotation.eps,
        )

    def rope_backward(
        self,
        d_qkv: torch.Tensor,
        heads: Heads,
        rotation: Rotation,
        kept: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        rope_qk_backward_(
            d_qkv,
            rotation.cos,
            rotation.sin,
            rotation.position,
            heads=heads.query,
            kv_heads=heads.key,
            q_norm=rotation.q_norm,
            k_norm=rotation.k_norm,
            kept=kept,
        )

    def attention(
        self, qkv: torch.Tensor, layout: Layout, heads: Heads, *, scale: float, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.calls["attention"] += 1
        blocks = cast(DeviceLayout, layout).blocks
        assert blocks is not None
        return attention_forward(
            qkv, blocks, heads=heads.query, kv_heads=heads.key, scale=scale, window=window
        )

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
        self.calls["attention_backward"] += 1
        blocks = cast(DeviceLayout, layout).blocks
        assert blocks is not None
        assert lse is not None
        return attention_backward(
            do, qkv, o, lse, blocks, heads=heads.query, kv_heads=heads.key, scale=scale, window=window
        )

    # ------------------------------------------------------------------ rows

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, w: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.calls["rms_norm"] += 1
        return add_rms_norm(x, delta, w, eps)

    def rms_norm_apply(self, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
        return rms_norm_apply(x, w, rstd)

    def rms_norm_backward(
        self,
        dh: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor,
        rstd: torch.Tensor,
        skip: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self.calls["rms_norm_backward"] += 1
        return rms_norm_backward(dh, x, w, rstd, skip)

    def rms_norm_backward_apply(
        self, dh: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor, skip: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls["rms_norm_backward"] += 1
        return rms_norm_backward_apply(dh, x, w, rstd, skip)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        self.calls["swiglu"] += 1
        return swiglu(gate_up)

    def swiglu_backward(self, dm: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return swiglu_backward(dm, gate_up)

    def cross_entropy(
        self, h: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.calls["cross_entropy"] += 1
        return linear_cross_entropy(h, head, targets, scale, self.gemm)

    def plan_cross_entropy(self, rows: int, head: torch.Tensor, *, training: bool) -> None:
        step = chunk_rows(rows, head.shape[0], head.element_size())
        for chunk in {min(step, rows - start) for start in range(0, rows, step)}:
            self.gemm.plan(chunk, head, dx=training)
