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
