"""A square root for the CPU references that is rounded as IEEE 754 says.

`torch.sqrt` on a CPU with AVX-512 is MKL's vector function, which is one unit in the last place off for 0.6 %
of fp32 values (torch 2.13; none with MKL_CBWR=AVX2,STRICT). The kernels round correctly.
"""

from __future__ import annotations

import numpy as np
import torch


def ieee_sqrt(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """`torch.sqrt(x, out=out)`, correctly rounded; CPU tensors."""
    return out.copy_(torch.from_numpy(np.sqrt(x.numpy())))
