"""What the SwiGLU kernels are compiled for."""

from __future__ import annotations

from typing import Any


def cases() -> list[tuple[Any, dict[str, str], dict[str, Any], int, int]]:
    """(kernel, signature, constexprs, num_warps, num_stages) for the compile test."""
    from gshare.kernels.swiglu_triton import _COLUMNS, _ROWS, _WARPS, swiglu_backward_kernel, swiglu_kernel

    found: list[tuple[Any, dict[str, str], dict[str, Any], int, int]] = []
    tile = {"I": 14336, "ROWS": _ROWS, "COLUMNS": _COLUMNS}
    for dtype in ("*bf16", "*fp32"):
        forward = {"gate_up_ptr": dtype, "m_ptr": dtype, "T": "i32"}
        found.append((swiglu_kernel, forward, tile, _WARPS, 3))
        backward = {"dm_ptr": dtype, "gate_up_ptr": dtype, "d_gate_up_ptr": dtype, "m_ptr": dtype, "T": "i32"}
        found.append((swiglu_backward_kernel, backward, tile, _WARPS, 3))
    return found
