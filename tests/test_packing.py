"""Who is admitted beside whom: by memory and throughput, decreasing batch size, equal sizes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gshare.agent.jobs.packing import Candidate, Packing
from hypothesis import given
from hypothesis import strategies as st

CANDIDATES = st.lists(st.sampled_from([1, 2, 4, 8]), max_size=8)


def _named(sizes: Sequence[int], prefix: str) -> list[Candidate]:
    return [Candidate(f"{prefix}{i}-{size}", size) for i, size in enumerate(sizes)]


def _rows(names: Sequence[str]) -> int:
    return sum(int(name.split("-")[1]) for name in names)


def _within(rows: int) -> Callable[[Sequence[str]], bool]:
    return lambda names: _rows(names) <= rows


def test_decreasing_batch_size_and_what_still_fits_beside() -> None:
    packing = Packing(_within(13))
    assert packing.admit(_named([1, 8, 2, 4, 8], "w"), []) == ["w1-8", "w3-4", "w0-1"]


def test_what_is_freed_is_filled_with_the_same_size_first() -> None:
    running = _named([2, 2, 4], "r")
    assert Packing(_within(10)).admit(_named([8, 1, 2], "w"), running) == ["w2-2"]
    # Mixed where no equal one is left, though the largest does not fit.
    assert Packing(_within(10)).admit(_named([8, 1, 1], "w"), running) == ["w1-1", "w2-1"]


def test_the_number_at_once_is_bounded() -> None:
    packing = Packing(_within(99), most=2)
    assert packing.admit(_named([1, 1, 1], "w"), _named([1], "r")) == ["w0-1"]
    assert packing.admit(_named([1], "w"), _named([1, 1], "r")) == []


def test_the_first_is_admitted_whatever_the_prediction_says() -> None:
    assert Packing(_within(0)).admit(_named([4, 8], "w"), []) == ["w1-8"]


def test_one_that_would_make_the_whole_slower_waits() -> None:
    """Tokens a second that peak at 6 rows; without the profile both are admitted."""

    def rate(names: Sequence[str]) -> float:
        return 6.0 - abs(6 - _rows(names))

    waiting = _named([4, 4, 2], "w")
    assert Packing(_within(99), rate).admit(waiting, []) == ["w0-4", "w2-2"]
    assert Packing(_within(99)).admit(waiting, []) == ["w0-4", "w1-4", "w2-2"]


@given(CANDIDATES, CANDIDATES, st.integers(0, 30), st.integers(0, 5))
def test_never_over_and_never_less_than_fits(
    waiting_sizes: list[int], running_sizes: list[int], rows: int, most: int
) -> None:
    waiting, running = _named(waiting_sizes, "w"), _named(running_sizes, "r")
    admitted = Packing(_within(rows), most=most).admit(waiting, running)
    names = [one.name for one in running] + admitted
    assert len(set(admitted)) == len(admitted)
    assert set(admitted) <= {one.name for one in waiting}
    if len(names) > 1 and admitted:
        assert _rows(names) <= rows
        assert not most or len(names) <= most
    assert admitted or running or not waiting
    if not most or len(names) < most:
        left = [one.name for one in waiting if one.name not in admitted]
        assert not any(_rows([*names, one]) <= rows for one in left)
