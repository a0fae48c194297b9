"""The RoPE kernels: the references' bits (without QK-norm), close to float64, and rows that never meet."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch
from row_company import relative_error, rows_ignore_company, same_bytes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the kernels are decorated

pytest.importorskip("triton")
from gshare.kernels.rms_norm import rms_norm_backward_reference, rms_norm_reference
from gshare.kernels.rope import rope_backward_reference, rope_reference
from gshare.kernels.rope_triton import rope_qk_, rope_qk_backward_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
EPS = 1e-6
POSITIONS = 50
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
norms = pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk-norm"])
#: (query heads, key heads, head size): MHA, grouped, a padded head, a head of 16, a chunk of eight heads.
shapes = pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 64), (9, 3, 64), (7, 1, 80), (4, 2, 16), (6, 2, 128)]
)


class Operands(NamedTuple):
    qkv: torch.Tensor
    dqkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    position: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor


def operands(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> Operands:
    generator = torch.Generator().manual_seed(tokens * 10007 + heads * 101 + dim)
    width = (heads + 2 * kv_heads) * dim
    qkv, dqkv = (torch.randn(tokens, width, generator=generator).to(DEVICE, dtype) for _ in range(2))
    angle = torch.rand(POSITIONS, dim // 2, generator=generator) * 6
    cos, sin = (torch.cat([f(angle)] * 2, -1).to(DEVICE) for f in (torch.cos, torch.sin))
    position = torch.randint(0, POSITIONS, (tokens,), generator=generator).to(DEVICE, torch.int32)
    weights = (torch.rand(dim, generator=generator).add(0.5).to(DEVICE, dtype) for _ in range(2))
    return Operands(qkv, dqkv, cos, sin, position, *weights)


def forward(
    o: Operands, heads: int, kv_heads: int, norm: bool
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """qkv after the kernel, and what it kept."""
    qkv = o.qkv.clone()
    q_norm, k_norm = (o.q_norm, o.k_norm) if norm else (None, None)
    kept = rope_qk_(
        qkv, o.cos, o.sin, o.position, heads=heads, kv_heads=kv_heads, q_norm=q_norm, k_norm=k_norm, eps=EPS
    )
    return qkv, kept


def backward(
    o: Operands, heads: int, kv_heads: int, kept: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """dqkv after the kernel."""
    dqkv = o.dqkv.clone()
    q_norm, k_norm = (o.q_norm, o.k_norm) if kept is not None else (None, None)
    rope_qk_backward_(
        dqkv,
        o.cos,
        o.sin,
        o.position,
        heads=heads,
        kv_heads=kv_heads,
        q_norm=q_norm,
        k_norm=k_norm,
        kept=kept,
    )
    return dqkv


def split(x: torch.Tensor, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(T, (Hq + 2·Hkv)·D) → q, k, v (T, heads, D)."""
    parts = x.view(x.shape[0], heads + 2 * kv_heads, -1).split([heads, kv_heads, kv_heads], 1)
    return parts[0], parts[1], parts[2]


