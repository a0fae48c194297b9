"""The base GEMM in Triton: what cuBLAS is checked against, and what runs where cuBLAS is slow or differs.

    forward   y (M, N)  = x (M, K) @ w (N, K)ᵀ
    dX        dx (M, K) = dy (M, N) @ w (N, K)

One fp32 accumulator an output element, over the reduced dimension in order; no split. So tiles may vary with
M and no row's bits can: on an H200 eight tile shapes gave one set of bits, cuBLAS's too.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from gshare.kernels.triton_common import INTERPRET, dot


@triton.jit(do_not_specialize=["rows"])
def _gemm(
    x_ptr,
    w_ptr,
    y_ptr,
    rows,
    x_stride,
    outputs: tl.constexpr,
    reduced: tl.constexpr,
    w_output_stride: tl.constexpr,
    w_reduced_stride: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """y[m, n] = Σ_k x[m, k] · w[n · w_output_stride + k · w_reduced_stride]."""
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    m = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m[:, None].to(tl.int64) * x_stride + k[None, :]
    w_at = w_ptr + n[None, :].to(tl.int64) * w_output_stride + k[:, None].to(tl.int64) * w_reduced_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    m_in, n_in = m[:, None] < rows, n[None, :] < outputs
    for start in range(0, reduced, BLOCK_K):
        left = reduced - start
        a = tl.load(x_at, mask=m_in & (k[None, :] < left), other=0.0)
        b = tl.load(w_at, mask=n_in & (k[:, None] < left), other=0.0)
        acc = dot(a, b, acc, WIDEN)
        x_at += BLOCK_K
        w_at += BLOCK_K * w_reduced_stride
    y_at = y_ptr + m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=m_in & n_in)


def linear_triton(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x (M, K) @ w (N, K)ᵀ → (M, N), in x's dtype."""
    return _launch(x, w, outputs=w.shape[0], reduced=w.shape[1], output_stride=w.stride(0), reduced_stride=1)


def linear_dx_triton(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """dy (M, N) @ w (N, K) → (M, K), in dy's dtype."""
    return _launch(dy, w, outputs=w.shape[1], reduced=w.shape[0], output_stride=1, reduced_stride=w.stride(0))


def _launch(
    x: torch.Tensor, w: torch.Tensor, *, outputs: int, reduced: int, output_stride: int, reduced_stride: int
) -> torch.Tensor:
    assert x.stride(1) == w.stride(1) == 1
    rows = x.shape[0]
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    block_m, block_n, block_k, warps, stages = _tiles(rows, outputs, x.element_size())
    grid = (triton.cdiv(rows, block_m) * triton.cdiv(outputs, block_n),)
    _gemm[grid](
        x,
        w,
        y,
        rows,
        x.stride(0),
        outputs,
        reduced,
        output_stride,
        reduced_stride,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        WIDEN=INTERPRET,
        num_warps=warps,
        num_stages=stages,
    )
    return y


@lru_cache(maxsize=256)
def _tiles(rows: int, outputs: int, element_size: int) -> tuple[int, int, int, int, int]:
    """(BLOCK_M, BLOCK_N, BLOCK_K, warps, stages): free for the bits, chosen for enough tiles.

    64 KiB of shared memory at most (bf16 128 × 128 × 64, 2 stages; fp32 64 × 64 × 32, 3), which every card
    since Turing has. cuBLAS takes the large shapes; these tiles are for few rows and for the check.
    """
    if element_size == 4:
        return (64, 64, 32, 4, 3)
    if rows <= 256 or outputs <= 1024:
        # Few tiles: small ones, so that more of the card works (H200, 128 × 896: 19 µs, cuBLAS 228).
        return (64, 64, 64, 4, 4)
    return (128, 128, 64, 8, 2)
