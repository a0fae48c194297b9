"""Trunk states kept for later epochs: found by content and layer, within a budget, without effect on bits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from cohort import Member, cohort, differences, part, run
from gshare.agent.base.load import load_base
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.base.weights import Base
from gshare.agent.train import trunk_cache
from gshare.agent.train.engine import Engine
from gshare.agent.train.part import Part
from gshare.agent.train.passes import StepWork
from gshare.agent.train.rounds import Rounds
from gshare.agent.train.trunk import TrunkUse
from gshare.agent.train.trunk_cache import MARGIN, TIMED, WARM_UP, Trial, TrunkCache
from gshare.kernels.reference_backend import ReferenceBackend

CPU = torch.device("cpu")
LAYERS, LENGTHS = 3, (9, 20, 12)
UPPER = {"layers_to_transform": (LAYERS - 1,)}
SWEEP = [Member(f"lr{i}", 1, LENGTHS, UPPER) for i in range(3)]
PLENTY = 1 << 30


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", num_layers=LAYERS)
    return load_base(path, base_dtype="fp32", device=CPU)


def new_engine(base: Base, device_bytes: int = PLENTY, *, auto: bool = False) -> Engine:
    engine = Engine(base, ReferenceBackend())
    engine.cache = TrunkCache(CPU, identity="base", device_bytes=device_bytes, auto=auto)
    return engine


def states(rows: int, value: float = 0.0) -> torch.Tensor:
    """4 bytes a row."""
    return torch.full((rows, 1), value)


def cache_of(nbytes: int) -> TrunkCache:
    return TrunkCache(CPU, identity="base", device_bytes=nbytes)


# ------------------------------------------------------------------ bits


def test_a_later_epoch_runs_no_trunk_and_has_the_same_bits(base: Base) -> None:
    members = [one for one in cohort(LAYERS - 1, LENGTHS) if one.name != "all"]
    expected = run(Engine(base, ReferenceBackend()), members)
    engine = new_engine(base)
    parts = [part(engine, one) for one in members]
    for epoch in range(3):
        for one in parts:
            engine.arena.zero_grads(one.adapter.name)
        done = engine.queue(parts)
        held_out = engine.evaluate(parts)
        found = {
            one.adapter.name: (losses, other, engine.arena.flat("grads", one.adapter.name).clone())
            for one, losses, other in zip(parts, done.losses(), held_out, strict=True)
        }
        assert differences(found, expected) == []
        below = min(one.adapter.lowest_layer for one in parts)
        trunk = sum(len(row.tokens) for row in {r.content: r for p in parts for r in p.rows}.values())
        assert expected_use(parts, trunk * below if epoch == 0 else 0, below) == done.trunk


def expected_use(parts: Sequence[Part], in_trunk: int, below: int) -> TrunkUse:
    """Jobs begin at layer `below` or one higher; the rows of these are shared in the layer between."""
    asked = sum(p.tokens * p.adapter.lowest_layer for p in parts)
    above = {r.content: r for p in parts if p.adapter.lowest_layer > below for r in p.rows}
    return TrunkUse(asked, in_trunk + sum(len(row.tokens) for row in above.values()))


def test_states_of_another_row_are_found(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a key that knows lengths only."""
    engine = new_engine(base)
    expected = run(Engine(base, ReferenceBackend()), [Member("b", 9, LENGTHS, UPPER)])
    run(engine, SWEEP[:1])
    assert differences(run(engine, [Member("b", 9, LENGTHS, UPPER)]), expected) == []
    engine = new_engine(base)
    monkeypatch.setattr(trunk_cache, "content", lambda row: len(row.tokens))
    run(engine, SWEEP[:1])
    assert differences(run(engine, [Member("b", 9, LENGTHS, UPPER)]), expected) == ["b"]


def test_running_out_of_memory_drops_the_states_first(base: Base) -> None:
    """Nothing else becomes smaller, and the bits are those of a run without a cache."""
    plain = Engine(base, ReferenceBackend())
    found = []
    for engine in (plain, new_engine(base)):
        one = part(engine, SWEEP[0])
        rounds = Rounds(engine, 16384)
        work = StepWork(one.adapter, 0, [one.rows])
        rounds.run([work])
        full = [engine.cache is not None]

        def before_pass(parts: Sequence[Part], full: list[bool] = full) -> None:
            if full.pop() if full else False:
                raise torch.OutOfMemoryError("simulated")

        engine.before_pass = before_pass
        outcome = rounds.run([work])[0]
        assert outcome.error is None
        found.append(
            (outcome.losses, outcome.grad_norm, engine.arena.flat("grads", one.adapter.name).clone())
        )
        assert not engine.checkpointing
        assert rounds.max_tokens == 16384
        if engine.cache is not None:
            assert engine.cache.nbytes == 0
            assert not full, "the error was raised"
    assert found[0][:2] == found[1][:2]
    assert torch.equal(found[0][2], found[1][2])


