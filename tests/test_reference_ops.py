"""The references' explicit backward passes against autograd in float64, on odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gshare.kernels import gemm as gemm_module
from gshare.kernels.attention import attend, attention_backward_reference, attention_reference, causal_mask
from gshare.kernels.cross_entropy import cross_entropy_reference
from gshare.kernels.errors import NotRowInvariant
from gshare.kernels.gemm import (
    CHECK_ROWS,
    TILE_ROWS,
    RowInvariantGemm,
    choose_plan,
    in_tiles,
    linear_dx_reference,
    linear_reference,
)
from gshare.kernels.grouped_lora import lora_dx_reference, lora_forward_reference, lora_grads_reference
from gshare.kernels.layout import Layout, LoraSlot
from gshare.kernels.rms_norm import (
    rms_norm_apply_reference,
    rms_norm_backward_reference,
    rms_norm_reference,
)
from gshare.kernels.rope import rope_backward_reference, rope_reference
from gshare.kernels.swiglu import swiglu_backward_reference, swiglu_reference

ODD = (1, 6, 42, 123)


def near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert error <= tolerance, float(error)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("tokens", ODD)
@pytest.mark.parametrize("width", [5, 64, 431])
def test_rms_norm(tokens: int, width: int) -> None:
    x, w, dy = torch.randn(tokens, width), torch.rand(width) + 0.5, torch.randn(tokens, width)
    y, rstd = rms_norm_reference(x, w, 1e-5)
    x64 = x.double().requires_grad_()
    expected = x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + 1e-5) * w.double()
    expected.backward(dy.double())
    near(y, expected.detach())
    near(rms_norm_backward_reference(dy, x, w, rstd), x64.grad)
    assert torch.equal(rms_norm_apply_reference(x, w, rstd), y)


@pytest.mark.parametrize("tokens", ODD)
def test_swiglu(tokens: int) -> None:
    g, u, dm = (torch.randn(tokens, 37) * 3 for _ in range(3))
    g64, u64 = g.double().requires_grad_(), u.double().requires_grad_()
    expected = torch.nn.functional.silu(g64) * u64
    expected.backward(dm.double())
    dg, du = swiglu_backward_reference(dm, g, u)
    near(swiglu_reference(g, u), expected.detach())
    near(dg, g64.grad)
    near(du, u64.grad)


def test_swiglu_bits_do_not_depend_on_an_element_s_place() -> None:
    """torch's fused silu fails this: its scalar tail rounds otherwise than its vector body."""
    g = torch.randn(4096) * 3
    u = torch.ones_like(g)
    whole = swiglu_reference(g, u)
    for length in (1, 3, 17, 100, 1001):
        for start in (0, 1, 5, 250):
            rows = slice(start, start + length)
            assert torch.equal(swiglu_reference(g[rows].clone(), u[rows].clone()), whole[rows])


