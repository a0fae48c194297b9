"""References of the grouped LoRA kernels: loops over adapters and linears, in float64, rounded never.

What each computes is written beside the kernels (`grouped_lora*_triton.py`); S and dS here have their
columns. Tokens of no adapter and columns past a rank stay zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from gshare.kernels.lora_tables import GroupShape, PassAdapter, column_width


@dataclass(frozen=True)
class _Share:
    """One adapter's share of linear j: its rows, its columns of S and of y, its matrices in flat memory."""

    j: int
    rows: slice
    s_columns: slice
    y_columns: slice
    a_at: slice
    b_at: slice
    rank: int
    scale: float


def _shares(shape: GroupShape, adapters: Sequence[PassAdapter], first_linear: int) -> Iterator[_Share]:
    """`first_linear`: index of the group's first linear in the adapters' `matrices`."""
    for adapter in adapters:
        rows = slice(adapter.sequences[0][0], adapter.sequences[-1][1])
        column = 0
        for j, (n_off, n) in enumerate(zip(shape.offsets, shape.out_features, strict=True)):
            a_off, b_off, rank = (int(v) for v in adapter.matrices[first_linear + j])
            if rank:
                yield _Share(
                    j,
                    rows,
                    slice(column, column + rank),
                    slice(n_off, n_off + n),
                    slice(a_off, a_off + rank * shape.in_features),
                    slice(b_off, b_off + n * rank),
                    rank,
                    adapter.scale,
                )
            column += column_width(rank)


def _kept(x: torch.Tensor, mask: torch.Tensor | None, share: _Share) -> torch.Tensor:
    rows = x[share.rows].double()
    return rows if mask is None else torch.where(mask[share.j, share.rows] != 0, rows, 0.0)


def lora_shrink_group_reference(
    x: torch.Tensor,
    flat: torch.Tensor,
    shape: GroupShape,
    adapters: Sequence[PassAdapter],
    columns: int,
    mask: torch.Tensor | None = None,
    first_linear: int = 0,
) -> torch.Tensor:
    """S (T, columns) = scale · (x ∘ m) Aᵀ."""
    s = x.new_zeros((x.shape[0], columns), dtype=torch.float64)
    for share in _shares(shape, adapters, first_linear):
        a = flat[share.a_at].view(share.rank, -1).double()
        s[share.rows, share.s_columns] = share.scale * (_kept(x, mask, share) @ a.t())
    return s


def lora_expand_group_reference(
    y: torch.Tensor,
    s: torch.Tensor,
    flat: torch.Tensor,
    shape: GroupShape,
    adapters: Sequence[PassAdapter],
    first_linear: int = 0,
) -> torch.Tensor:
    """y (T, ΣN_j) + S Bᵀ, as a new tensor."""
    out = y.double()
    for share in _shares(shape, adapters, first_linear):
        b = flat[share.b_at].view(-1, share.rank).double()
        out[share.rows, share.y_columns] += s[share.rows, share.s_columns].double() @ b.t()
    return out


def lora_ds_group_reference(
    dy: torch.Tensor,
    flat: torch.Tensor,
    shape: GroupShape,
    adapters: Sequence[PassAdapter],
    columns: int,
    first_linear: int = 0,
) -> torch.Tensor:
    """dS (T, columns) = scale · dy B."""
    ds = dy.new_zeros((dy.shape[0], columns), dtype=torch.float64)
    for share in _shares(shape, adapters, first_linear):
        b = flat[share.b_at].view(-1, share.rank).double()
        ds[share.rows, share.s_columns] = share.scale * (dy[share.rows, share.y_columns].double() @ b)
    return ds


def lora_dx_group_reference(
    dx: torch.Tensor,
    ds: torch.Tensor,
    flat: torch.Tensor,
    shape: GroupShape,
    adapters: Sequence[PassAdapter],
    mask: torch.Tensor | None = None,
    first_linear: int = 0,
) -> torch.Tensor:
    """dx (T, K) + Σ_j m_j ∘ (dS A), as a new tensor."""
    out = dx.double()
    for share in _shares(shape, adapters, first_linear):
        a = flat[share.a_at].view(share.rank, -1).double()
        part = ds[share.rows, share.s_columns].double() @ a
        out[share.rows] += part if mask is None else torch.where(mask[share.j, share.rows] != 0, part, 0.0)
    return out


def lora_grads_group_reference(
    x: torch.Tensor,
    dy: torch.Tensor,
    s: torch.Tensor,
    ds: torch.Tensor,
    grads: torch.Tensor,
    shape: GroupShape,
    adapters: Sequence[PassAdapter],
    mask: torch.Tensor | None = None,
    first_linear: int = 0,
) -> torch.Tensor:
    """grads + dSᵀ (x ∘ m) at every A's place and + dyᵀ S at every B's, as a new tensor."""
    out = grads.double()
    for share in _shares(shape, adapters, first_linear):
        s_rows, ds_rows = (v[share.rows, share.s_columns].double() for v in (s, ds))
        out[share.a_at] += (ds_rows.t() @ _kept(x, mask, share)).flatten()
        out[share.b_at] += (dy[share.rows, share.y_columns].double().t() @ s_rows).flatten()
    return out
