"""The base GEMM in Triton: close to float64 on any shape, rows on their own, sums in one order."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from row_company import relative_error, rows_ignore_company, same_bytes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the kernels are decorated

from gshare.kernels import gemm_triton
from gshare.kernels.gemm_triton import linear_dx_triton, linear_triton, product_tiles
from gshare.kernels.tile_tables import Kind, Tiles

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def operands(m: int, k: int, n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x (M, K), w (N, K), dy (M, N)."""
    generator = torch.Generator().manual_seed(m * 10007 + k * 101 + n)
    drawn = (torch.randn(*size, generator=generator) for size in ((m, k), (n, k), (m, n)))
    return [value.to(DEVICE, dtype) for value in drawn]


@dtypes
@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 6, 3), (42, 123, 17), (65, 64, 66), (7, 128, 192), (130, 200, 65)]
)
def test_both_products_are_near_float64(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    x, w, dy = operands(m, k, n, dtype)
    assert relative_error(linear_triton(x, w), x.double() @ w.double().t()) <= TOLERANCE[dtype]
    assert relative_error(linear_dx_triton(dy, w), dy.double() @ w.double()) <= TOLERANCE[dtype]


@dtypes
def test_views_of_wider_buffers_give_the_same_bits(dtype: torch.dtype) -> None:
    x, w, dy = operands(33, 64, 48, dtype)
    wide = [
        torch.full((t.shape[0], t.shape[1] + 16), float("nan"), device=DEVICE, dtype=dtype)
        for t in (x, w, dy)
    ]
    for buffer, values in zip(wide, (x, w, dy), strict=True):
        buffer[:, : values.shape[1]] = values
    x_view, w_view, dy_view = (b[:, : t.shape[1]] for b, t in zip(wide, (x, w, dy), strict=True))
    assert same_bytes(linear_triton(x_view, w_view), linear_triton(x, w))
    assert same_bytes(linear_dx_triton(dy_view, w_view), linear_dx_triton(dy, w))


@dtypes
@pytest.mark.parametrize(("k", "n"), [(70, 40), (128, 64)])
def test_a_row_ignores_its_company(k: int, n: int, dtype: torch.dtype) -> None:
    x, w, dy = operands(5, k, n, dtype)

    def both(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        return [linear_triton(x, w), linear_dx_triton(dy, w)]

    assert rows_ignore_company(both, [x, dy])


@pytest.mark.skipif(CUDA, reason="on a GPU no tile changes bits: see the next test")
def test_negative_control_a_sum_cut_by_the_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, _ = operands(5, 128, 64, torch.float32)

    def batch_dependent(
        kind: Kind, rows: int, outputs: int, reduced: int, size: int, device: torch.device
    ) -> Tiles:
        tiles = product_tiles(kind, rows, outputs, reduced, size, device)
        return replace(tiles, block_k=32) if rows > 8 else tiles

    monkeypatch.setattr(gemm_triton, "product_tiles", batch_dependent)
    assert not rows_ignore_company(lambda x: [linear_triton(x, w)], [x])


@pytest.mark.skipif(not CUDA, reason="the interpreter's matmul orders its sums by the tile's shape")
@pytest.mark.parametrize("rows", [1, 16, 100, 192, 700, 2100])
def test_tiles_change_no_bits(rows: int) -> None:
    """Few rows take small tiles, many rows large ones; the same row has the same bits in all."""
    x, w, dy = operands(4096, 896, 1152, torch.bfloat16)
    assert same_bytes(linear_triton(x[:rows], w), linear_triton(x, w)[:rows])
    assert same_bytes(linear_dx_triton(dy[:rows], w), linear_dx_triton(dy, w)[:rows])
