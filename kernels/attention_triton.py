"""Causal attention over packed sequences on CUDA: what of a sequence's bits may depend on, and the forward.

    T rows, Hq query heads, Hkv key heads, D head size, NB entries of the block table
    qkv (T, (Hq + 2·Hkv)·D): query heads, then key heads, then value heads; query head h uses key head
    h // (Hq / Hkv)
    o = softmax(q kᵀ · scale + mask) v within each sequence; window w: position i sees i − w + 1 … i

Online softmax (FlashAttention-2, arXiv:2307.08691, algorithm 1). One program makes one block of query rows of
one or two heads. It walks the key blocks in order, from the lowest visible one to the diagonal; blocks are
counted from the sequence's first token and their size is a function of D and dtype. So a row's bits depend
on its own sequence alone, wherever it lies and whoever lies beside it. Rows past a sequence's end are never
read: a masked load gives 0 in their place.

The grid comes from the table's length, so one captured launch serves every pass with the same number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from gshare.kernels.launch import assert_rows
from gshare.kernels.triton_common import INTERPRET, dot
from gshare.kernels.triton_rounding import round_to

#: Rows of one entry of the block table.
ROWS = 64
#: First column of an entry that is filler: its program returns at once.
NOTHING = -1
#: First column of an entry for rows that belong to no sequence: its program writes zeros.
NO_SEQUENCE = -2

LOG2E = 1.0 / math.log(2.0)


def attention_blocks(starts: Sequence[int], rows: int | None = None) -> list[tuple[int, int, int]]:
    """The block table: (sequence start, sequence end, block's first token), longest walks first.

    `starts` has S + 1 entries, first 0. Rows from starts[-1] to `rows` belong to no sequence; their entries
    (NO_SEQUENCE, rows, first) make every launch here write zeros there. Pad to `block_capacity` entries with
    (NOTHING, NOTHING, NOTHING).
    """
    table = [(a, b, first) for a, b in pairwise(starts) for first in range(a, b, ROWS)]
    # Long walks first, so that no long one starts when the card is nearly empty. Order changes no bit.
    table.sort(key=lambda entry: (entry[0] - entry[2], entry[0]))
    rows = starts[-1] if rows is None else rows
    return table + [(NO_SEQUENCE, rows, first) for first in range(starts[-1], rows, ROWS)]


def block_capacity(rows: int, sequences: int) -> int:
    """Most entries that `attention_blocks` gives for so many rows and sequences."""
    return rows // ROWS + sequences + 1


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut. `block` is part of the contract (a function of D and dtype); the rest is not."""

    block: int  # query rows and keys of one step
    heads: int  # query heads that share the loads of one key block
    warps: int
    stages: int

    @property
    def parts(self) -> int:
        """Programs that share one entry of the block table."""
        return ROWS // self.block

    @property
    def constants(self) -> dict[str, int]:
        """What a launch passes on: the kernel's constants and its options."""
        return {
            "BLOCK": self.block,
            "SPLIT": self.parts,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def padded(dim: int) -> int:
    """Columns of a tile that holds a head of size `dim`: the next power of two."""
    return 1 << (dim - 1).bit_length()


def forward_tiles(dim: int, itemsize: int, group: int, major: int) -> Tiles:
    """Tiles for head size `dim` and `group` query heads a key head on a card of compute capability `major`.x:
    no spilled registers, and at most 96 KiB of shared memory a program, which every card has, or half of what
    the large ones (9 and 10) have."""
    if itemsize == 4:  # no tensor cores: operands of a dot live in registers
        return Tiles(block=32 if dim <= 128 else 16, heads=1, warps=4, stages=1)
    if dim > 128:  # the accumulator of 64 rows fills 4 warps' registers
        return Tiles(block=64, heads=1, warps=8, stages=1)
    if dim > 64:
        # With two stages the next loads are issued when a step is done, and nothing hides them.
        return Tiles(block=64, heads=1, warps=4, stages=3 if major in (9, 10) else 2)
    # Two heads on one load of the keys where registers leave room for two such programs on a multiprocessor.
    heads = 2 if group % 2 == 0 else 1
    return Tiles(block=64, heads=heads, warps=4 * heads, stages=3)


@triton.jit
def _pointers(
    base, token, STRIDE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """(HEADS · BLOCK, WIDTH): rows token … token + BLOCK − 1 head after head; base: row 0 of the first."""
    row = tl.arange(0, HEADS * BLOCK)
    offset = (row % BLOCK) * STRIDE + (row // BLOCK) * D
    return base + token.to(tl.int64) * STRIDE + offset[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _inside(token, end, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr):
    """Mask of `_pointers`: rows before `end`, and columns before D where the tile is wider."""
    inside = (token + tl.arange(0, HEADS * BLOCK) % BLOCK < end)[:, None]
    if WIDTH != D:
        inside = inside & (tl.arange(0, WIDTH) < D)[None, :]
    return inside


@triton.jit
def load_tile(
    base, token, end, STRIDE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """(HEADS · BLOCK, WIDTH), laid out as `_pointers` says; zero from row `end` and column D on."""
    mask = _inside(token, end, D, WIDTH, BLOCK, HEADS)
    return tl.load(_pointers(base, token, STRIDE, D, WIDTH, BLOCK, HEADS), mask=mask, other=0.0)


@triton.jit
def store_tile(
    base, value, token, end, STRIDE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_tile`; rounds to the dtype of `base`."""
    mask = _inside(token, end, D, WIDTH, BLOCK, HEADS)
    rounded = round_to(value, base.dtype.element_ty)
    tl.store(_pointers(base, token, STRIDE, D, WIDTH, BLOCK, HEADS), rounded, mask=mask)


@triton.jit
def lowest_key(first, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Where the first block of KEYS keys begins that the query at `first`, a multiple of KEYS, sees."""
    if WINDOW == 0:
        return first * 0
    else:
        return tl.maximum(first - (WINDOW + KEYS - 2) // KEYS * KEYS, 0)


@triton.jit
def partly_visible(query, key, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Whether some of the QUERIES positions from `query` on does not see some of the KEYS from `key` on."""
    partly = key + KEYS > query + 1
    if WINDOW != 0:
        partly = partly | (query + QUERIES - key > WINDOW)
    return partly


@triton.jit
def visible(query, key, WINDOW: tl.constexpr):
    """Element mask of positions `query` and `key`, which broadcast."""
    seen = key <= query
    if WINDOW != 0:
        seen = seen & (query - key < WINDOW)
    return seen


@triton.jit(do_not_specialize=["lse_stride"])
def attention_forward_kernel(
    qkv, o, lse, blocks, lse_stride, scale_log2e,
    STRIDE: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr, WINDOW: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (h, b): HEADS heads from h · HEADS on, rows of part b % SPLIT of entry b // SPLIT."""
    head = tl.program_id(0) * HEADS
    entry = blocks + tl.program_id(1) // SPLIT * 3
    start = tl.load(entry)
    end = tl.load(entry + 1)
    token = tl.load(entry + 2) + tl.program_id(1) % SPLIT * BLOCK
    o_head = o + head * D
    if start < 0:
        if start == -2:  # NO_SEQUENCE
            blank = tl.zeros([HEADS * BLOCK, WIDTH], tl.float32)
            store_tile(o_head, blank, token, end, HQ * D, D, WIDTH, BLOCK, HEADS)
        return
    if token >= end:
        return
    q = load_tile(qkv + head * D, token, end, STRIDE, D, WIDTH, BLOCK, HEADS)
    k_head = qkv + (HQ + head // (HQ // HKV)) * D
    v_head = k_head + HKV * D
    first = token - start
    query = first + tl.arange(0, HEADS * BLOCK) % BLOCK
    m = tl.full([HEADS * BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([HEADS * BLOCK], tl.float32)
    acc = tl.zeros([HEADS * BLOCK, WIDTH], tl.float32)
    for j in tl.range(lowest_key(first, BLOCK, WINDOW), first + BLOCK, BLOCK):
        k = load_tile(k_head, start + j, end, STRIDE, D, WIDTH, BLOCK, 1)
        v = load_tile(v_head, start + j, end, STRIDE, D, WIDTH, BLOCK, 1)
        s = dot(q, tl.trans(k), tl.zeros([HEADS * BLOCK, BLOCK], tl.float32), WIDEN)
        if partly_visible(first, j, BLOCK, BLOCK, WINDOW):
            key = j + tl.arange(0, BLOCK)
            s = tl.where(visible(query[:, None], key[None, :], WINDOW), s, float("-inf"))
        m_next = tl.maximum(m, tl.max(s, 1) * scale_log2e)
        # A row that has seen no key yet (window) has −inf as its maximum, and −inf − −inf is NaN.
        base = m_next if WINDOW == 0 else tl.where(m_next == float("-inf"), 0.0, m_next)
        p = tl.exp2(s * scale_log2e - base[:, None])
        keep = tl.exp2(m - base)
        total = total * keep + tl.sum(p, 1)
        acc = dot(round_to(p, v.dtype), v, acc * keep[:, None], WIDEN)
        m = m_next
    store_tile(o_head, acc / total[:, None], token, end, HQ * D, D, WIDTH, BLOCK, HEADS)
    row = (head + tl.arange(0, HEADS * BLOCK) // BLOCK).to(tl.int64) * lse_stride + start + query
    tl.store(lse + row, (m + tl.log2(total)) * 0.6931471805599453, mask=start + query < end)


def check_qkv(qkv: torch.Tensor, blocks: torch.Tensor, heads: int, kv_heads: int, scale: float) -> int:
    """Head size D, after asserting what the kernels rely on."""
    dim, rest = divmod(qkv.shape[1], heads + 2 * kv_heads)
    assert (rest, heads % kv_heads) == (0, 0), (qkv.shape, heads, kv_heads)
    assert dim in range(16, 257, 16), f"head size {dim}"
    assert_rows(qkv)
    assert qkv.dtype in (torch.bfloat16, torch.float32), qkv.dtype
    assert (blocks.dtype, blocks.shape[1:], blocks.stride()) == (torch.int32, (3,), (3, 1))
    assert scale > 0  # the maximum is taken before scaling
    return dim


def attention_forward(
    qkv: torch.Tensor, blocks: torch.Tensor, *, heads: int, kv_heads: int, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """o (T, Hq·D) in qkv's dtype and lse (Hq, T) fp32, the natural logarithm of each row's softmax sum.

    qkv (T, (Hq + 2·Hkv)·D) bf16 or fp32, rows contiguous (a view of a wider buffer is fine), D a multiple of
    16 up to 256. blocks (NB, 3) int32 from `attention_blocks`. Probabilities are rounded to qkv's dtype
    before they multiply v. Rows of no sequence: o is zero, lse is undefined.
    """
    dim = check_qkv(qkv, blocks, heads, kv_heads, scale)
    rows = qkv.shape[0]
    o = torch.empty(rows, heads * dim, dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=qkv.device)
    major = torch.cuda.get_device_capability(qkv.device)[0] if qkv.is_cuda else 0
    tiles = forward_tiles(dim, qkv.element_size(), heads // kv_heads, major)
    attention_forward_kernel[heads // tiles.heads, blocks.shape[0] * tiles.parts](
        qkv, o, lse, blocks, rows, scale * LOG2E,
        STRIDE=qkv.stride(0), HQ=heads, HKV=kv_heads, D=dim, WIDTH=padded(dim), HEADS=tiles.heads,
        WINDOW=window or 0, WIDEN=INTERPRET, **tiles.constants,
    )  # fmt: skip
    return o, lse
