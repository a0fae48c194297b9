"""Grouped LoRA gradients in Triton: dA and dB of every adapter and linear of a group in one launch.

For the linears j of a group and the adapters i of a pass (`lora_tables.py`; T tokens, K in, N_j out):

    dA_ij += dS_ijᵀ (x ∘ m_j),   dB_ij += dy[:, n_off_j:]ᵀ S_ij         fp32, in place

Order of the sums: one fp32 accumulator starts at what `grads` holds (at zero for an adapter that the tables
call fresh) and runs over the adapter's sequences in order, in granules of 64 tokens counted from each
sequence's first: cutting a step's sequences into more calls changes no bits. Where the tables say which row a
token has (`PassTables.rows`), a token without one keeps its place in its granule, as zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gshare.kernels.grouped_lora_triton import (
    SHARED_BYTES,
    WARPS,
    column_block,
    column_width,
    first_column,
    locate_columns,
    offset,
    rank_of,
)
from gshare.kernels.lora_tables import BLOCK_T, COLUMN_ALIGN, PassTables
from gshare.kernels.lora_tables import column_width as padded_rank
from gshare.kernels.triton_common import INTERPRET, dot

_COLUMN_ALIGN = tl.constexpr(COLUMN_ALIGN)


@triton.jit
def _granule(granules, rows, g, BLOCK_T: tl.constexpr, HAS_ROWS: tl.constexpr):
    """Rows (BLOCK_T,) int64 of a granule's tokens and which of them it has."""
    t = tl.load(granules + g * 2) + tl.arange(0, BLOCK_T)
    t_ok = t < tl.load(granules + g * 2 + 1)
    if HAS_ROWS:
        t = tl.load(rows + t, mask=t_ok, other=-1)
        t_ok = t >= 0
    return t.to(tl.int64), t_ok


