"""Rows of logits at once: within the bytes, in equal chunks, never more than an estimate was told."""

from __future__ import annotations

import pytest
from gshare.kernels.logit_chunks import LOGITS_BYTES, MAX_ROWS, STEP, chunk_rows, most_rows
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("rows", "vocabulary", "size", "chunk"),
    [
        (3117, 128256, 2, 1664),
        (2560, 128256, 2, 2560),
        (2561, 128256, 2, 1408),
        (3200, 151936, 2, 1664),
        (3200, 49152, 2, 3200),
        (3200, 128256, 4, 1152),
        (1, 128256, 2, 128),
        (9000, 32000, 2, 3072),
    ],
)
def test_worked_examples(rows: int, vocabulary: int, size: int, chunk: int) -> None:
    assert chunk_rows(rows, vocabulary, size) == chunk


@given(rows=st.integers(0, 300_000), vocabulary=st.integers(1, 4_000_000), size=st.sampled_from([2, 4]))
def test_chunks_fit_are_few_and_alike(rows: int, vocabulary: int, size: int) -> None:
    step, most = chunk_rows(rows, vocabulary, size), most_rows(rows, vocabulary, size)
    assert step % STEP == most % STEP == 0
    assert STEP <= step <= most <= MAX_ROWS
    assert step == STEP or step * vocabulary * size <= LOGITS_BYTES
    chunks = -(-rows // step)
    assert chunks <= -(-rows // most)
    # No stub: without the rounding to STEP the last chunk is as long as the others.
    assert chunks * (step - STEP) < rows or rows == 0


@given(rows=st.integers(0, 20_000), more=st.integers(0, 20_000), vocabulary=st.integers(1, 300_000))
def test_an_estimate_for_more_rows_covers_fewer(rows: int, more: int, vocabulary: int) -> None:
    assert chunk_rows(rows, vocabulary, 2) <= most_rows(rows + more, vocabulary, 2)
