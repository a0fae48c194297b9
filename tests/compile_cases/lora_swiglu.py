"""What SwiGLU inside the grouped LoRA ops is compiled for: an 8B's widths, and one that no tile divides."""

from __future__ import annotations

from typing import Any


def cases() -> list[tuple[Any, ...]]:
    """(kernel, signature, constexprs, num_warps, num_stages, more) for the compile test."""
    from gshare.kernels.grouped_lora_triton import BLOCK_OUT, BLOCK_R
    from gshare.kernels.lora_swiglu_triton import WARPS, _dx_swiglu_kernel, _expand_swiglu_kernel
    from gshare.kernels.lora_tables import BLOCK_T

    found: list[tuple[Any, ...]] = []
    more = {"options": {"enable_fp_fusion": False}}
    tables = dict.fromkeys(("blocks", "granules", "spans"), "*i32") | {"table": "*i64"}
    tables |= dict.fromkeys(("block_count", "adapters", "tokens"), "i32")
    for dtype, size in (("*bf16", 2), ("*fp32", 4)):
        for inner, masked in ((14336, False), (14336, True), (1100, False)):
            tile = {"I": inner, "BLOCK_T": BLOCK_T, "BLOCK_N": BLOCK_OUT, "BLOCK_R": BLOCK_R[size]}
            tile |= {"WIDEN": False}
            if not masked:
                signature = tables | dict.fromkeys(("gate_up", "m", "s", "flat"), dtype) | {"s_stride": "i32"}
                found.append((_expand_swiglu_kernel, signature, tile, WARPS, 1, more))
            signature = tables | dict.fromkeys(("dm", "gate_up", "d_gate_up", "ds", "flat"), dtype)
            signature |= {"ds_stride": "i32", "mask": "*u8" if masked else dtype}
            found.append((_dx_swiglu_kernel, signature, tile | {"HAS_MASK": masked}, WARPS, 1, more))
    return found
