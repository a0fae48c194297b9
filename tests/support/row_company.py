"""Whether an op that works on rows gives a row the same bits whatever rows share the call with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

#: Rows put before the ones looked at.
OFFSETS = (1, 2, 3, 7, 8, 15)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits: NaN equals the same NaN, 0 differs from −0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got − want‖ / ‖want‖ in float64."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def rows_ignore_company(
    op: Callable[..., Sequence[torch.Tensor]], rows: Sequence[torch.Tensor], poison: float = float("nan")
) -> bool:
    """Compare `op` on all rows at once with each row alone, the rows in reverse, and the rows behind and
    before neighbours that hold `poison` (integer operands: 0).

    `rows`: tensors with one first dimension n; `op(*rows)` returns tensors with that first dimension.
    """
    count = rows[0].shape[0]
    whole = op(*(row.clone() for row in rows))

    def agree(found: Sequence[torch.Tensor], at: torch.Tensor | slice, rows: slice) -> bool:
        return all(same_bytes(f[at], w[rows]) for f, w in zip(found, whole, strict=True))

    for i in range(count):
        if not agree(op(*(row[i : i + 1].clone() for row in rows)), slice(None), slice(i, i + 1)):
            return False
    back = torch.arange(count - 1, -1, -1, device=rows[0].device)
    if not agree(op(*(row[back] for row in rows)), back, slice(None)):
        return False
    for offset in OFFSETS:
        packed = []
        for row in rows:
            value = poison if row.dtype.is_floating_point else 0
            before, behind = (row.new_full((k, *row.shape[1:]), value) for k in (offset, 1))
            packed.append(torch.cat([before, row, behind]))
        if not agree(op(*packed), slice(offset, offset + count), slice(None)):
            return False
    return True
