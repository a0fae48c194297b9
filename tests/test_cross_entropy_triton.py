"""The cross-entropy kernel: close to float64, padding rows untouched by what they hold, rows on their own."""

from __future__ import annotations

import os

import pytest
import torch
from row_company import relative_error, rows_ignore_company, same_bytes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the kernels are decorated

from gshare.kernels import cross_entropy_triton
from gshare.kernels.cross_entropy_triton import NO_TARGET, linear_cross_entropy, softmax_rows_
from gshare.kernels.gemm import RowInvariantGemm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def operands(rows: int, vocabulary: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """logits (R, V), targets (R,), scale (R,)."""
    generator = torch.Generator().manual_seed(rows * 10007 + vocabulary)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 4).to(DEVICE, dtype)
    targets = torch.randint(vocabulary, (rows,), generator=generator).to(DEVICE)
    scale = 1.0 / torch.randint(1, 900, (rows,), generator=generator).float()
    return [logits, targets, scale.to(DEVICE)]


@dtypes
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 6), (7, 123), (3, 4096), (2, 16385), (1, 50257)])
def test_loss_and_gradient_are_near_float64(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    logits, targets, scale = operands(rows, vocabulary, dtype)
    wide = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(wide, targets, reduction="none")
    kept = logits.clone()
    nll = softmax_rows_(logits, targets, None)
    assert same_bytes(logits, kept)  # without scale nothing is written
    assert relative_error(nll, expected.detach()) <= 1e-5
    assert same_bytes(softmax_rows_(logits, targets, scale), nll)
    (expected * scale.double()).sum().backward()
    assert wide.grad is not None
    assert relative_error(logits, wide.grad) <= TOLERANCE[dtype]


@dtypes
def test_padding_rows_are_zero_whatever_they_hold(dtype: torch.dtype) -> None:
    logits, targets, scale = operands(5, 123, dtype)
    alone, expected = logits.clone(), softmax_rows_(logits.clone(), targets, None)
    softmax_rows_(alone, targets, scale)
    for row, value in ((1, float("nan")), (4, float("inf"))):
        logits[row], targets[row], scale[row], alone[row], expected[row] = value, NO_TARGET, value, 0.0, 0.0
    nll = softmax_rows_(logits, targets, scale)
    assert same_bytes(nll, expected)
    assert same_bytes(logits, alone)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_shows_in_the_loss(value: float) -> None:
    logits, targets, scale = operands(3, 123, torch.float32)
    logits[1, 77] = value
    nll = softmax_rows_(logits, targets, scale)
    assert torch.isnan(nll).tolist() == [False, True, False]


@dtypes
@pytest.mark.parametrize("vocabulary", [64, 4101])
def test_a_row_ignores_its_company(vocabulary: int, dtype: torch.dtype) -> None:
    def in_place(logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
        return [softmax_rows_(logits, targets, scale), logits]

    assert rows_ignore_company(in_place, operands(4, vocabulary, dtype))


def test_negative_control_a_sum_ordered_by_the_batch_is_noticed() -> None:
    def batch_dependent(logits: torch.Tensor, *_: torch.Tensor) -> list[torch.Tensor]:
        # Addition by addition: a device's own sum may fold both views of a row in one order.
        e = logits.exp()
        columns = list(e.unbind(1)) if e.shape[0] > 8 else list(e.flip(1).unbind(1))
        total = columns[0].clone()
        for column in columns[1:]:
            total = total + column
        return [e / total[:, None]]

    assert not rows_ignore_company(batch_dependent, operands(4, 64, torch.float32))


@dtypes
def test_chunks_do_not_show_and_padding_rows_get_no_gradient(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    h, head = (torch.randn(n, 32, generator=generator).to(DEVICE, dtype) for n in (23, 211))
    _, targets, scale = operands(23, 211, dtype)
    targets[[5, 22]] = NO_TARGET
    gemm = RowInvariantGemm()
    nll, dh = linear_cross_entropy(h, head, targets, scale, gemm)
    assert dh is not None
    real = targets != NO_TARGET
    wide = h.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(
        wide @ head.double().T, targets, reduction="none", ignore_index=NO_TARGET
    )
    (loss * scale.double()).sum().backward()
    assert wide.grad is not None
    assert relative_error(nll, loss.detach()) <= TOLERANCE[dtype]
    assert relative_error(dh, wide.grad) <= TOLERANCE[dtype]
    assert not dh[~real].any()
    assert not nll[~real].any()

    monkeypatch.setattr(cross_entropy_triton, "chunk_rows", lambda *_: 8)
    in_chunks = linear_cross_entropy(h, head, targets, scale, gemm)
    assert in_chunks[1] is not None
    assert same_bytes(in_chunks[0], nll)
    assert same_bytes(in_chunks[1], dh)
    only_losses = linear_cross_entropy(h, head, targets, None, gemm)
    assert only_losses[1] is None
    assert same_bytes(only_losses[0], nll)
