"""Backward of causal attention over packed sequences on CUDA; shapes and the block table as in
`attention_triton.py`.

    P = exp(q kᵀ · scale − lse), dP = dO vᵀ, Δ = rowsum(dO ∘ O), dS = P ∘ (dP − Δ)
    dq = scale · dS k;   dk = scale · dSᵀ q;   dv = Pᵀ dO           (FlashAttention-2, arXiv:2307.08691, B)

Three launches and no atomics. The first makes dq and Δ, one program a block of query rows and head, walking
key blocks in order. The second makes dk and dv of one query head or of two (see `key_tiles`), one program a
block of keys and such a sum, walking query blocks from the diagonal on; the third adds the sums in the order
of the heads. (One program for a whole group leaves most of a card idle.) P and dS are rounded to qkv's dtype
before they multiply; every sum is one fp32 accumulator in that order, so a row's bits depend on its sequence
alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from gshare.kernels.attention_triton import (
    LOG2E,
    ROWS,
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

#: Bytes of partial sums of dk and dv at most: where a pass has more, pieces of the block table take turns.
SCRATCH_BYTES = 128 << 20
#: Rows of dk or dv that a program sums up: enough programs to fill the card, 16-byte loads of whole rows.
SUM_ROWS = 16


@dataclass(frozen=True)
class WalkTiles(Tiles):
    """Tiles of a kernel here. `step`, `block` and `heads` are part of the contract: functions of the model's
    shape and dtype."""

    step: int  # keys (dq) or queries (dk, dv) of one step of the walk

    @property
    def constants(self) -> dict[str, int]:
        return super().constants | {"STEP": self.step}


def query_tiles(dim: int, itemsize: int) -> WalkTiles:
    """Tiles of the dq kernel, at most 96 KiB of shared memory. Unlike the forward's, its fp32 accumulator has
    two operands beside it that live through the walk."""
    if itemsize == 4:
        block = 32 if dim <= 64 else 16
        return WalkTiles(block=block, heads=1, warps=8, stages=1, step=block)
    if dim > 128:
        return WalkTiles(block=32, heads=1, warps=8, stages=1, step=32)
    # Three stages, since with two the next loads are issued when a step is done, and nothing hides them.
    # Steps of 32 make room for that: 2 programs a multiprocessor of sm_90 (D = 128), 5 (D = 64).
    return WalkTiles(block=64, heads=1, warps=4, stages=3, step=32)


def key_tiles(dim: int, itemsize: int, group: int) -> WalkTiles:
    """Tiles of the dk and dv kernel for `group` query heads a key head; `heads` of them share two
    accumulators. Two programs a multiprocessor of sm_90 (D = 128), three (D = 64)."""
    tiles = query_tiles(dim, itemsize)
    # A head of 128 writes 64 KiB of partial sums for every 64 keys: two heads a sum halve that.
    return replace(tiles, heads=2 if dim > 64 and group % 2 == 0 else 1)


@triton.jit(do_not_specialize=["lse_stride"])
def attention_dq_kernel(
    qkv, do, o, lse, delta, dqkv, blocks, lse_stride, scale, scale_log2e,
    STRIDE: tl.constexpr, DO_STRIDE: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
    WIDEN: tl.constexpr,
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
    for j in tl.range(lowest_key(first, STEP, WINDOW), tl.minimum(first + BLOCK, end - start), STEP):
        k = load_tile(k_head, start + j, end, STRIDE, D, WIDTH, STEP, 1)
        v = load_tile(v_head, start + j, end, STRIDE, D, WIDTH, STEP, 1)
        s = dot(q, tl.trans(k), tl.zeros([BLOCK, STEP], tl.float32), WIDEN)
        dp = dot(dout, tl.trans(v), tl.zeros([BLOCK, STEP], tl.float32), WIDEN)
        if partly_visible(first, j, BLOCK, STEP, WINDOW):
            key = j + tl.arange(0, STEP)
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


@triton.jit(do_not_specialize=["lse_stride", "entries"])
def attention_dkv_kernel(
    qkv, do, lse, delta, partials, blocks, lse_stride, entries, scale_log2e,
    STRIDE: tl.constexpr, DO_STRIDE: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr,
    WINDOW: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (g, b): the HEADS query heads from g · HEADS on, keys of part b % SPLIT of entry
    entries − 1 − b // SPLIT. Writes dk / scale and dv of these heads to partials (B, HQ / HEADS, 2, BLOCK,
    WIDTH)."""
    first_head = tl.program_id(0) * HEADS
    # From the end: the forward's longest walks first are this kernel's shortest.
    entry = blocks + (entries - 1 - tl.program_id(1) // SPLIT) * 3
    start = tl.load(entry)
    end = tl.load(entry + 1)
    token = tl.load(entry + 2) + tl.program_id(1) % SPLIT * BLOCK
    if (start < 0) | (token >= end):
        return
    k_head = qkv + (HQ + first_head // (HQ // HKV)) * D
    k = load_tile(k_head, token, end, STRIDE, D, WIDTH, BLOCK, 1)
    v = load_tile(k_head + HKV * D, token, end, STRIDE, D, WIDTH, BLOCK, 1)
    dk = tl.zeros([BLOCK, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK, WIDTH], tl.float32)
    first = token - start
    key = first + tl.arange(0, BLOCK)
    # One loop over (head, query block), so that loads run ahead across heads too.
    steps = tl.cdiv(last_query(first, end - start, BLOCK, WINDOW) - first, STEP)
    for step in tl.range(0, HEADS * steps):
        head = first_head if HEADS == 1 else first_head + step // steps
        i = first + (step if HEADS == 1 else step % steps) * STEP
        query = i + tl.arange(0, STEP)
        q = load_tile(qkv + head * D, start + i, end, STRIDE, D, WIDTH, STEP, 1)
        dout = load_tile(do + head * D, start + i, end, DO_STRIDE, D, WIDTH, STEP, 1)
        row = head.to(tl.int64) * lse_stride + start + query
        inside = start + query < end
        # lse = ∞ past the end makes P zero there
        lse_row = tl.load(lse + row, mask=inside, other=float("inf")) * 1.4426950408889634
        delta_row = tl.load(delta + row, mask=inside, other=0.0)
        s = dot(k, tl.trans(q), tl.zeros([BLOCK, STEP], tl.float32), WIDEN)
        if partly_visible(i, first, STEP, BLOCK, WINDOW):
            s = tl.where(visible(query[None, :], key[:, None], WINDOW), s, float("-inf"))
        p = tl.exp2(s * scale_log2e - lse_row[None, :])
        dv = dot(round_to(p, dout.dtype), dout, dv, WIDEN)
        dp = dot(v, tl.trans(dout), tl.zeros([BLOCK, STEP], tl.float32), WIDEN)
        ds = p * (dp - delta_row[None, :])
        dk = dot(round_to(ds, q.dtype), q, dk, WIDEN)
    row = (tl.program_id(1) * (HQ // HEADS) + tl.program_id(0)) * (2 * BLOCK)
    store_tile(partials, dk, row, row + end - token, WIDTH, D, WIDTH, BLOCK, 1)
    row += BLOCK
    store_tile(partials, dv, row, row + end - token, WIDTH, D, WIDTH, BLOCK, 1)


@triton.jit(do_not_specialize=["entries"])
def attention_dkv_sum_kernel(
    partials, dqkv, blocks, entries, scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (c, b): ROWS rows of dk or dv of one key head, from the partial sums of programs (·, b) of
    `attention_dkv_kernel`, which are added in the order of the heads."""
    which = tl.program_id(0) % 2  # dk, dv
    kv_head = tl.program_id(0) // 2 % HKV
    first = tl.program_id(0) // (2 * HKV) * ROWS
    entry = blocks + (entries - 1 - tl.program_id(1) // SPLIT) * 3
    start = tl.load(entry)
    end = tl.load(entry + 1)
    token = tl.load(entry + 2) + tl.program_id(1) % SPLIT * BLOCK + first
    if (start == -1) | (token >= end):  # NOTHING
        return
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    if start >= 0:
        SUMS: tl.constexpr = HQ // HKV // HEADS
        for i in tl.static_range(SUMS):
            part = (tl.program_id(1) * HKV + kv_head) * SUMS + i
            row = (part * 2 + which) * BLOCK + first
            total += load_tile(partials, row, row + end - token, WIDTH, D, WIDTH, ROWS, 1)
    total *= tl.where(which == 0, scale, 1.0)
    head = HQ + which * HKV + kv_head
    store_tile(dqkv + head * D, total, token, end, (HQ + 2 * HKV) * D, D, WIDTH, ROWS, 1)


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
    `attention_forward`, o (T, Hq·D) and lse (Hq, T) from it. Needs Hq·T·4 bytes for Δ and up to
    SCRATCH_BYTES for partial sums.
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
    widths = dict(HQ=heads, HKV=kv_heads, D=dim, WIDTH=padded(dim))
    inputs = dict(STRIDE=qkv.stride(0), DO_STRIDE=do.stride(0), WINDOW=window or 0, WIDEN=INTERPRET)
    tiles = query_tiles(dim, qkv.element_size())
    attention_dq_kernel[heads, blocks.shape[0] * tiles.parts](
        qkv,
        do,
        o,
        lse,
        delta,
        dqkv,
        blocks,
        rows,
        scale,
        scale * LOG2E,
        **widths,
        **inputs,
        **tiles.constants,
    )
    tiles = key_tiles(dim, qkv.element_size(), heads // kv_heads)
    sums = heads // tiles.heads
    floats = sums * 2 * ROWS * padded(dim)  # an entry
    # Multiples of four entries, so that every piece of the table starts 16-byte aligned.
    most = max(SCRATCH_BYTES // (floats * 4) // 4 * 4, 4)
    partials = torch.empty(min(most, blocks.shape[0]) * floats, dtype=torch.float32, device=qkv.device)
    for piece in blocks.split(most):
        entries = piece.shape[0]
        attention_dkv_kernel[sums, entries * tiles.parts](
            qkv, do, lse, delta, partials, piece, rows, entries, scale * LOG2E,
            HEADS=tiles.heads, **widths, **inputs, **tiles.constants,
        )  # fmt: skip
        attention_dkv_sum_kernel[2 * kv_heads * (tiles.block // SUM_ROWS), entries * tiles.parts](
            partials, dqkv, piece, entries, scale, **widths,
            BLOCK=tiles.block, SPLIT=tiles.parts, HEADS=tiles.heads, ROWS=SUM_ROWS, num_warps=4,
        )  # fmt: skip
    return dqkv
