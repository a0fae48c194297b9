"""Which adapters have come to grief, remembered on the device: steps are queued before the host knows.

    A adapters of a step, C cells: one for each adapter that lives, whatever steps it takes part in

A step that was queued behind one in which an adapter's values stopped being numbers must leave that adapter
as it was. So what a step finds is kept in the adapter's cell, and the next step's flags start from there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gshare.kernels.adamw_triton import may_step
from gshare.kernels.launch import launch


@triton.jit
def health_kernel(health_ptr, cells_ptr, norms_ptr, finite_ptr, overflow_ptr):
    """0 into the cell of adapter program_id(0) when its step was refused, or a new weight is not finite."""
    adapter = tl.program_id(0)
    if (not may_step(norms_ptr, finite_ptr, adapter)) | (tl.load(overflow_ptr + adapter) != 0):
        tl.store(health_ptr + tl.load(cells_ptr + adapter), 0)


def note_health_(
    health: torch.Tensor,
    cells: torch.Tensor,
    norms: torch.Tensor,
    finite: torch.Tensor,
    overflow: torch.Tensor,
) -> None:
    """After a step's updates: health (C,) int32 becomes 0, never 1, where the step failed.

    cells (A,) int64, each adapter's index in `health`; norms, finite and overflow (A,) as `adamw_` has them.
    """
    adapters = cells.shape[0]
    assert (health.dtype, cells.dtype) == (torch.int32, torch.int64), (health.dtype, cells.dtype)
    assert (norms.shape, norms.dtype) == ((adapters,), torch.float64), (norms.shape, norms.dtype)
    for flag in (finite, overflow):
        assert (flag.shape, flag.dtype) == ((adapters,), torch.int32), (flag.shape, flag.dtype)
    launch(health_kernel, (adapters,), health, cells, norms, finite, overflow, num_warps=1)
