"""Grouped LoRA gradients in Triton: dA and dB of every adapter and linear of a group in one launch.

For the linears j of a group and the adapters i of a pass (`lora_tables.py`; T tokens, K in, N_j out):

    dA_ij += dS_ijᵀ (x ∘ m_j),   dB_ij += dy[:, n_off_j:]ᵀ S_ij         fp32, in place

Order of the sums: one fp32 accumulator starts at what `grads` holds (at zero for an adapter that the tables
call fresh) and runs over the adapter's sequences in order, in granules of 64 tokens counted from each
sequence's first: cutting a step's sequences into more calls changes no bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gshare.kernels.grouped_lora_triton import (
    WARPS,
    column_block,
    column_width,
    first_column,
    locate_columns,
    offset,
    rank_of,
    stages,
)
from gshare.kernels.lora_tables import BLOCK_T, PassTables
from gshare.kernels.lora_tables import column_width as padded_rank
from gshare.kernels.triton_common import INTERPRET, dot


@triton.jit
def _granule(granules, g, BLOCK_T: tl.constexpr):
    """Tokens (BLOCK_T,) int64 of a granule and which of them it has."""
    t = tl.load(granules + g * 2) + tl.arange(0, BLOCK_T)
    return t.to(tl.int64), t < tl.load(granules + g * 2 + 1)


@triton.jit
def _grad_a(
    x,
    ds,
    mask,
    grads,
    granules,
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
    WIDEN: tl.constexpr,
):
    """One tile of every linear's dAᵀ: BLOCK_F features by BLOCK_C columns of dS. held: grads hold a sum."""
    f = f0 + tl.arange(0, BLOCK_F)
    c = c0 + tl.arange(0, BLOCK_C)
    a_row, linear, columns = locate_columns(table, adapters, adapter, c, J, K)
    if c0 < columns:
        places = grads + a_row[None, :] + f[:, None]
        keep = (f < K)[:, None] & (linear >= 0)[None, :]
        acc = tl.load(places, mask=keep & held, other=0.0)
        for g in range(first, end):
            t, t_ok = _granule(granules, g, BLOCK_T)
            x_ok = t_ok[:, None] & (f < K)[None, :]
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
    WIDEN: tl.constexpr,
):
    """One tile of one linear's dB: BLOCK_F features by BLOCK_C of its columns of S."""
    f = f0 + tl.arange(0, BLOCK_F)
    c = c0 + tl.arange(0, BLOCK_C)
    if c0 < rank:
        places = b_grads + f[:, None] * rank + c[None, :]
        keep = (f < features)[:, None] & (c < rank)[None, :]
        acc = tl.load(places, mask=keep & held, other=0.0)
        for g in range(first, end):
            t, t_ok = _granule(granules, g, BLOCK_T)
            y_ok = t_ok[:, None] & (f < features)[None, :]
            ys = tl.load(dy + t[:, None] * dy_stride + f[None, :], mask=y_ok, other=0.0)
            s_ok = t_ok[:, None] & (c < column_width(rank))[None, :]
            ss = tl.load(s + t[:, None] * s_stride + c[None, :], mask=s_ok, other=0.0)
            acc = dot(tl.trans(ys), ss, acc, WIDEN)
        tl.store(places, acc, mask=keep)


@triton.jit(do_not_specialize=["adapters", "tokens"])
def _grads_kernel(
    x,
    dy,
    s,
    ds,
    mask,
    grads,
    granules,
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
    BLOCK_F: tl.constexpr,
    A_COLUMNS: tl.constexpr,
    B_COLUMNS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Both products as (features, columns) = (tokens, features)ᵀ (tokens, columns): 64 features or more are
    the rows of an MMA, which a rank is too small to be."""
    A_PROGRAMS: tl.constexpr = (K + BLOCK_F - 1) // BLOCK_F * A_TILES
    F0: tl.constexpr = (N0 + BLOCK_F - 1) // BLOCK_F
    F1: tl.constexpr = (N1 + BLOCK_F - 1) // BLOCK_F
    F2: tl.constexpr = (N2 + BLOCK_F - 1) // BLOCK_F
    PROGRAMS: tl.constexpr = A_PROGRAMS + (F0 + F1 + F2) * B_TILES
    pid = tl.program_id(0)
    adapter = pid // PROGRAMS
    program = pid % PROGRAMS
    first = tl.load(spans + adapter)
    end = tl.load(spans + adapter + 1)
    if first == end:
        return
    held = tl.load(fresh + adapter) == 0
    if program < A_PROGRAMS:
        _grad_a(
            x,
            ds,
            mask,
            grads,
            granules,
            first,
            end,
            table,
            adapters,
            adapter,
            held,
            x_stride,
            s_stride,
            tokens,
            program // A_TILES * BLOCK_F,
            program % A_TILES * A_COLUMNS,
            J,
            K,
            BLOCK_T,
            BLOCK_F,
            A_COLUMNS,
            HAS_MASK,
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
            first,
            end,
            held,
            dy_stride,
            s_stride,
            tl.where(j == 0, N0, tl.where(j == 1, N1, N2)),
            rank_of(table, adapters, adapter, j),
            (tile - tl.where(j == 0, 0, tl.where(j == 1, F0, F0 + F1))) * BLOCK_F,
            (program - A_PROGRAMS) % B_TILES * B_COLUMNS,
            BLOCK_T,
            BLOCK_F,
            B_COLUMNS,
            WIDEN,
        )


def grad_stages(bytes_a_stage: int, masked: bool) -> int:
    """A granule's place is loaded before its rows are, both in the pipeline: two stages a buffer of rows.
    Masks are loaded into registers, which more stages spill."""
    return 2 * stages(bytes_a_stage, 2 if masked else 5) - 1


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
    them; mask (J, T, K) uint8, 1 keeps.
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

    def programs(block_f: int) -> int:
        b_features = sum(-(-n // block_f) for n in sizes)
        return tables.max_adapters * (-(-k // block_f) * a_tiles + b_features * b_tiles)

    # Wider tiles where registers allow and even they give a large card's 132 SMs several programs each.
    narrow = size == 2 and a_columns <= 32 and mask is None
    block_f = 128 if narrow and programs(128) >= 1024 else 64
    _grads_kernel[(programs(block_f),)](
        x,
        dy,
        s,
        ds,
        x if mask is None else mask,
        grads,
        tables.granules,
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
        BLOCK_F=block_f,
        A_COLUMNS=a_columns,
        B_COLUMNS=b_columns,
        HAS_MASK=mask is not None,
        WIDEN=INTERPRET,
        num_warps=WARPS,
        num_stages=grad_stages((block_f + max(a_columns, b_columns)) * BLOCK_T * size, mask is not None),
    )
