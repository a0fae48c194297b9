"""8-bit AdamW of all matrices in one launch: the bits of `adamw_8bit_step_`, matrix by matrix."""

from __future__ import annotations

import os
from itertools import accumulate
from typing import Any

import pytest
import torch
from ieee_sqrt import ieee_sqrt
from row_company import same_bytes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the kernels are decorated

import triton
import triton.language as tl
from gshare.kernels.adamw_8bit import (
    MIN_8BIT_SIZE,
    Adam8bitState,
    adamw_8bit_step_,
    dequantise_blocks,
    dynamic_map,
    quantise_blocks,
)
from gshare.kernels.adamw_8bit_layout import (
    Matrix8bit,
    lookup_tables,
    matrix_tables,
    state_offsets,
    state_views,
)
from gshare.kernels.adamw_8bit_triton import _encode, adamw_8bit_
from gshare.kernels.adamw_triton import hyper_row
from gshare.kernels.grad_norm import clip_coefficient

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Below, at and above the limit of 8-bit state; a last block that is not full; three groups of blocks.
SHAPES = [(3, 16), (15, 273), (64, 64), (16, 257), (33, 257), (8, 6)]
NORM, LARGEST = 3.7, 1.0


@pytest.fixture(autouse=True)
def _reference_rounds_square_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "sqrt", ieee_sqrt)


