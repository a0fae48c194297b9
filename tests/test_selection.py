"""Who goes on after the warm-up: as many as the share says, each compared with those of as many steps."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from gshare.agent.jobs.selection import Contender, Place, select, share_of
from hypothesis import given
from hypothesis import strategies as st

LOSSES = st.none() | st.sampled_from([1.0, 1.5, 2.0]) | st.floats(0.1, 9.0)
CONTENDERS = st.lists(st.tuples(st.sampled_from([2, 4, 8, 16]), LOSSES), max_size=40).map(
    lambda pairs: [Contender(f"c{i}", steps, loss) for i, (steps, loss) in enumerate(pairs)]
)
SHARES = st.sampled_from([0.01, 0.1, 0.25, 1 / 3, 0.5, 1.0])


def on(places: dict[str, Place]) -> set[str]:
    return {name for name, place in places.items() if place.goes_on}


def crowd() -> list[Contender]:
    """Three batch sizes; the more steps, the lower all losses."""
    return [
        Contender(f"s{steps}-{number}", steps, 10 / steps + 0.01 * number)
        for steps in (8, 4, 2)
        for number in range(8)
    ]


def test_each_number_of_steps_sends_its_share() -> None:
    places = select(crowd(), 0.25)
    assert on(places) == {f"s{steps}-{number}" for steps in (8, 4, 2) for number in (0, 1)}
    assert places["s2-3"] == Place(False, 4, 8, 2, 5.01)
    assert on(select(crowd(), 0.25, among_all=True)) == {f"s8-{number}" for number in range(6)}
    assert select(crowd(), 0.25, among_all=True)["s4-0"] == Place(False, 9, 24, 6, 1.25 + 0.05)


def test_places_that_are_left_over_go_to_the_best_of_all() -> None:
    # ⌈0.3 · 24⌉ = 8: two of each eight, and two more.
    assert on(select(crowd(), 0.3)) == {f"s{steps}-{n}" for steps in (8, 4, 2) for n in (0, 1)} | {
        "s8-2",
        "s8-3",
    }


def test_who_is_out_leaves_its_place_to_others() -> None:
    gone = [one if one.steps != 2 else Contender(one.name, 2, None) for one in crowd()]
    places = select(gone, 0.25)
    assert on(places) == {"s8-0", "s8-1", "s4-0", "s4-1", "s8-2", "s8-3"}
    assert set(places) == {one.name for one in gone if one.loss is not None}


def test_of_equals_the_earlier_goes_on() -> None:
    same = [Contender(name, 3, 1.0) for name in "abcd"]
    assert on(select(same, 0.25)) == {"a"}
    assert list(select(same, 0.25)) == list("abcd")


def test_groups_of_one_are_ranked_together() -> None:
    each = [Contender(str(steps), steps, 10.0 - steps) for steps in range(1, 9)]
    assert on(select(each, 0.25)) == on(select(each, 0.25, among_all=True)) == {"8", "7"}
    assert select(each, 0.25)["1"] == Place(False, 1, 1, 0, None)


@pytest.mark.parametrize(("share", "count", "kept"), [(0.1, 30, 3), (0.25, 5, 2), (0.01, 3, 1), (1.0, 7, 7)])
def test_shares_are_rounded_up_as_meant(share: float, count: int, kept: int) -> None:
    assert share_of(share, count) == kept


@given(CONTENDERS, SHARES)
def test_as_many_as_the_share_and_nobody_before_a_better_one_of_its_group(
    contenders: list[Contender], share: float
) -> None:
    places = select(contenders, share)
    within = [one for one in contenders if one.loss is not None]
    assert set(places) == {one.name for one in within}
    assert len(on(places)) == min(len(within), share_of(share, len(contenders)))
    sizes = Counter(one.steps for one in contenders)
    for steps, size in sizes.items():
        group = [one for one in within if one.steps == steps]
        kept = [one for one in group if places[one.name].goes_on]
        assert len(kept) >= min(len(group), math.floor(round(share * size, 9)))
        assert all(places[one.name].of == len(group) for one in group)
        assert all(places[one.name].kept == len(kept) for one in group)
        losses = [(one.loss, contenders.index(one)) for one in kept]
        others = [(one.loss, contenders.index(one)) for one in group if one not in kept]
        assert not losses or not others or max(losses) < min(others)
        if kept:
            assert all(places[one.name].last_loss == max(losses)[0] for one in group)


@given(CONTENDERS, SHARES)
def test_with_one_number_of_steps_it_is_the_ranking_of_all(contenders: list[Contender], share: float) -> None:
    same = [Contender(one.name, 5, one.loss) for one in contenders]
    assert (
        select(same, share)
        == select(contenders, share, among_all=True)
        == select(same, share, among_all=True)
    )