def test_rope_backward_is_the_transpose() -> None:
    x, dy = torch.randn(11, 3, 8), torch.randn(11, 3, 8)
    angle = torch.rand(11, 4) * 6
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    forward = (rope_reference(x, cos, sin) * dy).double().sum()
    backward = (x * rope_backward_reference(dy, cos, sin)).double().sum()
    assert abs(forward - backward) < 1e-4
    near(rope_reference(x, cos, sin).norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
def test_attention_and_backward(window: int | None, heads: int, kv_heads: int) -> None:
    layout = Layout((0, 1, 8, 31))
    total, dim = layout.tokens, 6
    q, do = torch.randn(total, heads, dim), torch.randn(total, heads, dim)
    k, v = torch.randn(total, kv_heads, dim), torch.randn(total, kv_heads, dim)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    parts = []
    for a, b in layout.sequences:
        qs, ks, vs = (t[a:b].transpose(0, 1) for t in wide)
        ks, vs = (t.repeat_interleave(heads // kv_heads, 0) for t in (ks, vs))
        scores = qs @ ks.transpose(1, 2) * 0.3 + causal_mask(b - a, b - a, window).double()
        parts.append((scores.softmax(-1) @ vs).transpose(0, 1))
    expected = torch.cat(parts)
    expected.backward(do.double())
    o = attention_reference(q, k, v, layout, scale=0.3, window=window)
    near(o, expected.detach())
    grads = attention_backward_reference(do, q, k, v, o, layout, scale=0.3, window=window)
    for actual, leaf in zip(grads, wide, strict=True):
        near(actual, leaf.grad, 5e-6)


def test_a_sequence_attends_to_itself_only() -> None:
    q, k, v = (torch.randn(20, 2, 4) for _ in range(3))
    together = attention_reference(q, k, v, Layout((0, 7, 20)), scale=0.5, window=None)
    k[:7] = torch.nan
    alone = attention_reference(q, k, v, Layout((0, 7, 20)), scale=0.5, window=None)
    assert torch.equal(together[7:], alone[7:])
    assert alone[:7].isnan().any()


def test_cached_attention_equals_whole() -> None:
    q, k, v = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    whole = attend(q, k, v, scale=0.3, window=4)
    last = attend(q[6:], k, v, scale=0.3, window=4)
    near(last, whole[6:])


@pytest.mark.parametrize("rows", [1, 255, 256, 300])
def test_cross_entropy(rows: int) -> None:
    h, head = torch.randn(rows, 16), torch.randn(50, 16)
    targets, scale = torch.randint(0, 50, (rows,)), torch.rand(rows)
    h64 = h.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(h64 @ head.double().t(), targets, reduction="none")
    (expected * scale.double()).sum().backward()
    nll, dh = cross_entropy_reference(h, head, targets, scale, RowInvariantGemm())
    near(nll, expected.detach())
    assert dh is not None
    near(dh, h64.grad, 5e-6)
    only, none = cross_entropy_reference(h, head, targets, None, RowInvariantGemm())
    assert none is None
    assert torch.equal(only, nll)


def _slots(spans: list[list[tuple[int, int]]], ranks: list[int], k: int, n: int) -> list[LoraSlot]:
    return [
        LoraSlot(
            start=ranges[0][0],
            end=ranges[-1][1],
            sequences=tuple(ranges),
            a=torch.randn(r, k) / k**0.5,
            b=torch.randn(n, r) / r**0.5,
            grad_a=torch.zeros(r, k),
            grad_b=torch.zeros(n, r),
            scaling=2.0 / (i + 1),
        )
        for i, (ranges, r) in enumerate(zip(spans, ranks, strict=True))
    ]


def test_grouped_lora_against_autograd() -> None:
    """Three adapters of ranks 1, 7 and 32 over ragged sequences; rows 6:11 have no adapter."""
    k, n = 19, 23
    slots = _slots([[(0, 1), (1, 6)], [(11, 12)], [(12, 40), (40, 43)]], [1, 7, 32], k, n)
    x, y, dy = torch.randn(43, k), torch.randn(43, n), torch.randn(43, n)
    dx = torch.randn(43, k)
    before_y, before_dx = y.clone(), dx.clone()
    thin = RowInvariantGemm().thin
    saved = lora_forward_reference(x, y, slots, thin)
    lora_grads_reference(x, dy, slots, saved, lora_dx_reference(dy, dx, slots, thin))
    assert torch.equal(y[6:11], before_y[6:11])
    assert torch.equal(dx[6:11], before_dx[6:11])
    for slot in slots:
        rows = slice(slot.start, slot.end)
        xs = x[rows].double().requires_grad_()
        a, b = slot.a.double().requires_grad_(), slot.b.double().requires_grad_()
        added = slot.scaling * (xs @ a.t() @ b.t())
        added.backward(dy[rows].double())
        near(y[rows] - before_y[rows], added.detach(), 2e-6)
        near(dx[rows] - before_dx[rows], xs.grad, 2e-6)
        assert slot.grad_a is not None
        assert slot.grad_b is not None
        near(slot.grad_a, a.grad)
        near(slot.grad_b, b.grad)


@pytest.mark.parametrize(("k", "n"), [(64, 176), (176, 64), (576, 1536), (1536, 576), (64, 301)])
def test_rows_of_a_packed_product_have_solo_bits(k: int, n: int) -> None:
    gemm = RowInvariantGemm()
    w = torch.randn(n, k)
    x, dy = torch.randn(333, k), torch.randn(333, n)
    y, dx = gemm.linear(x, w), gemm.linear_dx(dy, w)
    for start, rows in ((0, 1), (3, 5), (16, 16), (40, 63), (100, 200), (332, 1)):
        assert torch.equal(gemm.linear(x[start : start + rows].clone(), w), y[start : start + rows])
        assert torch.equal(gemm.linear_dx(dy[start : start + rows].clone(), w), dx[start : start + rows])


def test_the_negative_control_is_not_row_invariant() -> None:
    gemm = RowInvariantGemm(exact=False)
    w, x = torch.randn(176, 64), torch.randn(333, 64)
    assert not torch.equal(gemm.linear(x[:5].clone(), w), gemm.linear(x, w)[:5])
    near(gemm.linear(x, w), linear_reference(x, w))
    dy = torch.randn(333, 176)
    assert not torch.equal(gemm.linear_dx(dy[:5].clone(), w), gemm.linear_dx(dy, w)[:5])
    near(gemm.linear_dx(dy, w), linear_dx_reference(dy, w))


def _splits_above(limit: int):
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= limit:
            return x @ w.t()
        half = x.shape[1] // 2
        return (x[:, :half] @ w[:, :half].t()).addmm_(x[:, half:], w[:, half:].t())

    return product


def test_a_product_that_splits_k_is_run_in_tiles() -> None:
    """A library that splits K above 100 rows: found, and the tiled plan restores the property."""
    product, w = _splits_above(100), torch.randn(48, 96)
    x = torch.randn(max(CHECK_ROWS["cpu"]), 96)
    assert not torch.equal(product(x[:7], w), product(x, w)[:7])
    assert choose_plan("linear", product, x, w) == "tiled"
    tiled = in_tiles(product, x, w)
    assert torch.equal(in_tiles(product, x[50:57].clone(), w), tiled[50:57])


def test_a_product_that_looks_at_its_neighbours_is_refused() -> None:
    def poisoned(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w.t() + x.sum()

    with pytest.raises(NotRowInvariant, match="depend on their neighbours"):
        choose_plan("linear", poisoned, torch.randn(4, 32), torch.randn(8, 32))


def _few_rows_differ(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As MKL on processors that are not Intel's, where its strict mode is none: fewer than 16 rows of a thin
    product are summed in another order."""
    if x.shape[0] >= 16:
        return x @ w
    half = x.shape[1] // 2
    return x[:, :half] @ w[:half] + x[:, half:] @ w[half:]


@pytest.mark.parametrize("exact", [True, False])
def test_an_adapter_s_products_have_the_bits_of_a_sequence_alone(
    monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """Whatever library multiplies; the second is the control. B is zero before the first step, when the plans
    are made."""
    monkeypatch.setattr(gemm_module, "linear_dx_reference", _few_rows_differ)
    thin = RowInvariantGemm().thin if exact else _few_rows_differ
    (slot,) = _slots([[(0, 3), (3, 40), (40, 41)]], [8], 64, 48)
    x, dy, zero = torch.randn(41, 64), torch.randn(41, 48), torch.zeros_like(slot.b)
    lora_forward_reference(x, torch.zeros(41, 48), [replace(slot, b=zero)], thin)

    def run(first: int, last: int, slot: LoraSlot) -> list[torch.Tensor]:
        y, dx = torch.zeros(last - first, 48), torch.zeros(last - first, 64)
        (s,) = lora_forward_reference(x[first:last].clone(), y, [slot], thin)
        (ds,) = lora_dx_reference(dy[first:last].clone(), dx, [slot], thin)
        return [y, s, dx, ds]

    together = run(0, 41, slot)
    for first, last in slot.sequences:
        alone = replace(slot, start=0, end=last - first, sequences=((0, last - first),))
        same = all(
            torch.equal(one, whole[first:last])
            for one, whole in zip(run(first, last, alone), together, strict=True)
        )
        assert same is (exact or last - first >= 16)


def _peak(run: Callable[[], object]) -> int:
    """The most bytes that were allocated at once, by the allocator's own record."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as seen:
        run()
    held = most = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize("plan", ["whole", "tiled"])
def test_a_product_is_compared_within_two_results(plan: str) -> None:
    """`estimate_run` counts the logits of 256 rows twice: what compares the head's may not need more, nor
    may what runs it in tiles need another result."""
    w = torch.randn(20_000, 8)
    product = {"whole": lambda x, w: x[:, :1] * w[:, 0], "tiled": _splits_above(100)}[plan]
    rows = max(CHECK_ROWS["cpu"])
    result, tile = rows * w.shape[0] * 4, TILE_ROWS["cpu"] * w.shape[0] * 4
    product(torch.ones(rows, 8), w)  # what a library keeps for itself from its first product on

    def compare() -> str:
        return choose_plan("linear", product, torch.ones(1, 8), w)

    assert compare() == plan
    assert result < _peak(compare) < 2.1 * result + 2 * tile
    assert result < _peak(lambda: in_tiles(product, torch.ones(rows, 8), w)) < 1.1 * result + 2 * tile


def test_the_head_is_compared_before_there_are_logits() -> None:
    """Its products need as much as the logits do: the first pass may not hold both."""
    h, head, targets = torch.randn(256, 8), torch.randn(20_000, 8), torch.randint(20_000, (256,))
    logits, gemm = targets.numel() * head.shape[0] * 4, RowInvariantGemm()
    peaks = [
        _peak(lambda: cross_entropy_reference(h, head, targets, torch.ones(256), gemm)) for _ in range(2)
    ]
    assert logits < peaks[0] < peaks[1] + 0.4 * logits


def test_a_product_of_no_rows_is_empty() -> None:
    """A pass may have no label at all."""
    empty = in_tiles(linear_dx_reference, torch.zeros(0, 8), torch.zeros(8, 5))
    assert empty.shape == (0, 5)
