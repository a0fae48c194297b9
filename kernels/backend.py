"""The one object that picks which implementation of each op runs; nothing above it knows.

`ReferenceBackend` runs the plain-PyTorch references on any device. A Triton backend takes its place on
CUDA without the decoder or the engine changing. `calls` counts launches by op, so that tests and the
audit can prove that a packed pass really is packed: one `linear` per base linear, whatever N is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch
from gshare.kernels.attention import attention_backward_reference, attention_reference
from gshare.kernels.cross_entropy import cross_entropy_reference
from gshare.kernels.gemm import RowInvariantGemm
from gshare.kernels.grouped_lora import lora_backward_reference, lora_forward_reference
from gshare.kernels.layout import Layout, LoraSlot
from gshare.kernels.rms_norm import (
    rms_norm_apply_reference,
    rms_norm_backward_reference,
    rms_norm_reference,
)
from gshare.kernels.rope import rope_backward_reference, rope_reference
from gshare.kernels.swiglu import swiglu_backward_reference, swiglu_reference

#: Version of NUMERICS.md that this code keeps.
NUMERICS = 1


class Backend(Protocol):
    """The ops of a training step. Shapes: T tokens, K in, N out, H hidden, D head size, R label rows."""

    name: str
    calls: Counter[str]

    def linear(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...
    def linear_dx(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor: ...
    def lora_forward(
        self, x: torch.Tensor, y: torch.Tensor, slots: Sequence[LoraSlot]
    ) -> list[torch.Tensor]: ...
    def lora_backward(
        self,
        x: torch.Tensor,
        dy: torch.Tensor,
        dx: torch.Tensor | None,
        slots: Sequence[LoraSlot],
        saved: Sequence[torch.Tensor],
    ) -> None: ...
    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Layout,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor: ...
    def attention_backward(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        layout: Layout,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...
    def rms_norm(self, x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]: ...
    def rms_norm_apply(self, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor: ...
    def rms_norm_backward(
        self, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor
    ) -> torch.Tensor: ...
    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...
    def rope_backward(self, dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor: ...
    def swiglu(self, g: torch.Tensor, u: torch.Tensor) -> torch.Tensor: ...
    def swiglu_backward(
        self, dm: torch.Tensor, g: torch.Tensor, u: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def cross_entropy(
        self, h: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


class ReferenceBackend:
    """Plain PyTorch on CPU or CUDA. `exact=False` breaks row invariance on purpose (negative control)."""

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

    def lora_forward(self, x: torch.Tensor, y: torch.Tensor, slots: Sequence[LoraSlot]) -> list[torch.Tensor]:
        self.calls["lora_forward"] += 1
        return lora_forward_reference(x, y, slots)

    def lora_backward(
        self,
        x: torch.Tensor,
        dy: torch.Tensor,
        dx: torch.Tensor | None,
        slots: Sequence[LoraSlot],
        saved: Sequence[torch.Tensor],
    ) -> None:
        self.calls["lora_backward"] += 1
        lora_backward_reference(x, dy, dx, slots, saved)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Layout,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        self.calls["attention"] += 1
        return attention_reference(q, k, v, layout, scale=scale, window=window)

    def attention_backward(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        layout: Layout,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.calls["attention_backward"] += 1
        return attention_backward_reference(do, q, k, v, o, layout, scale=scale, window=window)

    def rms_norm(self, x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls["rms_norm"] += 1
        return rms_norm_reference(x, w, eps)

    def rms_norm_apply(self, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
        return rms_norm_apply_reference(x, w, rstd)

    def rms_norm_backward(
        self, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor
    ) -> torch.Tensor:
        self.calls["rms_norm_backward"] += 1
        return rms_norm_backward_reference(dy, x, w, rstd)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rope_reference(x, cos, sin)

    def rope_backward(self, dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return rope_backward_reference(dy, cos, sin)

    def swiglu(self, g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        self.calls["swiglu"] += 1
        return swiglu_reference(g, u)

    def swiglu_backward(
        self, dm: torch.Tensor, g: torch.Tensor, u: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return swiglu_backward_reference(dm, g, u)

    def cross_entropy(
        self, h: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.calls["cross_entropy"] += 1
        return cross_entropy_reference(h, head, targets, scale, self.gemm)


def pick_backend(device: torch.device) -> Backend:
    """The best backend of a device: the references everywhere today."""
    del device
    return ReferenceBackend()