@dtypes
@shapes
@pytest.mark.parametrize("tokens", [1, 37])
def test_without_norm_the_bits_are_the_references(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    o = operands(tokens, heads, kv_heads, dim, dtype)
    cos, sin = o.cos[o.position], o.sin[o.position]
    for got, given, reference in (
        (forward(o, heads, kv_heads, False)[0], o.qkv, rope_reference),
        (backward(o, heads, kv_heads, None), o.dqkv, rope_backward_reference),
    ):
        q, k, v = split(given, heads, kv_heads)
        expected = torch.cat([reference(q, cos, sin), reference(k, cos, sin), v], 1)
        assert same_bytes(got, expected.flatten(1))


@dtypes
@shapes
def test_with_norm_it_is_near_float64(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    o = operands(23, heads, kv_heads, dim, dtype)
    got, kept = forward(o, heads, kv_heads, True)
    assert kept is not None
    wide = o.qkv.double().requires_grad_()
    cos, sin = o.cos[o.position][:, None].double(), o.sin[o.position][:, None].double()
    parts = []
    for x, w in zip(split(wide, heads, kv_heads)[:2], (o.q_norm, o.k_norm), strict=True):
        y = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * w.double()
        parts.append(y * cos + torch.cat([-y[..., dim // 2 :], y[..., : dim // 2]], -1) * sin)
    expected = torch.cat([*parts, split(wide, heads, kv_heads)[2]], 1).flatten(1)
    expected.backward(o.dqkv.double())
    assert wide.grad is not None
    assert relative_error(got, expected.detach()) <= TOLERANCE[dtype]
    assert relative_error(backward(o, heads, kv_heads, kept), wide.grad) <= TOLERANCE[dtype]
    rotated = (heads + kv_heads) * dim
    assert same_bytes(kept[0], o.qkv[:, :rotated])
    before = wide.detach()[:, :rotated].view(23, -1, dim)
    assert relative_error(kept[1], (before.square().mean(-1) + EPS).rsqrt()) <= 1e-6
    assert same_bytes(got[:, rotated:], o.qkv[:, rotated:])


@dtypes
def test_norm_rounds_where_the_references_round(dtype: torch.dtype) -> None:
    """Only the order of the statistics' sum differs: a few elements round to the other side. Negative
    control: without the roundings between, the error is a multiple of the tolerance."""
    tolerance = 1e-6 if dtype == torch.float32 else 5e-4
    o = operands(40, 4, 2, 64, dtype)
    got, kept = forward(o, 4, 2, True)
    assert kept is not None
    gradient = backward(o, 4, 2, kept)
    cos, sin = o.cos[o.position], o.sin[o.position]
    for at, w in ((slice(0, 4), o.q_norm), (slice(4, 6), o.k_norm)):
        x, dy, y, dx = (t.view(40, 8, 64)[:, at] for t in (o.qkv, o.dqkv, got, gradient))
        normed, rstd = rms_norm_reference(x, w, EPS)
        rotated = rope_reference(normed, cos, sin)
        assert relative_error(y, rotated) <= tolerance
        turned_back = rope_backward_reference(dy, cos, sin)
        assert relative_error(dx, rms_norm_backward_reference(turned_back, x, w, rstd)) <= tolerance
        if dtype == torch.bfloat16:
            unrounded = rope_reference(x.float() * rstd * w.float(), cos, sin).to(dtype)
            assert relative_error(unrounded, rotated) > 2 * tolerance


@dtypes
@norms
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (2, 1, 80)])
def test_a_row_ignores_its_company(
    heads: int, kv_heads: int, dim: int, norm: bool, dtype: torch.dtype
) -> None:
    o = operands(3, heads, kv_heads, dim, dtype)

    def forward_and_backward(
        qkv: torch.Tensor, dqkv: torch.Tensor, position: torch.Tensor
    ) -> list[torch.Tensor]:
        rows = o._replace(qkv=qkv, dqkv=dqkv, position=position)
        rotated, kept = forward(rows, heads, kv_heads, norm)
        return [rotated, *(kept or ()), backward(rows, heads, kv_heads, kept)]

    assert rows_ignore_company(forward_and_backward, [o.qkv, o.dqkv, o.position])


def test_negative_control_a_table_by_place_in_the_batch_is_noticed() -> None:
    o = operands(5, 3, 1, 64, torch.float32)

    def by_place(qkv: torch.Tensor) -> list[torch.Tensor]:
        place = torch.arange(qkv.shape[0], device=DEVICE, dtype=torch.int32)
        return [forward(o._replace(qkv=qkv, position=place), 3, 1, False)[0]]

    assert not rows_ignore_company(by_place, [o.qkv])


@norms
def test_columns_of_a_wider_buffer(norm: bool) -> None:
    o = operands(11, 4, 2, 64, torch.bfloat16)
    width = o.qkv.shape[1]
    expected, kept = forward(o, 4, 2, norm)
    gradient = backward(o, 4, 2, kept)
    wider = torch.full((11, width + 24), torch.nan, dtype=o.qkv.dtype, device=DEVICE)
    q_norm, k_norm = (o.q_norm, o.k_norm) if norm else (None, None)
    view = wider[:, 8 : 8 + width]
    view.copy_(o.qkv)
    rope_qk_(view, o.cos, o.sin, o.position, heads=4, kv_heads=2, q_norm=q_norm, k_norm=k_norm, eps=EPS)
    assert same_bytes(view, expected)
    view.copy_(o.dqkv)
    rope_qk_backward_(
        view, o.cos, o.sin, o.position, heads=4, kv_heads=2, q_norm=q_norm, k_norm=k_norm, kept=kept
    )
    assert same_bytes(view, gradient)
    assert wider[:, :8].isnan().all()
    assert wider[:, 8 + width :].isnan().all()


def test_what_the_kernels_cannot_take_is_refused() -> None:
    o = operands(3, 2, 1, 64, torch.float32)
    with pytest.raises(AssertionError, match="16 bytes"):
        rope_qk_(o.qkv.view(-1)[1:-255].view(2, 256), o.cos, o.sin, o.position[:2], heads=2, kv_heads=1)
    with pytest.raises(AssertionError, match="both weights or none"):
        rope_qk_(o.qkv, o.cos, o.sin, o.position, heads=2, kv_heads=1, q_norm=o.q_norm)
    with pytest.raises(AssertionError, match="goes with QK-norm"):
        rope_qk_backward_(
            o.dqkv, o.cos, o.sin, o.position, heads=2, kv_heads=1, q_norm=o.q_norm, k_norm=o.k_norm
        )
