"""8-bit AdamW against bitsandbytes, a scalar model of its CUDA kernel's rounding, and itself."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from gshare.kernels import adamw_8bit
from gshare.kernels.adamw import adamw_step_
from gshare.kernels.adamw_8bit import (
    BLOCK,
    MIN_8BIT_SIZE,
    Adam8bitState,
    adamw_8bit_step_,
    dequantise_blocks,
    dynamic_map,
    quantise_blocks,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    bnb = pytest.importorskip("bitsandbytes")

HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("signed", [True, False])
def test_tables_equal_bitsandbytes_bit_for_bit(signed: bool) -> None:
    assert torch.equal(dynamic_map(signed), bnb.functional.create_dynamic_map(signed))


def binary_search_code(table: np.ndarray, x: np.float32, signed: bool) -> int:
    """A scalar model of a binary search that compares with midpoints, as the CUDA kernel's."""
    low, pivot, high = 0, 127, 255
    for half in (64, 32, 16, 8, 4, 2, 1):
        if x > table[pivot]:
            low, pivot = pivot, pivot + half
        else:
            high, pivot = pivot, pivot - half
    if x > table[pivot]:
        code = high if x > (table[high] + table[pivot]) * np.float32(0.5) else pivot
    else:
        code = low if x < (table[low] + table[pivot]) * np.float32(0.5) else pivot
    return code - 1 if signed and x < 0 and table[code] >= 0 else code


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_binary_search_ties_and_signs_included(signed: bool) -> None:
    table = dynamic_map(signed)
    ties = (table[:-1] + table[1:]) * 0.5
    tiny = torch.tensor([1e-9, -1e-9, 2.7e-7, -2.7e-7, -2.8e-7, 0.0])
    x = torch.cat([table, ties, torch.nextafter(ties, ties + 1), tiny, normal(3000, seed=1).clamp(-1, 1)])
    x = x if signed else x.abs()
    x = torch.cat([x, torch.zeros(-x.numel() % 255)]).view(-1, 255)
    x = torch.cat([x, torch.ones(x.shape[0], 1)], dim=1)  # absmax 1: the scaled value is x itself
    codes, absmax = quantise_blocks(x, signed)
    assert (absmax == 1).all()
    values = table.numpy()
    expected = [binary_search_code(values, value, signed) for value in x.view(-1).numpy()]
    assert codes.view(-1).tolist() == expected
    if signed:  # negative control: without the sign rule some code would be another
        assert [binary_search_code(values, value, False) for value in x.view(-1).numpy()] != expected


def test_a_block_of_zeros_and_every_table_value_come_back() -> None:
    codes, absmax = quantise_blocks(torch.zeros(2, BLOCK), signed=True)
    assert (codes == 127).all()
    assert (absmax == 0).all()
    for signed in (True, False):
        table = dynamic_map(signed)
        codes, absmax = quantise_blocks(table[None] * 0.5, signed)  # a power of two: scaling is exact
        assert codes[0].tolist() == list(range(256))
        assert torch.equal(dequantise_blocks(codes, absmax, signed)[0], table * 0.5)


