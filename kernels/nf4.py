"""NF4: 4-bit NormalFloat with one scale a block (QLoRA, arXiv:2305.14314, sections 3 and appendix E).

Plain PyTorch, for any device. What is stored for a weight of n = N × K elements, row-major:

    codes_P    (ceil(n / 2),) uint8   element 2i in the high nibble, 2i + 1 in the low
    scales_B   (ceil(n / 64),)        absmax of each block of 64: fp32, or with double quantisation
                                      8-bit codes of `dynamic_code` in blocks of 256 around their mean

so 4.5 bits a weight, 4.127 with double quantisation. Against bitsandbytes 0.50.2 (tests/test_nf4.py):

- `dequantise` gives its bits, with and without double quantisation. One exception: where K is not a multiple
  of 64, bitsandbytes' AVX-512 kernel takes the wrong block scales (errors as large as the weights); here
  such shapes are right, and equal to its own PyTorch fallback. On one core a (4096, 4096) weight takes 16 ms
  here and 40 ms there, so on CPU this is not only the reference but what runs.
- `quantise` gives its codes and its fp32 scales.
- The second quantisation differs on purpose. The mean of the scales is summed in fp64: an fp32 mean of
  40 000 scales has other bits on 1 thread than on 2, and then the base's hash would too. And a scale goes to
  the nearest code, as bitsandbytes' CUDA kernel does; its CPU library misses the nearest for about one scale
  in a thousand, those within 5e-6 of a midpoint.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

BLOCK = 64  # QLoRA's block of weights
SCALE_BLOCK = 256  # and of scales under double quantisation

#: Quantiles of N(0, 1) scaled to [-1, 1] with an exact zero: QLoRA appendix E.
NF4_CODE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)

# Elements quantised at a time: bounds the fp32 and int32 temporaries to 64 MiB whatever the weight's size.
_CHUNK = 1 << 22


class Nf4Tensor(NamedTuple):
    """A quantised (N, K) weight. `scale_absmax` and `scale_mean` are there with double quantisation only."""

    shape: tuple[int, int]
    codes: torch.Tensor  # (P,) uint8
    scales: torch.Tensor  # (B,) fp32, or uint8 codes
    scale_absmax: torch.Tensor | None = None  # (ceil(B / 256),) fp32
    scale_mean: torch.Tensor | None = None  # () fp32


def quantise(w_NK: torch.Tensor, *, double: bool = True) -> Nf4Tensor:
    """Quantise an (N, K) floating-point weight, on its device. A block of zeros stays zeros."""
    assert w_NK.dim() == 2, w_NK.shape
    assert w_NK.numel() > 0, w_NK.shape
    codes, scales = [], []
    flat = w_NK.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        chunk_codes, chunk_scales = _quantise_blocks(flat[start : start + _CHUNK].float())
        codes.append(chunk_codes)
        scales.append(chunk_scales)
    n, k = w_NK.shape
    scales_B = torch.cat(scales)
    if not double:
        return Nf4Tensor((n, k), torch.cat(codes), scales_B)
    mean = scales_B.double().mean().float()
    scale_codes, scale_absmax = _quantise_scales(scales_B - mean)
    return Nf4Tensor((n, k), torch.cat(codes), scale_codes, scale_absmax, mean)


def block_scales(q: Nf4Tensor) -> torch.Tensor:
    """(B,) fp32: the scale of each block, the second quantisation undone."""
    if q.scale_absmax is None:
        return q.scales
    assert q.scale_mean is not None
    values = dynamic_code(q.scales.device)[q.scales.int()]
    return _times_blocks(values, q.scale_absmax, SCALE_BLOCK) + q.scale_mean


def dequantise(
    q: Nf4Tensor, dtype: torch.dtype = torch.float32, out: torch.Tensor | None = None
) -> torch.Tensor:
    """(N, K) in `dtype`: code × scale in fp32, rounded once. `out` (N, K), contiguous, is filled if given."""
    assert out is None or (out.shape == q.shape and out.dtype == dtype and out.is_contiguous())
    n = q.shape[0] * q.shape[1]
    size = n + n % 2  # whole bytes
    in_place = out is not None and dtype == torch.float32 and n % 2 == 0
    flat = out.view(-1) if in_place and out is not None else q.codes.new_empty(size, dtype=torch.float32)
    # A byte's two fp32 values are gathered as one 8-byte element: 4 times faster than rows of two.
    pairs = _nibble_pairs(q.codes.device)
    scales_B = block_scales(q)
    for start in range(0, n, _CHUNK):
        part = flat[start : min(start + _CHUNK, flat.numel())]
        codes = q.codes[start // 2 : start // 2 + part.numel() // 2]
        torch.index_select(pairs, 0, codes.int(), out=part.view(torch.float64))
        _times_blocks(part, scales_B[start // BLOCK :], BLOCK)
    if in_place and out is not None:
        return out
    values = flat[:n].view(q.shape)
    return values.to(dtype) if out is None else out.copy_(values)


@lru_cache(maxsize=8)
def dynamic_code(device: torch.device) -> torch.Tensor:
    """(256,) fp32, ascending: the signed dynamic 8-bit code (arXiv:2110.02861, section 1.3).

    Decade 10^(e-6), e = 0…6, holds the middles of 2^e equal parts of [0.1, 1]; both signs, and 0 and 1.
    """
    values = [0.0, 1.0]
    for e in range(7):
        edges = torch.linspace(0.1, 1, 2**e + 1, dtype=torch.float32)
        middles = 10.0 ** (e - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += middles.tolist() + (-middles).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32).to(device)


@lru_cache(maxsize=8)
def _nibble_pairs(device: torch.device) -> torch.Tensor:
    """(256,) of 8 bytes each, typed float64 but never computed with: a byte's two fp32 values, high first."""
    code = torch.tensor(NF4_CODE, dtype=torch.float32)
    byte = torch.arange(256)
    return torch.stack((code[byte >> 4], code[byte & 15]), dim=1).view(torch.float64).view(-1).to(device)


