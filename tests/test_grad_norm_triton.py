"""The norms of all adapters at once: the written order bit for bit, whatever else lies in the arena."""

from __future__ import annotations

import os

import pytest
import torch
from row_company import same_bytes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the kernels are decorated

from gshare.kernels import grad_norm_triton
from gshare.kernels.grad_norm_triton import LANES, grad_norms
from gshare.kernels.slot_table import BLOCK, slot_tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (16, BLOCK, BLOCK + 16, 3 * BLOCK - 32)


def gradients(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randn(length, generator=generator) * torch.logspace(-6, 3, length)


def fold(x: torch.Tensor) -> torch.Tensor:
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x[..., 0]


def contract(x: torch.Tensor, *, lanes: int = LANES, shift: int = 0) -> torch.Tensor:
    """The docstring's order in PyTorch; `shift` zeros before the first element break it."""
    x = torch.nn.functional.pad(x.double(), (shift, -(x.numel() + shift) % BLOCK))
    sums = fold(x.square().view(-1, BLOCK))
    total = torch.zeros(lanes, dtype=torch.float64)
    for row in torch.nn.functional.pad(sums, (0, -sums.numel() % lanes)).view(-1, lanes):
        total = total + row
    return fold(total).sqrt()


def norms_of(
    slots: dict[int, int], order: list[int], *, adapters: int = 0, blocks: int = 0, fill: float = float("nan")
) -> list[torch.Tensor]:
    """Norms, in `order` of lengths, of slots {length: start} in an arena otherwise full of `fill`."""
    arena = torch.full((sum(slots) + 20 * BLOCK,), fill)
    for length, start in slots.items():
        arena[start : start + length] = gradients(length)
    tables = slot_tables([(slots[n], 0, n) for n in order], max_adapters=adapters, max_blocks=blocks)
    return list(grad_norms(arena.to(DEVICE), *(table.to(DEVICE) for table in tables)).cpu())


@pytest.mark.parametrize("length", [*LENGTHS, 50 * BLOCK + 48])
def test_one_adapter_has_the_bits_of_the_contract(length: int) -> None:
    (norm,) = norms_of({length: 0}, [length])
    assert same_bytes(norm, contract(gradients(length)))
    torch.testing.assert_close(norm, gradients(length).double().norm(), rtol=1e-13, atol=0)


def test_more_block_sums_than_lanes_are_added_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_norm_triton, "LANES", 4)  # 1,024 would need 4 million elements
    for blocks in (4, 5, 11):
        (norm,) = norms_of({blocks * BLOCK: 16}, [blocks * BLOCK])
        assert same_bytes(norm, contract(gradients(blocks * BLOCK), lanes=4))


def test_place_order_neighbours_and_padding_do_not_show() -> None:
    expected = {n: contract(gradients(n)) for n in LENGTHS}
    for shift in (0, 16, 48, 240, BLOCK - 16):
        starts, at = {}, shift
        for length in LENGTHS:
            starts[length] = at
            at += length + 16
        for order in (list(LENGTHS), list(reversed(LENGTHS)), [LENGTHS[2]]):
            for norm, length in zip(norms_of(starts, order), order, strict=True):
                assert same_bytes(norm, expected[length]), (shift, order, length)
    padded = norms_of(starts, list(LENGTHS), adapters=6, blocks=40)
    assert [float(n) for n in padded] == [*(float(expected[n]) for n in LENGTHS), 0.0, 0.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_shows_in_its_own_norm_alone(value: float) -> None:
    arena = torch.ones(3 * BLOCK)
    arena[BLOCK + 77] = value
    tables = slot_tables([(0, 0, BLOCK), (BLOCK, 0, BLOCK), (2 * BLOCK, 0, BLOCK)])
    norms = grad_norms(arena.to(DEVICE), *(table.to(DEVICE) for table in tables))
    assert torch.isfinite(norms).tolist() == [True, False, True]


def test_negative_control_blocks_counted_from_the_arena_are_noticed() -> None:
    length = 3 * BLOCK - 32
    assert not same_bytes(contract(gradients(length), shift=16), contract(gradients(length)))


def test_tables_that_are_too_small_or_unaligned_are_refused() -> None:
    with pytest.raises(AssertionError, match="3 blocks do not fit"):
        slot_tables([(0, 0, 3 * BLOCK)], max_blocks=2)
    with pytest.raises(AssertionError, match="2 adapters do not fit"):
        slot_tables([(0, 0, 16), (16, 16, 16)], max_adapters=1)
    with pytest.raises(AssertionError, match="multiples of 16"):
        slot_tables([(8, 0, 16)])
