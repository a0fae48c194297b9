"""Where the adapters of a step lie, as tables on the device: one launch serves all of them.

`slots` int64 (A, 4), a row an adapter: start of its weights and gradients, start of its moments, length
(elements of the flat arenas), and the row of `blocks` where its blocks begin. An adapter that is not there
has length 0. `blocks` int32 (NB, 2), a row a program: adapter and block within its slot, adapters in order
and blocks ascending; rows beyond the step's are −1. Blocks are counted from the slot's own start, so what a
block holds does not depend on where the slot lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from gshare.kernels.launch import ceil_div

#: Elements of a block: one program of the optimizer, one partial sum of the norm.
BLOCK = 4096
#: Starts and lengths are multiples of this (the arena's alignment: 64 bytes of fp32).
ALIGN = 16
#: Columns of `slots`.
WEIGHTS, MOMENTS, LENGTH, FIRST_BLOCK = range(4)


def slot_tables(
    slots: Sequence[tuple[int, int, int]], *, max_adapters: int = 0, max_blocks: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, blocks) on the CPU, for the caller to upload, of (weights start, moments start, length) rows.

    With `max_adapters` and `max_blocks` the tables get that many rows, so that a captured launch can be
    replayed for any step that fits; too few is an AssertionError.
    """
    adapters = max_adapters or len(slots)
    counts = [ceil_div(length, BLOCK) for _, _, length in slots]
    rows = max_blocks or sum(counts)
    assert len(slots) <= adapters, f"{len(slots)} adapters do not fit in a table of {adapters}"
    assert sum(counts) <= rows, f"{sum(counts)} blocks do not fit in a table of {rows}"
    assert all(value % ALIGN == 0 for value in chain(*slots)), f"starts and lengths are multiples of {ALIGN}"
    table, blocks, first = torch.zeros(adapters, 4, dtype=torch.int64), [], 0
    for i, ((weights, moments, length), count) in enumerate(zip(slots, counts, strict=True)):
        table[i] = torch.tensor([weights, moments, length, first])
        blocks.append(torch.stack([torch.full((count,), i), torch.arange(count)], dim=1))
        first += count
    blocks.append(torch.full((rows - first, 2), -1))
    return table, torch.cat(blocks).to(torch.int32)
