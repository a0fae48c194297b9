"""What the cross-entropy kernel is compiled for: Llama 3's vocabulary, with and without a gradient."""

from __future__ import annotations

from typing import Any

#: What `launch` compiles with, and that it does what it is for.
EXACT = {"options": {"enable_fp_fusion": False}, "forbid": ["fma.rn.f32"]}


def cases() -> list[tuple[Any, ...]]:
    """(kernel, signature, constexprs, num_warps, num_stages, more) for `compile_kernels.py`."""
    from gshare.kernels.cross_entropy_triton import _DEPTH, _LANES, _WARPS, softmax_rows_kernel

    found: list[tuple[Any, ...]] = []
    for dtype in ("*bf16", "*fp32"):
        signature = {"logits_ptr": dtype, "target_ptr": "*i64", "scale_ptr": "*fp32", "nll_ptr": "*fp32"}
        for has_scale in (True, False):
            constexprs = {"V": 128256, "DEPTH": _DEPTH, "LANES": _LANES, "HAS_SCALE": has_scale}
            found.append((softmax_rows_kernel, signature, constexprs, _WARPS, 3, EXACT))
    return found
