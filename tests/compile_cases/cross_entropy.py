"""What the cross-entropy kernel is compiled for: Llama 3's vocabulary, with and without a gradient."""

from __future__ import annotations

from typing import Any


def cases() -> list[tuple[Any, dict[str, str], dict[str, Any], int, int]]:
    """(kernel, signature, constexprs, num_warps, num_stages) for the compile test."""
    from gshare.kernels.cross_entropy_triton import _DEPTH, _LANES, _WARPS, softmax_rows_kernel

    found: list[tuple[Any, dict[str, str], dict[str, Any], int, int]] = []
    for dtype in ("*bf16", "*fp32"):
        signature = {"logits_ptr": dtype, "target_ptr": "*i64", "scale_ptr": "*fp32", "nll_ptr": "*fp32"}
        for has_scale in (True, False):
            constexprs = {"V": 128256, "DEPTH": _DEPTH, "LANES": _LANES, "HAS_SCALE": has_scale}
            found.append((softmax_rows_kernel, signature, constexprs, _WARPS, 3))
    return found