def _quantise_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 (m,) → packed codes (ceil(m / 2),) and block scales (ceil(m / 64),)."""
    scaled, scales = _scale_blocks(x, BLOCK)
    code = torch.tensor(NF4_CODE, dtype=torch.float32, device=x.device)
    index = torch.bucketize(scaled, (code[:-1] + code[1:]) / 2, out_int32=True).to(torch.uint8)
    if index.numel() % 2:
        # The nibble after the last element holds the code of zero.
        index = torch.cat((index, index.new_full((1,), NF4_CODE.index(0.0))))
    return (index[::2] << 4) | index[1::2], scales


def _quantise_scales(x_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 (B,) → uint8 codes (B,) and fp32 absmax (ceil(B / 256),)."""
    scaled, absmax = _scale_blocks(x_B, SCALE_BLOCK)
    code = dynamic_code(x_B.device)
    return torch.bucketize(scaled, (code[:-1] + code[1:]) / 2, out_int32=True).to(torch.uint8), absmax


def _scale_blocks(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(m,) → x scaled into [-1, 1] (m,) and the absmax of each block (ceil(m / block),), both fp32.

    A full block is multiplied by the reciprocal, the part block at the end divided, as bitsandbytes does:
    the two differ in the last bit, and on a midpoint that bit chooses the code. 1e-38 keeps a block of
    zeros from dividing by zero.
    """
    full = x.numel() - x.numel() % block
    body = x[:full].view(-1, block)
    absmax = body.abs().amax(dim=-1)
    scaled = (body * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(-1)).clamp(-1, 1).view(-1)
    if full < x.numel():
        tail = x[full:]
        tail_absmax = tail.abs().max().clamp(min=1e-38)
        absmax = torch.cat((absmax, tail_absmax.view(1)))
        scaled = torch.cat((scaled, (tail / tail_absmax).clamp(-1, 1)))
    return scaled, absmax


def _times_blocks(values: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """(m,) times the scale of each element's block, in place. `scales` may hold more than are needed."""
    blocks = values.numel() // block
    full = blocks * block
    values[:full].view(-1, block).mul_(scales[:blocks].unsqueeze(-1))
    if full < values.numel():
        values[full:].mul_(scales[blocks])
    return values
