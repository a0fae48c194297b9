"""Linear cross-entropy at the labelled tokens only; never all logits at once.

    logits = h (R, H) @ W (V, H)ᵀ for the R rows that predict a labelled token
    nll_i = logsumexp(logits_i) − logits_i[target_i]
    dh = ((softmax(logits) − onehot) · scale) @ W

`scale` (R,) is each row's 1 / (label tokens of its own adapter's step), so that no adapter's gradient
knows another's count. Rows go in chunks of CHUNK_ROWS: 256 × 49,152 × 4 bytes is 48 MiB.
"""

from __future__ import annotations

import torch
from gshare.kernels.gemm import RowInvariantGemm

CHUNK_ROWS = 256


def cross_entropy_reference(
    h: torch.Tensor,
    head: torch.Tensor,
    targets: torch.Tensor,
    scale: torch.Tensor | None,
    gemm: RowInvariantGemm,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h (R, H), head (V, H), targets (R,) int64 → nll (R,) fp32 and dh (R, H), or None without `scale`."""
    gemm.plan(head, dx=scale is not None)  # before there are logits: it needs as much as they do
    nll = torch.empty(h.shape[0], dtype=torch.float32, device=h.device)
    dh = torch.empty_like(h) if scale is not None else None
    for start in range(0, h.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        target = targets[rows, None]
        log_p = torch.log_softmax(gemm.linear(h[rows], head).float(), dim=-1)
        nll[rows] = -log_p.gather(1, target)[:, 0]
        if scale is not None and dh is not None:
            grad = log_p.exp_()
            grad.scatter_add_(1, target, grad.new_full((target.shape[0], 1), -1.0))
            grad *= scale[rows, None]
            dh[rows] = gemm.linear_dx(grad.to(h.dtype), head)
    return nll, dh