@triton.jit
def _grad_a(
    x,
    ds,
    mask,
    grads,
    granules,
    rows,
    first,
    end,
    table,
    adapters,
    adapter,
    held,
    x_stride,
    s_stride,
    tokens,
    f0,
    c0,
    J: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of every linear's dAᵀ: BLOCK_F features by BLOCK_C columns of dS. held: grads hold a sum."""
    EVEN: tl.constexpr = K % BLOCK_F == 0
    f = f0 + tl.arange(0, BLOCK_F)
    c = c0 + tl.arange(0, BLOCK_C)
    a_row, linear, columns = locate_columns(table, adapters, adapter, c, J, K)
    places = grads + a_row[None, :] + f[:, None]
    keep = (f < K)[:, None] & (linear >= 0)[None, :] & (first < end)
    acc = tl.load(places, mask=keep & held, other=0.0)
    for g in range(first, tl.where(c0 < columns, end, first)):
        t, t_ok = _granule(granules, rows, g, BLOCK_T, HAS_ROWS)
        # A mask along features only where tiles do not divide them: it is the loads' longest arithmetic.
        x_ok = t_ok[:, None] if EVEN else t_ok[:, None] & (f < K)[None, :]
        xs = tl.load(x + t[:, None] * x_stride + f[None, :], mask=x_ok, other=0.0)
        d_ok = t_ok[:, None] & (c < columns)[None, :]
        d = tl.load(ds + t[:, None] * s_stride + c[None, :], mask=d_ok, other=0.0)
        if HAS_MASK:
            # Every column gets its own linear's product and zeros from the others.
            for j in tl.static_range(J):
                m_rows = mask + (j * tokens.to(tl.int64) + t)[:, None] * K
                m = tl.load(m_rows + f[None, :], mask=x_ok, other=0)
                kept = tl.where(m != 0, xs, 0.0).to(xs.dtype)
                own = tl.where((linear == j)[None, :], d, 0.0).to(d.dtype)
                acc = dot(tl.trans(kept), own, acc, WIDEN)
        else:
            acc = dot(tl.trans(xs), d, acc, WIDEN)
    tl.store(places, acc, mask=keep)


@triton.jit
def _grad_b(
    dy,
    s,
    b_grads,
    granules,
    rows,
    first,
    end,
    held,
    dy_stride,
    s_stride,
    features,
    rank,
    f0,
    c0,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of one linear's dB: BLOCK_F features by BLOCK_C of its columns of S. EVEN: tiles divide every
    linear's features."""
    f = f0 + tl.arange(0, BLOCK_F)
    c = c0 + tl.arange(0, BLOCK_C)
    keep = (f < features)[:, None] & (c < rank)[None, :] & (first < end)
    acc = tl.load(b_grads + f[:, None] * rank + c[None, :], mask=keep & held, other=0.0)
    for g in range(first, tl.where(c0 < rank, end, first)):
        t, t_ok = _granule(granules, rows, g, BLOCK_T, HAS_ROWS)
        y_ok = t_ok[:, None] if EVEN else t_ok[:, None] & (f < features)[None, :]
        ys = tl.load(dy + t[:, None] * dy_stride + f[None, :], mask=y_ok, other=0.0)
        s_ok = t_ok[:, None] & (c < column_width(rank))[None, :]
        ss = tl.load(s + t[:, None] * s_stride + c[None, :], mask=s_ok, other=0.0)
        acc = dot(tl.trans(ys), ss, acc, WIDEN)
    if rank % _COLUMN_ALIGN == 0:
        # The product shows the compiler 16-byte stores.
        width = rank // _COLUMN_ALIGN * _COLUMN_ALIGN
        tl.store(b_grads + f[:, None] * width + c[None, :], acc, mask=keep)
    else:
        tl.store(b_grads + f[:, None] * rank + c[None, :], acc, mask=keep)


@triton.jit(do_not_specialize=["adapters", "tokens"])
def _grads_kernel(
    x,
    dy,
    s,
    ds,
    mask,
    grads,
    granules,
    rows,
    spans,
    fresh,
    table,
    x_stride,
    dy_stride,
    s_stride,
    adapters,
    tokens,
    J: tl.constexpr,
    K: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    N2: tl.constexpr,
    A_TILES: tl.constexpr,
    B_TILES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    A_FEATURES: tl.constexpr,
    B_FEATURES: tl.constexpr,
    A_COLUMNS: tl.constexpr,
    B_COLUMNS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Both products as (features, columns) = (tokens, features)ᵀ (tokens, columns): 64 features or more are
    the rows of an MMA, which a rank is too small to be."""
    A_PROGRAMS: tl.constexpr = (K + A_FEATURES - 1) // A_FEATURES * A_TILES
    F0: tl.constexpr = (N0 + B_FEATURES - 1) // B_FEATURES
    F1: tl.constexpr = (N1 + B_FEATURES - 1) // B_FEATURES
    F2: tl.constexpr = (N2 + B_FEATURES - 1) // B_FEATURES
    PROGRAMS: tl.constexpr = A_PROGRAMS + (F0 + F1 + F2) * B_TILES
    pid = tl.program_id(0)
    adapter = pid // PROGRAMS
    program = pid % PROGRAMS
    first = tl.load(spans + adapter)
    end = tl.load(spans + adapter + 1)
    # No branch on what was loaded: spans, flags and tables come in one trip to memory.
    held = tl.load(fresh + adapter) == 0
    if program < A_PROGRAMS:
        _grad_a(
            x,
            ds,
            mask,
            grads,
            granules,
            rows,
            first,
            end,
            table,
            adapters,
            adapter,
            held,
            x_stride,
            s_stride,
            tokens,
            program // A_TILES * A_FEATURES,
            program % A_TILES * A_COLUMNS,
            J,
            K,
            BLOCK_T,
            A_FEATURES,
            A_COLUMNS,
            HAS_MASK,
            HAS_ROWS,
            WIDEN,
        )
    else:
        tile = (program - A_PROGRAMS) // B_TILES
        j = (tile >= F0).to(tl.int32) + (tile >= F0 + F1).to(tl.int32)
        _grad_b(
            dy + tl.where(j == 0, 0, tl.where(j == 1, N0, N0 + N1)),
            s + first_column(table, adapters, adapter, j, J),
            grads + offset(table, adapters, adapter, j, 1),
            granules,
            rows,
            first,
            end,
            held,
            dy_stride,
            s_stride,
            tl.where(j == 0, N0, tl.where(j == 1, N1, N2)),
            rank_of(table, adapters, adapter, j),
            (tile - tl.where(j == 0, 0, tl.where(j == 1, F0, F0 + F1))) * B_FEATURES,
            (program - A_PROGRAMS) % B_TILES * B_COLUMNS,
            BLOCK_T,
            B_FEATURES,
            B_COLUMNS,
            N0 % B_FEATURES == 0 and N1 % B_FEATURES == 0 and N2 % B_FEATURES == 0,
            HAS_ROWS,
            WIDEN,
        )


def feature_block(features: int, columns: int, adapters: int, element_size: int, masked: bool = False) -> int:
    """Features of dA or dB that a program holds; changes no bits.

    128 halves the reads of dS or S, which pays on long sides (H200, 8B and 0.5B, 4 and 16 adapters: from
    4,864 features on, not at 4,096) where registers hold the tile and a large card's 132 SMs each get one.
    """
    wide = features > 4096 and features * adapters >= 128 * 132
    return 128 if wide and columns <= 32 and element_size == 2 and not masked else 64


def grad_stages(a_features: int, b_features: int, columns: int, element_size: int, masked: bool) -> int:
    """A granule's place is loaded before its rows are, both in the pipeline: two stages a buffer of rows.

    Three buffers; two of wide dA tiles (H200: 2–14 % faster than three), and two where masks are loaded, into
    registers that more stages spill.
    """
    bytes_a_buffer = (max(a_features, b_features) + columns) * BLOCK_T * element_size
    buffers = 2 if masked or a_features > 64 else 3
    return 2 * max(2, min(buffers, SHARED_BYTES // bytes_a_buffer)) - 1


def lora_grads(
    x: torch.Tensor,
    dy: torch.Tensor,
    s: torch.Tensor,
    ds: torch.Tensor,
    grads: torch.Tensor,
    tables: PassTables,
    group: int,
    mask: torch.Tensor | None = None,
) -> None:
    """Adds every adapter's dA and dB to grads (flat fp32, the matrices' own offsets) in place; a fresh
    adapter's are written and what was there is not read.

    x (T, K) and dy (T, ΣN_j), rows may be strided; S and dS (T, columns) as `lora_shrink` and `lora_ds` give
    them; mask (J, T, K) uint8, 1 keeps. With `PassTables.rows` T is the number of rows, not of tokens.
    """
    table = tables.groups[group]
    tokens, k = x.shape
    assert k == table.shape.in_features
    assert dy.shape == (tokens, sum(table.shape.out_features))
    assert x.stride(1) == dy.stride(1) == 1
    assert s.shape == ds.shape == (tokens, table.columns)
    assert s.is_contiguous()
    assert ds.is_contiguous()
    assert x.dtype == dy.dtype == s.dtype == ds.dtype
    assert grads.dtype == torch.float32
    assert mask is None or (mask.shape == (table.shape.linears, tokens, k) and mask.is_contiguous())
    size = x.element_size()
    a_columns = column_block(table.columns, size, mask is not None)
    b_columns = column_block(padded_rank(tables.max_rank), size)
    a_tiles, b_tiles = -(-table.columns // a_columns), -(-tables.max_rank // b_columns)
    sizes = (*table.shape.out_features, 0, 0)

    a_features = feature_block(k, a_columns, tables.max_adapters, size, mask is not None)
    b_features = feature_block(sum(sizes), b_columns, tables.max_adapters, size, mask is not None)
    programs = -(-k // a_features) * a_tiles + sum(-(-n // b_features) for n in sizes) * b_tiles
    _grads_kernel[(tables.max_adapters * programs,)](
        x,
        dy,
        s,
        ds,
        x if mask is None else mask,
        grads,
        tables.granules,
        tables.granules if tables.rows is None else tables.rows,
        tables.spans,
        tables.fresh,
        table.matrices,
        x.stride(0),
        dy.stride(0),
        table.columns,
        tables.max_adapters,
        tokens,
        J=table.shape.linears,
        K=k,
        N0=sizes[0],
        N1=sizes[1],
        N2=sizes[2],
        A_TILES=a_tiles,
        B_TILES=b_tiles,
        BLOCK_T=BLOCK_T,
        A_FEATURES=a_features,
        B_FEATURES=b_features,
        A_COLUMNS=a_columns,
        B_COLUMNS=b_columns,
        HAS_MASK=mask is not None,
        HAS_ROWS=tables.rows is not None,
        WIDEN=INTERPRET,
        num_warps=WARPS,
        num_stages=grad_stages(a_features, b_features, max(a_columns, b_columns), size, mask is not None),
    )
