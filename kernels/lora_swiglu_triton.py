"""SwiGLU inside the grouped LoRA ops next to it: a launch and the reading of T × I activations less, twice a
layer.

    lora_expand_swiglu          gate_up = round(gate_up + S Bᵀ) in place, m = round(silu(gate) · up)
    lora_dx_swiglu_backward_    dm = round(dm + mask ∘ (dS A)), then d_gate_up, and m again in dm's place

    T tokens, I intermediate; gate_up (T, 2I): gate, up; dm, m (T, I)

Every rounding is where the separate launches (`grouped_lora_triton.py`, `swiglu_triton.py`) have it, so the
bits are theirs. A program holds the same features of gate and up. Rows behind the last adapter's (a pass is
padded) are nobody's: programs of unused blocks give them what the plain SwiGLU would.

Bytes at T = 3,885, I = 14,336, bf16, in units of T × I: forward 5 instead of 7, backward 6 instead of 8, so
222 of 780 and of 891 MB less: 52 µs each at 4.3 TB/s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gshare.kernels.grouped_lora_backward_triton import dx_sum
from gshare.kernels.grouped_lora_triton import (
    BLOCK_OUT,
    BLOCK_R,
    column_width,
    expand_sum,
    offset,
    rank_of,
)
from gshare.kernels.launch import ceil_div, launch
from gshare.kernels.lora_tables import BLOCK_T, PassTables
from gshare.kernels.swiglu_triton import swiglu_gradients, swiglu_product
from gshare.kernels.triton_common import INTERPRET
from gshare.kernels.triton_rounding import round_to

#: With four a thread has 32 elements of each operand: 141 and 196 registers on sm_90, 78 and 119 with eight.
WARPS = 8


def covers_padding(tables: PassTables, tokens: int) -> bool:
    """Whether the unused blocks reach over all rows behind the adapters', however few those are."""
    return tables.max_blocks >= ceil_div(tokens, BLOCK_T) + tables.max_adapters


@triton.jit
def _rows_of(blocks, granules, spans, block, block_count, adapters, tokens, BLOCK_T: tl.constexpr):
    """First row and end of a block, and its adapter; −1: rows of nobody, counted from the last block back."""
    adapter = tl.load(blocks + block * 3)
    first = tl.load(blocks + block * 3 + 1)
    end = tl.load(blocks + block * 3 + 2)
    if adapter < 0:
        granule = tl.load(spans + adapters) - 1
        first = tl.load(granules + granule * 2 + 1, mask=granule >= 0, other=0)
        first += (block_count - 1 - block) * BLOCK_T
        end = tokens
    return first, end, adapter


@triton.jit(do_not_specialize=["block_count", "adapters", "tokens"])
def _expand_swiglu_kernel(
    gate_up,
    m,
    s,
    flat,
    blocks,
    granules,
    spans,
    table,
    s_stride,
    block_count,
    adapters,
    tokens,
    I: tl.constexpr,  # noqa: E741
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDEN: tl.constexpr,
):
    TILES: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    first, end, adapter = _rows_of(
        blocks, granules, spans, pid // TILES, block_count, adapters, tokens, BLOCK_T
    )
    if first >= end:
        return
    t = first + tl.arange(0, BLOCK_T)
    t_ok = t < end
    n = pid % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok = n < I
    keep = t_ok[:, None] & n_ok[None, :]
    row = t.to(tl.int64)[:, None]
    places = gate_up + row * (2 * I) + n[None, :]
    # Before the tables are read, which takes as long.
    gate = tl.load(places, mask=keep, other=0.0)
    up = tl.load(places + I, mask=keep, other=0.0)
    dtype = gate_up.dtype.element_ty
    if adapter >= 0:
        s_rows = s + row * s_stride
        rank = rank_of(table, adapters, adapter, 0)
        if rank > 0:
            b = flat + offset(table, adapters, adapter, 0, 1)
            acc = expand_sum(s_rows, t_ok, b, n, n_ok, rank, BLOCK_T, BLOCK_N, BLOCK_R, WIDEN)
            gate = round_to(gate.to(tl.float32) + acc, dtype)
            tl.store(places, gate, mask=keep)
        s_rows += column_width(rank)
        rank = rank_of(table, adapters, adapter, 1)
        if rank > 0:
            b = flat + offset(table, adapters, adapter, 1, 1)
            acc = expand_sum(s_rows, t_ok, b, n, n_ok, rank, BLOCK_T, BLOCK_N, BLOCK_R, WIDEN)
            up = round_to(up.to(tl.float32) + acc, dtype)
            tl.store(places + I, up, mask=keep)
    product = swiglu_product(gate.to(tl.float32), up.to(tl.float32))
    tl.store(m + row * I + n[None, :], round_to(product, dtype), mask=keep)


