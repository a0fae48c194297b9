"""What the kernels of attention's backward are compiled for, as `attention.py` beside it.

Heads of 256 in fp32 are not among them: they work, but dq then spills 128 bytes, and no supported family has
them.
"""

from __future__ import annotations

from typing import Any

#: (query heads, key heads, head size, window or 0, dtype)
SHAPES = (
    (32, 8, 128, 0, "*bf16"),
    (14, 2, 64, 0, "*bf16"),
    (32, 8, 128, 4096, "*bf16"),
    (32, 32, 80, 0, "*bf16"),
    (8, 4, 256, 0, "*bf16"),
    (14, 2, 64, 100, "*fp32"),
    (32, 8, 128, 0, "*fp32"),
)


def cases(arch: int) -> list[tuple[Any, dict[str, str], dict[str, Any], int, int, dict[str, list[str]]]]:
    """(kernel, signature, constexprs, num_warps, num_stages, 16-byte accesses) for the compile test."""
    from gshare.kernels.attention_backward_triton import (
        attention_dkv_kernel,
        attention_dq_kernel,
        key_tiles,
        query_tiles,
    )
    from gshare.kernels.attention_triton import padded

    found = []
    for heads, kv_heads, dim, window, dtype in SHAPES:
        size = 4 if dtype == "*fp32" else 2
        shape = {"STRIDE": (heads + 2 * kv_heads) * dim, "HQ": heads, "HKV": kv_heads, "D": dim}
        shape |= {"DO_STRIDE": heads * dim, "WIDTH": padded(dim), "WINDOW": window, "WIDEN": False}
        signature = {"qkv": dtype, "do": dtype, "lse": "*fp32", "delta": "*fp32", "dqkv": dtype}
        signature |= {"blocks": "*i32", "lse_stride": "i32", "scale": "fp32", "scale_log2e": "fp32"}
        for kernel, tiles, more in (
            (attention_dq_kernel, query_tiles(dim, size), {"o": dtype}),
            (attention_dkv_kernel, key_tiles(dim, size, arch // 10), {}),
        ):
            constants = shape | {"BLOCK": tiles.block, "SPLIT": tiles.parts}
            # Keys are copied past the registers where the loop's loads run ahead.
            wide = {"require": ["cp.async.cg.shared.global" if tiles.stages > 1 else "ld.global.v4.b32"]}
            found.append((kernel, signature | more, constants, tiles.warps, tiles.stages, wide))
    return found
