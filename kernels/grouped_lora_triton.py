"""Grouped LoRA forward in Triton: one launch an op, however many adapters and linears share the pass.

For the linears j of a group and the adapters i of a pass (`lora_tables.py`; T tokens, K in, N_j out):

    lora_shrink   S_ij = round(scale_i · (x ∘ m_j) A_ijᵀ)           S (T, columns)
    lora_expand   y[:, n_off_j:] = round(float(y) + S_ij B_ijᵀ)     y (T, ΣN_j), in place

Order of the sums, the same for every pass: K is cut in chunks of 1,024 features; a chunk is one fp32
accumulator in order; the chunks' sums are added in order in fp32. Where that gives the card more to do, each
chunk is a program of its own, and the last to arrive adds them: in the chunks' order, not in that of arrival.
Tiles over outputs (tokens, columns of S, features of y) change no bits. A program reads rows of its own
adapter only: the rest of a tile is masked on load, since a neighbour's values may be NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gshare.kernels.lora_tables import ALIGN, BLOCK_T, COLUMN_ALIGN, LoraWorkspace, PassTables
from gshare.kernels.triton_common import INTERPRET, dot, narrow

#: Features of one accumulator. Part of the numerics, as are BLOCK_K and WARPS.
CHUNK = 1024
#: Features a step of an accumulator, by element size: 128 bytes of a row.
BLOCK_K = {2: 64, 4: 32}
#: Ranks a step of the sums over the rank, part of the numerics; a rank up to 16 takes one step of 16.
BLOCK_R = {2: 32, 4: 16}
#: Features of y or dx a program updates. Registers leave room for 5 programs on an SM of sm_90; 128: 2.
BLOCK_OUT = 64
#: Four warps are one warpgroup: the 64 rows of a block are one Hopper MMA.
WARPS = 4
#: Shared memory a program may use for tiles in flight: 99 KiB is all there is on sm_86, 89 and 120.
SHARED_BYTES = 80 * 1024

_ALIGN = tl.constexpr(ALIGN)
_COLUMN_ALIGN = tl.constexpr(COLUMN_ALIGN)


def column_block(columns: int, element_size: int, masked: bool = False) -> int:
    """Columns of S a program holds: all of them where they fit, so that x is read once. More than the
    limits spill registers (64 with a mask: 11 KB a thread on sm_80). The interpreter's matmul, unlike a
    GPU's, picks the order of its sums from the tile's shape: there the tile is always the widest."""
    widest = 32 if masked or element_size == 4 else 64
    return widest if INTERPRET else min(max(triton.next_power_of_2(columns), 16), widest)


def stages(bytes_a_stage: int, most: int) -> int:
    """Loads in flight: as many as fit, at least two."""
    return max(2, min(most, SHARED_BYTES // bytes_a_stage))


def splits(programs: int, block_c: int) -> bool:
    """Whether every chunk gets a program of its own: where whole sums give too few of them to fill a large
    card. The limit falls with the width: a launch's partial sums stay under 60 MiB at K = 14,336."""
    return programs < 16384 // block_c


@triton.jit
def column_width(rank):
    """`lora_tables.column_width`: the quotient shows the compiler that columns start 16-byte aligned."""
    return (rank + (_COLUMN_ALIGN - 1)) // _COLUMN_ALIGN * _COLUMN_ALIGN


@triton.jit
def offset(table, adapters, adapter, j, FIELD: tl.constexpr):
    """a_off (FIELD 0) or b_off (1), visibly a multiple of ALIGN."""
    return tl.load(table + (j * adapters + adapter) * 3 + FIELD) // _ALIGN * _ALIGN


@triton.jit
def rank_of(table, adapters, adapter, j):
    return tl.load(table + (j * adapters + adapter) * 3 + 2).to(tl.int32)


@triton.jit
def first_column(table, adapters, adapter, j, J: tl.constexpr):
    """Where linear j's columns of S begin."""
    column = 0
    for i in tl.static_range(J - 1):
        column += tl.where(i < j, column_width(rank_of(table, adapters, adapter, i)), 0)
    return column


