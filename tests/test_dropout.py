"""Dropout masks: a function of their key, reproducible from the written contract, and fair coins."""

from __future__ import annotations

import hashlib

import pytest
import torch
from gshare.kernels.dropout import keep_mask, keep_scale, threshold
from hypothesis import given, settings
from hypothesis import strategies as st

KEY = {"seed": 5, "step": 3, "sample": 2, "layer": 1, "module": 4}
MASK64 = 2**64 - 1


def philox4x64_10(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10 in integers, from the paper (SC'11, section 3.3): what a kernel would compute."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * c[2], 2**64)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B97F4A7C15) & MASK64, (k[1] + 0xBB67AE8584CAA73B) & MASK64]
    return c


def keep_from_contract(position: int, feature: int, features: int, p: float, key: dict[str, int]) -> bool:
    block = position * -(-features // 16) + feature // 16
    counter = [block + 1, key["sample"], key["layer"] << 32 | key["module"], 0]
    words = philox4x64_10(counter, [key["seed"], key["step"]])
    return (words[feature % 16 // 4] >> 16 * (feature % 4)) & 0xFFFF >= round(p * 65536)


def test_philox_has_the_known_answers_of_its_authors() -> None:
    # kat_vectors of Random123: philox4x64 10 rounds, all zeros and all ones.
    zeros = philox4x64_10([0] * 4, [0] * 2)
    assert zeros == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    ones = philox4x64_10([MASK64] * 4, [MASK64] * 2)
    assert ones == [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]


@pytest.mark.parametrize("features", [1, 6, 16, 42, 123])
def test_every_bit_is_that_of_the_written_contract(features: int) -> None:
    mask = keep_mask(**KEY, length=7, features=features, p=0.3)
    expected = [[keep_from_contract(t, f, features, 0.3, KEY) for f in range(features)] for t in range(7)]
    assert mask.dtype == torch.bool
    assert mask.tolist() == expected


def test_known_answer() -> None:
    mask = keep_mask(**KEY, length=64, features=576, p=0.1)
    digest = hashlib.sha256(mask.numpy().tobytes()).hexdigest()
    assert digest == "0dd050e23515e92db95d7fa73be6eee3c015a0121427413af9d73bd16caadc22"


@given(
    length=st.integers(1, 40),
    longer=st.integers(0, 40),
    features=st.integers(1, 70),
    sample=st.integers(0, 2**64 - 1),
)
@settings(max_examples=60, deadline=None)
def test_a_position_does_not_know_the_length(length: int, longer: int, features: int, sample: int) -> None:
    key = {**KEY, "sample": sample}
    short = keep_mask(**key, length=length, features=features, p=0.5)
    long = keep_mask(**key, length=length + longer, features=features, p=0.5)
    assert torch.equal(long[:length], short)


def test_a_mask_keyed_by_batch_offset_would_differ() -> None:
    """Negative control: cut from one stream over the batch, a row's mask depends on the rows before it."""
    alone = keep_mask(**KEY, length=9, features=64, p=0.5)
    stream = keep_mask(**KEY, length=30, features=64, p=0.5)
    assert not torch.equal(stream[11 : 11 + 9], alone)


@pytest.mark.parametrize("name", list(KEY))
def test_every_part_of_the_key_matters(name: str) -> None:
    base = keep_mask(**KEY, length=32, features=64, p=0.5)
    other = keep_mask(**{**KEY, name: KEY[name] + 1}, length=32, features=64, p=0.5)
    agree = (base == other).float().mean().item()
    assert 0.44 < agree < 0.56  # independent coins agree half the time; 2048 of them: sigma 0.011


def test_parts_of_the_key_cannot_stand_in_for_one_another() -> None:
    keys = [
        dict(zip(KEY, values, strict=True))
        for values in ([1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1])
    ]
    masks = {keep_mask(**key, length=8, features=64, p=0.5).numpy().tobytes() for key in keys}
    assert len(masks) == 5


@pytest.mark.parametrize("p", [0.0, 0.05, 0.1, 0.5, 0.9])
def test_rate_and_independence(p: float) -> None:
    mask = keep_mask(seed=11, step=0, sample=0, layer=0, module=0, length=500, features=400, p=p)
    n = mask.numel()
    kept = mask.float().mean().item()
    sigma = (p * (1 - p) / n) ** 0.5
    assert abs(kept - (1 - p)) <= 5 * sigma + 1 / 65536
    if p == 0.0:
        assert mask.all()
        return
    x = mask.double() - mask.double().mean()
    for other in (x[:, 1:] * x[:, :-1], x[1:] * x[:-1], x[:, 16:] * x[:, :-16]):
        assert abs(other.mean().item()) < 5 * p * (1 - p) / other.numel() ** 0.5


def test_scaling_keeps_the_mean_and_thresholds_are_exact() -> None:
    assert threshold(0.0) == 0
    assert threshold(0.5) == 32768
    assert threshold(0.1) == 6554
    assert keep_scale(0.0) == 1.0
    assert keep_scale(0.5) == 2.0
    assert keep_scale(0.1) == pytest.approx(1 / 0.9, rel=1e-5)
    assert threshold(0.9999999) == 65535
    with pytest.raises(AssertionError, match="dropout"):
        threshold(1.0)
