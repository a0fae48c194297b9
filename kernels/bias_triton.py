"""Adding a linear's bias on CUDA: y ← round(y + bias), in place.

torch's own broadcast addition goes element by element, two bytes at a time; this one moves 16 bytes. Every
element is on its own and has torch's bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gshare.kernels.launch import ceil_div, launch
from gshare.kernels.triton_rounding import round_to

# 16 × 128 with 4 warps: two 16-byte bf16 loads a thread. Widths of fused qkv are multiples of 128.
_ROWS, _COLUMNS, _WARPS = 16, 128, 4


@triton.jit(do_not_specialize=["T"])
def add_bias_kernel(y_ptr, bias_ptr, T, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One tile (ROWS, COLUMNS) of y a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < T)[:, None] & (column < N)[None, :]
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    y = tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, round_to(y + bias[None, :], y_ptr.dtype.element_ty), mask=mask)


def add_bias_(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """y (T, N) bf16 or fp32, contiguous; bias (N,) bf16 or fp32 → y itself, with bias added."""
    tokens, width = y.shape
    assert bias.shape == (width,), (y.shape, bias.shape)
    assert y.is_contiguous(), "contiguous rows needed"
    assert bias.is_contiguous()
    launch(
        add_bias_kernel,
        (ceil_div(tokens, _ROWS), ceil_div(width, _COLUMNS)),
        y,
        bias,
        tokens,
        N=width,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return y
