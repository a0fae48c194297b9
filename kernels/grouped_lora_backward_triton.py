"""Grouped LoRA dS and dx in Triton: one launch an op, however many adapters and linears share the pass.

For the linears j of a group and the adapters i of a pass (`lora_tables.py`; T tokens, K in, N_j out):

    lora_ds      dS_ij = round(scale_i · dy[:, n_off_j:] B_ij)          dS (T, columns)
    lora_dx      dx = round(float(dx) + Σ_j m_j ∘ (dS_ij A_ij))         dx (T, K), in place

Order of the sums: dS as S in `grouped_lora_triton.py`, over chunks of 1,024 of N_j. In dx the linears' parts
have accumulators of their own, added in the order of j.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gshare.kernels.grouped_lora_triton import (
    BLOCK_K,
    BLOCK_OUT,
    BLOCK_R,
    CHUNK,
    WARPS,
    add_partials,
    column_block,
    column_width,
    first_column,
    load_b,
    offset,
    rank_of,
    splits,
    stages,
)
from gshare.kernels.lora_tables import BLOCK_T, COLUMN_ALIGN, LoraWorkspace, PassTables
from gshare.kernels.lora_tables import column_width as padded_rank
from gshare.kernels.triton_common import INTERPRET, dot, narrow

_COLUMN_ALIGN = tl.constexpr(COLUMN_ALIGN)


@triton.jit
def _ds_sum(
    dy_rows,
    t_ok,
    b,
    r,
    rank,
    features,
    first_chunk,
    end_chunk,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """dy B over some chunks of a linear's features, fp32."""
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for chunk in range(first_chunk, end_chunk):
        acc = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for n0 in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, features), BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            n_ok = n < features
            dy = tl.load(dy_rows + n[None, :], mask=t_ok[:, None] & n_ok[None, :], other=0.0)
            acc = dot(dy, load_b(b, n, n_ok, r, rank, ALIGNED), acc, WIDEN)
        total += acc
    return total


@triton.jit(do_not_specialize=["adapters"])
def _ds_kernel(
    dy,
    flat,
    ds,
    blocks,
    table,
    scales,
    partials,
    counters,
    dy_stride,
    ds_stride,
    adapters,
    J: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
):
    CHUNKS0: tl.constexpr = (N0 + CHUNK - 1) // CHUNK
    CHUNKS1: tl.constexpr = (N1 + CHUNK - 1) // CHUNK
    CHUNKS2: tl.constexpr = (N2 + CHUNK - 1) // CHUNK
    # A unit is one chunk of one linear, or a whole linear.
    UNITS0: tl.constexpr = CHUNKS0 if SPLIT else 1
    UNITS1: tl.constexpr = CHUNKS1 if SPLIT else (1 if J > 1 else 0)
    UNITS2: tl.constexpr = CHUNKS2 if SPLIT else (1 if J > 2 else 0)
    UNITS: tl.constexpr = UNITS0 + UNITS1 + UNITS2
    pid = tl.program_id(0)
    block = pid // (TILES * UNITS)
    unit = pid // TILES % UNITS
    tile = pid % TILES
    adapter = tl.load(blocks + block * 3)
    if adapter < 0:
        return
    t = tl.load(blocks + block * 3 + 1) + tl.arange(0, BLOCK_T)
    t_ok = t < tl.load(blocks + block * 3 + 2)
    j = (unit >= UNITS0).to(tl.int32) + (unit >= UNITS0 + UNITS1).to(tl.int32)
    rank = rank_of(table, adapters, adapter, j)
    if tile * BLOCK_C >= rank:
        return
    features = tl.where(j == 0, N0, tl.where(j == 1, N1, N2))
    chunks = tl.where(j == 0, CHUNKS0, tl.where(j == 1, CHUNKS1, CHUNKS2))
    first_unit = tl.where(j == 0, 0, tl.where(j == 1, UNITS0, UNITS0 + UNITS1))
    r = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    dy_rows = dy + tl.where(j == 0, 0, tl.where(j == 1, N0, N0 + N1)) + t.to(tl.int64)[:, None] * dy_stride
    b = flat + offset(table, adapters, adapter, j, 1)
    part = unit - first_unit
    end = part + 1 if SPLIT else chunks
    if rank % _COLUMN_ALIGN == 0:
        total = _ds_sum(
            dy_rows, t_ok, b, r, rank, features, part, end, CHUNK, BLOCK_T, BLOCK_C, BLOCK_N, True, WIDEN
        )
    else:
        total = _ds_sum(
            dy_rows, t_ok, b, r, rank, features, part, end, CHUNK, BLOCK_T, BLOCK_C, BLOCK_N, False, WIDEN
        )
    # Columns past the rank are written as zeros: B was zero there, but dy may be Inf.
    keep = t_ok[:, None] & (r < column_width(rank))[None, :]
    column = first_column(table, adapters, adapter, j, J)
    ds_places = ds + t.to(tl.int64)[:, None] * ds_stride + column + r[None, :]
    scale = tl.load(scales + adapter)
    if not SPLIT:
        value = tl.where((r < rank)[None, :], total * scale, 0.0)
        tl.store(ds_places, narrow(value, ds.dtype.element_ty, WIDEN), mask=keep)
    else:
        SIZE: tl.constexpr = BLOCK_T * BLOCK_C
        base = partials + ((block * UNITS + first_unit).to(tl.int64) * TILES + tile) * SIZE
        places = tl.arange(0, BLOCK_T)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        tl.store(base + part * (TILES * SIZE) + places, total, mask=keep)
        # Every warp's stores before the one atomic that publishes them.
        tl.debug_barrier()
        counter = counters + (block * J + j) * TILES + tile
        if tl.atomic_add(counter, 1, sem="acq_rel") == chunks - 1:
            total = add_partials(base, places, keep, chunks, TILES * SIZE, BLOCK_T, BLOCK_C)
            value = tl.where((r < rank)[None, :], total * scale, 0.0)
            tl.store(ds_places, narrow(value, ds.dtype.element_ty, WIDEN), mask=keep)
            tl.store(counter, 0)


