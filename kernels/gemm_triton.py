"""The base GEMM in Triton: what cuBLAS is checked against, and what runs where cuBLAS is slow or differs.

    forward   y (M, N)  = x (M, K) @ w (N, K)ᵀ
    dX        dx (M, K) = dy (M, N) @ w (N, K)

One fp32 accumulator an output element, over the reduced dimension in order; no split. So tiles may vary with
M and no row's bits can: on an H200 eight tile shapes gave one set of bits, cuBLAS's too.

Widths are arguments and not constants: a model's ten products share the few kernels that its tiles need,
where a kernel a shape had cost most of a 60 s start.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from gshare.kernels.launch import ceil_div, launch
from gshare.kernels.tile_tables import LEAST_SHARED, Kind, Tiles, gemm_tiles
from gshare.kernels.triton_common import INTERPRET, dot, narrow


@triton.jit(do_not_specialize=["rows"])
def gemm_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    rows,
    outputs,
    reduced,
    x_stride,
    w_stride,
    TRANS: tl.constexpr,
    WHOLE_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """y[m, n] = Σ_k x[m, k] · w[n, k] with TRANS (forward), w[k, n] without (dX).

    WHOLE_K: `reduced` is a multiple of BLOCK_K, so that nothing is masked along it.
    """
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    m = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + m[:, None].to(tl.int64) * x_stride + k[None, :]
    if TRANS:
        w_at = w_ptr + n[None, :].to(tl.int64) * w_stride + k[:, None]
    else:
        w_at = w_ptr + n[None, :] + k[:, None].to(tl.int64) * w_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    m_in, n_in = m[:, None] < rows, n[None, :] < outputs
    for start in range(0, reduced, BLOCK_K):
        if WHOLE_K:
            a = tl.load(x_at, mask=m_in, other=0.0)
            b = tl.load(w_at, mask=n_in, other=0.0)
        else:
            a = tl.load(x_at, mask=m_in & (k[None, :] < reduced - start), other=0.0)
            b = tl.load(w_at, mask=n_in & (k[:, None] < reduced - start), other=0.0)
        acc = dot(a, b, acc, INTERPRETED)
        x_at += BLOCK_K
        if TRANS:
            w_at += BLOCK_K
        else:
            w_at += BLOCK_K * w_stride.to(tl.int64)
    y_at = y_ptr + m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(y_at, narrow(acc, y_ptr.dtype.element_ty, INTERPRETED), mask=m_in & n_in)


def linear_triton(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x (M, K) @ w (N, K)ᵀ → (M, N), in x's dtype (bf16 or fp32). Rows of both may be strided."""
    return _product("linear", x, w, outputs=w.shape[0], reduced=w.shape[1])


def linear_dx_triton(dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """dy (M, N) @ w (N, K) → (M, K), in dy's dtype (bf16 or fp32). Rows of both may be strided."""
    return _product("linear_dx", dy, w, outputs=w.shape[1], reduced=w.shape[0])


def _product(kind: Kind, x: torch.Tensor, w: torch.Tensor, *, outputs: int, reduced: int) -> torch.Tensor:
    assert x.shape[1] == reduced, (x.shape, w.shape)
    assert x.dtype == w.dtype, (x.dtype, w.dtype)
    assert x.stride(1) == w.stride(1) == 1, "contiguous rows needed"
    rows = x.shape[0]
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tiles = product_tiles(kind, rows, outputs, reduced, x.element_size(), x.device)
    launch(
        gemm_kernel,
        (ceil_div(rows, tiles.block_m) * ceil_div(outputs, tiles.block_n),),
        x,
        w,
        y,
        rows,
        outputs,
        reduced,
        x.stride(0),
        w.stride(0),
        TRANS=kind == "linear",
        WHOLE_K=reduced % tiles.block_k == 0,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        INTERPRETED=INTERPRET,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return y


@lru_cache(maxsize=1024)
def product_tiles(
    kind: Kind, rows: int, outputs: int, reduced: int, element_size: int, device: torch.device
) -> Tiles:
    """The card's tile for a product. The interpreter's matmul, unlike a GPU's, picks the order of its sums
    from the tile's shape: there one tile serves every number of rows."""
    if device.type != "cuda":
        return gemm_tiles(kind, 64, outputs, reduced, 0, LEAST_SHARED, element_size)
    card = torch.cuda.get_device_properties(device)
    return gemm_tiles(
        kind,
        rows,
        outputs,
        reduced,
        10 * card.major + card.minor,
        card.shared_memory_per_block_optin,
        element_size,
    )