def lora_expand_swiglu(
    gate_up: torch.Tensor, s: torch.Tensor, flat: torch.Tensor, tables: PassTables, group: int
) -> torch.Tensor:
    """m (T, I) = silu(gate) · up after every adapter's path was added to gate_up (T, 2I) in place.

    gate_up is contiguous, bf16 or fp32; S (T, columns) as `lora_shrink` gives it; flat: the adapters'
    matrices in gate_up's dtype. The adapters' rows follow one another from row 0; `covers_padding` holds.
    """
    table = tables.groups[group]
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    assert table.shape.out_features == (inner, inner), (gate_up.shape, table.shape)
    assert gate_up.is_contiguous()
    assert s.shape == (tokens, table.columns)
    assert s.is_contiguous()
    assert flat.dtype == gate_up.dtype == s.dtype
    assert covers_padding(tables, tokens), (tables.max_blocks, tables.max_adapters, tokens)
    m = gate_up.new_empty(tokens, inner)
    launch(
        _expand_swiglu_kernel,
        (tables.max_blocks * ceil_div(inner, BLOCK_OUT),),
        gate_up,
        m,
        s,
        flat,
        tables.blocks,
        tables.granules,
        tables.spans,
        table.matrices,
        table.columns,
        tables.max_blocks,
        tables.max_adapters,
        tokens,
        I=inner,
        BLOCK_T=BLOCK_T,
        BLOCK_N=BLOCK_OUT,
        BLOCK_R=BLOCK_R[gate_up.element_size()],
        WIDEN=INTERPRET,
        num_warps=WARPS,
        num_stages=1,
    )
    return m


@triton.jit(do_not_specialize=["block_count", "adapters", "tokens"])
def _dx_swiglu_kernel(
    dm,
    gate_up,
    d_gate_up,
    ds,
    mask,
    flat,
    blocks,
    granules,
    spans,
    table,
    ds_stride,
    block_count,
    adapters,
    tokens,
    I: tl.constexpr,  # noqa: E741
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_MASK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    TILES: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    first, end, adapter = _rows_of(
        blocks, granules, spans, pid // TILES, block_count, adapters, tokens, BLOCK_T
    )
    if first >= end:
        return
    t = first + tl.arange(0, BLOCK_T)
    t_ok = t < end
    n = pid % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok = n < I
    keep = t_ok[:, None] & n_ok[None, :]
    row = t.to(tl.int64)[:, None]
    at_m, at = row * I + n[None, :], row * (2 * I) + n[None, :]
    # Before the tables are read, which takes as long.
    d = tl.load(dm + at_m, mask=keep, other=0.0)
    gate = tl.load(gate_up + at, mask=keep, other=0.0)
    up = tl.load(gate_up + at + I, mask=keep, other=0.0)
    dtype = dm.dtype.element_ty
    # m first: three results at once take more registers (130 a thread on sm_90 instead of 119), so that an SM
    # has room for one program instead of two.
    product = swiglu_product(gate.to(tl.float32), up.to(tl.float32))
    tl.store(dm + at_m, round_to(product, dtype), mask=keep)
    if adapter >= 0:
        total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        rank = rank_of(table, adapters, adapter, 0)
        if rank > 0:
            a_rows = flat + offset(table, adapters, adapter, 0, 0)
            total = dx_sum(ds + row * ds_stride, t_ok, a_rows, n, rank, I, BLOCK_T, BLOCK_N, BLOCK_R, WIDEN)
            if HAS_MASK:
                total = tl.where(tl.load(mask + at_m, mask=keep, other=0) != 0, total, 0.0)
        d = round_to(d.to(tl.float32) + total, dtype)
    d_gate, d_up = swiglu_gradients(d.to(tl.float32), gate.to(tl.float32), up.to(tl.float32))
    tl.store(d_gate_up + at, round_to(d_gate, dtype), mask=keep)
    tl.store(d_gate_up + at + I, round_to(d_up, dtype), mask=keep)


def lora_dx_swiglu_backward_(
    dm: torch.Tensor,
    ds: torch.Tensor,
    flat: torch.Tensor,
    tables: PassTables,
    group: int,
    gate_up: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """d_gate_up (T, 2I), once every adapter's path was added to dm (T, I); dm itself becomes m (T, I).

    dm and gate_up (T, 2I) are contiguous, bf16 or fp32; dS (T, columns) as `lora_ds` gives it; flat: the
    adapters' matrices in dm's dtype; mask (1, T, I) uint8, 1 keeps. The adapters' rows follow one another
    from row 0; `covers_padding` holds.
    """
    table = tables.groups[group]
    tokens, inner = dm.shape
    assert table.shape.linears == 1, table.shape
    assert table.shape.in_features == inner, (dm.shape, table.shape)
    assert gate_up.shape == (tokens, 2 * inner), (dm.shape, gate_up.shape)
    assert ds.shape == (tokens, table.columns)
    assert all(tensor.is_contiguous() for tensor in (dm, gate_up, ds))
    assert flat.dtype == dm.dtype == ds.dtype == gate_up.dtype
    assert mask is None or (mask.shape == (1, tokens, inner) and mask.is_contiguous())
    assert covers_padding(tables, tokens), (tables.max_blocks, tables.max_adapters, tokens)
    d_gate_up = torch.empty_like(gate_up)
    launch(
        _dx_swiglu_kernel,
        (tables.max_blocks * ceil_div(inner, BLOCK_OUT),),
        dm,
        gate_up,
        d_gate_up,
        ds,
        dm if mask is None else mask,
        flat,
        tables.blocks,
        tables.granules,
        tables.spans,
        table.matrices,
        table.columns,
        tables.max_blocks,
        tables.max_adapters,
        tokens,
        I=inner,
        BLOCK_T=BLOCK_T,
        BLOCK_N=BLOCK_OUT,
        BLOCK_R=BLOCK_R[dm.element_size()],
        HAS_MASK=mask is not None,
        WIDEN=INTERPRET,
        num_warps=WARPS,
        num_stages=1,
    )
    return d_gate_up