# ------------------------------------------------------------------ what is kept


def test_what_is_full_takes_nothing_new() -> None:
    cache = cache_of(40)
    for content in range(4):
        cache.put(1, content, states(5, float(content)))
    assert cache.nbytes == 40
    for content in range(2):
        known = cache.get(1, content)
        assert known is not None
        assert known.unique().tolist() == [content]
    assert cache.get(1, 2) is None
    assert cache.get(2, 0) is None, "another layer's"


def test_states_are_copies() -> None:
    cache, given = cache_of(40), states(5, 1.0)
    cache.put(1, "a", given)
    given.zero_()
    known = cache.get(1, "a")
    assert known is not None
    assert known.unique().tolist() == [1.0]


def test_a_new_job_s_rows_take_the_place_of_those_that_nobody_uses() -> None:
    cache = cache_of(60)
    for content in "abc":
        cache.put(1, content, states(5))
    cache.age()
    assert cache.get(1, "a") is not None
    cache.put(1, "d", states(6))
    assert [cache.get(1, content) is not None for content in "abcd"] == [True, False, False, True]
    cache.put(1, "e", states(5))
    assert cache.get(1, "e") is None, "what is left is in use"
    cache.put(1, "f", states(16))
    assert cache.nbytes == 44, "nothing made room for what never fits"


def test_pinned_memory_is_counted_as_the_allocator_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 bytes take 32 there: three would be 96, more than the 80 that are reserved."""
    monkeypatch.setattr(trunk_cache, "_pinned_copy", torch.clone)
    cache = TrunkCache(torch.device("cuda"), identity="base", device_bytes=0, host_bytes=80)
    for content in "abc":
        cache.put(1, content, states(5))
    assert [cache.get(1, content) is not None for content in "abc"] == [True, True, False]
    assert cache.nbytes == 64
    cache.age()
    cache.put(1, "c", states(5))
    assert cache.nbytes == 64, "what made room gave back as much"


def test_giving_up_the_device_keeps_nothing_there() -> None:
    cache = cache_of(60)
    cache.put(1, "a", states(5))
    assert cache.give_up_device() == 20
    cache.put(1, "a", states(5))
    assert (cache.get(1, "a"), cache.nbytes, cache.give_up_device()) == (None, 0, 0)


@pytest.mark.parametrize(("run_seconds", "pays"), [(10 * MARGIN, True), (MARGIN / 2, False)])
def test_the_trial_compares_after_warming_up(run_seconds: float, pays: bool) -> None:
    trial = Trial()
    for _ in range(WARM_UP):
        trial.note(1000.0 if not pays else 0.001, 1.0)
    for _ in range(TIMED):
        assert trial.pays is None
        trial.note(run_seconds, 1.0)
    assert trial.pays is pays


@pytest.mark.parametrize("pays", [True, False])
def test_what_does_not_pay_is_dropped(base: Base, monkeypatch: pytest.MonkeyPatch, pays: bool) -> None:
    """By a clock of the test's own: a step of the trunk takes 100 or 1, storing and loading 10."""
    ticks = iter(range(1_000_000))
    times = [(0.0, 100.0 if pays else 1.0, 110.0 if pays else 11.0)[tick % 3] for tick in range(300)]
    monkeypatch.setattr(trunk_cache, "_clock", lambda device: lambda: times[next(ticks)])
    engine = new_engine(base, auto=True)
    cache = engine.cache
    assert cache is not None
    for number in range(WARM_UP + TIMED):
        assert cache.trial is not None
        run(engine, [Member(f"job{number}", 10 + number, LENGTHS, UPPER)])
    assert cache.trial is None
    assert (cache.nbytes > 0) is pays


def test_too_little_room_ends_the_trial(base: Base) -> None:
    """Nothing is known of what cannot be kept; a device is not asked to wait in every pass for ever."""
    engine = new_engine(base, 100, auto=True)
    run(engine, SWEEP[:1])
    cache = engine.cache
    assert cache is not None
    assert (cache.trial, cache.active) == (None, False)


def test_a_smaller_budget_drops_the_longest_unused() -> None:
    cache = cache_of(60)
    for content in "abc":
        cache.put(1, content, states(5))
    assert cache.get(1, "a") is not None
    cache.set_device_budget(45)
    assert [cache.get(1, content) is not None for content in "abc"] == [True, False, True]
    cache.give_up_device()
    cache.set_device_budget(1000)
    cache.put(1, "a", states(5))
    assert cache.nbytes == 0
