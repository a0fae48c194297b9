"""NF4 dequantisation in one launch, with the bits of `nf4.dequantise`.

    code of a block's scale → dynamic_code × scale_absmax + scale_mean     fp32, rounded after each operation
    weight                  → NF4_CODE[nibble] × scale                     fp32, then rounded once to `out`

The flattened weight is cut into words of 4 bytes, 8 elements; blocks of 64 elements run across rows as in
the reference, so K need not be a multiple of 64. A warp reads 32 words side by side (128 bytes) and each
thread writes the 8 elements of its own (16 bytes in bf16). Reading 16 bytes a thread would give a thread
elements that another has to store: an exchange through shared memory and four barriers more.

The 16 values lie in shared memory, one in each 4-byte bank, so that a look-up never conflicts. Compiled for
sm_90, a bf16 element costs a thread 8.5 instructions: a (4096, 14336) weight 17 µs on 132 SMs at 1.75 GHz,
beside the 34 µs that its 146 MB take at 4.3 TB/s (counted, not measured). Nothing is summed, so no tile or
grid can show in the bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from gshare.kernels import nf4
from gshare.kernels.triton_common import INTERPRET, narrow

# 4 words in flight for each of 256 threads. A program has to lie inside one block of scales, which is
# SCALE_BLOCK × BLOCK / 8 = 2048 words.
_WORDS = 1024
# dynamic_code × absmax + mean rounds twice: no fused multiply-add.
_LAUNCH: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit
def _scale(scales, scale_absmax, scale_mean, dynamic_code, block, group, inside, DOUBLE: tl.constexpr):
    """fp32 scales of blocks `block`, all in one block `group` of scales."""
    if DOUBLE:
        code = tl.load(scales + block, mask=inside, other=0).to(tl.int32)
        scale = tl.load(dynamic_code + code) * tl.load(scale_absmax + group) + tl.load(scale_mean)
    else:
        scale = tl.load(scales + block, mask=inside, other=0)
    return scale


# The codes' alignment is hidden from the compiler, or it reads 16 bytes a thread (see above). The number of
# elements is no reason to compile anew.
@triton.jit(do_not_specialize=["elements"], do_not_specialize_on_alignment=["codes"])
def nf4_dequantise_kernel(
    codes,
    scales,
    scale_absmax,
    scale_mean,
    nf4_code,
    dynamic_code,
    out,
    elements,
    DOUBLE: tl.constexpr,
    TAIL: tl.constexpr,
    WORDS: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Words [pid × WORDS, (pid + 1) × WORDS) of the flat weight; TAIL: the last program also the rest."""
    words = elements // 8
    first = tl.program_id(0).to(tl.int64) * WORDS
    word = tl.arange(0, WORDS)
    inside = word < words - first
    packed = tl.load(codes.to(tl.pointer_type(tl.int32)) + first + word, mask=inside, other=0)
    scale = _scale(
        scales, scale_absmax, scale_mean, dynamic_code, first // 8 + word // 8, first // 2048, inside, DOUBLE
    )
    values = tl.load(nf4_code + tl.arange(0, 16))
    j = tl.arange(0, 8)
    # Element 2i is the high nibble of byte i, and the first byte the lowest of the word.
    nibble = (packed[:, None] >> (4 * (j ^ 1))[None, :]) & 15
    weight = tl.reshape(tl.gather(values, tl.reshape(nibble, [WORDS * 8]), 0), [WORDS, 8]) * scale[:, None]
    at = word[:, None] * 8 + j[None, :]
    tl.store(out + first * 8 + at, narrow(weight, out.dtype.element_ty, ROUND), mask=inside[:, None])
    if TAIL and tl.program_id(0) == tl.num_programs(0) - 1:
        # Under 8 elements, which begin at a multiple of 8: all in one block.
        last = words.to(tl.int64) * 8
        left = last + j < elements
        byte = tl.load(codes + last // 2 + j // 2, mask=left, other=0).to(tl.int32)
        block = last // 64
        of_block = _scale(
            scales, scale_absmax, scale_mean, dynamic_code, block, block // 256, last < elements, DOUBLE
        )
        tail = tl.load(nf4_code + ((byte >> (4 * (1 - j % 2))) & 15)) * of_block
        tl.store(out + last + j, narrow(tail, out.dtype.element_ty, ROUND), mask=left)


def dequantise(q: nf4.Nf4Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` (N, K), bf16 or fp32, with the weight and return it.

    `out` has its rows one after the other: a whole buffer, or a range of a longer one's rows, as when q, k
    and v share one. The first call on a device copies two small tables there, which a CUDA graph
    cannot capture.
    """
    n, k = q.shape
    assert out.shape == q.shape, (out.shape, q.shape)
    assert out.is_contiguous()
    assert out.dtype in (torch.bfloat16, torch.float32), out.dtype
    assert q.codes.is_contiguous()
    assert q.codes.data_ptr() % 4 == 0
    assert q.codes.numel() == (n * k + 1) // 2, q.codes.shape
    double = q.scale_absmax is not None
    assert q.scales.dtype == (torch.uint8 if double else torch.float32), q.scales.dtype
    constants: dict[str, Any] = {
        "DOUBLE": double,
        "TAIL": n * k % 8 != 0,
        "WORDS": _WORDS,
        "ROUND": INTERPRET,
    }
    nf4_dequantise_kernel[(max(1, triton.cdiv(n * k // 8, _WORDS)),)](
        q.codes,
        q.scales,
        q.scale_absmax,
        q.scale_mean,
        _nf4_code(out.device),
        nf4.dynamic_code(out.device) if double else None,
        out,
        n * k,
        **constants,
        **_LAUNCH,
    )
    return out


@lru_cache(maxsize=8)
def _nf4_code(device: torch.device) -> torch.Tensor:
    """(16,) fp32."""
    return torch.tensor(nf4.NF4_CODE, dtype=torch.float32).to(device)
