"""What every Triton kernel here shares: how it runs without a GPU, and the one dot product."""

from __future__ import annotations

import os

import triton
import triton.language as tl

#: The interpreter runs kernels on CPU tensors. Its bf16 dot gives garbage: operands are widened after load.
INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"


@triton.jit
def dot(a, b, acc, WIDEN: tl.constexpr):
    """acc + a @ b in fp32; WIDEN: operands to fp32 first (the interpreter)."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, DTYPE: tl.constexpr, ROUND: tl.constexpr):
    """fp32 → DTYPE, to nearest even. ROUND: bf16 by hand (the interpreter cuts the low bits off instead)."""
    if ROUND and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # A NaN stays one: the sum could carry it into infinity or zero.
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        y = rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y
