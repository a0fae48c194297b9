"""What the attention kernel is compiled for: heads of 64, 128, 80 (padded) and 256, windows, both dtypes."""

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
    (8, 4, 256, 0, "*fp32"),
)


def cases() -> list[tuple[Any, dict[str, str], dict[str, Any], int, int, dict[str, list[str]]]]:
    """(kernel, signature, constexprs, num_warps, num_stages, 16-byte accesses) for the compile test."""
    from gshare.kernels.attention_triton import attention_forward_kernel, forward_tiles, padded

    found = []
    for heads, kv_heads, dim, window, dtype in SHAPES:
        tiles = forward_tiles(dim, 4 if dtype == "*fp32" else 2, heads // kv_heads)
        shape = {"STRIDE": (heads + 2 * kv_heads) * dim, "HQ": heads, "HKV": kv_heads, "D": dim}
        shape |= {"WIDTH": padded(dim), "WINDOW": window, "WIDEN": False}
        shape |= {"BLOCK": tiles.block, "SPLIT": tiles.parts, "HEADS": tiles.heads}
        signature = {"qkv": dtype, "o": dtype, "lse": "*fp32", "blocks": "*i32"}
        signature |= {"lse_stride": "i32", "scale_log2e": "fp32"}
        # Keys are copied past the registers where the loop's loads run ahead.
        wide = {"require": ["cp.async.cg.shared.global" if tiles.stages > 1 else "ld.global.v4.b32"]}
        found.append((attention_forward_kernel, signature, shape, tiles.warps, tiles.stages, wide))
    return found
