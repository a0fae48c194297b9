"""What the dropout kernel is compiled for: whole words, and a width that needs single bytes."""

from __future__ import annotations

from typing import Any


def cases() -> list[tuple[Any, ...]]:
    """(kernel, signature, constexprs, num_warps, num_stages) for `compile_kernels.py`."""
    from gshare.kernels.dropout import FIELDS
    from gshare.kernels.dropout_triton import _BLOCKS, _TOKENS, _WARPS, keep_masks_kernel

    signature = {"tokens_ptr": "*i64", "mask_ptr": "*u8", "T": "i32", "layer": "i32", "module": "i32"}
    tile = {"TOKENS": _TOKENS, "BLOCKS": _BLOCKS, "FIELDS": FIELDS}
    return [(keep_masks_kernel, signature, {"K": k, **tile}, _WARPS, 3) for k in (4096, 123)]
