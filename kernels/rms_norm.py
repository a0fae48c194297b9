"""RMSNorm over the last dimension (Zhang & Sennrich, arXiv:1910.07467), weight frozen.

    rstd = 1 / sqrt(mean(x²) + eps);   y = x · rstd · w
    dx = rstd · (w ∘ dy) − x · rstd³/H · Σ(x ∘ w ∘ dy)

Statistics in fp32. `1 / sqrt` from IEEE-exact parts instead of rsqrt, whose approximation may differ
between vector and scalar code.
"""

from __future__ import annotations

import torch
from gshare.kernels import vector_math
from gshare.kernels.row_sum import row_sum_reference

vector_math.set_up()


def rms_norm_reference(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x (…, H) → y (…, H) in x's dtype and rstd (…, 1) in fp32."""
    wide = x.float()
    rstd = 1.0 / torch.sqrt(row_sum_reference(wide * wide) / x.shape[-1] + eps)
    return rms_norm_apply_reference(x, w, rstd), rstd


def rms_norm_apply_reference(x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """y again from a kept rstd: same bits as the forward's, for recomputation in the backward."""
    return w.to(x.dtype) * (x.float() * rstd).to(x.dtype)


def rms_norm_backward_reference(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor
) -> torch.Tensor:
    """dx (…, H) in x's dtype."""
    wide, g = x.float(), w.float() * dy.float()
    dot = row_sum_reference(wide * g)
    coefficient = rstd * rstd * rstd * dot / x.shape[-1]
    return (rstd * g - wide * coefficient).to(x.dtype)
