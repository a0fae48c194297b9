"""What the RMSNorm kernels are compiled for: a narrow row (two a program), common widths, a very wide one."""

from __future__ import annotations

from typing import Any

#: What `launch` compiles with, and that it does what it is for.
EXACT = {"options": {"enable_fp_fusion": False}, "forbid": ["fma.rn.f32"]}


def cases() -> list[tuple[Any, ...]]:
    """(kernel, signature, constexprs, num_warps, num_stages, more) for `compile_kernels.py`."""
    from gshare.kernels.rms_norm_triton import (
        _shape,
        add_rms_norm_kernel,
        rms_norm_apply_kernel,
        rms_norm_backward_kernel,
    )

    found: list[tuple[Any, ...]] = []
    for dtype in ("*bf16", "*fp32"):
        for hidden in (576, 3584, 4096, 16384):
            shape = _shape(hidden)
            tile = {"H": hidden, "BLOCK": shape.block, "ROWS": shape.rows}
            matrices = dict.fromkeys(("x_ptr", "delta_ptr", "w_ptr", "new_ptr", "h_ptr"), dtype)
            signature = {**matrices, "rstd_ptr": "*fp32", "T": "i32", "eps": "fp32"}
            found.append(
                (add_rms_norm_kernel, signature, {**tile, "HAS_DELTA": True}, shape.num_warps, 3, EXACT)
            )
            matrices = dict.fromkeys(("x_ptr", "w_ptr"), dtype)
            signature = {**matrices, "rstd_ptr": "*fp32", "h_ptr": dtype, "T": "i32"}
            found.append((rms_norm_apply_kernel, signature, tile, shape.num_warps, 3, EXACT))
            matrices = dict.fromkeys(("dh_ptr", "x_ptr", "w_ptr"), dtype)
            outputs = dict.fromkeys(("skip_ptr", "dx_ptr", "h_ptr"), dtype)
            signature = {**matrices, "rstd_ptr": "*fp32", **outputs, "T": "i32"}
            tile = {**tile, "HAS_SKIP": True, "HAS_H": True}
            found.append((rms_norm_backward_kernel, signature, tile, shape.num_warps, 3, EXACT))
    return found
