"""kernels/int8_triton.py has the bits of kernels/int8.py; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")
from gshare.kernels import int8, int8_triton  # noqa: E402  (after the variable is set)

# wide rows in one tile and in two, narrow rows many to a tile, odd K, one element
SHAPES = [(3, 4096), (2, 4500), (64, 64), (70, 576), (123, 431), (6, 42), (1, 5), (1, 1)]
DTYPES = [torch.float32, torch.bfloat16]


def quantised(shape: tuple[int, int]) -> int8.Int8Tensor:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0] * 1000 + shape[1])) * 0.02
    return int8.quantise(w.to(DEVICE))


def filled(q: int8.Int8Tensor, dtype: torch.dtype) -> torch.Tensor:
    return int8_triton.dequantise(q, torch.full(q.codes.shape, torch.nan, dtype=dtype, device=DEVICE))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compared as integers: a NaN equals itself, and zero is not minus zero."""
    whole = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.view(whole), b.view(whole))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_are_those_of_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    q = quantised(shape)
    assert same_bytes(filled(q, dtype), int8.dequantise(q, dtype))


def test_cutting_off_would_show() -> None:
    """Negative control: bf16 that is cut off instead of rounded has other bits."""
    q = quantised((123, 431))
    cut = (int8.dequantise(q).view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    assert not same_bytes(filled(q, torch.bfloat16), cut)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_a_group_share_a_buffer(dtype: torch.dtype) -> None:
    """q, k and v in adjacent rows, at offsets of no alignment; what lies around them stays."""
    parts = [quantised(shape) for shape in ((40, 431), (9, 431), (9, 431))]
    buffer = torch.full((1 + 58 + 1, 431), torch.nan, dtype=dtype, device=DEVICE)
    start = 1
    for q in parts:
        rows = buffer[start : start + q.codes.shape[0]]
        assert int8_triton.dequantise(q, rows) is rows
        start += q.codes.shape[0]
    assert same_bytes(buffer[1:-1], torch.cat([int8.dequantise(q, dtype) for q in parts]))
    assert bool(buffer[0].isnan().all())
    assert bool(buffer[-1].isnan().all())


def test_a_row_knows_no_other() -> None:
    """A scale that is NaN spoils its row and no more; the rows share a tile."""
    q = quantised((70, 576))
    clean = filled(q, torch.bfloat16)
    q.scales[6] = torch.nan
    spoilt = filled(q, torch.bfloat16)
    assert bool(spoilt[6].isnan().all())
    spoilt[6] = clean[6]
    assert same_bytes(spoilt, clean)


@pytest.mark.parametrize("k", [64, 431, 576, 896, 1536, 4096, 4864, 11008, 14336])
def test_at_most_an_eighth_of_a_tile_is_idle(k: int) -> None:
    width = 8 * int8_triton._eights(k)
    assert -(-k // width) * width * 7 <= k * 8


def test_a_wrong_buffer_is_refused() -> None:
    q = quantised((64, 64))
    wide = torch.empty(64, 128, device=DEVICE)
    for out in (wide, wide[:, :64], torch.empty(64, 64, dtype=torch.float16, device=DEVICE)):
        with pytest.raises(AssertionError):
            int8_triton.dequantise(q, out)
