"""What the RoPE kernels are compiled for: SmolLM2, Llama-8B, Qwen3 (QK-norm), and a head that is padded."""

from __future__ import annotations

from typing import Any

#: (query heads, key heads, head size, QK-norm)
SHAPES = ((9, 3, 64, False), (32, 8, 128, False), (32, 8, 128, True), (16, 8, 256, True), (32, 32, 80, False))


def cases() -> list[tuple[Any, dict[str, str], dict[str, Any], int, int, dict[str, Any]]]:
    """(kernel, signature, constexprs, num_warps, num_stages, what its PTX must hold) for the compile test."""
    from gshare.kernels.rope_triton import WARPS, rope_qk_backward_kernel, rope_qk_kernel, rope_tile

    found: list[tuple[Any, dict[str, str], dict[str, Any], int, int, dict[str, Any]]] = []
    exact = {
        "options": {"enable_fp_fusion": False},
        "forbid": ["fma.rn.f32"],
        "require": ["ld.global.v4.b32"],
    }
    for dtype in ("*bf16", "*fp32"):
        for heads, kv_heads, dim, norm in SHAPES:
            tile = rope_tile(dim, heads + kv_heads)
            shape: dict[str, Any] = {"STRIDE": (heads + 2 * kv_heads) * dim, "HQ": heads, "D": dim}
            shape |= {"H": heads + kv_heads, "TOKENS": tile.tokens, "HEADS": tile.heads, "HALF": tile.half}
            tables = {"cos": "*fp32", "sin": "*fp32", "position": "*i32", "T": "i32"}
            weights = dict.fromkeys(("q_norm", "k_norm", "kept"), dtype) if norm else {}
            shape |= {} if norm else dict.fromkeys(("q_norm", "k_norm", "kept"))
            for kernel, x, rstd, more in (
                (rope_qk_kernel, "qkv", "rstd_out", {"eps": "fp32"}),
                (rope_qk_backward_kernel, "dqkv", "rstd_in", {}),
            ):
                arguments = {x: dtype, **tables, **weights, **more} | ({rstd: "*fp32"} if norm else {})
                constants = shape if norm else shape | {rstd: None}
                found.append((kernel, arguments, constants, WARPS, 3, exact))
    return found
