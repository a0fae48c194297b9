"""The split: by content and seed; equal rows stay together; never an empty side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from gshare.agent.data.split import Split, split_rows
from gshare.agent.data.tokens import TokenStore
from gshare.agent.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st


def store(contents: list[int]) -> TokenStore:
    """All that the split reads of a store: a row's content by number."""
    digests = np.zeros((len(contents), 16), np.uint8)
    digests[:, :2] = np.asarray(contents, ">u2")[:, None].view(np.uint8).reshape(-1, 2)
    fake: Any = SimpleNamespace(n_rows=len(contents), content=digests, meta=SimpleNamespace(source="d.jsonl"))
    return cast(TokenStore, fake)


def contents_of(contents: list[int], rows: np.ndarray) -> set[int]:
    return {contents[i] for i in rows.tolist()}


@settings(max_examples=150, deadline=None)
@given(
    contents=st.lists(st.integers(0, 12), min_size=2, max_size=40),
    fraction=st.floats(0.001, 0.999),
    seed=st.integers(-(2**64), 2**64),
)
def test_sides_are_disjoint_whole_not_empty_and_share_no_content(
    contents: list[int], fraction: float, seed: int
) -> None:
    if len(set(contents)) < 2:
        with pytest.raises(UsageError, match="cannot be split"):
            split_rows(store(contents), val_fraction=fraction, seed=seed)
        return
    split = split_rows(store(contents), val_fraction=fraction, seed=seed)
    assert sorted([*split.train.tolist(), *split.val.tolist()]) == list(range(len(contents)))
    assert len(split.train) > 0
    assert len(split.val) > 0
    assert not contents_of(contents, split.train) & contents_of(contents, split.val)


def test_five_rows_at_a_tenth_give_one() -> None:  # case 16
    split = split_rows(store([1, 2, 3, 4, 5]), val_fraction=0.1, seed=0)
    assert len(split.val) == 1


def test_one_row_or_equal_rows_are_refused_and_fraction_zero_is_not() -> None:
    for contents in ([1], [1, 1, 1]):
        with pytest.raises(UsageError, match="name val_data, or set val_fraction = 0"):
            split_rows(store(contents), val_fraction=0.1, seed=0)
        split = split_rows(store(contents), val_fraction=0.0, seed=0)
        assert (split.train.tolist(), split.val.tolist()) == (list(range(len(contents))), [])


def test_the_split_is_pinned() -> None:
    """A resume under another version must find the same split: these numbers may never change."""
    split = split_rows(store(list(range(20))), val_fraction=0.2, seed=7)
    assert split.val.tolist() == [0, 2, 3, 14]
    assert split.val.dtype == split.train.dtype == np.int64


def test_split_follows_content_and_seed_and_not_the_rows_order() -> None:
    contents = list(range(40))
    split = split_rows(store(contents), val_fraction=0.25, seed=3)
    shuffled = contents[::-1]
    again = split_rows(store(shuffled), val_fraction=0.25, seed=3)
    assert contents_of(contents, split.val) == contents_of(shuffled, again.val)
    other = split_rows(store(contents), val_fraction=0.25, seed=4)
    assert split.val.tolist() != other.val.tolist()


def test_a_group_larger_than_the_share_is_taken_only_when_nothing_else_fits() -> None:
    mixed = [1] * 9 + [2]
    assert all(_val(mixed, seed) == [9] for seed in range(8))
    assert len(_val([1] * 6 + [2] * 4, 0)) == 4


def _val(contents: list[int], seed: int) -> list[int]:
    split: Split = split_rows(store(contents), val_fraction=0.1, seed=seed)
    return split.val.tolist()


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(UsageError, match="val_fraction must be"):
        split_rows(store([1, 2]), val_fraction=fraction, seed=0)
