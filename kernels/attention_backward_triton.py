"""Backward of causal attention over packed sequences on CUDA; shapes and the block table as in
`attention_triton.py`.

    P = exp(q kᵀ · scale − lse), dP = dO vᵀ, Δ = rowsum(dO ∘ O), dS = P ∘ (dP − Δ)
    dq = scale · dS k;   dk = scale · dSᵀ q;   dv = Pᵀ dO           (FlashAttention-2, arXiv:2307.08691, B)

Two launches and no atomics. The first makes dq and Δ, one program a block of query rows and head, walking key
blocks in order. The second makes dk and dv, one program a block of keys and key head, walking the group's
query heads in order and, for each, the query blocks from the diagonal on. P and dS are rounded to qkv's dtype
before they multiply; every sum is one fp32 accumulator in that order, so a row's bits depend on its sequence
alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gshare.kernels.attention_triton import (
    LOG2E,
    Tiles,
    check_qkv,
    load_tile,
    lowest_key,
    padded,
    partly_visible,
    store_tile,
    visible,
)
from gshare.kernels.launch import assert_aligned, assert_rows
from gshare.kernels.triton_common import INTERPRET, dot
from gshare.kernels.triton_rounding import round_to


def query_tiles(dim: int, itemsize: int) -> Tiles:
    """Tiles of the dq kernel, at most 96 KiB of shared memory. Unlike the forward's, its fp32 accumulator has
    two operands beside it that live through the walk, hence more warps."""
    if itemsize == 4:
        return Tiles(block=32 if dim <= 64 else 16, heads=1, warps=8, stages=1)
    if dim > 128:
        return Tiles(block=32, heads=1, warps=8, stages=1)
    return Tiles(block=64, heads=1, warps=4, stages=2)


def key_tiles(dim: int, itemsize: int, major: int) -> Tiles:
    """Tiles of the dk and dv kernel on a card of compute capability `major`.x: two accumulators."""
    if itemsize == 4 or dim > 128:
        return query_tiles(dim, itemsize)
    if dim > 64:  # 4 warps would spill 112 bytes on sm_90
        return Tiles(block=64, heads=1, warps=8, stages=2)
    # Where operands of a product come from registers, loads that run ahead spill up to 296 bytes.
    return Tiles(block=64, heads=1, warps=4, stages=2 if major in (9, 10) else 1)


@triton.jit(do_not_specialize=["lse_stride"])
def attention_dq_kernel(
    qkv, do, o, lse, delta, dqkv, blocks, lse_stride, scale, scale_log2e,
    STRIDE: tl.constexpr, DO_STRIDE: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (h, b): head h, rows of part b % SPLIT of entry b // SPLIT. Writes dq and delta (Hq, T)."""
    head = tl.program_id(0)
    entry = blocks + tl.program_id(1) // SPLIT * 3
    start = tl.load(entry)
    end = tl.load(entry + 1)
    token = tl.load(entry + 2) + tl.program_id(1) % SPLIT * BLOCK
    dq_head = dqkv + head * D
    acc = tl.zeros([BLOCK, WIDTH], tl.float32)
    if start < 0:
        if start == -2:  # NO_SEQUENCE
            store_tile(dq_head, acc, token, end, (HQ + 2 * HKV) * D, D, WIDTH, BLOCK, 1)
        return
    if token >= end:
        return
    dout = load_tile(do + head * D, token, end, DO_STRIDE, D, WIDTH, BLOCK, 1)
    out = load_tile(o + head * D, token, end, HQ * D, D, WIDTH, BLOCK, 1)
    q = load_tile(qkv + head * D, token, end, STRIDE, D, WIDTH, BLOCK, 1)
    k_head = qkv + (HQ + head // (HQ // HKV)) * D
    v_head = k_head + HKV * D
    first = token - start
    query = first + tl.arange(0, BLOCK)
    row = head.to(tl.int64) * lse_stride + start + query
    delta_row = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta + row, delta_row, mask=start + query < end)
    lse_row = tl.load(lse + row, mask=start + query < end, other=0.0) * 1.4426950408889634
    for j in tl.range(lowest_key(first, BLOCK, WINDOW), first + BLOCK, BLOCK):
        k = load_tile(k_head, start + j, end, STRIDE, D, WIDTH, BLOCK, 1)
        v = load_tile(v_head, start + j, end, STRIDE, D, WIDTH, BLOCK, 1)
        s = dot(q, tl.trans(k), tl.zeros([BLOCK, BLOCK], tl.float32), WIDEN)
        dp = dot(dout, tl.trans(v), tl.zeros([BLOCK, BLOCK], tl.float32), WIDEN)
        if partly_visible(first, j, BLOCK, WINDOW):
            key = j + tl.arange(0, BLOCK)
            s = tl.where(visible(query[:, None], key[None, :], WINDOW), s, float("-inf"))
        ds = tl.exp2(s * scale_log2e - lse_row[:, None]) * (dp - delta_row[:, None])
        acc = dot(round_to(ds, k.dtype), k, acc, WIDEN)
    store_tile(dq_head, acc * scale, token, end, (HQ + 2 * HKV) * D, D, WIDTH, BLOCK, 1)


