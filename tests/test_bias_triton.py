"""Adding a bias: torch's bits, and rows on their own."""

from __future__ import annotations

import os

import pytest
import torch
from row_company import rows_ignore_company, same_bytes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the kernels are decorated

from gshare.kernels.bias_triton import add_bias_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def operands(tokens: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """y (T, N), bias (N,)."""
    generator = torch.Generator().manual_seed(tokens * 10007 + width)
    y, bias = torch.randn(tokens, width, generator=generator), torch.randn(width, generator=generator)
    return y.to(DEVICE, dtype), bias.to(DEVICE, dtype)


@dtypes
@pytest.mark.parametrize(("tokens", "width"), [(1, 6), (42, 123), (17, 128), (33, 300)])
def test_the_bits_are_torch_s(tokens: int, width: int, dtype: torch.dtype) -> None:
    y, bias = operands(tokens, width, dtype)
    expected = y.clone().add_(bias)
    found = add_bias_(y, bias)
    assert found is y
    assert same_bytes(found, expected)


def test_a_bias_in_fp32_is_added_before_rounding() -> None:
    y, bias = operands(9, 40, torch.bfloat16)
    bias = bias.float() * 1.001
    expected = y.clone().add_(bias)
    assert not same_bytes(expected, y.clone().add_(bias.bfloat16())), "nothing to tell them apart"
    assert same_bytes(add_bias_(y, bias), expected)


@dtypes
def test_a_row_ignores_its_company(dtype: torch.dtype) -> None:
    y, bias = operands(5, 130, dtype)
    assert rows_ignore_company(lambda y: [add_bias_(y, bias)], [y])


def test_negative_control_an_addition_that_looks_at_the_batch_is_noticed() -> None:
    y, bias = operands(5, 130, torch.float32)

    def batch_dependent(y: torch.Tensor) -> list[torch.Tensor]:
        return [add_bias_(y, bias * y.abs().max())]

    assert not rows_ignore_company(batch_dependent, [y], poison=1e3)
