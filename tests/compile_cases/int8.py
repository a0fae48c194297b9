"""kernels/int8_triton.py: wide rows, narrow rows, and a K that no vector fits."""

from __future__ import annotations

from typing import Any


def cases() -> list[tuple[Any, ...]]:
    from gshare.kernels.int8_triton import _EIGHTS, _LAUNCH, _eights, int8_dequantise_kernel

    found: list[tuple[Any, ...]] = []
    for out in ("*bf16", "*fp32"):
        for k in (14336, 576, 431):
            signature = {"codes": "*i8", "scales": "*fp32", "out": out, "n": "i32"}
            constexprs = {"K": k, "ROWS": _EIGHTS // _eights(k), "EIGHTS": _eights(k), "ROUND": False}
            # 16 bytes a store, but where rows begin at odd places.
            more = {"require": ["st.global.v4.b32"] if k % 8 == 0 else []}
            found.append((int8_dequantise_kernel, signature, constexprs, _LAUNCH["num_warps"], 3, more))
    return found