@triton.jit
def locate_columns(table, adapters, adapter, c, J: tl.constexpr, K: tl.constexpr):
    """Of the columns c (C,) of S: offset of A's row (int64), linear (−1 for none); and columns in all."""
    row = tl.zeros(c.shape, tl.int64)
    linear = tl.full(c.shape, -1, tl.int32)
    at = 0
    for j in tl.static_range(J):
        a_off = offset(table, adapters, adapter, j, 0)
        rank = rank_of(table, adapters, adapter, j)
        mine = (c >= at) & (c < at + rank)
        row = tl.where(mine, a_off + (c - at).to(tl.int64) * K, row)
        linear = tl.where(mine, j, linear)
        at += column_width(rank)
    return row, linear, at


@triton.jit
def load_b(b, n, n_ok, r, rank, ALIGNED: tl.constexpr):
    """Rows n (N,), columns r (R,) of B (·, rank); ALIGNED: the rank is a multiple of 8, 16 bytes a load."""
    if ALIGNED:
        rank = rank // _COLUMN_ALIGN * _COLUMN_ALIGN
    return tl.load(b + n[:, None] * rank + r[None, :], mask=n_ok[:, None] & (r < rank)[None, :], other=0.0)


@triton.jit
def add_partials(base, places, keep, PARTS, stride, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """The parts' sums, in order. `.cg`: other SMs wrote them, and only L2 is coherent. Eight loads in
    flight: one at a time costs 0.7 µs a part."""
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for first in range(0, PARTS, 8):
        for i in tl.static_range(8):
            part = first + i
            total += tl.load(
                base + part.to(tl.int64) * stride + places,
                mask=keep & (part < PARTS),
                other=0.0,
                cache_modifier=".cg",
            )
    return total


@triton.jit(do_not_specialize=["adapters", "tokens"])
def _shrink_kernel(
    x,
    mask,
    flat,
    s,
    blocks,
    table,
    scales,
    partials,
    counters,
    x_stride,
    s_stride,
    adapters,
    tokens,
    J: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    PARTS: tl.constexpr = CHUNKS if SPLIT else 1
    pid = tl.program_id(0)
    block = pid // (TILES * PARTS)
    part = pid // TILES % PARTS
    tile = pid % TILES
    adapter = tl.load(blocks + block * 3)
    if adapter < 0:
        return
    t = tl.load(blocks + block * 3 + 1) + tl.arange(0, BLOCK_T)
    t_ok = t < tl.load(blocks + block * 3 + 2)
    c = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    a_row, linear, columns = locate_columns(table, adapters, adapter, c, J, K)
    if tile * BLOCK_C >= columns:
        return
    c_ok = linear >= 0
    x_rows = x + t.to(tl.int64)[:, None] * x_stride
    m_rows = mask + t.to(tl.int64)[:, None] * K
    a_rows = flat + a_row[:, None]
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for chunk in range(part, part + 1 if SPLIT else CHUNKS):
        acc = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for k0 in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, K), BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            xs = tl.load(x_rows + k[None, :], mask=t_ok[:, None] & (k < K)[None, :], other=0.0)
            a = tl.load(a_rows + k[None, :], mask=c_ok[:, None] & (k < K)[None, :], other=0.0)
            if HAS_MASK:
                # Every column gets its own linear's product and zeros from the others: the order stays.
                for j in tl.static_range(J):
                    m = tl.load(
                        m_rows + j * tokens.to(tl.int64) * K + k[None, :],
                        mask=t_ok[:, None] & (k < K)[None, :],
                        other=0,
                    )
                    kept = tl.where(m != 0, xs, 0.0).to(xs.dtype)
                    own = tl.where((linear == j)[:, None], a, 0.0).to(a.dtype)
                    acc = dot(kept, tl.trans(own), acc, WIDEN)
            else:
                acc = dot(xs, tl.trans(a), acc, WIDEN)
        total += acc
    # Columns past a rank are written as zeros: whoever reads S takes whole groups of eight columns.
    keep = t_ok[:, None] & (c < columns)[None, :]
    s_places = s + t.to(tl.int64)[:, None] * s_stride + c[None, :]
    scale = tl.load(scales + adapter)
    if PARTS == 1:
        value = tl.where(c_ok[None, :], total * scale, 0.0)
        tl.store(s_places, narrow(value, s.dtype.element_ty, WIDEN), mask=keep)
    else:
        SIZE: tl.constexpr = BLOCK_T * BLOCK_C
        slot = block * TILES + tile
        base = partials + slot.to(tl.int64) * (PARTS * SIZE)
        places = tl.arange(0, BLOCK_T)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        tl.store(base + part * SIZE + places, total, mask=keep)
        # Every warp's stores before the one atomic that publishes them.
        tl.debug_barrier()
        if tl.atomic_add(counters + slot, 1, sem="acq_rel") == PARTS - 1:
            total = add_partials(base, places, keep, PARTS, SIZE, BLOCK_T, BLOCK_C)
            value = tl.where(c_ok[None, :], total * scale, 0.0)
            tl.store(s_places, narrow(value, s.dtype.element_ty, WIDEN), mask=keep)
            tl.store(counters + slot, 0)


def lora_shrink(
    x: torch.Tensor,
    flat: torch.Tensor,
    tables: PassTables,
    group: int,
    workspace: LoraWorkspace,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """S (T, columns) in x's dtype. x (T, K), rows may be strided; flat: the adapters' matrices in x's dtype;
    mask (J, T, K) uint8, 1 keeps. Rows of no adapter are left unwritten."""
    table = tables.groups[group]
    tokens, k = x.shape
    assert k == table.shape.in_features
    assert x.stride(1) == 1
    assert flat.dtype == x.dtype
    assert mask is None or (mask.shape == (table.shape.linears, tokens, k) and mask.is_contiguous())
    s = torch.empty(tokens, table.columns, device=x.device, dtype=x.dtype)
    block_c = column_block(table.columns, x.element_size(), mask is not None)
    block_k = BLOCK_K[x.element_size()]
    tiles, chunks = -(-table.columns // block_c), -(-k // CHUNK)
    programs = tables.max_blocks * tiles
    split = chunks > 1 and splits(programs, block_c)
    partials, counters = workspace.reserve(
        programs * chunks * BLOCK_T * block_c if split else 0, programs if split else 0
    )
    _shrink_kernel[(programs * (chunks if split else 1),)](
        x,
        x if mask is None else mask,
        flat,
        s,
        tables.blocks,
        table.matrices,
        tables.scales,
        partials,
        counters,
        x.stride(0),
        table.columns,
        tables.max_adapters,
        tokens,
        J=table.shape.linears,
        K=k,
        CHUNK=CHUNK,
        SPLIT=split,
        TILES=tiles,
        BLOCK_T=BLOCK_T,
        BLOCK_C=block_c,
        BLOCK_K=block_k,
        HAS_MASK=mask is not None,
        WIDEN=INTERPRET,
        num_warps=WARPS,
        num_stages=stages((BLOCK_T + block_c) * block_k * x.element_size(), 4 if mask is None else 3),
    )
    return s


@triton.jit
def _expand_sum(
    s_rows,
    t_ok,
    b,
    n,
    n_ok,
    rank,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """S Bᵀ of one tile, fp32: the rank in steps of BLOCK_R, or in one of 16 where that is enough."""
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    width = column_width(rank)
    if rank <= 16:
        r = tl.arange(0, 16)
        s = tl.load(s_rows + r[None, :], mask=t_ok[:, None] & (r < width)[None, :], other=0.0)
        acc = dot(s, tl.trans(load_b(b, n, n_ok, r, rank, ALIGNED)), acc, WIDEN)
    else:
        for r0 in range(0, rank, BLOCK_R):
            r = r0 + tl.arange(0, BLOCK_R)
            s = tl.load(s_rows + r[None, :], mask=t_ok[:, None] & (r < width)[None, :], other=0.0)
            acc = dot(s, tl.trans(load_b(b, n, n_ok, r, rank, ALIGNED)), acc, WIDEN)
    return acc


@triton.jit(do_not_specialize=["adapters"])
def _expand_kernel(
    y,
    s,
    flat,
    blocks,
    table,
    y_stride,
    s_stride,
    adapters,
    J: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDEN: tl.constexpr,
):
    TILES0: tl.constexpr = (N0 + BLOCK_N - 1) // BLOCK_N
    TILES1: tl.constexpr = (N1 + BLOCK_N - 1) // BLOCK_N
    TILES2: tl.constexpr = (N2 + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = TILES0 + TILES1 + TILES2
    pid = tl.program_id(0)
    block = pid // TILES
    tile = pid % TILES
    adapter = tl.load(blocks + block * 3)
    if adapter < 0:
        return
    t = tl.load(blocks + block * 3 + 1) + tl.arange(0, BLOCK_T)
    t_ok = t < tl.load(blocks + block * 3 + 2)
    j = (tile >= TILES0).to(tl.int32) + (tile >= TILES0 + TILES1).to(tl.int32)
    features = tl.where(j == 0, N0, tl.where(j == 1, N1, N2))
    tile -= tl.where(j == 0, 0, tl.where(j == 1, TILES0, TILES0 + TILES1))
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok = n < features
    places = (
        y
        + tl.where(j == 0, 0, tl.where(j == 1, N0, N0 + N1))
        + t.to(tl.int64)[:, None] * y_stride
        + n[None, :]
    )
    keep = t_ok[:, None] & n_ok[None, :]
    # Before the tables are read, which takes as long.
    value = tl.load(places, mask=keep)
    rank = rank_of(table, adapters, adapter, j)
    if rank == 0:
        return
    b = flat + offset(table, adapters, adapter, j, 1)
    s_rows = s + t.to(tl.int64)[:, None] * s_stride + first_column(table, adapters, adapter, j, J)
    if rank % _COLUMN_ALIGN == 0:
        acc = _expand_sum(s_rows, t_ok, b, n, n_ok, rank, BLOCK_T, BLOCK_N, BLOCK_R, True, WIDEN)
    else:
        acc = _expand_sum(s_rows, t_ok, b, n, n_ok, rank, BLOCK_T, BLOCK_N, BLOCK_R, False, WIDEN)
    tl.store(places, narrow(value.to(tl.float32) + acc, y.dtype.element_ty, WIDEN), mask=keep)


def lora_expand(y: torch.Tensor, s: torch.Tensor, flat: torch.Tensor, tables: PassTables, group: int) -> None:
    """Adds every adapter's path to y (T, ΣN_j) in place. y's rows may be strided; S (T, columns) as
    `lora_shrink` gives it; flat: the adapters' matrices in y's dtype."""
    table = tables.groups[group]
    assert y.shape == (s.shape[0], sum(table.shape.out_features))
    assert y.stride(1) == 1
    assert s.shape[1] == table.columns
    assert s.is_contiguous()
    assert flat.dtype == y.dtype == s.dtype
    sizes = (*table.shape.out_features, 0, 0)
    tiles = sum(-(-n // BLOCK_OUT) for n in sizes)
    _expand_kernel[(tables.max_blocks * tiles,)](
        y,
        s,
        flat,
        tables.blocks,
        table.matrices,
        y.stride(0),
        table.columns,
        tables.max_adapters,
        J=table.shape.linears,
        N0=sizes[0],
        N1=sizes[1],
        N2=sizes[2],
        BLOCK_T=BLOCK_T,
        BLOCK_N=BLOCK_OUT,
        BLOCK_R=BLOCK_R[y.element_size()],
        WIDEN=INTERPRET,
        num_warps=WARPS,
        num_stages=1,
    )
