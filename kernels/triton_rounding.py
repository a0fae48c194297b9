"""Rounding an fp32 value to the compute dtype in a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from gshare.kernels.triton_common import INTERPRET

_CAST_TRUNCATES = tl.constexpr(INTERPRET)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x (fp32) in `dtype`, to nearest, ties to even, NaN kept.

    On a GPU that is the cast itself. The interpreter's cast to bf16 cuts the low bits off (triton 3.6 and
    3.7), so there the bits are rounded first.
    """
    if _CAST_TRUNCATES and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, x, nearest.to(tl.float32, bitcast=True))
    return x.to(dtype)
