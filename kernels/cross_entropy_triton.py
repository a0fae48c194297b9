"""Linear cross-entropy on CUDA: softmax and its gradient in place, in the logits' own buffer.

    nll_i = logsumexp(logits_i) − logits_i[target_i]
    logits_i ← round((softmax(logits_i) − onehot(target_i)) · scale_i)

One program a row. Pass one keeps a running maximum and a rescaled sum (Milakov & Gimelshein,
arXiv:1805.02867) in each of LANES columns, four rows of a tile folded before each rescale: 1.25 exponentials
an element instead of 2. Pass two reads the row again and writes the gradient. The row is asked to stay in L2
until then: on an H200 264 rows of 128,256 are under way, half of them (33 of 50 MiB) between their passes.
Tiles and warps are the same for every V, R and card, so a row's bits depend on the row alone.
"""

from __future__ import annotations

from typing import Protocol

import torch
import triton
import triton.language as tl
from gshare.kernels.launch import assert_aligned, launch
from gshare.kernels.logit_chunks import chunk_rows
from gshare.kernels.triton_rounding import round_to

#: Target of a padding row.
NO_TARGET = -1
# A tile of 4 × 4096 with 16 warps: four 16-byte bf16 loads in flight a thread.
_DEPTH, _LANES, _WARPS = 4, 4096, 16


class Gemm(Protocol):
    """The two products with the head; row-invariant (NUMERICS.md)."""

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor: ...
    def linear_dx(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor: ...


@triton.jit
def softmax_rows_kernel(
    logits_ptr,
    target_ptr,
    scale_ptr,
    nll_ptr,
    V: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """nll of row program_id(0) of logits (R, V); with HAS_SCALE the row becomes its gradient."""
    row = tl.program_id(0)
    target = tl.load(target_ptr + row)
    row_ptr = logits_ptr + row.to(tl.int64) * V
    dtype = logits_ptr.dtype.element_ty
    column = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    if target < 0:
        # Its logits may be anything, NaN included: they are not read.
        tl.store(nll_ptr + row, 0.0)
        if HAS_SCALE:
            zeros = tl.zeros([DEPTH, LANES], dtype)
            for start in range(0, V, DEPTH * LANES):
                tl.store(row_ptr + start + column, zeros, mask=start + column < V)
        return
    # Without a gradient nobody reads the row again.
    KEEP: tl.constexpr = "evict_last" if HAS_SCALE else "evict_first"
    at_target = tl.load(row_ptr + target).to(tl.float32)
    # The lowest float, not −inf: a lane that sees no column gives exp(−inf) = 0 and not exp(NaN).
    peak = tl.full([LANES], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, V, DEPTH * LANES):
        at = start + column
        x = tl.load(row_ptr + at, mask=at < V, other=-float("inf"), eviction_policy=KEEP).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, axis=0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher[None, :]), axis=0)
        peak = higher
    top = tl.max(peak, axis=0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(peak - top), axis=0))
    tl.store(nll_ptr + row, log_sum - at_target)
    if HAS_SCALE:
        scale = tl.load(scale_ptr + row)
        for start in range(0, V, DEPTH * LANES):
            at = start + column
            x = tl.load(row_ptr + at, mask=at < V, other=0.0, eviction_policy="evict_first").to(tl.float32)
            grad = tl.exp(x - log_sum) - tl.where(at == target, 1.0, 0.0)
            tl.store(row_ptr + at, round_to(grad * scale, dtype), mask=at < V)


def softmax_rows_(logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """logits (R, V) bf16 or fp32, targets (R,) int64, scale (R,) fp32 or None → nll (R,) fp32.

    With `scale`, `logits` becomes (softmax − onehot) · scale in place, rounded once. A row whose target is
    −1 is padding: nll 0 and a gradient of zeros, whatever it holds. Targets must be below V: nothing checks
    that on the device.
    """
    rows, vocabulary = logits.shape
    assert targets.shape == (rows,), (logits.shape, targets.shape)
    assert targets.dtype == torch.int64, targets.dtype
    assert scale is None or (scale.shape == (rows,) and scale.dtype == torch.float32), "scale: (R,) fp32"
    assert_aligned(logits)
    assert all(t is None or t.is_contiguous() for t in (targets, scale)), "one value a row"
    nll = torch.empty(rows, dtype=torch.float32, device=logits.device)
    launch(
        softmax_rows_kernel,
        (rows,),
        logits,
        targets,
        nll if scale is None else scale,
        nll,
        V=vocabulary,
        DEPTH=_DEPTH,
        LANES=_LANES,
        HAS_SCALE=scale is not None,
        num_warps=_WARPS,
    )
    return nll


def linear_cross_entropy(
    h: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor | None, gemm: Gemm
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h (R, H), head (V, H), targets (R,) int64 → nll (R,) fp32 and dh (R, H), or None without `scale`.

    `scale` (R,) fp32 is each row's 1 / (label tokens of its own adapter's step). Logits are rounded to h's
    dtype and live for a chunk of rows at a time (`logit_chunks.py`). Rows with target −1 give nll 0 and dh 0.
    """
    rows = h.shape[0]
    nll = torch.empty(rows, dtype=torch.float32, device=h.device)
    dh = None if scale is None else torch.empty_like(h)
    step = chunk_rows(rows, head.shape[0], h.element_size())
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        scale_chunk = None if scale is None else scale[chunk]
        nll[chunk], gradient = _chunk(h[chunk], head, targets[chunk], scale_chunk, gemm)
        if dh is not None and gradient is not None:
            dh[chunk] = gradient
    return nll, dh


def _chunk(
    h: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor | None, gemm: Gemm
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One chunk. A function of its own, so that its logits are freed before the next chunk's are made and
    the allocator hands out the same buffer again."""
    logits = gemm.linear(h, head)
    nll = softmax_rows_(logits, targets, scale)
    return nll, None if scale is None else gemm.linear_dx(logits, head)
