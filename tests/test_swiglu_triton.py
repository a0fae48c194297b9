"""The SwiGLU kernels: close to float64, the backward's m equal to the forward's, rows on their own."""

from __future__ import annotations

import os

import pytest
import torch
from row_company import relative_error, rows_ignore_company, same_bytes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the kernels are decorated

from gshare.kernels.swiglu_triton import swiglu, swiglu_backward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def operands(tokens: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """dm (T, I), gate_up (T, 2I)."""
    generator = torch.Generator().manual_seed(tokens * 10007 + inner)
    dm, gate_up = (torch.randn(tokens, k * inner, generator=generator) for k in (1, 2))
    return dm.to(DEVICE, dtype), (gate_up * 3).to(DEVICE, dtype)


@dtypes
@pytest.mark.parametrize(("tokens", "inner"), [(1, 6), (42, 123), (5, 512), (7, 1537)])
def test_forward_and_backward_are_near_float64(tokens: int, inner: int, dtype: torch.dtype) -> None:
    dm, gate_up = operands(tokens, inner, dtype)
    wide = gate_up.double().requires_grad_()
    expected = torch.nn.functional.silu(wide[:, :inner]) * wide[:, inner:]
    m = swiglu(gate_up)
    assert relative_error(m, expected.detach()) <= TOLERANCE[dtype]
    expected.backward(dm.double())
    assert wide.grad is not None
    gradient, again = swiglu_backward(dm, gate_up)
    assert relative_error(gradient, wide.grad) <= TOLERANCE[dtype]
    assert same_bytes(again, m)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@dtypes
def test_large_gates_saturate_without_nan(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-3e38, -1e4, -100.0, 100.0, 1e4, 3e38]], device=DEVICE)
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1).to(dtype)
    m = swiglu(gate_up)
    assert torch.equal(m[0, :3], torch.zeros(3, device=DEVICE, dtype=dtype))
    assert torch.equal(m[0, 3:], gate_up[0, 3:6])


@dtypes
@pytest.mark.parametrize("inner", [6, 515])
def test_a_row_ignores_its_company(inner: int, dtype: torch.dtype) -> None:
    def both(dm: torch.Tensor, gate_up: torch.Tensor) -> list[torch.Tensor]:
        gradient, m = swiglu_backward(dm, gate_up)
        return [swiglu(gate_up), gradient, m]

    assert rows_ignore_company(both, operands(5, inner, dtype))


def test_negative_control_a_value_scaled_by_the_batch_is_noticed() -> None:
    def batch_dependent(dm: torch.Tensor, gate_up: torch.Tensor) -> list[torch.Tensor]:
        largest = dm.abs().nan_to_num().max()  # an honest-looking rescaling around the product
        return [swiglu(gate_up) * (dm / largest) * largest]

    assert not rows_ignore_company(batch_dependent, operands(5, 64, torch.float32), poison=1e3)
