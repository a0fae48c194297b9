"""Grouped LoRA backward in Triton: one launch an op, however many adapters and linears share the pass.

For the linears j of a group and the adapters i of a pass (`lora_tables.py`; T tokens, K in, N_j out):

    lora_ds      dS_ij = round(scale_i · dy[:, n_off_j:] B_ij)          dS (T, columns)
    lora_dx      dx = round(float(dx) + Σ_j m_j ∘ (dS_ij A_ij))         dx (T, K), in place
    lora_grads   dA_ij += dS_ijᵀ (x ∘ m_j),   dB_ij += dyᵀ S_ij         fp32, in place

Order of the sums: dS as S in `grouped_lora_triton.py`, over chunks of 1,024 of N_j. In dx the linears' parts
have accumulators of their own, added in the order of j. For dA and dB one fp32 accumulator starts at what
`grads` holds and runs over the adapter's sequences in order, in granules of 64 tokens counted from each
sequence's first: cutting a step's sequences into more calls changes no bits.
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
    locate_columns,
    offset,
    rank_of,
    splits,
    stages,
)
from gshare.kernels.lora_tables import BLOCK_T, COLUMN_ALIGN, LoraWorkspace, PassTables
from gshare.kernels.lora_tables import column_width as padded_rank
from gshare.kernels.triton_common import INTERPRET, dot

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
        tl.store(ds_places, value.to(ds.dtype.element_ty), mask=keep)
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
            tl.store(ds_places, value.to(ds.dtype.element_ty), mask=keep)
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
    tl.store(places, (value.to(tl.float32) + total).to(dx.dtype.element_ty), mask=keep)


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
    """One tile of every linear's dAᵀ: BLOCK_F features by BLOCK_C columns of dS."""
    f = f0 + tl.arange(0, BLOCK_F)
    c = c0 + tl.arange(0, BLOCK_C)
    a_row, linear, columns = locate_columns(table, adapters, adapter, c, J, K)
    if c0 < columns:
        places = grads + a_row[None, :] + f[:, None]
        keep = (f < K)[:, None] & (linear >= 0)[None, :]
        acc = tl.load(places, mask=keep, other=0.0)
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
        acc = tl.load(places, mask=keep, other=0.0)
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
    """Adds every adapter's dA and dB to grads (flat fp32, the matrices' own offsets) in place.

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
