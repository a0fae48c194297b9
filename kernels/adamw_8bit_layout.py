"""Where the moments of 8-bit adapters lie: four flat arenas, and the tables that name their parts.

    codes1, codes2     uint8: the codes of both moments, for matrices of at least 4,096 elements
    floats1, floats2   fp32: one absmax a block of 256 elements for those matrices; the moments themselves,
                       one float an element, for smaller ones

Both moments have the same offsets. A matrix starts at a multiple of 64 bytes in each arena and owns the gap
behind it up to the next multiple of 16 elements. Blocks of 256 are counted from the matrix's own first
element: they never reach across matrices (`adamw_8bit.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from gshare.kernels.adamw_8bit import BLOCK, MIN_8BIT_SIZE, Adam8bitState, dynamic_map
from gshare.kernels.launch import ceil_div

#: Blocks of 256 that a program handles. With 8 warps that takes 114 registers a thread, so that two programs
#: share an SM; 16 blocks took 185.
GROUP = 8
_CODES_ALIGN, _FLOATS_ALIGN = 64, 16


class Matrix8bit(NamedTuple):
    """One LoRA matrix: a row of the matrix table. Offsets are in elements of the flat arenas."""

    adapter: int
    weights: int
    elements: int
    codes: int
    floats: int


class StateOffsets(NamedTuple):
    """Room for the state of one adapter: (codes, floats) of every matrix, and the length of each slot."""

    matrices: tuple[tuple[int, int], ...]
    codes: int
    floats: int


def state_offsets(elements: Sequence[int]) -> StateOffsets:
    """Offsets within an adapter's slots, of matrices with that many `elements`, in contract order."""
    matrices, codes, floats = [], 0, 0
    for count in elements:
        matrices.append((codes, floats))
        eight_bit = count >= MIN_8BIT_SIZE
        codes += ceil_div(count, _CODES_ALIGN) * _CODES_ALIGN if eight_bit else 0
        floats += ceil_div(ceil_div(count, BLOCK) if eight_bit else count, _FLOATS_ALIGN) * _FLOATS_ALIGN
    return StateOffsets(tuple(matrices), codes, floats)


def state_views(
    matrix: Matrix8bit,
    shape: tuple[int, int],
    codes: tuple[torch.Tensor, torch.Tensor],
    floats: tuple[torch.Tensor, torch.Tensor],
) -> Adam8bitState:
    """The matrix's state as views of the arenas: what the reference steps and a checkpoint holds."""
    count = math.prod(shape)
    assert count == matrix.elements, (shape, matrix)
    if count < MIN_8BIT_SIZE:
        first, second = (flat[matrix.floats :][:count].view(shape) for flat in floats)
        return Adam8bitState(first, second, None, None)
    first, second = (flat[matrix.codes :][:count].view(shape) for flat in codes)
    absmax1, absmax2 = (flat[matrix.floats :][: ceil_div(count, BLOCK)] for flat in floats)
    return Adam8bitState(first, second, absmax1, absmax2)


def matrix_tables(
    matrices: Sequence[Matrix8bit], *, max_matrices: int = 0, max_groups: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(matrices int64 (M, 5), groups int32 (NG, 2)) on the CPU, for the caller to upload.

    A row of `groups` is a program: the matrix's row and the group of 8 blocks within it; −1 beyond the
    step's. `max_matrices` and `max_groups` fix the sizes for replays; too few is an AssertionError.
    """
    counts = [ceil_div(matrix.elements, GROUP * BLOCK) for matrix in matrices]
    table_rows, group_rows = max_matrices or len(matrices), max_groups or sum(counts)
    assert len(matrices) <= table_rows, f"{len(matrices)} matrices do not fit in a table of {table_rows}"
    assert sum(counts) <= group_rows, f"{sum(counts)} groups do not fit in a table of {group_rows}"
    table = torch.zeros(table_rows, len(Matrix8bit._fields), dtype=torch.int64)
    table[: len(matrices)] = torch.tensor(matrices, dtype=torch.int64).view(-1, table.shape[1])
    groups = [torch.stack([torch.full((n,), i), torch.arange(n)], dim=1) for i, n in enumerate(counts)]
    groups.append(torch.full((group_rows - sum(counts), 2), -1))
    return table, torch.cat(groups).to(torch.int32)


def lookup_tables(device: torch.device | str) -> torch.Tensor:
    """(4, 256) fp32: the signed map, its midpoints, the unsigned map, its midpoints.

    The 255 midpoints between neighbouring values are filled up with +inf, which no scaled moment reaches.
    """
    rows = []
    for signed in (True, False):
        values = dynamic_map(signed)
        midpoints = (values[:-1] + values[1:]) * 0.5
        rows += [values, torch.cat([midpoints, midpoints.new_full((1,), float("inf"))])]
    return torch.stack(rows).to(device)
