"""Cases for compile_kernels.py that must be found wrong, one for each thing that it looks at."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def mistyped_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at) + tl.arange(0, 2 * N))


@triton.jit
def product_kernel(x, w, out, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out (M, N) = x (M, k) @ w (k, N): a tile too large for shared memory or for the registers."""
    row, column, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros((M, N), tl.float32)
    for i in range(0, k, K):
        a = tl.load(x + row[:, None] * k + i + depth[None, :])
        b = tl.load(w + (i + depth)[:, None] * N + column[None, :])
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(out + row[:, None] * N + column[None, :], acc)


@triton.jit
def fused_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    v = tl.load(x + at)
    tl.store(out + at, v * v + v)


def cases() -> list[tuple[Any, ...]]:
    pair = {"x": "*fp32", "out": "*fp32"}
    spilling = {"M": 128, "N": 128, "K": 32}
    few = {"maxnreg": 96}
    product = {"x": "*bf16", "w": "*bf16", "out": "*fp32", "k": "i32"}
    return [
        (mistyped_kernel, pair, {"N": 128}, 4, 1),
        (fused_kernel, pair, {"N": 128, "M": 1}, 4, 1),
        (product_kernel, product, {"M": 256, "N": 128, "K": 128}, 8, 4),
        (product_kernel, product, spilling, 4, 2, {"options": few}),
        # A case may allow more than is usual, and this much is not enough.
        (product_kernel, product, spilling, 4, 2, {"options": few, "stack": 80}),
        (fused_kernel, pair, {"N": 128}, 4, 1, {"forbid": ["fma."]}),
        (fused_kernel, pair, {"N": 128}, 4, 1, {"require": ["st.global.v4.b32"]}),
        # Right: nothing may be said about these.
        (product_kernel, product, spilling, 4, 2, {"options": few, "stack": 4096}),
        (fused_kernel, pair, {"N": 128}, 4, 1, {"options": {"enable_fp_fusion": False}, "forbid": ["fma."]}),
    ]
