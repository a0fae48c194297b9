"""The dropout kernel: every bit that of `keep_mask`, whoever shares the pass."""

from __future__ import annotations

import os

import pytest
import torch
from row_company import same_bytes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the kernels are decorated

from gshare.kernels.dropout import keep_mask, threshold
from gshare.kernels.dropout_triton import SequenceKey, keep_masks, token_keys

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: seed, step, sample, length, p
SEQUENCES = [
    (5, 3, 2, 7, 0.1),
    (2**64 - 1, 10**6, 0, 3, 0.5),
    (0, 0, 0, 4, 0.0),
    (123456789, 2**63, 2**64 - 1, 1, 0.999),
    (5, 3, 3, 5, 0.1),
]


def keys(sequences: list[tuple[int, int, int, int, float]], max_tokens: int = 0) -> torch.Tensor:
    rows = [SequenceKey(seed, step, sample, n, threshold(p)) for seed, step, sample, n, p in sequences]
    return token_keys(rows, max_tokens=max_tokens).to(DEVICE)


def expected(
    sequences: list[tuple[int, int, int, int, float]], features: int, layer: int, module: int
) -> torch.Tensor:
    masks = [
        keep_mask(seed, step, sample, layer, module, n, features, p) for seed, step, sample, n, p in sequences
    ]
    return torch.cat(masks).to(DEVICE, torch.uint8)


@pytest.mark.parametrize(("layer", "module"), [(0, 0), (0, 1), (1, 6), (31, 4)])
@pytest.mark.parametrize("features", [1, 6, 16, 123, 132, 528])
def test_every_bit_is_that_of_the_reference(features: int, layer: int, module: int) -> None:
    mask = keep_masks(keys(SEQUENCES), features, layer=layer, module=module)
    assert same_bytes(mask, expected(SEQUENCES, features, layer, module))


def test_company_order_and_padding_do_not_show() -> None:
    whole = expected(SEQUENCES, 48, 2, 3)
    backwards = keep_masks(keys(SEQUENCES[::-1]), 48, layer=2, module=3)
    assert same_bytes(backwards, expected(SEQUENCES[::-1], 48, 2, 3))
    padded = keep_masks(keys(SEQUENCES, max_tokens=32), 48, layer=2, module=3)
    assert same_bytes(padded[:20], whole)
    assert bool((padded[20:] == 1).all())
    alone = keep_masks(keys(SEQUENCES[4:]), 48, layer=2, module=3)
    assert same_bytes(alone, whole[15:])


def test_a_slice_of_the_masks_of_a_group_is_written_and_nothing_else() -> None:
    masks = torch.full((3, 20, 132), 9, dtype=torch.uint8, device=DEVICE)
    keep_masks(keys(SEQUENCES), 132, layer=1, module=2, out=masks[1])
    assert same_bytes(masks[1], expected(SEQUENCES, 132, 1, 2))
    assert bool((masks[[0, 2]] == 9).all())


def test_too_many_tokens_for_a_table_are_refused() -> None:
    with pytest.raises(AssertionError, match="20 tokens in a table of 19"):
        keys(SEQUENCES, max_tokens=19)


def test_negative_control_a_position_counted_in_the_pass_is_noticed() -> None:
    table = keys(SEQUENCES)
    table[3] = torch.arange(20)
    assert not same_bytes(keep_masks(table, 48, layer=2, module=3), expected(SEQUENCES, 48, 2, 3))
