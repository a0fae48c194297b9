"""kernels/nf4_triton.py: with and without double quantisation, with a part word at the end."""

from __future__ import annotations

from typing import Any


def cases() -> list[tuple[Any, ...]]:
    from gshare.kernels.nf4_triton import _LAUNCH, _WORDS, nf4_dequantise_kernel

    found: list[tuple[Any, ...]] = []
    for out in ("*bf16", "*fp32"):
        for double in (True, False):
            signature = {"codes": "*u8", "scales": "*u8" if double else "*fp32", "nf4_code": "*fp32"}
            signature |= {"out": out, "elements": "i32"}
            constexprs = {"DOUBLE": double, "TAIL": not double, "WORDS": _WORDS, "ROUND": False}
            second = ("scale_absmax", "scale_mean", "dynamic_code")
            if double:
                signature |= dict.fromkeys(second, "*fp32")
            else:
                constexprs |= dict.fromkeys(second)
            # With a fused multiply-add a scale would have other bits than the reference's.
            more = {"options": _LAUNCH, "forbid": ["fma."], "require": ["st.global.v4.b32"]}
            found.append((nf4_dequantise_kernel, signature, constexprs, _LAUNCH["num_warps"], 3, more))
    return found
