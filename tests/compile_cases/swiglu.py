"""What the SwiGLU kernels are compiled for."""

from __future__ import annotations

from typing import Any

#: What `launch` compiles with, and that it does what it is for.
EXACT = {"options": {"enable_fp_fusion": False}, "forbid": ["fma.rn.f32"]}


def cases() -> list[tuple[Any, ...]]:
    """(kernel, signature, constexprs, num_warps, num_stages, more) for `compile_kernels.py`."""
    from gshare.kernels.swiglu_triton import _COLUMNS, _ROWS, _WARPS, swiglu_backward_kernel, swiglu_kernel

    found: list[tuple[Any, ...]] = []
    tile = {"I": 14336, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    for dtype in ("*bf16", "*fp32"):
        forward = {"gate_up_ptr": dtype, "m_ptr": dtype, "T": "i32"}
        found.append((swiglu_kernel, forward, tile, _WARPS, 3, EXACT))
        backward = {"dm_ptr": dtype, "gate_up_ptr": dtype, "d_gate_up_ptr": dtype, "m_ptr": dtype, "T": "i32"}
        found.append((swiglu_backward_kernel, backward, tile, _WARPS, 3, EXACT))
    return found
