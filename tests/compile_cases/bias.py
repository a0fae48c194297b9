"""What the addition of a bias is compiled for: Qwen2.5-0.5B's fused qkv."""

from __future__ import annotations

from typing import Any


def cases() -> list[tuple[Any, ...]]:
    """(kernel, signature, constexprs, num_warps, num_stages, more) for the compile test."""
    from gshare.kernels.bias_triton import _COLUMNS, _ROWS, _WARPS, add_bias_kernel

    tile = {"N": 1152, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    more = {"options": {"enable_fp_fusion": False}, "require": ["st.global.v4.b32"]}
    return [
        (add_bias_kernel, {"y_ptr": dtype, "bias_ptr": dtype, "T": "i32"}, tile, _WARPS, 3, more)
        for dtype in ("*bf16", "*fp32")
    ]
