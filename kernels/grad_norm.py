"""The gradient norm of one adapter, and the clipping factor: plain-PyTorch reference.

ATen's `sum` picks its order from pointer alignment, shape and thread count, so the norm of the same
gradients could differ between two places in an arena. Here the order is written out: rows of `ROW`
elements are folded by elementwise additions, and the row sums are added up one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

#: Elements of a row; a power of two. The last row of each module is filled up with zeros.
ROW = 1024
#: Rows folded at once: bounds the float64 temporaries to about 12 MiB plus the largest module.
_ROWS_AT_ONCE = 1024


def grad_norm(grads: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all of `grads` (any shapes and float dtypes), a float64 scalar tensor.

    Contract: each module's gradient is flattened, widened to float64, squared (exact for float32), and
    split into rows of 1024, the last one filled with zeros. A row is folded in halves,
    x[:h] + x[h:] for h = 512, 256, …, 1. The row sums are then added in order, modules in the order given,
    starting from 0.0; the norm is the square root of that. Inf and NaN come through.
    """
    assert grads, "the norm of no gradients is not defined"
    total = 0.0
    for group in _groups(grads):
        for row_sum in _row_sums(group).tolist():
            total += row_sum  # one by one: `sum` of Python 3.12 compensates and would give other bits
    return torch.tensor(math.sqrt(total), dtype=torch.float64, device=grads[0].device)


def clip_coefficient(norm: float, max_grad_norm: float) -> float:
    """What to multiply gradients of this norm with, as `torch.nn.utils.clip_grad_norm_` does:
    max_grad_norm / (norm + 1e-6), at most 1. `max_grad_norm` 0 means no clipping; NaN stays NaN."""
    assert max_grad_norm >= 0, f"max_grad_norm must not be negative, got {max_grad_norm}"
    if max_grad_norm == 0:
        return 1.0
    coefficient = max_grad_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient


def _groups(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive modules, about `_ROWS_AT_ONCE` rows a group: few launches, bounded memory."""
    group: list[Tensor] = []
    rows = 0
    for grad in grads:
        group.append(grad)
        rows += -(-grad.numel() // ROW)
        if rows >= _ROWS_AT_ONCE:
            yield group
            group, rows = [], 0
    if group:
        yield group


def _row_sums(group: Sequence[Tensor]) -> Tensor:
    """Sums of squares of every row of every module of the group, in order: (R,), float64."""
    rows = [-(-grad.numel() // ROW) for grad in group]
    x_RW = torch.zeros(sum(rows), ROW, dtype=torch.float64, device=group[0].device)
    flat = x_RW.view(-1)
    first = 0
    for grad, count in zip(group, rows, strict=True):
        flat[first * ROW :][: grad.numel()].copy_(grad.reshape(-1))
        first += count
    x_RW.mul_(x_RW)
    width = ROW
    while width > 1:
        width //= 2
        x_RW = x_RW[:, :width] + x_RW[:, width:]
    return x_RW.view(-1)
