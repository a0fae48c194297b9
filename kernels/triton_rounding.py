"""Rounding to the compute dtype, in kernels that do not pass on whether they are interpreted."""

from __future__ import annotations

import triton
import triton.language as tl
from gshare.kernels.triton_common import INTERPRET, narrow

_ROUND = tl.constexpr(INTERPRET)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x (fp32) in `dtype`, to nearest even."""
    return narrow(x, dtype, _ROUND)
