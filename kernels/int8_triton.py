"""Weight-only int8 dequantisation in one launch, with the bits of `int8.dequantise`.

    out (N, K) = codes (N, K) × scales (N,)      fp32, then rounded once to `out`

A thread takes eights of elements of one row: 8 bytes read, 16 written in bf16, two of each in flight. A
(4096, 14336) weight moves 176 MB, 41 µs at 4.3 TB/s (counted, not measured). Nothing is summed, so no tile
or grid can show in the bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from gshare.kernels import int8
from gshare.kernels.triton_common import INTERPRET, narrow

# Eights of elements a program: two for each of 256 threads.
_EIGHTS = 512
_LAUNCH: dict[str, Any] = {"num_warps": 8}


@triton.jit(do_not_specialize=["n"])
def int8_dequantise_kernel(
    codes, scales, out, n, K: tl.constexpr, ROWS: tl.constexpr, EIGHTS: tl.constexpr, ROUND: tl.constexpr
):
    """ROWS rows by EIGHTS × 8 columns; programs run along the columns first."""
    blocks: tl.constexpr = (K + EIGHTS * 8 - 1) // (EIGHTS * 8)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    # The innermost axis is 8 long so that reads of 1 byte and writes of 2 are dealt to threads alike.
    eight = tl.program_id(0) % blocks * EIGHTS + tl.arange(0, EIGHTS)
    column = eight[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    inside = (row < n)[:, None, None] & (column < K)
    at = row.to(tl.int64)[:, None, None] * K + column
    code = tl.load(codes + at, mask=inside, other=0)
    scale = tl.load(scales + row, mask=row < n, other=0)
    weight = code.to(tl.float32) * scale[:, None, None]
    tl.store(out + at, narrow(weight, out.dtype.element_ty, ROUND), mask=inside)


def dequantise(q: int8.Int8Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` (N, K), bf16 or fp32, with the weight and return it.

    `out` has its rows one after the other: a whole buffer, or a range of a longer one's rows, as when q, k
    and v share one.
    """
    n, k = q.codes.shape
    assert out.shape == q.codes.shape, (out.shape, q.codes.shape)
    assert out.is_contiguous()
    assert out.dtype in (torch.bfloat16, torch.float32), out.dtype
    assert q.codes.is_contiguous()
    eights = _eights(k)
    rows = _EIGHTS // eights
    constants: dict[str, Any] = {"K": k, "ROWS": rows, "EIGHTS": eights, "ROUND": INTERPRET}
    int8_dequantise_kernel[(triton.cdiv(n, rows) * triton.cdiv(k, eights * 8),)](
        *(q.codes, q.scales, out, n),
        **constants,
        **_LAUNCH,
    )
    return out


def _eights(k: int) -> int:
    """Eights of columns a tile: the widest power of two, from 8 to `_EIGHTS`, with at most an eighth idle."""
    width = _EIGHTS
    while width > 8 and triton.cdiv(k, width * 8) * width * 8 * 7 > k * 8:
        width //= 2
    return width
