"""How a Triton kernel is launched, and what its operands must be like so that it is compiled once."""

from __future__ import annotations

from typing import Any

import torch


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉: programs for `a` elements in tiles of `b`."""
    return -(-a // b)


def launch(kernel: Any, grid: tuple[int, ...], *operands: Any, num_warps: int, **constants: Any) -> None:
    """`kernel[grid](*operands, **constants)` without contracting a multiply and an add into an FMA, so that
    every operation rounds on its own and the same expression has the same bits in two kernels.

    (`kernel` is Any: for a type checker a jitted function takes its own parameters only, not `num_warps`.)
    """
    kernel[grid](*operands, **constants, num_warps=num_warps, enable_fp_fusion=False)


def assert_aligned(*tensors: torch.Tensor | None) -> None:
    """Every tensor (None is skipped) is contiguous and starts at a multiple of 16 bytes.

    Triton compiles a kernel anew when a pointer stops being a multiple of 16 bytes, and the new layout adds
    in another order. A launcher whose kernel reduces refuses such operands instead of changing bits.
    """
    for tensor in tensors:
        if tensor is not None:
            assert tensor.is_contiguous(), f"contiguous rows needed, got strides {tensor.stride()}"
            assert tensor.data_ptr() % 16 == 0, "a view that does not start at a multiple of 16 bytes"


def assert_rows(*tensors: torch.Tensor) -> None:
    """`assert_aligned` for matrices that may be columns of a wider buffer: every row starts at a multiple of
    16 bytes."""
    for tensor in tensors:
        assert tensor.stride(-1) == 1, f"contiguous rows needed, got strides {tensor.stride()}"
        assert tensor.stride(0) * tensor.element_size() % 16 == 0, (
            "rows do not start at multiples of 16 bytes"
        )
        assert tensor.data_ptr() % 16 == 0, "a view that does not start at a multiple of 16 bytes"
