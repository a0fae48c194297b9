"""kernels/nf4.py against bitsandbytes, and what it promises where the two differ."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from gshare.kernels import nf4

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it looks for optional kernels when imported
functional = pytest.importorskip("bitsandbytes.functional")

# K a multiple of 64, odd K, K below a block, a part block at the end, a part byte at the end
SHAPES = [(64, 64), (49, 128), (576, 192), (123, 431), (6, 42), (5, 7), (33, 6)]


def weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    return (torch.randn(shape, generator=generator) * 0.02).to(dtype)


def bitsandbytes_state(w: torch.Tensor, *, double: bool) -> tuple[torch.Tensor, Any]:
    codes, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=double)
    return codes, state


def as_ours(codes: torch.Tensor, state: Any, shape: tuple[int, int]) -> nf4.Nf4Tensor:
    nested = state.state2
    return nf4.Nf4Tensor(
        shape,
        codes.view(-1),
        state.absmax,
        nested.absmax if nested else None,
        state.offset if nested else None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_dequantise_has_bitsandbytes_bits(shape: tuple[int, int], double: bool, dtype: torch.dtype) -> None:
    codes, state = bitsandbytes_state(weight(shape), double=double)
    state.dtype = dtype
    theirs = functional.dequantize_4bit(codes, state)
    q = as_ours(codes, state, shape)
    assert torch.equal(nf4.dequantise(q, dtype), theirs)
    out = torch.full(shape, torch.nan, dtype=dtype)
    assert nf4.dequantise(q, dtype, out) is out
    assert torch.equal(out, theirs)


@pytest.mark.parametrize("shape", [(64, 176), (16, 96)])
def test_blocks_that_straddle_rows_are_right(shape: tuple[int, int]) -> None:
    """Where K is not a multiple of 64, bitsandbytes' AVX-512 kernel is wrong; its PyTorch fallback is not."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    w = weight(shape)
    codes, state = bitsandbytes_state(w, double=False)
    ours = nf4.dequantise(as_ours(codes, state, shape))
    code = torch.tensor(nf4.NF4_CODE)
    absmax = state.absmax
    fallback = _dequantize_4bit_compute(codes.reshape(-1), absmax, code, 64, shape, torch.float32)
    assert torch.equal(ours, fallback)
    # NF4's widest gap is 0.304 of a block's absmax, so an element is at most half of that away.
    assert (ours - w).abs().max() <= 0.153 * w.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 176)])
def test_quantise_has_bitsandbytes_codes_and_scales(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = weight(shape, dtype)
    codes, state = bitsandbytes_state(w, double=False)
    q = nf4.quantise(w, double=False)
    assert torch.equal(q.codes, codes.view(-1))
    assert torch.equal(q.scales, state.absmax)


def test_double_quantisation_goes_to_the_nearest_code() -> None:
    """Scales as in bitsandbytes but for midpoints, which its CPU library rounds the wrong way."""
    w = weight((576, 1536))
    _, state = bitsandbytes_state(w, double=True)
    q = nf4.quantise(w, double=True)
    plain = nf4.quantise(w, double=False).scales
    assert q.scale_mean is not None
    assert q.scale_mean == plain.double().mean().float()
    differing = (q.scales != state.absmax).float().mean()
    assert differing < 0.005
    assert q.scale_absmax is not None
    wanted = (plain - q.scale_mean).view(-1, nf4.SCALE_BLOCK) / q.scale_absmax.unsqueeze(1)
    distance = (wanted.unsqueeze(-1) - nf4.dynamic_code(w.device)).abs()
    got = distance.gather(-1, q.scales.view(wanted.shape).long().unsqueeze(-1)).squeeze(-1)
    # 1e-6: on a midpoint, rounding of the quotient may make either neighbour the nearer one
    assert bool((got <= distance.amin(-1) + 1e-6).all())


def test_dynamic_code_is_that_of_bitsandbytes() -> None:
    assert torch.equal(nf4.dynamic_code(torch.device("cpu")), functional.create_dynamic_map())


def test_stored_bytes_do_not_depend_on_the_number_of_threads() -> None:
    w = weight((1024, 2560))  # 40 960 scales: enough for torch to split their mean over threads
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(nf4.quantise(w))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert one == two if isinstance(one, tuple) else torch.equal(one, two)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weight((123, 431))
    whole = nf4.quantise(w)
    dense = nf4.dequantise(whole)
    monkeypatch.setattr(nf4, "_CHUNK", 1024)
    chunked = nf4.quantise(w)
    assert torch.equal(whole.codes, chunked.codes)
    assert torch.equal(whole.scales, chunked.scales)
    assert torch.equal(nf4.dequantise(chunked), dense)


def test_zeros_stay_zeros() -> None:
    for double in (False, True):
        w = torch.zeros(4, 64)
        assert torch.equal(nf4.dequantise(nf4.quantise(w, double=double)), w)


def test_a_wrong_buffer_is_refused() -> None:
    q = nf4.quantise(weight((64, 64)))
    with pytest.raises(AssertionError):
        nf4.dequantise(q, torch.float32, torch.empty(64, 32))
    with pytest.raises(AssertionError):
        nf4.dequantise(q, torch.float32, torch.empty(64, 64, dtype=torch.bfloat16))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 176), (1024, 4096)])
def test_cuda_has_the_bits_of_the_cpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Quantised there, unpacked by the reference there and by bitsandbytes' kernel: one result."""
    w = weight(shape)
    here, there = nf4.quantise(w), nf4.quantise(w.cuda())
    for one, two in zip(here[1:], there[1:], strict=True):
        assert isinstance(one, torch.Tensor)
        assert isinstance(two, torch.Tensor)
        assert torch.equal(one, two.cpu())
    dense = nf4.dequantise(here, dtype)
    assert torch.equal(nf4.dequantise(there, dtype).cpu(), dense)
    out = torch.empty(shape, dtype=dtype, device="cuda")
    scales = nf4.block_scales(there)
    torch.ops.bitsandbytes.dequantize_4bit.out(there.codes, scales, nf4.BLOCK, "nf4", shape, dtype, out=out)
    assert torch.equal(out.cpu(), dense)