def lora_ds(
    dy: torch.Tensor, flat: torch.Tensor, tables: PassTables, group: int, workspace: LoraWorkspace
) -> torch.Tensor:
    """dS (T, columns) in dy's dtype. dy (T, ΣN_j), rows may be strided; flat: the adapters' matrices in
    dy's dtype. Rows of no adapter are left unwritten."""
    table = tables.groups[group]
    assert dy.shape[1] == sum(table.shape.out_features)
    assert dy.stride(1) == 1
    assert flat.dtype == dy.dtype
    ds = torch.empty(dy.shape[0], table.columns, device=dy.device, dtype=dy.dtype)
    block_c, block_n = (
        column_block(padded_rank(tables.max_rank), dy.element_size()),
        BLOCK_K[dy.element_size()],
    )
    linears, tiles = table.shape.linears, -(-tables.max_rank // block_c)
    chunks = [-(-n // CHUNK) for n in table.shape.out_features]
    programs = tables.max_blocks * linears * tiles
    split = max(chunks) > 1 and splits(programs, block_c)
    units = sum(chunks) if split else linears
    partials, counters = workspace.reserve(
        tables.max_blocks * units * tiles * BLOCK_T * block_c if split else 0, programs if split else 0
    )
    sizes = (*table.shape.out_features, 0, 0)
    _ds_kernel[(tables.max_blocks * units * tiles,)](
        dy,
        flat,
        ds,
        tables.blocks,
        table.matrices,
        tables.scales,
        partials,
        counters,
        dy.stride(0),
        table.columns,
        tables.max_adapters,
        J=linears,
        N0=sizes[0],
        N1=sizes[1],
        N2=sizes[2],
        CHUNK=CHUNK,
        SPLIT=split,
        TILES=tiles,
        BLOCK_T=BLOCK_T,
        BLOCK_C=block_c,
        BLOCK_N=block_n,
        WIDEN=INTERPRET,
        num_warps=WARPS,
        num_stages=stages((BLOCK_T + block_c) * block_n * dy.element_size(), 4),
    )
    return ds


@triton.jit
def _dx_sum(
    ds_rows,
    t_ok,
    a_rows,
    k,
    rank,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """dS A of one tile, fp32: the rank in steps of BLOCK_R, or in one of 16 where that is enough."""
    acc = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    width = column_width(rank)
    k_ok = (k < K)[None, :]
    if rank <= 16:
        r = tl.arange(0, 16)
        ds = tl.load(ds_rows + r[None, :], mask=t_ok[:, None] & (r < width)[None, :], other=0.0)
        a = tl.load(a_rows + r[:, None] * K + k[None, :], mask=(r < rank)[:, None] & k_ok, other=0.0)
        acc = dot(ds, a, acc, WIDEN)
    else:
        for r0 in range(0, rank, BLOCK_R):
            r = r0 + tl.arange(0, BLOCK_R)
            ds = tl.load(ds_rows + r[None, :], mask=t_ok[:, None] & (r < width)[None, :], other=0.0)
            a = tl.load(a_rows + r[:, None] * K + k[None, :], mask=(r < rank)[:, None] & k_ok, other=0.0)
            acc = dot(ds, a, acc, WIDEN)
    return acc


@triton.jit(do_not_specialize=["adapters", "tokens"])
def _dx_kernel(
    dx,
    ds,
    mask,
    flat,
    blocks,
    table,
    dx_stride,
    ds_stride,
    adapters,
    tokens,
    J: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    pid = tl.program_id(0)
    block = pid // TILES
    adapter = tl.load(blocks + block * 3)
    if adapter < 0:
        return
    t = tl.load(blocks + block * 3 + 1) + tl.arange(0, BLOCK_T)
    t_ok = t < tl.load(blocks + block * 3 + 2)
    k = pid % TILES * BLOCK_K + tl.arange(0, BLOCK_K)
    keep = t_ok[:, None] & (k < K)[None, :]
    places = dx + t.to(tl.int64)[:, None] * dx_stride + k[None, :]
    # Before the tables are read, which takes as long.
    value = tl.load(places, mask=keep)
    ds_rows = ds + t.to(tl.int64)[:, None] * ds_stride
    total = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    for j in tl.static_range(J):
        rank = rank_of(table, adapters, adapter, j)
        if rank > 0:
            a_rows = flat + offset(table, adapters, adapter, j, 0)
            acc = _dx_sum(ds_rows, t_ok, a_rows, k, rank, K, BLOCK_T, BLOCK_K, BLOCK_R, WIDEN)
            if HAS_MASK:
                m_rows = mask + (j * tokens.to(tl.int64) + t)[:, None] * K
                acc = tl.where(tl.load(m_rows + k[None, :], mask=keep, other=0) != 0, acc, 0.0)
            total += acc
        ds_rows += column_width(rank)
    tl.store(places, narrow(value.to(tl.float32) + total, dx.dtype.element_ty, WIDEN), mask=keep)


def lora_dx(
    dx: torch.Tensor,
    ds: torch.Tensor,
    flat: torch.Tensor,
    tables: PassTables,
    group: int,
    mask: torch.Tensor | None = None,
) -> None:
    """Adds every adapter's path to dx (T, K) in place. dx's rows may be strided; dS (T, columns) as
    `lora_ds` gives it; flat: the adapters' matrices in dx's dtype; mask (J, T, K) uint8, 1 keeps."""
    table = tables.groups[group]
    tokens, k = dx.shape
    assert k == table.shape.in_features
    assert dx.stride(1) == 1
    assert ds.shape == (tokens, table.columns)
    assert ds.is_contiguous()
    assert flat.dtype == dx.dtype == ds.dtype
    assert mask is None or (mask.shape == (table.shape.linears, tokens, k) and mask.is_contiguous())
    _dx_kernel[(tables.max_blocks * -(-k // BLOCK_OUT),)](
        dx,
        ds,
        dx if mask is None else mask,
        flat,
        tables.blocks,
        table.matrices,
        dx.stride(0),
        table.columns,
        tables.max_adapters,
        tokens,
        J=table.shape.linears,
        K=k,
        BLOCK_T=BLOCK_T,
        BLOCK_K=BLOCK_OUT,
        BLOCK_R=BLOCK_R[dx.element_size()],
        HAS_MASK=mask is not None,
        WIDEN=INTERPRET,
        num_warps=WARPS,
        num_stages=1,
    )
