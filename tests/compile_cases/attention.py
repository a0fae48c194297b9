"""What the attention kernels are compiled for: heads of 64, 128, 80 (padded) and 256, windows, both dtypes.

Heads of 256 in fp32 are not among them: they work, but dq then spills 128 bytes, and no supported family has
them.
"""

from __future__ import annotations

from typing import Any

#: (query heads, key heads, head size, window or 0, dtype)
SHAPES = (
    (32, 8, 128, 0, "*bf16"),
    (14, 2, 64, 0, "*bf16"),
    (32, 8, 64, 0, "*bf16"),
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
    from gshare.kernels.attention_triton import attention_forward_kernel, forward_tiles, padded

    found = []
    for heads, kv_heads, dim, window, dtype in SHAPES:
        size = 4 if dtype == "*fp32" else 2
        shape = {"STRIDE": (heads + 2 * kv_heads) * dim, "HQ": heads, "HKV": kv_heads, "D": dim}
        shape |= {"WIDTH": padded(dim), "WINDOW": window, "WIDEN": False}
        always = {"qkv": dtype, "lse": "*fp32", "blocks": "*i32", "lse_stride": "i32", "scale_log2e": "fp32"}
        backward = always | {"do": dtype, "delta": "*fp32", "dqkv": dtype, "scale": "fp32"}
        forward = forward_tiles(dim, size, heads // kv_heads)
        do = {"DO_STRIDE": heads * dim}
        for kernel, signature, tiles, more in (
            (attention_forward_kernel, always | {"o": dtype}, forward, {"HEADS": forward.heads}),
            (attention_dq_kernel, backward | {"o": dtype}, query_tiles(dim, size), do),
            (attention_dkv_kernel, backward, key_tiles(dim, size, arch // 10), do),
        ):
            constants = {**shape, **more, "BLOCK": tiles.block, "SPLIT": tiles.parts}
            # Keys are copied past the registers where the loop's loads run ahead.
            wide = {"require": ["cp.async.cg.shared.global" if tiles.stages > 1 else "ld.global.v4.b32"]}
            found.append((kernel, signature, constants, tiles.warps, tiles.stages, wide))
    return found
