"""RoPE on CUDA, in place on the query and key heads of a packed qkv, after QK-norm where wanted (Qwen3).

    T rows, Hq query heads, Hkv key heads, H = Hq + Hkv, D head size, P positions of the tables
    without QK-norm:  y = x · cos + rotate(x) · sin                      formulas in `rope.py`
    with QK-norm:     x is w · round(x · rstd) first                     formulas in `rms_norm.py`

Statistics and rotation in fp32, rounded where the references round; multiply-adds are not contracted, so that
without QK-norm the bits are the references'. With it they depend on the order of a row's sum, which D alone
sets. A program has a few heads of a few rows; rows never meet, and what a row holds is its own matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from gshare.kernels.launch import assert_rows, ceil_div, launch
from gshare.kernels.triton_rounding import round_to

#: Elements of half a tile: 16 a thread. At 1,024 and below threads would share elements, and one could read
#: what another has already replaced.
HALF_TILE = 2048
WARPS = 4


class RopeTile(NamedTuple):
    """What a launch is compiled for: a function of D and H alone."""

    tokens: int
    heads: int
    half: int  # columns of half a head, padded to a power of two


def rope_tile(dim: int, heads: int) -> RopeTile:
    """Four heads waste little whatever H is (12 in SmolLM2-135M); eight read the tables half as often."""
    half = 1 << (dim // 2 - 1).bit_length()
    per_tile = 8 if heads % 8 == 0 else 4
    return RopeTile(HALF_TILE // (per_tile * half), per_tile, half)


@triton.jit
def _norm_weights(q_norm, k_norm, head, d, HQ: tl.constexpr, D: tl.constexpr):
    """(HEADS, HALF) of each half in fp32: query heads' or key heads' weights."""
    first = (d < D // 2)[None, :]
    is_query = (head < HQ)[:, None]
    at = d[None, :]
    w1 = tl.where(is_query, tl.load(q_norm + at, first, 0.0), tl.load(k_norm + at, first, 0.0))
    at += D // 2
    w2 = tl.where(is_query, tl.load(q_norm + at, first, 0.0), tl.load(k_norm + at, first, 0.0))
    return w1.to(tl.float32)[None], w2.to(tl.float32)[None]


@triton.jit
def _normed(x, rstd, w, dtype: tl.constexpr):
    """round(round(w) · round(x · rstd)) in fp32."""
    rounded = round_to(x * rstd[:, :, None], dtype).to(tl.float32)
    return round_to(round_to(w, dtype).to(tl.float32) * rounded, dtype).to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def rope_qk_kernel(
    qkv, cos, sin, position, q_norm, k_norm, kept, rstd_out, T, eps,
    STRIDE: tl.constexpr, HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program (h, t): HEADS heads of TOKENS rows. q_norm is None: no QK-norm."""
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    row_mask = (token < T)[:, None] & (head < H)[None, :]
    mask = row_mask[:, :, None] & (d < D // 2)[None, None, :]
    in_row = (head * D)[None, :, None] + d[None, None, :]
    at = token.to(tl.int64)[:, None, None] * STRIDE + in_row
    dtype = qkv.dtype.element_ty
    raw1 = tl.load(qkv + at, mask, 0.0)
    raw2 = tl.load(qkv + at + D // 2, mask, 0.0)
    turn = tl.load(position + token, token < T, 0)[:, None] * D + d[None, :]
    turn_mask = (token < T)[:, None] & (d < D // 2)[None, :]
    c = tl.load(cos + turn, turn_mask, 0.0)[:, None, :]
    s = tl.load(sin + turn, turn_mask, 0.0)[:, None, :]
    x1, x2 = raw1.to(tl.float32), raw2.to(tl.float32)
    if q_norm is not None:
        at_kept = token.to(tl.int64)[:, None, None] * (H * D) + in_row
        tl.store(kept + at_kept, raw1, mask)
        tl.store(kept + at_kept + D // 2, raw2, mask)
        mean = tl.div_rn(tl.sum(x1 * x1 + x2 * x2, 2), D * 1.0)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        tl.store(rstd_out + token.to(tl.int64)[:, None] * H + head[None, :], rstd, row_mask)
        w1, w2 = _norm_weights(q_norm, k_norm, head, d, HQ, D)
        x1, x2 = _normed(x1, rstd, w1, dtype), _normed(x2, rstd, w2, dtype)
    tl.store(qkv + at, round_to(x1 * c - x2 * s, dtype), mask)
    tl.store(qkv + at + D // 2, round_to(x2 * c + x1 * s, dtype), mask)


@triton.jit(do_not_specialize=["T"])
def rope_qk_backward_kernel(
    dqkv, cos, sin, position, q_norm, k_norm, kept, rstd_in, T,
    STRIDE: tl.constexpr, HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Program (h, t) as in `rope_qk_kernel`."""
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF)
    row_mask = (token < T)[:, None] & (head < H)[None, :]
    mask = row_mask[:, :, None] & (d < D // 2)[None, None, :]
    in_row = (head * D)[None, :, None] + d[None, None, :]
    at = token.to(tl.int64)[:, None, None] * STRIDE + in_row
    dtype = dqkv.dtype.element_ty
    y1 = tl.load(dqkv + at, mask, 0.0).to(tl.float32)
    y2 = tl.load(dqkv + at + D // 2, mask, 0.0).to(tl.float32)
    turn = tl.load(position + token, token < T, 0)[:, None] * D + d[None, :]
    turn_mask = (token < T)[:, None] & (d < D // 2)[None, :]
    c = tl.load(cos + turn, turn_mask, 0.0)[:, None, :]
    s = tl.load(sin + turn, turn_mask, 0.0)[:, None, :]
    dx1, dx2 = round_to(y1 * c + y2 * s, dtype), round_to(y2 * c - y1 * s, dtype)
    if q_norm is not None:
        at_kept = token.to(tl.int64)[:, None, None] * (H * D) + in_row
        x1 = tl.load(kept + at_kept, mask, 0.0).to(tl.float32)
        x2 = tl.load(kept + at_kept + D // 2, mask, 0.0).to(tl.float32)
        rstd = tl.load(rstd_in + token.to(tl.int64)[:, None] * H + head[None, :], row_mask, 0.0)
        w1, w2 = _norm_weights(q_norm, k_norm, head, d, HQ, D)
        g1, g2 = w1 * dx1.to(tl.float32), w2 * dx2.to(tl.float32)
        dot = tl.sum(x1 * g1 + x2 * g2, 2)
        coefficient = tl.div_rn(rstd * rstd * rstd * dot, D * 1.0)[:, :, None]
        dx1 = round_to(rstd[:, :, None] * g1 - x1 * coefficient, dtype)
        dx2 = round_to(rstd[:, :, None] * g2 - x2 * coefficient, dtype)
    tl.store(dqkv + at, dx1, mask)
    tl.store(dqkv + at + D // 2, dx2, mask)


def rope_qk_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rotate the query and key heads of qkv in place; the value heads stay.

    qkv (T, (Hq + 2·Hkv)·D) bf16 or fp32, rows contiguous (a view of a wider buffer is fine), D even. cos, sin
    (P, D) fp32 whose halves are equal, as `rope_tables` makes them: the first is read. position (T,) int32 in
    0 … P − 1. q_norm and k_norm (D,), both or none: QK-norm with `eps` first; then returned are the heads
    before it (T, H·D) in qkv's dtype and their rstd (T, H) fp32, which the backward needs.
    """
    dim = _check(qkv, cos, sin, position, heads, kv_heads, q_norm, k_norm)
    rows, both = qkv.shape[0], heads + kv_heads
    kept = rstd = None
    if q_norm is not None:
        kept = torch.empty(rows, both * dim, dtype=qkv.dtype, device=qkv.device)
        rstd = torch.empty(rows, both, dtype=torch.float32, device=qkv.device)
    tile = rope_tile(dim, both)
    launch(
        rope_qk_kernel, (ceil_div(both, tile.heads), ceil_div(rows, tile.tokens)),
        qkv, cos, sin, position, q_norm, k_norm, kept, rstd, rows, float(eps),
        STRIDE=qkv.stride(0), HQ=heads, H=both, D=dim,
        TOKENS=tile.tokens, HEADS=tile.heads, HALF=tile.half, num_warps=WARPS,
    )  # fmt: skip
    return None if kept is None or rstd is None else (kept, rstd)


def rope_qk_backward_(
    dqkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Gradient of `rope_qk_` in place on the query and key heads of dqkv; arguments as there.

    `kept` is what `rope_qk_` returned. As in the references the gradient is rounded between the rotation and
    QK-norm.
    """
    dim = _check(dqkv, cos, sin, position, heads, kv_heads, q_norm, k_norm)
    rows, both = dqkv.shape[0], heads + kv_heads
    assert (kept is None) == (q_norm is None), "what the forward kept goes with QK-norm"
    before, rstd = (None, None) if kept is None else kept
    if before is not None and rstd is not None:
        assert (before.shape, before.dtype) == ((rows, both * dim), dqkv.dtype), before.shape
        assert (rstd.shape, before.is_contiguous(), rstd.is_contiguous()) == ((rows, both), True, True)
    tile = rope_tile(dim, both)
    launch(
        rope_qk_backward_kernel, (ceil_div(both, tile.heads), ceil_div(rows, tile.tokens)),
        dqkv, cos, sin, position, q_norm, k_norm, before, rstd, rows,
        STRIDE=dqkv.stride(0), HQ=heads, H=both, D=dim,
        TOKENS=tile.tokens, HEADS=tile.heads, HALF=tile.half, num_warps=WARPS,
    )  # fmt: skip


def _check(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    heads: int,
    kv_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
) -> int:
    """Head size D, after asserting what the kernels rely on."""
    dim, rest = divmod(qkv.shape[1], heads + 2 * kv_heads)
    assert rest == 0, (qkv.shape, heads, kv_heads)
    assert dim in range(2, 1025, 2), f"head size {dim}"
    assert_rows(qkv)
    assert cos.shape == sin.shape == (cos.shape[0], dim), (cos.shape, sin.shape)
    assert cos.dtype == sin.dtype == torch.float32
    assert (position.shape, position.dtype) == (qkv.shape[:1], torch.int32), (position.shape, position.dtype)
    assert (q_norm is None) == (k_norm is None), "QK-norm has both weights or none"
    for tensor in (cos, sin, position, q_norm, k_norm):
        assert tensor is None or tensor.is_contiguous()
    assert q_norm is None or k_norm is None or q_norm.shape == k_norm.shape == (dim,)
    return dim
