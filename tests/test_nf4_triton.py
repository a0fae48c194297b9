"""kernels/nf4_triton.py has the bits of kernels/nf4.py; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")
from gshare.kernels import nf4, nf4_triton  # noqa: E402  (after the variable is set)

# K a multiple of 64; odd K; K below a block; a part block, word and byte at the end; less than a word;
# several programs (8192 elements each) and several blocks of scales (16384 elements each)
SHAPES = [(64, 64), (49, 128), (576, 192), (123, 431), (6, 42), (5, 7), (33, 6), (1, 3), (1, 1), (37, 1000)]
DTYPES = [torch.float32, torch.bfloat16]


def quantised(shape: tuple[int, int], *, double: bool) -> nf4.Nf4Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    w = torch.randn(shape, generator=generator) * 0.02
    return nf4.quantise(w.to(DEVICE), double=double)


def filled(q: nf4.Nf4Tensor, dtype: torch.dtype) -> torch.Tensor:
    return nf4_triton.dequantise(q, torch.full(q.shape, torch.nan, dtype=dtype, device=DEVICE))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compared as integers: a NaN equals itself, and zero is not minus zero."""
    whole = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.view(whole), b.view(whole))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_are_those_of_the_reference(
    shape: tuple[int, int], double: bool, dtype: torch.dtype
) -> None:
    q = quantised(shape, double=double)
    assert same_bytes(filled(q, dtype), nf4.dequantise(q, dtype))


def test_one_rounding_less_would_show() -> None:
    """Negative control: scales by a fused multiply-add, and bf16 by cutting off, give other bits."""
    q = quantised((576, 192), double=True)
    exact = nf4.dequantise(q)
    assert q.scale_absmax is not None
    assert q.scale_mean is not None
    table = nf4.dynamic_code(DEVICE).double()
    absmax = q.scale_absmax.double().repeat_interleave(nf4.SCALE_BLOCK)[: q.scales.numel()]
    fused = (table[q.scales.int()] * absmax + q.scale_mean.double()).float()
    plain = nf4.Nf4Tensor(q.shape, q.codes, fused)
    assert not same_bytes(filled(plain, torch.float32), exact)
    cut = (exact.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    assert not same_bytes(filled(q, torch.bfloat16), cut)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_a_group_share_a_buffer(dtype: torch.dtype) -> None:
    """q, k and v in adjacent rows, at offsets of no alignment; what lies around them stays."""
    parts = [quantised(shape, double=True) for shape in ((40, 431), (9, 431), (9, 431))]
    buffer = torch.full((1 + 58 + 1, 431), torch.nan, dtype=dtype, device=DEVICE)
    start = 1
    for q in parts:
        rows = buffer[start : start + q.shape[0]]
        assert nf4_triton.dequantise(q, rows) is rows
        start += q.shape[0]
    assert same_bytes(buffer[1:-1], torch.cat([nf4.dequantise(q, dtype) for q in parts]))
    assert bool(buffer[0].isnan().all())
    assert bool(buffer[-1].isnan().all())


def test_a_block_knows_no_other() -> None:
    """One scale that is NaN spoils its 64 elements, which here lie in two rows, and no more."""
    q = quantised((123, 431), double=False)
    clean = filled(q, torch.bfloat16)
    q.scales[6] = torch.nan
    spoilt = filled(q, torch.bfloat16).view(-1)
    assert bool(spoilt[6 * 64 : 7 * 64].isnan().all())
    spoilt[6 * 64 : 7 * 64] = clean.view(-1)[6 * 64 : 7 * 64]
    assert same_bytes(spoilt, clean.view(-1))


def test_a_wrong_buffer_is_refused() -> None:
    q = quantised((64, 64), double=True)
    wide = torch.empty(64, 128, device=DEVICE)
    for out in (wide, wide[:, :64], torch.empty(64, 64, dtype=torch.float16, device=DEVICE)):
        with pytest.raises(AssertionError):
            nf4_triton.dequantise(q, out)