def normal(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def hyper_of(adapter: int, step: int) -> dict[str, Any]:
    lr, beta1, decay = ((1e-3, 0.9, 0.01), (2e-4, 0.95, 0.0), (3e-2, 0.8, 0.1))[adapter]
    return {"lr": lr, "beta1": beta1, "beta2": 0.999, "eps": 1e-8, "weight_decay": decay, "step": step}


class Arenas:
    """Adapters with the matrices SHAPES each, in the given order, in arenas whose gaps hold marks."""

    def __init__(self, adapters: list[int], first: int = 0) -> None:
        self.adapters = adapters
        elements = [rows * columns for rows, columns in SHAPES]
        offsets = state_offsets(elements)
        padded = [-(-count // 16) * 16 for count in elements]
        starts = list(accumulate(padded, initial=0))
        room = starts[-1] + 32
        self.matrices = [
            Matrix8bit(
                place,
                first + place * room + starts[i],
                count,
                first * 4 + place * offsets.codes + codes,
                first + place * offsets.floats + floats,
            )
            for place in range(len(adapters))
            for i, (count, (codes, floats)) in enumerate(zip(elements, offsets.matrices, strict=True))
        ]
        size = first + len(adapters) * room
        params, grads = torch.full((size,), 77.0), torch.full((size,), 77.0)
        compute = torch.full((size,), 77.0, dtype=torch.bfloat16)
        codes = torch.full((2, first * 4 + len(adapters) * offsets.codes), 99, dtype=torch.uint8)
        floats = torch.full((2, first + len(adapters) * offsets.floats), 77.0)
        self.params, self.grads, self.compute = (t.to(DEVICE) for t in (params, grads, compute))
        self.codes, self.floats = ((t[0].to(DEVICE), t[1].to(DEVICE)) for t in (codes, floats))
        self.lookup = lookup_tables(DEVICE)
        for k, matrix in enumerate(self.matrices):
            for part in self.state(k).named_tensors().values():
                part.zero_()
            self.of(self.params, k).copy_(normal(matrix.elements, seed=self.seed(k)))

    def seed(self, k: int, step: int = 0) -> int:
        return 1000 * self.adapters[self.matrices[k].adapter] + 10 * (k % len(SHAPES)) + step

    def of(self, flat: torch.Tensor, k: int) -> torch.Tensor:
        matrix = self.matrices[k]
        return flat[matrix.weights : matrix.weights + matrix.elements]

    def state(self, k: int) -> Adam8bitState:
        return state_views(self.matrices[k], SHAPES[k % len(SHAPES)], self.codes, self.floats)

    def gradient(self, k: int, step: int) -> torch.Tensor:
        grad = normal(self.matrices[k].elements, seed=self.seed(k, step)) * 0.1
        grad[:300] *= 1e-4  # a first block of other size
        grad[-7:] = 0.0
        return grad

    def step(
        self,
        step: int,
        norms: list[float] | None = None,
        *,
        zero_grads: bool = False,
        sizes: tuple[int, int] = (0, 0),
    ) -> list[int]:
        """One step of all; the overflow marks."""
        count = len(self.adapters)
        for k in range(len(self.matrices)):
            self.of(self.grads, k).copy_(self.gradient(k, step))
        tables = matrix_tables(self.matrices, max_matrices=sizes[0], max_groups=sizes[1])
        hyper = [hyper_row(**hyper_of(a, step), max_grad_norm=LARGEST) for a in self.adapters]
        overflow = torch.zeros(count, dtype=torch.int32, device=DEVICE)
        adamw_8bit_(
            self.params,
            self.grads,
            self.codes,
            self.floats,
            self.compute,
            self.lookup,
            *(table.to(DEVICE) for table in tables),
            torch.tensor(hyper, dtype=torch.float64, device=DEVICE),
            torch.tensor(norms or [NORM] * count, dtype=torch.float64, device=DEVICE),
            torch.ones(count, dtype=torch.int32, device=DEVICE),
            overflow=overflow,
            zero_grads=zero_grads,
        )
        return overflow.tolist()

    def snapshot(self, place: int) -> list[torch.Tensor]:
        """Weights, compute copy and state of the adapter at `place`."""
        found = []
        for k, matrix in enumerate(self.matrices):
            if matrix.adapter == place:
                parts = (
                    self.of(self.params, k),
                    self.of(self.compute, k),
                    *self.state(k).named_tensors().values(),
                )
                found += [part.cpu().clone() for part in parts]
        return found


def reference(adapter: int, steps: int) -> list[torch.Tensor]:
    """What `Adapter.update` gives after `steps` steps."""
    arenas, found = Arenas([adapter]), []
    for k, shape in enumerate(SHAPES):
        param = normal(arenas.matrices[k].elements, seed=arenas.seed(k)).view(shape)
        state = Adam8bitState.new(shape)
        for step in range(1, steps + 1):
            grad = arenas.gradient(k, step).view(shape) * clip_coefficient(NORM, LARGEST)
            adamw_8bit_step_(param, grad, state, **hyper_of(adapter, step))
        found += [param.view(-1), param.view(-1).bfloat16(), *state.named_tensors().values()]
    return found


def agree(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(same_bytes(a, b) for a, b in zip(found, expected, strict=True))


def test_three_steps_have_the_bits_of_the_reference_in_any_place_and_order() -> None:
    expected = [reference(adapter, steps=3) for adapter in range(3)]
    runs = [([0, 1, 2], 0, (0, 0)), ([2, 0], 16, (0, 0)), ([1], 240, (20, 90))]
    for adapters, first, sizes in runs:
        arenas = Arenas(adapters, first)
        for step in (1, 2, 3):
            assert arenas.step(step, sizes=sizes) == [0] * len(adapters)
        for place, adapter in enumerate(adapters):
            assert agree(arenas.snapshot(place), expected[adapter]), (adapters, adapter)


def test_outside_the_matrices_nothing_but_zeros_in_their_gaps_is_written() -> None:
    arenas = Arenas([0, 1], first=16)
    flats = [arenas.params, arenas.grads, arenas.compute, *arenas.floats, *arenas.codes]
    owner = [torch.zeros(flat.numel(), dtype=torch.int64, device=DEVICE) for flat in flats]
    for matrix in arenas.matrices:
        big = matrix.elements >= MIN_8BIT_SIZE
        lengths = [matrix.elements] * 3 + [-(-matrix.elements // 256) if big else matrix.elements] * 2
        starts = [matrix.weights] * 3 + [matrix.floats] * 2
        for marks, start, length in zip(owner, starts, lengths, strict=False):
            gap = 0 if big and start == matrix.floats else -length % 16
            marks[start : start + length + gap] = 1
            marks[start + length : start + length + gap] = 2
        for marks in owner[5:]:
            marks[matrix.codes : matrix.codes + (-(-matrix.elements // 16) * 16 if big else 0)] = 1
    arenas.step(1, zero_grads=True)
    for flat, marks in zip(flats, owner, strict=True):
        assert bool((flat[marks == 0] == (99 if flat.dtype == torch.uint8 else 77)).all())
        assert not flat[marks == 2].any()
    assert int((owner[0] == 2).sum()) == 2 * (1 + 15)  # 15 × 273 and 33 × 257 end in gaps
    assert not any(arenas.of(arenas.grads, k).any() for k in range(len(arenas.matrices)))


def test_an_adapter_whose_norm_is_not_finite_is_left_as_it_was() -> None:
    arenas = Arenas([0, 1])
    arenas.step(1)
    before = arenas.snapshot(1)
    arenas.step(2, norms=[NORM, float("nan")])
    assert agree(arenas.snapshot(1), before)
    assert agree(arenas.snapshot(0), reference(0, steps=2))


@triton.jit
def encode_kernel(x_ptr, midpoints_ptr, codes_ptr, absmax_ptr, ROWS: tl.constexpr, SIGNED: tl.constexpr):
    row = tl.arange(0, ROWS)
    at = row[:, None] * 256 + tl.arange(0, 256)[None, :]
    codes, absmax = _encode(tl.load(x_ptr + at), midpoints_ptr, SIGNED)
    tl.store(codes_ptr + at, codes)
    tl.store(absmax_ptr + row, absmax)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_of_ties_neighbours_and_signs_are_those_of_the_reference(signed: bool) -> None:
    table = dynamic_map(signed)
    ties = (table[:-1] + table[1:]) * 0.5
    close = [torch.nextafter(ties, ties + sign) for sign in (1, -1)]
    tiny = torch.tensor([1e-9, -1e-9, 2.7e-7, -2.7e-7, -2.8e-7, 0.0, -0.0])
    x = torch.cat([table, ties, *close, tiny, normal(3 * 256, seed=1).clamp(-1, 1)])
    x = x if signed else x.abs()
    x = torch.cat([x, torch.zeros(-x.numel() % (8 * 255))]).view(-1, 255)
    x = torch.cat([x, torch.ones(x.shape[0], 1)], dim=1)  # absmax 1: the scaled value is x itself
    x[-1] = 0.0
    expected_codes, expected_absmax = quantise_blocks(x, signed)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=DEVICE)
    absmax = torch.empty(x.shape[0], device=DEVICE)
    midpoints = lookup_tables(DEVICE)[1 if signed else 3]
    for i in range(0, x.shape[0], 8):
        rows = slice(i, i + 8)
        encode_kernel[(1,)](x[rows].to(DEVICE), midpoints, codes[rows], absmax[rows], ROWS=8, SIGNED=signed)
    assert same_bytes(codes.cpu(), expected_codes)
    assert same_bytes(absmax.cpu(), expected_absmax)
    # Negative control: ties really are among the values, and rounding them up would be noticed.
    up = torch.bucketize(x, ties, right=True)
    assert not torch.equal(up.clamp(max=255).to(torch.uint8), expected_codes)


def test_negative_control_blocks_counted_from_elsewhere_are_noticed() -> None:
    x = normal(600, seed=5)

    def decoded(before: int) -> torch.Tensor:
        blocks = torch.nn.functional.pad(x, (before, -(before + 600) % 256)).view(-1, 256)
        return dequantise_blocks(*quantise_blocks(blocks, True), signed=True).view(-1)[before : before + 600]

    assert same_bytes(decoded(256), decoded(0))
    assert not same_bytes(decoded(16), decoded(0))


def test_tables_that_are_too_small_are_refused() -> None:
    matrices = [Matrix8bit(0, 0, 9000, 0, 0)]
    with pytest.raises(AssertionError, match="5 groups do not fit"):
        matrix_tables(matrices, max_groups=4)
    with pytest.raises(AssertionError, match="2 matrices do not fit"):
        matrix_tables(matrices * 2, max_matrices=1)
