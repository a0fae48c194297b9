"""Dropout masks of all adapters of a pass, one launch a linear: the bits of `dropout.keep_mask`.

The key of a token's mask is in the token's own column of a table, so a bit knows nothing of the pass, the
grid or the neighbours. One thread computes one Philox4x64-10 block, 16 features, and writes 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from gshare.kernels.dropout import FIELDS
from gshare.kernels.launch import ceil_div, launch

# A tile of 8 tokens × 32 blocks with 4 warps: two Philox blocks a thread.
_TOKENS, _BLOCKS, _WARPS = 8, 32, 4
_ROUNDS = tl.constexpr(10)


class SequenceKey(NamedTuple):
    """What one sequence's masks are keyed by; `threshold` as `dropout.threshold` gives it, 0: no dropout."""

    seed: int
    step: int
    sample: int
    length: int
    threshold: int


def token_keys(sequences: Sequence[SequenceKey], *, max_tokens: int = 0) -> torch.Tensor:
    """(5, T) int64 on the CPU: seed, step, sample, position and threshold of every token of a pass.

    64-bit words keep their bits (two's complement). With `max_tokens` the table is filled up with tokens
    that keep everything.
    """
    words = [[_signed(word) for word in (s.seed, s.step, s.sample)] for s in sequences]
    lengths = torch.tensor([s.length for s in sequences], dtype=torch.int64)
    table = torch.zeros(5, max_tokens or int(lengths.sum()), dtype=torch.int64)
    assert int(lengths.sum()) <= table.shape[1], f"{int(lengths.sum())} tokens in a table of {table.shape[1]}"
    real = table[:, : int(lengths.sum())]
    real[:3] = torch.tensor(words, dtype=torch.int64).view(-1, 3).T.repeat_interleave(lengths, dim=1)
    real[3] = torch.cat([torch.arange(s.length) for s in sequences])
    real[4] = torch.tensor([s.threshold for s in sequences]).repeat_interleave(lengths)
    return table


def _signed(word: int) -> int:
    assert 0 <= word < 2**64, word
    return word - 2**64 if word >= 2**63 else word


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox4x64-10 (Salmon et al., SC'11) on uint64 tensors: four words of output."""
    for _ in tl.static_range(_ROUNDS):  # pyright: ignore[reportGeneralTypeIssues]
        high0, low0 = tl.umulhi(c0, 0xD2E7470EE14C6C93), c0 * 0xD2E7470EE14C6C93
        high1, low1 = tl.umulhi(c2, 0xCA5A826395121157), c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B97F4A7C15
        k1 += 0xBB67AE8584CAA73B
    return c0, c1, c2, c3


@triton.jit
def _kept(word, cut):
    """The four 16-bit fields of a word as four bytes of an int32, lowest first: 1 where field >= cut."""
    packed = ((word & 0xFFFF) >= cut).to(tl.int32)
    packed |= (((word >> 16) & 0xFFFF) >= cut).to(tl.int32) << 8
    packed |= (((word >> 32) & 0xFFFF) >= cut).to(tl.int32) << 16
    return packed | ((word >> 48) >= cut).to(tl.int32) << 24


@triton.jit(do_not_specialize=["T", "layer", "module"])
def keep_masks_kernel(
    tokens_ptr,
    mask_ptr,
    T,
    layer,
    module,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """mask (T, K) uint8 of one linear. A tile of TOKENS × BLOCKS Philox blocks a program."""
    blocks_a_token: tl.constexpr = (K + FIELDS - 1) // FIELDS
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    here = token < T
    key_ptr = tokens_ptr + token
    zeros = tl.zeros([TOKENS, BLOCKS], tl.uint64)
    seed = tl.load(key_ptr, mask=here, other=0).to(tl.uint64)[:, None] + zeros
    step = tl.load(key_ptr + T, mask=here, other=0).to(tl.uint64)[:, None] + zeros
    sample = tl.load(key_ptr + 2 * T, mask=here, other=0).to(tl.uint64)[:, None] + zeros
    position = tl.load(key_ptr + 3 * T, mask=here, other=0)
    cut = tl.load(key_ptr + 4 * T, mask=here, other=0).to(tl.uint64)[:, None]
    counter = (position[:, None] * blocks_a_token + block[None, :] + 1).to(tl.uint64)
    linear = zeros + ((layer.to(tl.uint64) << 32) | module.to(tl.uint64))
    w0, w1, w2, w3 = _philox(counter, sample, linear, zeros, seed, step)
    # join interleaves: (w0, w2) with (w1, w3) gives w0, w1, w2, w3.
    low, high = tl.join(_kept(w0, cut), _kept(w2, cut)), tl.join(_kept(w1, cut), _kept(w3, cut))
    words = tl.reshape(tl.join(low, high), (TOKENS, BLOCKS * 4))
    row = token.to(tl.int64)[:, None]
    word = tl.program_id(1) * BLOCKS * 4 + tl.arange(0, BLOCKS * 4)
    if K % 4 == 0:
        word_ptr = mask_ptr.to(tl.pointer_type(tl.int32)) + row * (K // 4) + word[None, :]
        tl.store(word_ptr, words, mask=here[:, None] & (word < K // 4)[None, :])
    else:
        for i in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
            column = word * 4 + i
            kept = ((words >> (8 * i)) & 1).to(tl.uint8)
            tl.store(mask_ptr + row * K + column[None, :], kept, mask=here[:, None] & (column < K)[None, :])


def keep_masks(
    tokens: torch.Tensor, features: int, *, layer: int, module: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The keep mask (T, K) uint8, 1 = kept, of one linear's input for all tokens of a pass.

    tokens (5, T) int64: `token_keys`. `features` is K; `module` the index in `LINEARS`. `out`, contiguous,
    is written when given (a slice of the masks of linears that read the same input).
    """
    assert 0 <= layer < 2**31, layer
    assert 0 <= module < 2**31, module
    assert (tokens.shape[0], tokens.dtype) == (5, torch.int64), (tokens.shape, tokens.dtype)
    assert tokens.is_contiguous(), "token keys are read row after row"
    count = tokens.shape[1]
    mask = torch.empty(count, features, dtype=torch.uint8, device=tokens.device) if out is None else out
    assert (mask.shape, mask.dtype) == ((count, features), torch.uint8), (mask.shape, mask.dtype)
    assert mask.is_contiguous(), "masks are contiguous"
    assert features % 4 or mask.data_ptr() % 4 == 0, "a mask starts at a multiple of 4 bytes"
    grid = (ceil_div(count, _TOKENS), ceil_div(ceil_div(features, FIELDS), _BLOCKS))
    launch(
        keep_masks_kernel,
        grid,
        tokens,
        mask,
        count,
        layer,
        module,
        K=features,
        TOKENS=_TOKENS,
        BLOCKS=_BLOCKS,
        FIELDS=FIELDS,
        num_warps=_WARPS,
    )
    return mask
