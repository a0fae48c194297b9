"""RMSNorm on CUDA: the residual's addition and the norm in one launch; formulas in `rms_norm.py`.

A row's sums run over one block of its next power of two, with warps and rows a program chosen by H alone, so
their order knows nothing of T. Square root and division are IEEE-exact and multiply-adds are not contracted,
so bits depend on the card only through the order of a row's sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from gshare.kernels.launch import assert_aligned, ceil_div, launch
from gshare.kernels.triton_rounding import round_to


class _Shape(NamedTuple):
    """What a launch is compiled for: a function of H alone."""

    block: int
    rows: int
    num_warps: int


def _shape(hidden: int) -> _Shape:
    """About 16 elements a thread; narrow rows share a program, at most 8 (H = 576: two rows, 4 warps)."""
    block = max(16, 1 << (hidden - 1).bit_length())
    return _Shape(block, max(1, min(8, 2048 // block)), max(4, min(32, block // 512)))


@triton.jit(do_not_specialize=["T"])
def add_rms_norm_kernel(
    x_ptr,
    delta_ptr,
    w_ptr,
    new_ptr,
    h_ptr,
    rstd_ptr,
    T,
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """new = round(x + delta); rstd of new; h = w · round(new · rstd). One program for ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < T)[:, None] & (column < H)[None, :]
    at = row.to(tl.int64)[:, None] * H + column[None, :]
    dtype = x_ptr.dtype.element_ty
    wide = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        wide += tl.load(delta_ptr + at, mask=mask, other=0.0).to(tl.float32)
        new = round_to(wide, dtype)
        tl.store(new_ptr + at, new, mask=mask)
        wide = new.to(tl.float32)
    mean = tl.div_rn(tl.sum(wide * wide, axis=1), H * 1.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(rstd_ptr + row, rstd, mask=row < T)
    w = round_to(tl.load(w_ptr + column, mask=column < H, other=0.0).to(tl.float32), dtype).to(tl.float32)
    normed = round_to(wide * rstd[:, None], dtype).to(tl.float32)
    tl.store(h_ptr + at, round_to(w[None, :] * normed, dtype), mask=mask)


@triton.jit(do_not_specialize=["T"])
def rms_norm_apply_kernel(
    x_ptr, w_ptr, rstd_ptr, h_ptr, T, H: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """h = w · round(x · rstd), elementwise from a kept rstd."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < T)[:, None] & (column < H)[None, :]
    at = row.to(tl.int64)[:, None] * H + column[None, :]
    dtype = x_ptr.dtype.element_ty
    wide = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row, mask=row < T, other=0.0)
    w = round_to(tl.load(w_ptr + column, mask=column < H, other=0.0).to(tl.float32), dtype).to(tl.float32)
    normed = round_to(wide * rstd[:, None], dtype).to(tl.float32)
    tl.store(h_ptr + at, round_to(w[None, :] * normed, dtype), mask=mask)


@triton.jit(do_not_specialize=["T"])
def rms_norm_backward_kernel(
    dh_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    skip_ptr,
    dx_ptr,
    h_ptr,
    T,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_H: tl.constexpr,
):
    """dx = round(rstd · g − x · rstd³ · Σ(x ∘ g) / H) with g = w ∘ dh; then dx = round(dx + skip).
    HAS_H: h as in `rms_norm_apply_kernel` too, from the x that is here already."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < T)[:, None] & (column < H)[None, :]
    at = row.to(tl.int64)[:, None] * H + column[None, :]
    dtype = x_ptr.dtype.element_ty
    wide = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + at, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + column, mask=column < H, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row, mask=row < T, other=0.0)
    g = w[None, :] * dh
    dot = tl.sum(wide * g, axis=1)
    coefficient = tl.div_rn(rstd * rstd * rstd * dot, H * 1.0)
    dx = round_to(rstd[:, None] * g - wide * coefficient[:, None], dtype)
    if HAS_SKIP:
        skip = tl.load(skip_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dx = round_to(dx.to(tl.float32) + skip, dtype)
    tl.store(dx_ptr + at, dx, mask=mask)
    if HAS_H:
        normed = round_to(wide * rstd[:, None], dtype).to(tl.float32)
        narrow_w = round_to(w, dtype).to(tl.float32)
        tl.store(h_ptr + at, round_to(narrow_w[None, :] * normed, dtype), mask=mask)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, delta (T, H) bf16 or fp32, w (H,) → the new residual (T, H), h (T, H), rstd (T,) fp32.

    The new residual is round(x + delta), or x itself without a delta; statistics are those of the rounded
    residual. Any row may hold anything: rows never meet.
    """
    tokens, hidden = x.shape
    assert w.shape == (hidden,), (x.shape, w.shape)
    assert delta is None or (delta.shape == x.shape and delta.dtype == x.dtype), "delta is added to x"
    assert_aligned(x, delta, w)
    shape = _shape(hidden)
    new = x if delta is None else torch.empty_like(x)
    h = torch.empty_like(x)
    rstd = torch.empty(tokens, dtype=torch.float32, device=x.device)
    launch(
        add_rms_norm_kernel,
        (ceil_div(tokens, shape.rows),),
        x,
        x if delta is None else delta,
        w,
        new,
        h,
        rstd,
        tokens,
        float(eps),
        H=hidden,
        BLOCK=shape.block,
        ROWS=shape.rows,
        HAS_DELTA=delta is not None,
        num_warps=shape.num_warps,
    )
    return new, h, rstd


def rms_norm_apply(x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """h (T, H) again from the new residual x (T, H), w (H,) and rstd (T,): `add_rms_norm`'s bits."""
    tokens, hidden = x.shape
    assert (w.shape, rstd.shape) == ((hidden,), (tokens,)), (x.shape, w.shape, rstd.shape)
    assert_aligned(x, w, rstd)
    shape = _shape(hidden)
    h = torch.empty_like(x)
    launch(
        rms_norm_apply_kernel,
        (ceil_div(tokens, shape.rows),),
        x,
        w,
        rstd,
        h,
        tokens,
        H=hidden,
        BLOCK=shape.block,
        ROWS=shape.rows,
        num_warps=shape.num_warps,
    )
    return h


def rms_norm_backward(
    dh: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor, skip: torch.Tensor | None
) -> torch.Tensor:
    """The residual's gradient (T, H) in x's dtype: round(round(dx) + skip), or round(dx) without skip.

    dh, x, skip (T, H) of one dtype, w (H,), rstd (T,) fp32. `x` is the new residual of the forward and
    `skip` the gradient that reached it past the norm.
    """
    return _backward(dh, x, w, rstd, skip, None)


def rms_norm_backward_apply(
    dh: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor, skip: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm_backward` and `rms_norm_apply` in one launch that reads x once: dx and h, both (T, H)."""
    h = torch.empty_like(x)
    return _backward(dh, x, w, rstd, skip, h), h


def _backward(
    dh: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    rstd: torch.Tensor,
    skip: torch.Tensor | None,
    h: torch.Tensor | None,
) -> torch.Tensor:
    tokens, hidden = x.shape
    assert (w.shape, rstd.shape) == ((hidden,), (tokens,)), (x.shape, w.shape, rstd.shape)
    for gradient in (dh, skip):
        assert gradient is None or gradient.shape == x.shape, (gradient.shape, x.shape)
        assert gradient is None or gradient.dtype == x.dtype, "one compute dtype"
    assert_aligned(dh, x, w, rstd, skip)
    shape = _shape(hidden)
    dx = torch.empty_like(x)
    launch(
        rms_norm_backward_kernel,
        (ceil_div(tokens, shape.rows),),
        dh,
        x,
        w,
        rstd,
        dh if skip is None else skip,
        dx,
        dx if h is None else h,
        tokens,
        H=hidden,
        BLOCK=shape.block,
        ROWS=shape.rows,
        HAS_SKIP=skip is not None,
        HAS_H=h is not None,
        num_warps=shape.num_warps,
    )
    return dx
