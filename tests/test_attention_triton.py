"""The attention kernels: close to float64, and a sequence's bits know nothing of the others in the batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from row_company import relative_error, same_bytes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the kernels are decorated

pytest.importorskip("triton")
from gshare.kernels import attention_backward_triton
from gshare.kernels.attention import causal_mask
from gshare.kernels.attention_backward_triton import attention_backward
from gshare.kernels.attention_triton import (
    NO_SEQUENCE,
    NOTHING,
    ROWS,
    attention_blocks,
    attention_forward,
    block_capacity,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
#: o (T, Hq·D), lse (T, Hq), dqkv (T, …).
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
#: (qkv, do, starts) → Results.
Operation = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], Results]


def starts_of(lengths: Sequence[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def table(entries: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.int32, device=DEVICE)


def operands(
    tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """qkv, do."""
    generator = torch.Generator().manual_seed(seed * 100003 + tokens * 101 + heads * 7 + dim)
    widths = ((heads + 2 * kv_heads) * dim, heads * dim)
    qkv, do = (torch.randn(tokens, width, generator=generator) for width in widths)
    return qkv.to(DEVICE, dtype), do.to(DEVICE, dtype)


def kernels(
    qkv: torch.Tensor, do: torch.Tensor, blocks: torch.Tensor, heads: int, kv_heads: int, window: int | None
) -> Results:
    dim = qkv.shape[1] // (heads + 2 * kv_heads)
    how: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "scale": dim**-0.5, "window": window}
    o, lse = attention_forward(qkv, blocks, **how)
    by_row = lse.t().clone(memory_format=torch.contiguous_format)
    return o, by_row, attention_backward(do, qkv, o, lse, blocks, **how)


def float64(
    qkv: torch.Tensor, do: torch.Tensor, starts: Sequence[int], heads: int, kv_heads: int, window: int | None
) -> Results:
    leaf = qkv.double().requires_grad_()
    x = leaf.view(qkv.shape[0], heads + 2 * kv_heads, -1).transpose(0, 1)
    q, k, v = x.split([heads, kv_heads, kv_heads])
    k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
    outs, sums = [], []
    for a, b in pairwise(starts):
        mask = causal_mask(b - a, b - a, window, qkv.device).double()
        scores = q[:, a:b] @ k[:, a:b].transpose(1, 2) * q.shape[-1] ** -0.5 + mask
        outs.append((scores.softmax(-1) @ v[:, a:b]).transpose(0, 1))
        sums.append(scores.logsumexp(-1).t())
    o = torch.cat(outs).flatten(1)
    o.backward(do.double())
    assert leaf.grad is not None
    return o.detach(), torch.cat(sums).detach(), leaf.grad


def check(
    heads: int, kv_heads: int, dim: int, lengths: Sequence[int], window: int | None, dtype: torch.dtype
) -> None:
    starts = starts_of(lengths)
    qkv, do = operands(starts[-1], heads, kv_heads, dim, dtype)
    o, lse, dqkv = kernels(qkv, do, table(attention_blocks(starts)), heads, kv_heads, window)
    o64, lse64, dqkv64 = float64(qkv, do, starts, heads, kv_heads, window)
    assert relative_error(o, o64) <= TOLERANCE[dtype]
    assert relative_error(lse, lse64) <= 1e-5
    for got, want in zip(
        dqkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1),
        dqkv64.split([heads * dim, kv_heads * dim, kv_heads * dim], 1),
        strict=True,
    ):
        # A position that sees itself alone has P = 1, and dS = 0 but for rounding: nothing to compare with.
        if window == 1 and want.norm() < 1e-9:
            assert float(got.double().norm()) <= TOLERANCE[dtype] * float(do.double().norm())
        else:
            assert relative_error(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "lengths", "dtype"),
    [
        (2, 2, 64, (1, 63, 64, 65), torch.bfloat16),
        (4, 1, 64, (200, 6), torch.bfloat16),
        (7, 1, 64, (1, 130), torch.bfloat16),
        (1, 1, 64, (511,), torch.bfloat16),
        (4, 1, 128, (63, 70), torch.bfloat16),
        (2, 2, 80, (1, 65), torch.bfloat16),
        (2, 1, 256, (1, 65), torch.bfloat16),
        (1, 1, 64, (1, 63, 64, 65), torch.float32),
        (4, 1, 64, (65,), torch.float32),
        (7, 1, 16, (33,), torch.float32),
        (1, 1, 128, (65,), torch.float32),
        (1, 1, 80, (40,), torch.float32),
        (1, 1, 256, (35,), torch.float32),
    ],
)
def test_near_float64(
    heads: int, kv_heads: int, dim: int, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    check(heads, kv_heads, dim, lengths, None, dtype)


@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, 100, 128, 4096])
def test_window_near_float64(window: int) -> None:
    check(2, 1, 64, (1, 65, 200), window, torch.bfloat16)


@pytest.mark.parametrize("window", [1, 16, 33])
def test_window_near_float64_in_fp32(window: int) -> None:
    check(1, 1, 64, (70,), window, torch.float32)


# ---------------------------------------------------------------------- company


def ignores_company(op: Operation, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether `op` gives each sequence (qkv, do) of `parts` the bytes that it has alone: beside the others in
    two orders, and between sequences of NaN of 1, 7 or 15 tokens."""
    alone = [op(qkv, do, [0, qkv.shape[0]]) for qkv, do in parts]
    foreign = [
        tuple(torch.full((n, x.shape[1]), torch.nan, dtype=x.dtype, device=DEVICE) for x in parts[0])
        for n in (1, 7, 15)
    ]
    count = len(parts)
    companies = [(range(count), list(parts)), (range(count - 1, -1, -1), list(parts)[::-1])]
    companies += [(range(1, count + 1), [nan, *parts, nan]) for nan in foreign]
    for places, sequences in companies:
        starts = starts_of([qkv.shape[0] for qkv, _ in sequences])
        qkv, do = (torch.cat(tensors) for tensors in zip(*sequences, strict=True))
        together = op(qkv, do, starts)
        order = range(count) if places[0] < places[-1] else range(count - 1, -1, -1)
        for place, i in zip(sorted(places), order, strict=True):
            rows = slice(starts[place], starts[place + 1])
            if not all(same_bytes(t[rows], a) for t, a in zip(together, alone[i], strict=True)):
                return False
    return True


