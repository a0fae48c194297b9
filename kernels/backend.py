"""What a training step asks of a backend, and the one place that picks one; nothing above it knows which.

    T tokens of the pass, H hidden, I intermediate, Hq query heads, Hkv key heads, D head size, R label rows
    qkv (T, (Hq + 2·Hkv)·D): query heads, key heads, value heads; gate_up (T, 2·I): gate, up

`calls` counts launches by op, so that tests and the audit can prove that a packed pass really is packed:
one `linear` per group of linears, whatever the number of adapters is.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import torch
from gshare.kernels.layout import Group, Heads, Layout, LoraPlan, Rotation


class Backend(Protocol):
    """The ops of a training step."""

    name: str
    calls: Counter[str]

    def linear(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...
    def linear_dx(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor: ...
    def separable(self, w: torch.Tensor, at: int) -> bool:
        """Whether two products make the columns before and from `at` on with the bits of one `linear`."""
        ...

    def lora_forward(self, x: torch.Tensor, y: torch.Tensor, lora: LoraPlan, group: Group) -> Any:
        """Adds every adapter's path to y (T, ΣN) in place; returns what the backward needs (S), or None."""
        ...

    def lora_dx(self, dy: torch.Tensor, dx: torch.Tensor | None, lora: LoraPlan, group: Group) -> Any:
        """Adds to dx (T, K) in place unless None; returns what `lora_grads` needs (dS), or None."""
        ...

    def lora_grads(
        self, x: torch.Tensor, dy: torch.Tensor, s: Any, ds: Any, lora: LoraPlan, group: Group
    ) -> None:
        """Adds dA and dB to the adapters' gradients."""
        ...

    def rope(self, qkv: torch.Tensor, heads: Heads, rotation: Rotation) -> Any:
        """QK-norm (if any) and rotation of the query and key heads, in place; returns what is needed back."""
        ...

    def rope_backward(self, d_qkv: torch.Tensor, heads: Heads, rotation: Rotation, kept: Any) -> None:
        """The gradient before QK-norm and rotation, in place."""
        ...

    def attention(
        self, qkv: torch.Tensor, layout: Layout, heads: Heads, *, scale: float, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """o (T, Hq·D), and the rows' log-sum-exp if the backward wants it."""
        ...

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
        """d_qkv, shaped as qkv."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, w: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x + delta (or x), its RMSNorm h, and rstd."""
        ...

    def rms_norm_apply(self, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor: ...
    def rms_norm_backward(
        self,
        dh: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor,
        rstd: torch.Tensor,
        skip: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """dx, plus the residual's gradient `skip`."""
        ...

    def rms_norm_backward_apply(
        self, dh: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor, skip: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rms_norm_backward` and `rms_norm_apply`: dx, and h again."""
        ...

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor: ...
    def swiglu_backward(self, dm: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """d_gate_up, and m again."""
        ...

    def cross_entropy(
        self, h: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """nll (R,) fp32 and dh (R, H), or None without `scale`."""
        ...

    def plan_cross_entropy(self, rows: int, head: torch.Tensor, *, training: bool) -> None:
        """Whatever `cross_entropy` of R = `rows` would find out the first time, found out now, where nothing
        of the pass is in memory yet."""
        ...


def pick_backend(device: torch.device, *, exact: bool = True, plans: Path | None = None) -> Backend:
    """The backend of a device: Triton's on CUDA, the references elsewhere; `exact=False` is the control.

    `plans`: the file in which a GPU's GEMM plans are kept between processes (`gemm_plans.py`), or None.
    """
    if device.type == "cuda":
        from gshare.kernels.triton_backend import TritonBackend

        return TritonBackend(exact=exact, plans=plans)
    from gshare.kernels.reference_backend import ReferenceBackend

    return ReferenceBackend(exact=exact)
