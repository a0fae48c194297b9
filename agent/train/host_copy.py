"""Copies of an adapter in host memory: one for each purpose, not one for each of hundreds of matrices.

On CUDA they are made in stream order, after what was queued before and before what is queued next: the caller
goes on, and whoever reads them waits first. An r = 64 adapter of a model with 420 matrices and its moments
take 1,260 copies otherwise, each of which waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

#: Copies above this are made at once, in memory that is not pinned: torch keeps pinned memory for good, in
#: powers of two.
MOST_PINNED_BYTES = 256 << 20
_ALIGN = 64


@dataclass(frozen=True)
class HostCopy:
    """Tensors by name; `wait` before they are read."""

    parameters: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    wait: Callable[[], None]


def copied(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Copies of flat tensors of one device, and what waits until they hold what these hold now."""
    sizes = [-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors]
    *starts, total = accumulate(sizes, initial=0)
    device = tensors[0].device
    later = device.type == "cuda" and total <= MOST_PINNED_BYTES
    buffer = torch.empty(total, dtype=torch.uint8, pin_memory=later)
    copies = [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor, non_blocking=later)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
    if not later:
        return copies, lambda: None
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    return copies, done.synchronize
