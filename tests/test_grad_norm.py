"""The gradient norm: right, and the same bits wherever the gradients lie."""

from __future__ import annotations

import math

import pytest
import torch
from gshare.kernels.grad_norm import ROW, clip_coefficient, grad_norm

SHAPES = [(8, 64), (3, 5), (1, 1), (1023,), (1024,), (1025,), (40, 431), (6, 42, 3)]


def gradients(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) * 10.0 ** (i % 4 - 2) for i, shape in enumerate(SHAPES)]


def test_value_is_the_exact_norm_to_float64_rounding() -> None:
    grads = gradients()
    exact = math.sqrt(math.fsum(x * x for g in grads for x in g.view(-1).tolist()))
    norm = grad_norm(grads)
    assert norm.dtype == torch.float64
    assert norm.shape == ()
    assert norm.item() == pytest.approx(exact, rel=1e-14)
    assert grad_norm([torch.zeros(3), torch.zeros(2, 2)]).item() == 0.0
    assert grad_norm([torch.tensor([3.0]), torch.tensor([[4.0]])]).item() == 5.0
    big = torch.full((1100 * ROW,), 1e25)  # float32 squares would overflow; more than one group
    assert grad_norm([big, torch.ones(7)]).item() == pytest.approx(1e25 * math.sqrt(1100 * ROW), rel=1e-7)


def test_bits_do_not_depend_on_place_threads_or_layout() -> None:
    grads = gradients(1)
    expected = grad_norm(grads).item()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            for offset in (0, 1, 3, 15, 17):
                arena = torch.full((sum(g.numel() for g in grads) + 64,), 7.0)
                placed, at = [], offset
                for g in grads:
                    view = arena[at : at + g.numel()].view(g.shape)
                    view.copy_(g)
                    placed.append(view)
                    at += g.numel()
                assert grad_norm(placed).item() == expected
            transposed = [g.mT.contiguous().mT if g.dim() > 1 else g for g in grads]
            assert grad_norm(transposed).item() == expected
    finally:
        torch.set_num_threads(before)


def test_the_written_order_is_the_order_used() -> None:
    """A scalar model of the contract gives the same bits; the same squares from left to right do not."""
    grads = gradients(2)
    total, plain = 0.0, 0.0
    for g in grads:
        squares = [x * x for x in g.reshape(-1).tolist()]
        for x in squares:
            plain += x
        squares += [0.0] * (-len(squares) % ROW)
        for first in range(0, len(squares), ROW):
            row = squares[first : first + ROW]
            while len(row) > 1:
                half = len(row) // 2
                row = [a + b for a, b in zip(row[:half], row[half:], strict=True)]
            total += row[0]
    assert grad_norm(grads).item() == math.sqrt(total)
    assert math.sqrt(plain) != math.sqrt(total)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_comes_through(bad: float) -> None:
    grads = gradients(3)
    grads[6].view(-1)[-1] = bad
    assert not grad_norm(grads).isfinite()
    assert grad_norm(gradients(3)).isfinite()


@pytest.mark.parametrize("max_norm", [0.5, 1.0, 1e6])
def test_clipping_equals_torch(max_norm: float) -> None:
    grads = gradients(4)
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for param, g in zip(params, grads, strict=True):
        param.grad = g.clone()
    their_norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    norm = grad_norm(grads).item()
    assert norm == pytest.approx(their_norm.item(), rel=1e-6)
    coefficient = clip_coefficient(norm, max_norm)
    assert (coefficient == 1.0) == (norm < max_norm)
    for param, g in zip(params, grads, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(g * coefficient, param.grad, rtol=1e-6, atol=0)


def test_clip_coefficient_at_its_edges() -> None:
    assert clip_coefficient(10.0, 0.0) == 1.0
    assert clip_coefficient(0.0, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert clip_coefficient(float("inf"), 1.0) == 0.0
    assert math.isnan(clip_coefficient(float("nan"), 1.0))
    with pytest.raises(AssertionError, match="negative"):
        clip_coefficient(1.0, -1.0)
