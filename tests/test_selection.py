"""Who goes on after the warm-up: as many as the share says, each compared with those of as many steps."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from gshare.agent.jobs.selection import (
    Contender,
    Place,
    Verdict,
    describe_drop,
    describe_rank,
    evidence_of,
    select,
    share_of,
    standings,
)
from hypothesis import given
from hypothesis import strategies as st

LOSSES = st.none() | st.sampled_from([1.0, 1.5, 2.0]) | st.floats(0.1, 9.0)
CONTENDERS = st.lists(st.tuples(st.sampled_from([2, 4, 8, 16]), LOSSES), max_size=40).map(
    lambda pairs: [Contender(f"c{i}", steps, loss) for i, (steps, loss) in enumerate(pairs)]
)
SHARES = st.sampled_from([0.01, 0.1, 0.25, 1 / 3, 0.5, 1.0])


def on(places: dict[str, Verdict]) -> set[str]:
    return {name for name, place in places.items() if place.goes_on}


def crowd() -> list[Contender]:
    """Three batch sizes; the more steps, the lower all losses."""
    return [
        Contender(f"s{steps}-{number}", steps, 10 / steps + 0.01 * number)
        for steps in (8, 4, 2)
        for number in range(8)
    ]


def test_each_number_of_steps_sends_its_share() -> None:
    found = select(crowd(), 0.25)
    assert on(found) == {f"s{steps}-{number}" for steps in (8, 4, 2) for number in (0, 1)}
    assert found["s2-3"] == Verdict(False, Place(4, 8, 2, 5.01), Place(20, 24, 6, 5.01))
    together = select(crowd(), 0.25, among_all=True)
    assert on(together) == {f"s8-{number}" for number in range(6)}
    assert together["s4-0"] == Verdict(False, *2 * (Place(9, 24, 6, 1.25 + 0.05),))


def test_places_that_are_left_over_go_round_the_groups_by_their_losses() -> None:
    # ⌈0.3 · 24⌉ = 8: two of each eight, and of two groups one more.
    two_each = {f"s{steps}-{n}" for steps in (8, 4, 2) for n in (0, 1)}
    assert on(select(crowd(), 0.3)) == two_each | {"s8-2", "s4-2"}
    small = [one for one in crowd() if one.name[-1] in "01"]  # two of each: half a place each
    assert on(select(small, 0.25)) == {"s8-0", "s4-0"}


def test_a_sampler_is_told_where_each_stands_among_its_like() -> None:
    """Of raw losses it would learn to draw small batches, which have made more steps: the control."""
    told = standings([*crowd(), Contender("out", 2, None), Contender("alone", 3, 5.0)])
    assert told["out"] is None
    for steps in (8, 4, 2):
        assert [told[f"s{steps}-{number}"] for number in range(8)] == [(n + 0.5) / 8 for n in range(8)]
    best_eight = sorted(crowd(), key=lambda one: told[one.name] or 0.0)[:8]
    assert Counter(one.steps for one in best_eight) == {8: 3, 4: 3, 2: 2}
    by_loss = sorted(crowd(), key=lambda one: one.loss or 0.0)[:8]
    assert Counter(one.steps for one in by_loss) == {8: 8}


def test_few_of_a_kind_are_told_by_their_place_among_each_other() -> None:
    """The control is a group of four, which stands by itself: alone, each would be told 0.5, and the sampler
    nothing."""
    unlike = [Contender(f"c{n}", 10 + n, loss) for n, loss in enumerate((3.0, 1.0, 2.0))]
    assert standings(unlike) == {"c0": 2.5 / 3, "c1": 0.5 / 3, "c2": 1.5 / 3}
    four = [Contender(f"d{n}", 2, 9.0 + n) for n in range(4)]
    together = standings([*unlike, *four])
    assert together == standings(unlike) | {f"d{n}": (n + 0.5) / 4 for n in range(4)}
    assert standings([*unlike, *four[:3]])["d0"] == 3.5 / 6


@given(CONTENDERS)
def test_standings_keep_the_order_of_losses_within_a_group(contenders: list[Contender]) -> None:
    told = standings(contenders)
    assert list(told) == [one.name for one in contenders]
    for one in contenders:
        value = told[one.name]
        assert (value is None) is (one.loss is None)
        for other in contenders:
            further = told[other.name]
            if value is None or further is None or one.steps != other.steps:
                continue
            assert one.loss is not None
            assert other.loss is not None
            assert (one.loss < other.loss) <= (value < further)


def test_a_larger_remainder_comes_first() -> None:
    seven = [Contender(f"a{n}", 2, 9.0 + n) for n in range(7)]  # 1.75 places
    five = [Contender(f"b{n}", 4, 1.0 + n) for n in range(5)]  # 1.25
    assert on(select([*five, *seven], 0.25)) == {"a0", "a1", "b0"}


def test_who_is_out_leaves_its_place_to_others() -> None:
    gone = [one if one.steps != 2 else Contender(one.name, 2, None) for one in crowd()]
    found = select(gone, 0.25)
    assert on(found) == {"s8-0", "s8-1", "s4-0", "s4-1", "s8-2", "s4-2"}
    assert set(found) == {one.name for one in gone if one.loss is not None}


def test_what_is_written_down() -> None:
    found = select(crowd(), 0.25)
    evidence = evidence_of(found["s2-1"], 2)
    assert (evidence["rank"], evidence["of"], evidence["kept"]) == (18, 24, 6)
    assert (evidence["steps"], evidence["rank_alike"], evidence["of_alike"], evidence["kept_alike"]) == (
        2,
        2,
        8,
        2,
    )
    assert (evidence["last_kept_val_loss"], evidence["last_kept_val_loss_alike"]) == (5.01, 5.01)
    assert describe_rank(evidence) == "number 2 of 8 that have made as many steps"
    assert describe_drop(found["s4-2"]) == (
        "number 3 of 8 that have made as many steps at the end of the warm-up; 2 of these go on, the last "
        "of them with 2.51 (of all it is number 11 of 24, and 6 go on)"
    )
    alone = select([Contender("a", 2, 2.0), Contender("b", 4, 1.0)], 0.25)
    assert "number 1 of 1 that have made as many steps at the end of the warm-up; none of these" in (
        describe_drop(alone["a"])
    )
    together = select(crowd(), 0.25, among_all=True)
    assert describe_rank(evidence_of(together["s8-5"], 8)) == "number 6 of 24"
    assert "steps" not in evidence_of(together["s8-5"], 8)
    assert describe_drop(together["s4-0"]) == (
        "number 9 of 24 at the end of the warm-up; 6 go on, the last of them with 1.3"
    )
    one = select([Contender("a", 2, 1.0), Contender("b", 2, 2.4751)], 0.25)
    assert describe_drop(one["b"]) == "number 2 of 2 at the end of the warm-up; 1 goes on, with 1"
    pair = select([Contender(f"{name}{n}", n, float(n)) for n in (1, 2) for name in "ab"], 0.25)
    assert describe_drop(pair["b1"]) == (
        "number 2 of 2 that have made as many steps at the end of the warm-up; 1 of these goes on, with 1 "
        "(of all it is number 2 of 4, and 1 goes on)"
    )


def test_of_equals_the_earlier_goes_on() -> None:
    same = [Contender(name, 3, 1.0) for name in "abcd"]
    assert on(select(same, 0.25)) == {"a"}
    assert list(select(same, 0.25)) == list("abcd")


def test_groups_of_one_are_ranked_together() -> None:
    each = [Contender(str(steps), steps, 10.0 - steps) for steps in range(1, 9)]
    assert on(select(each, 0.25)) == on(select(each, 0.25, among_all=True)) == {"8", "7"}
    assert select(each, 0.25)["1"].alike == Place(1, 1, 0, None)


@pytest.mark.parametrize(("share", "count", "kept"), [(0.1, 30, 3), (0.25, 5, 2), (0.01, 3, 1), (1.0, 7, 7)])
def test_shares_are_rounded_up_as_meant(share: float, count: int, kept: int) -> None:
    assert share_of(share, count) == kept


@given(CONTENDERS, SHARES)
def test_as_many_as_the_share_and_nobody_before_a_better_one_of_its_group(
    contenders: list[Contender], share: float
) -> None:
    found = select(contenders, share)
    within = [one for one in contenders if one.loss is not None]
    assert set(found) == {one.name for one in within}
    assert len(on(found)) == min(len(within), share_of(share, len(contenders)))
    sizes = Counter(one.steps for one in contenders)
    for steps, size in sizes.items():
        group = [one for one in within if one.steps == steps]
        kept = [one for one in group if found[one.name].goes_on]
        assert len(kept) >= min(len(group), math.floor(round(share * size, 9)))
        if len(within) == len(contenders):
            assert len(kept) <= math.ceil(round(share * size, 9)), "in proportion, up to rounding"
        losses = [(one.loss, contenders.index(one)) for one in kept]
        others = [(one.loss, contenders.index(one)) for one in group if one not in kept]
        assert not losses or not others or max(losses) < min(others)
        for one in group:
            alike = found[one.name].alike
            assert (alike.of, alike.kept) == (len(group), len(kept))
            assert alike.last_loss == (max(losses)[0] if losses else None)


@given(CONTENDERS, SHARES)
def test_with_one_number_of_steps_it_is_the_ranking_of_all(contenders: list[Contender], share: float) -> None:
    same = [Contender(one.name, 5, one.loss) for one in contenders]
    together = select(contenders, share, among_all=True)
    assert select(same, share) == select(same, share, among_all=True) == together
    best = sorted((one.loss, place, one.name) for place, one in enumerate(contenders) if one.loss is not None)
    assert on(together) == {name for _, _, name in best[: share_of(share, len(contenders))]}
