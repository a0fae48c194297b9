"""Weight-only int8, symmetric, one scale per output channel; plain-PyTorch reference, any device.

    q_NK = round(w_NK × (127 / absmax_N)), scale_N = absmax_N / 127, w_NK ≈ q_NK × scale_N

The vector-wise scheme of LLM.int8() (arXiv:2208.07339, section 3.1) without outlier columns: activations stay
in the compute dtype. Codes equal bitsandbytes' `int8_vectorwise_quant`. 8 bits a weight plus 32 / K.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Int8Tensor(NamedTuple):
    """A quantised (N, K) weight."""

    codes: torch.Tensor  # (N, K) int8 in [-127, 127]
    scales: torch.Tensor  # (N,) fp32


def quantise(w_NK: torch.Tensor) -> Int8Tensor:
    """Quantise an (N, K) floating-point weight, on its device. A row of zeros stays zeros."""
    assert w_NK.dim() == 2, w_NK.shape
    assert w_NK.numel() > 0, w_NK.shape
    w = w_NK.float()
    absmax_N = w.abs().amax(dim=1)
    # 1e-36: 127 / absmax stays finite, so a row of zeros gives 0 × finite, not 0 × inf.
    reciprocal_N = 127.0 / absmax_N.clamp(min=1e-36)
    codes = torch.round(w * reciprocal_N.unsqueeze(1)).clamp_(-127, 127).to(torch.int8)
    return Int8Tensor(codes, absmax_N / 127.0)


def dequantise(
    q: Int8Tensor, dtype: torch.dtype = torch.float32, out: torch.Tensor | None = None
) -> torch.Tensor:
    """(N, K) in `dtype`: code × scale in fp32, rounded once. `out` (N, K) is filled if given."""
    if out is None:
        out = torch.empty(q.codes.shape, dtype=dtype, device=q.codes.device)
    assert out.shape == q.codes.shape, out.shape
    assert out.dtype == dtype, out.dtype
    if dtype == torch.float32:
        return torch.mul(q.codes, q.scales.unsqueeze(1), out=out)
    return out.copy_(q.codes * q.scales.unsqueeze(1))