def bitsandbytes_run(param: torch.Tensor, grads: list[torch.Tensor]) -> tuple[torch.Tensor, dict]:
    theirs = torch.nn.Parameter(param.clone())
    optimizer = bnb.optim.AdamW8bit([theirs], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    for grad in grads:
        theirs.grad = grad.clone()
        optimizer.step()
    return theirs.detach(), optimizer.state[theirs]


def run(param: torch.Tensor, grads: list[torch.Tensor]) -> tuple[torch.Tensor, Adam8bitState]:
    mine, state = param.clone(), Adam8bitState.new(tuple(param.shape))
    for step, grad in enumerate(grads, 1):
        adamw_8bit_step_(mine, grad, state, **HYPER, step=step)
    return mine, state


def snapped_quantise(x_NB: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """bitsandbytes' CPU backend: its lookup table has an entry for every 2/65535 of [-1, 1]."""
    absmax_N = x_NB.abs().amax(dim=1)
    scaled = x_NB / torch.where(absmax_N == 0, 1.0, absmax_N)[:, None]
    entry = ((scaled + 1.0) * 0.5 * 65535 + 0.5).floor()
    table = dynamic_map(signed)
    codes = torch.bucketize(entry * (2 / 65535) - 1.0, (table[:-1] + table[1:]) * 0.5)
    return codes.to(torch.uint8), absmax_N


@pytest.mark.parametrize("signed", [True, False])
def test_codes_equal_bitsandbytes_cpu_apart_from_its_coarse_lookup(signed: bool) -> None:
    x = normal(400, BLOCK, seed=2) ** 3
    x = x if signed else x.abs()
    theirs, their_absmax = torch.ops.bitsandbytes.quantize_blockwise(x, dynamic_map(signed), BLOCK)
    snapped, absmax = snapped_quantise(x, signed)
    assert torch.equal(snapped, theirs)
    assert torch.equal(absmax, their_absmax)
    exact, absmax = quantise_blocks(x, signed)
    assert torch.equal(absmax, their_absmax)
    # Where the map is as coarse as the lookup or coarser, at most one code off, and rarely.
    table = dynamic_map(signed)
    wide = (x / absmax[:, None]).abs() > 0.1
    off = (exact.int() - theirs.int()).abs()[wide]
    assert off.max() <= 1
    assert (off > 0).float().mean() < 0.005
    # Near zero the exact code is the nearer one: that is the point of not following the lookup.
    distance = [(x / absmax[:, None] - table[codes.int()]).abs().mean() for codes in (exact, theirs)]
    assert distance[0] < distance[1]


@pytest.mark.parametrize("shape", [(64, 64), (16, 300), (4097,)])
def test_twenty_steps_equal_bitsandbytes_cpu_given_its_lookup(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the CPU backend's lookup in place of the exact codes, the rest is bitsandbytes' arithmetic up
    to the last bit or two (it uses addcmul, addcdiv and add(alpha=), which contract)."""
    param = normal(*shape, seed=3) * 0.02
    grads = [normal(*shape, seed=10 + i) * 0.1 for i in range(20)]
    theirs, their_state = bitsandbytes_run(param, grads)
    monkeypatch.setattr(adamw_8bit, "quantise_blocks", snapped_quantise)
    mine, state = run(param, grads)
    assert (mine - param).abs().max() > 5e-3
    for moment in (1, 2):
        codes, absmax = getattr(state, f"state{moment}"), getattr(state, f"absmax{moment}")
        expected = their_state[f"state{moment}"]
        assert codes.dtype == expected.dtype
        assert codes.shape == expected.shape
        assert absmax is not None
        assert (codes != expected).float().mean() < 2e-3  # a last bit can tip a value over a midpoint
        torch.testing.assert_close(absmax, their_state[f"absmax{moment}"], rtol=0.02, atol=0)
    close = torch.isclose(mine, theirs, rtol=1e-6, atol=1e-9)
    assert close.float().mean() > 0.99
    assert (mine - theirs).norm() < 1e-3 * (theirs - param).norm()


def test_twenty_steps_stay_near_bitsandbytes_cpu_with_exact_codes() -> None:
    param = normal(48, 128, seed=4) * 0.02
    grads = [normal(48, 128, seed=10 + i) * 0.1 for i in range(20)]
    theirs, _ = bitsandbytes_run(param, grads)
    mine, _ = run(param, grads)
    assert (mine - theirs).norm() < 0.02 * (theirs - param).norm()


def test_small_tensors_keep_float32_moments_and_equal_adamw() -> None:
    param, grads = normal(63, 65, seed=5), [normal(63, 65, seed=6), normal(63, 65, seed=7)]
    assert param.numel() == MIN_8BIT_SIZE - 1
    mine, state = run(param, grads)
    plain, m, v = param.clone(), torch.zeros_like(param), torch.zeros_like(param)
    for step, grad in enumerate(grads, 1):
        adamw_step_(plain, grad, m, v, **HYPER, step=step)
    assert state.state1.dtype == torch.float32
    assert state.absmax1 is None
    assert torch.equal(mine, plain)
    assert torch.equal(state.state1, m)
    assert torch.equal(state.state2, v)
    assert Adam8bitState.new((64, 64)).state1.dtype == torch.uint8


def test_bits_do_not_depend_on_place_or_threads() -> None:
    shape, n = (37, 173), 37 * 173
    param, grads = normal(*shape, seed=8), [normal(*shape, seed=20 + i) for i in range(3)]
    mine, state = run(param, grads)
    before = torch.get_num_threads()
    try:
        for offset, threads in ((1, 1), (7, 2), (13, 4)):
            torch.set_num_threads(threads)
            arena = torch.full((n + 32,), 9.0)
            place = arena[offset : offset + n].view(shape)
            place.copy_(param)
            fresh = Adam8bitState.new(shape)
            codes = torch.zeros(n + 32, dtype=torch.uint8)
            fresh.state1 = codes[offset : offset + n].view(shape)
            for step, grad in enumerate(grads, 1):
                adamw_8bit_step_(place, grad, fresh, **HYPER, step=step)
            assert torch.equal(place, mine)
            for name, tensor in fresh.named_tensors().items():
                assert torch.equal(tensor, state.named_tensors()[name]), name
            assert (arena[:offset] == 9.0).all()
            assert (arena[offset + n :] == 9.0).all()
    finally:
        torch.set_num_threads(before)


def test_blocks_do_not_reach_across_tensors() -> None:
    """Two matrices stepped as one flat tensor get another absmax where a block spans both: the bits differ,
    which is why a state belongs to one matrix."""
    first, second = normal(4100, seed=30), normal(4100, seed=31) * 100
    alone, _ = run(first, [first, first, first])
    both, _ = run(torch.cat([first, second]), [torch.cat([first, second])] * 3)
    assert torch.equal(both[:4096], alone[:4096])
    assert not torch.equal(both[4096:4100], alone[4096:])


def test_a_state_survives_its_names_and_continues_with_the_same_bits() -> None:
    param, grads = normal(80, 80, seed=40), [normal(80, 80, seed=50 + i) for i in range(4)]
    mine, state = run(param, grads)
    half, half_state = run(param, grads[:2])
    named = {name: t.clone() for name, t in half_state.named_tensors().items()}
    assert sorted(named) == ["absmax1", "absmax2", "state1", "state2"]
    again = Adam8bitState.from_named_tensors(named)
    for step in (3, 4):
        adamw_8bit_step_(half, grads[step - 1], again, **HYPER, step=step)
    assert torch.equal(half, mine)
    assert torch.equal(again.state2, state.state2)
    forgotten = Adam8bitState.new((80, 80))  # negative control: without the state the bits differ
    other, _ = run(param, grads[:2])
    for step in (3, 4):
        adamw_8bit_step_(other, grads[step - 1], forgotten, **HYPER, step=step)
    assert not torch.equal(other, mine)
    small = Adam8bitState.new((3, 5))
    assert sorted(small.named_tensors()) == ["state1", "state2"]
    assert Adam8bitState.from_named_tensors(small.named_tensors()).absmax1 is None
    with pytest.raises(KeyError, match="absmax2"):
        Adam8bitState.from_named_tensors({name: t for name, t in named.items() if name != "absmax2"})
