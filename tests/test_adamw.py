"""AdamW: close to torch, and bits that do not depend on place, slicing or threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gshare.kernels.adamw import CHUNK, adamw_step_

HYPER = {"lr": 2e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def operands(n: int, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    param, grad, exp_avg = (torch.randn(n, generator=g) for _ in range(3))
    return [param, grad * 0.1, exp_avg * 0.01, torch.rand(n, generator=g) * 1e-3]


def run(tensors: list[torch.Tensor], step: int = 7) -> None:
    adamw_step_(*tensors, **HYPER, step=step)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_twenty_steps_equal_torch_within_1e_6(weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(1)
    mine = torch.randn(43, 31, generator=generator)
    theirs = torch.nn.Parameter(mine.clone())
    start = mine.clone()
    moments = [torch.zeros_like(mine) for _ in range(2)]
    optimizer = torch.optim.AdamW([theirs], lr=1e-3, betas=(0.9, 0.98), eps=1e-8, weight_decay=weight_decay)
    for step in range(1, 21):
        grad = torch.randn(43, 31, generator=generator)
        theirs.grad = grad.clone()
        optimizer.step()
        adamw_step_(
            mine,
            grad,
            *moments,
            lr=1e-3,
            beta1=0.9,
            beta2=0.98,
            eps=1e-8,
            weight_decay=weight_decay,
            step=step,
        )
    assert (mine - start).abs().max() > 1e-3  # it moved by far more than the tolerance
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("n", [1, 6, 123, 4099])
def test_slices_at_any_offset_have_the_bits_of_the_whole(n: int) -> None:
    whole = operands(n)
    run(whole)
    for offset in (0, 1, 3, 7, 15):
        # The same elements at another address, in an arena full of other values, cut at odd places.
        arenas = [torch.full((n + 40,), 3.0) for _ in range(4)]
        for arena, source in zip(arenas, operands(n), strict=True):
            arena[offset : offset + n] = source
        for first, last in ((0, n // 3), (n // 3, n // 2 + 1), (n // 2 + 1, n)):
            run([arena[offset + first : offset + last] for arena in arenas])
        for arena, expected in zip(arenas, whole, strict=True):
            assert torch.equal(arena[offset : offset + n], expected)


def test_one_two_and_four_threads_give_the_same_bits() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            tensors = operands(CHUNK + 77)
            run(tensors)
            results.append(tensors)
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_scalar_and_vector_body_agree_and_the_check_can_fail() -> None:
    """Element by element in numpy float32 (no vector unit, no FMA) gives the same bits; another association
    of the same products does not, so equality here is not a loose comparison."""
    tensors = operands(300)
    p, g, m, v = (t.numpy().copy() for t in tensors)
    run(tensors, step=3)
    f32 = np.float32
    c1, c2 = 1.0 - 0.9**3, (1.0 - 0.999**3) ** 0.5
    expected, squares, other = np.empty_like(p), np.empty_like(p), np.empty_like(p)
    for i in range(300):
        mi = m[i] * f32(0.9) + g[i] * f32(1.0 - 0.9)
        vi = v[i] * f32(0.999) + (g[i] * f32(1.0 - 0.999)) * g[i]
        d = np.sqrt(vi) / f32(c2) + f32(1e-8)
        expected[i] = p[i] * f32(1.0 - 2e-4 * 0.01) - (mi / d) * f32(2e-4 / c1)
        squares[i] = vi
        other[i] = v[i] * f32(0.999) + f32(1.0 - 0.999) * (g[i] * g[i])
    assert (tensors[0].numpy() == expected).all()
    assert (tensors[3].numpy() == squares).all()
    assert (tensors[3].numpy() != other).any()


def test_nan_stays_in_its_element() -> None:
    clean, dirty = operands(100), operands(100)
    dirty[1][42] = float("nan")
    run(clean)
    run(dirty)
    others = torch.arange(100) != 42
    assert dirty[0][42].isnan()
    for a, b in zip(clean[:1] + clean[2:], dirty[:1] + dirty[2:], strict=True):
        assert torch.equal(a[others], b[others])


def test_step_zero_and_float64_are_refused() -> None:
    with pytest.raises(AssertionError, match="count from 1"):
        run(operands(4), step=0)
    with pytest.raises(AssertionError, match="float32"):
        run([t.double() for t in operands(4)])