@triton.jit
def last_query(first, length, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """End of the query blocks that see the key block at `first`: the last such block's first position + 1."""
    if WINDOW == 0:
        return length
    else:
        return tl.minimum(length, first + BLOCK + WINDOW - 1)


@triton.jit(do_not_specialize=["lse_stride"])
def attention_dkv_kernel(
    qkv, do, lse, delta, dqkv, blocks, lse_stride, scale, scale_log2e,
    STRIDE: tl.constexpr, DO_STRIDE: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (h, b): key head h, keys of part b % SPLIT of entry b // SPLIT counted from the table's end."""
    kv_head = tl.program_id(0)
    # From the end: the forward's longest walks first are this kernel's shortest.
    entry = blocks + (tl.num_programs(1) - 1 - tl.program_id(1)) // SPLIT * 3
    start = tl.load(entry)
    end = tl.load(entry + 1)
    token = tl.load(entry + 2) + tl.program_id(1) % SPLIT * BLOCK
    dk_head = dqkv + (HQ + kv_head) * D
    dk = tl.zeros([BLOCK, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK, WIDTH], tl.float32)
    if start < 0:
        if start == -2:  # NO_SEQUENCE
            store_tile(dk_head, dk, token, end, (HQ + 2 * HKV) * D, D, WIDTH, BLOCK, 1)
            store_tile(dk_head + HKV * D, dv, token, end, (HQ + 2 * HKV) * D, D, WIDTH, BLOCK, 1)
        return
    if token >= end:
        return
    k = load_tile(qkv + (HQ + kv_head) * D, token, end, STRIDE, D, WIDTH, BLOCK, 1)
    v = load_tile(qkv + (HQ + HKV + kv_head) * D, token, end, STRIDE, D, WIDTH, BLOCK, 1)
    first = token - start
    key = first + tl.arange(0, BLOCK)
    # One loop over (head of the group, query block), so that loads run ahead across heads too.
    steps = tl.cdiv(last_query(first, end - start, BLOCK, WINDOW) - first, BLOCK)
    for step in tl.range(0, HQ // HKV * steps):
        head = kv_head * (HQ // HKV) + step // steps
        i = first + step % steps * BLOCK
        query = i + tl.arange(0, BLOCK)
        q = load_tile(qkv + head * D, start + i, end, STRIDE, D, WIDTH, BLOCK, 1)
        dout = load_tile(do + head * D, start + i, end, DO_STRIDE, D, WIDTH, BLOCK, 1)
        row = head.to(tl.int64) * lse_stride + start + query
        inside = start + query < end
        # lse = ∞ past the end makes P zero there
        lse_row = tl.load(lse + row, mask=inside, other=float("inf")) * 1.4426950408889634
        delta_row = tl.load(delta + row, mask=inside, other=0.0)
        s = dot(k, tl.trans(q), tl.zeros([BLOCK, BLOCK], tl.float32), WIDEN)
        if partly_visible(i, first, BLOCK, WINDOW):
            s = tl.where(visible(query[None, :], key[:, None], WINDOW), s, float("-inf"))
        p = tl.exp2(s * scale_log2e - lse_row[None, :])
        dv = dot(round_to(p, dout.dtype), dout, dv, WIDEN)
        dp = dot(v, tl.trans(dout), tl.zeros([BLOCK, BLOCK], tl.float32), WIDEN)
        ds = p * (dp - delta_row[None, :])
        dk = dot(round_to(ds, q.dtype), q, dk, WIDEN)
    store_tile(dk_head, dk * scale, token, end, (HQ + 2 * HKV) * D, D, WIDTH, BLOCK, 1)
    store_tile(dk_head + HKV * D, dv, token, end, (HQ + 2 * HKV) * D, D, WIDTH, BLOCK, 1)


def attention_backward(
    do: torch.Tensor,
    qkv: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    blocks: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """dqkv (T, (Hq + 2·Hkv)·D) in qkv's dtype: zero in rows of no sequence.

    do (T, Hq·D) in qkv's dtype, rows contiguous (a view of a wider buffer is fine); qkv and blocks as for
    `attention_forward`, o (T, Hq·D) and lse (Hq, T) from it. Needs Hq·T·4 bytes for Δ.
    """
    dim = check_qkv(qkv, blocks, heads, kv_heads, scale)
    rows = qkv.shape[0]
    assert do.shape == o.shape == (rows, heads * dim), (do.shape, o.shape)
    assert do.dtype == o.dtype == qkv.dtype, (do.dtype, o.dtype)
    assert lse.shape == (heads, rows), lse.shape
    assert_rows(do)
    assert_aligned(o, lse)
    dqkv = torch.empty(rows, (heads + 2 * kv_heads) * dim, dtype=qkv.dtype, device=qkv.device)
    delta = torch.empty_like(lse)
    major = torch.cuda.get_device_capability(qkv.device)[0] if qkv.is_cuda else 0
    for_queries = query_tiles(dim, qkv.element_size())
    for_keys = key_tiles(dim, qkv.element_size(), major)
    shape = dict(
        STRIDE=qkv.stride(0), DO_STRIDE=do.stride(0), HQ=heads, HKV=kv_heads, D=dim, WIDTH=padded(dim),
        WINDOW=window or 0, WIDEN=INTERPRET,
    )  # fmt: skip
    scales = (scale, scale * LOG2E)
    attention_dq_kernel[heads, blocks.shape[0] * for_queries.parts](
        qkv, do, o, lse, delta, dqkv, blocks, rows, *scales, **shape, **for_queries.constants
    )
    attention_dkv_kernel[kv_heads, blocks.shape[0] * for_keys.parts](
        qkv, do, lse, delta, dqkv, blocks, rows, *scales, **shape, **for_keys.constants
    )
    return dqkv
