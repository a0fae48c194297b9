"""kernels/int8.py against bitsandbytes and its own definition."""

from __future__ import annotations

import logging

import pytest
import torch
from gshare.kernels import int8

SHAPES = [(64, 64), (123, 431), (6, 42), (1, 5)]


def weight(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 0.02


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_equal_bitsandbytes(shape: tuple[int, int]) -> None:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    functional = pytest.importorskip("bitsandbytes.functional")
    w = weight(shape).half()  # the only dtype that bitsandbytes takes here
    codes, absmax, _ = functional.int8_vectorwise_quant(w)
    q = int8.quantise(w)
    assert torch.equal(q.codes, codes)
    assert torch.equal(q.scales, absmax / 127.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_at_most_half_a_step(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = weight(shape)
    q = int8.quantise(w)
    dense = int8.dequantise(q, dtype)
    assert dense.dtype == dtype
    rounding = 2.0**-8 * w.abs() if dtype == torch.bfloat16 else 0.0
    assert bool(((dense.float() - w).abs() <= 0.501 * q.scales.unsqueeze(1) + rounding).all())
    # The channel's largest element is the one that is exact.
    assert bool((q.codes.abs().amax(1) == 127).all())


def test_the_buffer_is_filled() -> None:
    q = int8.quantise(weight((6, 42)))
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((6, 42), torch.nan, dtype=dtype)
        assert int8.dequantise(q, dtype, out) is out
        assert torch.equal(out, int8.dequantise(q, dtype))


def test_zero_rows_stay_zero() -> None:
    w = weight((4, 8))
    w[2] = 0
    dense = int8.dequantise(int8.quantise(w))
    assert bool((dense[2] == 0).all())
    assert bool(dense.isfinite().all())


def test_rows_are_independent() -> None:
    """One scale per output channel: a huge row does not cost the others their precision."""
    w = weight((3, 64))
    scaled = w.clone()
    scaled[0] *= 1e4
    assert torch.equal(int8.quantise(w).codes[1:], int8.quantise(scaled).codes[1:])