@pytest.mark.parametrize(
    ("heads", "dim", "window", "lengths", "dtype"),
    [
        (2, 64, None, (65, 1), torch.bfloat16),
        (2, 64, 16, (65, 1), torch.bfloat16),
        (1, 80, 100, (130, 1), torch.bfloat16),
        (1, 64, None, (40, 33), torch.float32),
        (1, 64, 16, (40, 33), torch.float32),
    ],
)
def test_a_sequence_ignores_its_company(
    heads: int, dim: int, window: int | None, lengths: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts = [operands(n, heads, 1, dim, dtype, seed=n) for n in lengths]

    def op(qkv: torch.Tensor, do: torch.Tensor, starts: Sequence[int]) -> Results:
        return kernels(qkv, do, table(attention_blocks(starts)), heads, 1, window)

    assert ignores_company(op, parts)


@pytest.mark.parametrize("fault", ["splits", "blocks"])
def test_negative_control_an_order_set_by_the_batch_is_noticed(fault: str) -> None:
    """Keys in as many pieces as the batch has sequences (as FlashAttention's dQ), or in blocks that start at
    the batch's first token: both right, neither with a sequence's own bits."""
    parts = [operands(n, 1, 1, 64, torch.float32, seed=n) for n in (65, 1, 130)]

    def op(qkv: torch.Tensor, do: torch.Tensor, starts: Sequence[int]) -> Results:
        outs, sums = [], []
        for a, b in pairwise(starts):
            q, k, v = qkv[a:b].split(64, 1)
            edges = range(0, b - a, -(-(b - a) // len(starts)))
            if fault == "blocks":
                edges = range(a // 64 * 64 - a, b - a, 64)
            scores = q @ k.t() / 8 + causal_mask(b - a, b - a, None, qkv.device)
            lse = scores.logsumexp(-1, keepdim=True)
            p = (scores - lse).exp()
            pieces = [slice(max(e, 0), max(e + edges.step, 0)) for e in edges]
            outs.append(sum(p[:, piece] @ v[piece] for piece in pieces))
            sums.append(lse)
        return torch.cat(outs), torch.cat(sums), do

    assert not ignores_company(op, parts)


@dtypes
def test_order_and_filler_of_the_table_change_nothing(dtype: torch.dtype) -> None:
    starts = starts_of((65, 1))
    qkv, do = operands(starts[-1], 1, 1, 64, dtype)
    entries = attention_blocks(starts)
    plain = kernels(qkv, do, table(entries), 1, 1, None)
    nothing = [(NOTHING, NOTHING, NOTHING)] * 3
    for other in (entries + nothing, nothing[:1] + entries[::-1] + nothing[:1]):
        again = kernels(qkv, do, table(other), 1, 1, None)
        assert all(same_bytes(a, b) for a, b in zip(plain, again, strict=True))


# ---------------------------------------------------------------------- sums over a group's heads


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_the_heads_of_a_group_are_added_in_order(order: tuple[int, ...]) -> None:
    """Against the same heads launched one at a time; the other order is the negative control."""
    qkv, do = operands(40, 3, 1, 64, torch.float32)
    blocks = table(attention_blocks([0, 40]))
    q, kv = qkv.split([192, 128], 1)
    total = torch.zeros_like(kv)
    for head in order:
        columns = slice(head * 64, head * 64 + 64)
        alone = torch.cat([q[:, columns], kv], 1)
        # The scale is a power of two: multiplying each summand by it, or the sum, is the same.
        total += kernels(alone, do[:, columns].contiguous(), blocks, 1, 1, None)[2][:, 64:]
    assert same_bytes(kernels(qkv, do, blocks, 3, 1, None)[2][:, 192:], total) == (order == (0, 1, 2))


@pytest.mark.usefixtures("_nan_allocations")
def test_little_scratch_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = starts_of((1, 2, 3, 40))
    qkv, do = operands(starts[-1] + 5, 4, 1, 128, torch.bfloat16)  # two sums of two heads
    qkv[starts[-1] :] = torch.nan
    entries = [*attention_blocks(starts, starts[-1] + 5), (NOTHING, NOTHING, NOTHING)]
    sizes: list[int] = []
    split = torch.Tensor.split

    def seen(x: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
        sizes.append(len(split(x, size)))
        return split(x, size)

    monkeypatch.setattr(torch.Tensor, "split", seen)
    plain = kernels(qkv, do, table(entries), 4, 1, None)
    monkeypatch.setattr(attention_backward_triton, "SCRATCH_BYTES", 1)
    pieces = kernels(qkv, do, table(entries), 4, 1, None)
    assert sizes == [1, 2]
    assert all(same_bytes(a, b) for a, b in zip((plain[0], plain[2]), (pieces[0], pieces[2]), strict=True))


# ---------------------------------------------------------------------- rows of no sequence, views


@pytest.fixture
def _nan_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody writes is NaN, instead of zero by chance."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        x = empty(*size, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", poisoned)


@dtypes
@pytest.mark.parametrize(("lengths", "rows"), [((65,), 66), ((3, 64), 200)])
@pytest.mark.usefixtures("_nan_allocations")
def test_rows_of_no_sequence_are_zero(lengths: tuple[int, ...], rows: int, dtype: torch.dtype) -> None:
    starts = starts_of(lengths)
    qkv, do = operands(rows, 2, 1, 64, dtype)
    qkv[starts[-1] :], do[starts[-1] :] = torch.nan, torch.nan
    padded = kernels(qkv, do, table(attention_blocks(starts, rows)), 2, 1, None)
    for x in (padded[0], padded[2]):
        assert (x[starts[-1] :] == 0).all()
    bare = kernels(qkv[: starts[-1]], do[: starts[-1]], table(attention_blocks(starts)), 2, 1, None)
    assert all(same_bytes(a[: starts[-1]], b) for a, b in zip(padded, bare, strict=True))
    left_out = kernels(qkv, do, table(attention_blocks(starts)), 2, 1, None)
    assert left_out[0][starts[-1] :].isnan().all()  # negative control: it is the entries that do it


def test_columns_of_a_wider_buffer() -> None:
    starts = starts_of((70, 5))
    qkv, do = operands(starts[-1], 2, 1, 64, torch.bfloat16)
    blocks = table(attention_blocks(starts))
    views = []
    for x in (qkv, do):
        wider = torch.full((x.shape[0], x.shape[1] + 24), torch.nan, dtype=x.dtype, device=DEVICE)
        views.append(wider[:, 8 : 8 + x.shape[1]].copy_(x))
    expected = kernels(qkv, do, blocks, 2, 1, None)
    assert all(same_bytes(a, b) for a, b in zip(kernels(*views, blocks, 2, 1, None), expected, strict=True))


def test_what_the_kernels_cannot_take_is_refused() -> None:
    qkv, _ = operands(8, 2, 1, 64, torch.float32)
    blocks = table(attention_blocks([0, 8]))
    how: dict[str, Any] = {"heads": 2, "kv_heads": 1, "scale": 0.1, "window": None}
    with pytest.raises(AssertionError, match="head size 24"):
        attention_forward(qkv[:, :96].contiguous(), blocks, **how)
    with pytest.raises(AssertionError, match="16 bytes"):
        attention_forward(qkv.view(-1)[1:-255].view(7, 256), blocks, **how)
    with pytest.raises(AssertionError):
        attention_forward(qkv, blocks.long(), **how)


# ---------------------------------------------------------------------- block table


@given(st.lists(st.integers(1, 400), min_size=1, max_size=12), st.integers(0, 300))
def test_the_table_covers_every_row_once(lengths: list[int], tail: int) -> None:
    starts = starts_of(lengths)
    rows = starts[-1] + tail
    entries = attention_blocks(starts, rows)
    assert len(entries) <= block_capacity(rows, len(lengths))
    covered = [row for _, end, first in entries for row in range(first, min(first + ROWS, end))]
    assert sorted(covered) == list(range(rows))
    inside = [entry for entry in entries if entry[0] != NO_SEQUENCE]
    assert entries[: len(inside)] == inside
    assert {(start, end) for start, end, _ in inside} == set(pairwise(starts))
    walks = [first - start for start, _, first in inside]
    assert all(walk % ROWS == 0 for walk in walks)
    assert walks == sorted(walks, reverse=True)
    assert all(first >= starts[-1] and end == rows for start, end, first in entries if start == NO_SEQUENCE)
