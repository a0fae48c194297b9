"""The RMSNorm kernels: close to float64, and a row's bits know nothing of the other rows."""

from __future__ import annotations

import os

import pytest
import torch
from row_company import relative_error, rows_ignore_company, same_bytes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the kernels are decorated

from gshare.kernels.rms_norm_triton import (
    add_rms_norm,
    rms_norm_apply,
    rms_norm_backward,
    rms_norm_backward_apply,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
EPS = 1e-6
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def operands(tokens: int, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, delta, w, dh, skip."""
    generator = torch.Generator().manual_seed(tokens * 10007 + hidden)
    shapes = [(tokens, hidden), (tokens, hidden), (hidden,), (tokens, hidden), (tokens, hidden)]
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def float64_norm(new: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return new * (new.square().mean(-1, keepdim=True) + EPS).rsqrt() * w


@dtypes
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 6), (42, 64), (5, 123), (9, 576), (3, 1100), (2, 4097)])
def test_forward_and_backward_are_near_float64(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    x, delta, w, dh, skip = operands(tokens, hidden, dtype)
    new, h, rstd = add_rms_norm(x, delta, w, EPS)
    assert same_bytes(new, (x.float() + delta.float()).to(dtype))
    wide = new.double().requires_grad_()
    expected = float64_norm(wide, w.double())
    assert relative_error(h, expected.detach()) <= TOLERANCE[dtype]
    assert relative_error(rstd, (wide.detach().square().mean(-1) + EPS).rsqrt()) <= 1e-6
    expected.backward(dh.double())
    assert wide.grad is not None
    assert relative_error(rms_norm_backward(dh, new, w, rstd, None), wide.grad) <= TOLERANCE[dtype]
    dx = rms_norm_backward(dh, new, w, rstd, skip)
    assert relative_error(dx, wide.grad + skip.double()) <= TOLERANCE[dtype]


@dtypes
def test_without_a_delta_the_residual_is_the_input_itself(dtype: torch.dtype) -> None:
    x, _, w, _, _ = operands(5, 123, dtype)
    new, h, rstd = add_rms_norm(x, None, w, EPS)
    assert new is x
    added = add_rms_norm(x, torch.zeros_like(x), w, EPS)
    assert same_bytes(added[1], h)
    assert same_bytes(added[2], rstd)


@dtypes
def test_apply_gives_the_bits_of_the_forward(dtype: torch.dtype) -> None:
    x, delta, w, _, _ = operands(11, 576, dtype)
    new, h, rstd = add_rms_norm(x, delta, w, EPS)
    assert same_bytes(rms_norm_apply(new, w, rstd), h)


@dtypes
@pytest.mark.parametrize("hidden", [123, 576, 2056])
def test_one_launch_for_the_gradient_and_the_norm_has_the_bits_of_two(
    hidden: int, dtype: torch.dtype
) -> None:
    x, delta, w, dh, skip = operands(11, hidden, dtype)
    new, h, rstd = add_rms_norm(x, delta, w, EPS)
    dx, again = rms_norm_backward_apply(dh, new, w, rstd, skip)
    assert same_bytes(again, h)
    assert same_bytes(dx, rms_norm_backward(dh, new, w, rstd, skip))
    # Negative control: the comparisons see one changed row of an input.
    new[3] *= 2
    dx_2, again_2 = rms_norm_backward_apply(dh, new, w, rstd, skip)
    assert not same_bytes(again_2, h)
    assert not same_bytes(dx_2, dx)


@dtypes
def test_the_gradient_is_rounded_before_the_skip_is_added(dtype: torch.dtype) -> None:
    x, _, w, dh, skip = operands(7, 576, dtype)
    _, _, rstd = add_rms_norm(x, None, w, EPS)
    plain = rms_norm_backward(dh, x, w, rstd, None)
    assert same_bytes(rms_norm_backward(dh, x, w, rstd, skip), (plain.float() + skip.float()).to(dtype))


@dtypes
@pytest.mark.parametrize("hidden", [64, 576, 2056])
def test_a_row_ignores_its_company(hidden: int, dtype: torch.dtype) -> None:
    x, delta, w, dh, skip = operands(4, hidden, dtype)

    def forward_and_backward(*rows: torch.Tensor) -> list[torch.Tensor]:
        x, delta, dh, skip = rows
        new, h, rstd = add_rms_norm(x, delta, w, EPS)
        return [new, h, rstd, *rms_norm_backward_apply(dh, new, w, rstd, skip)]

    assert rows_ignore_company(forward_and_backward, [x, delta, dh, skip])


def test_negative_control_a_sum_ordered_by_the_batch_is_noticed() -> None:
    x, _, w, _, _ = operands(4, 576, torch.float32)

    def batch_dependent(x: torch.Tensor) -> list[torch.Tensor]:
        squares = (x * x).view(x.shape[0], -1, 2 if x.shape[0] > 8 else 4).sum(1).sum(-1, keepdim=True)
        return [x * torch.rsqrt(squares / x.shape[1] + EPS) * w]

    assert not rows_ignore_company(batch_dependent, [x])


def test_a_view_that_would_be_compiled_to_another_order_is_refused() -> None:
    x, _, w, _, _ = operands(4, 6, torch.float32)
    with pytest.raises(AssertionError, match="16 bytes"):
        add_rms_norm(x[1:], None, w, EPS)
    with pytest.raises(AssertionError, match="contiguous"):
        add_rms_norm(torch.zeros(4, 12, device=DEVICE)[:, :6], None, w, EPS)
