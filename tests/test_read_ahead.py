"""Checkpoints read ahead: what `load_checkpoint` gives, few at a time, and each one's damage its own."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gshare.agent.errors import GshareError
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.train import read_ahead
from gshare.agent.train.checkpoint import Snapshot, adapter_config, load_checkpoint, write_checkpoint
from gshare.agent.train.read_ahead import AHEAD, ReadAhead

#: For what comes at once unless the guarantee is broken; whoever waits in vain fails then, and does not hang.
PATIENCE = 30.0
#: More than twice what is read at once.
MANY = 2 * AHEAD + 3


def write_many(directory: Path, count: int = MANY) -> list[Path]:
    """Checkpoints that tell which they are, with floats that only their bits tell from others."""
    config = adapter_config(AdapterSpec(name="a", data="a.jsonl", output_dir="out", r=4), "toy")
    paths = []
    for step in range(count):
        weights = {"A": torch.full((4, 64), float(step)), "B": torch.tensor([[float("nan"), -0.0, 1e-45]])}
        moments = {"A.state1": torch.full((64,), step, dtype=torch.uint8)}
        snapshot = Snapshot(f"job-{step}", step, weights, moments, {"tokens": step / 3})
        paths.append(write_checkpoint(snapshot, directory / str(step), config))
    return paths


def content(snapshot: Snapshot) -> object:
    tensors = [
        {name: (t.dtype, t.shape, t.numpy().tobytes()) for name, t in some.items()}
        for some in (snapshot.adapter, snapshot.optimizer)
    ]
    return snapshot.job, snapshot.step, snapshot.state, tensors


def damage(path: Path) -> None:
    weights = path / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def settle(ahead: ReadAhead) -> None:
    """Until all that it has asked its threads for is read: they take what they are asked for in order, and
    meet when they have come to the last of it."""
    assert ahead._pool is not None
    meeting = threading.Barrier(AHEAD)
    for met in [ahead._pool.submit(meeting.wait, PATIENCE) for _ in range(AHEAD)]:
        met.result()


class Reading:
    """In place of `load_checkpoint`: who reads what, and no further than it is let."""

    def __init__(self, patch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None) -> None:
        patch.setattr(read_ahead, "load_checkpoint", self)
        self.before = before
        self.begun: list[Path] = []
        self.threads: set[str] = set()
        self.given: list[weakref.ref[Snapshot]] = []

    def __call__(self, path: Path) -> Snapshot:
        self.begun.append(path)
        self.threads.add(threading.current_thread().name.rpartition("_")[0] or "main")
        self.before()
        snapshot = Snapshot(path.name, 0, {}, {}, {})
        self.given.append(weakref.ref(snapshot))
        return snapshot


PATHS = [Path(f"checkpoint-{step}") for step in range(MANY)]


# ---------------------------------------------------------------------- what is taken


@pytest.mark.parametrize("order", ["as expected", "reversed", "shuffled"])
def test_what_is_taken_is_what_a_load_gives_in_whatever_order(tmp_path: Path, order: str) -> None:
    paths = write_many(tmp_path)
    taken = paths[::-1] if order == "reversed" else list(paths)
    if order == "shuffled":
        random.Random(1).shuffle(taken)
    with ReadAhead(paths) as ahead:
        for path in taken:
            assert content(ahead.take(path)) == content(load_checkpoint(path))
    assert len({str(content(load_checkpoint(path))) for path in paths}) == MANY, "the control: they differ"


def test_one_that_was_not_expected_is_read_and_the_expected_ones_come_all_the_same(tmp_path: Path) -> None:
    *expected, other = write_many(tmp_path)
    with ReadAhead(expected) as ahead:
        assert content(ahead.take(other)) == content(load_checkpoint(other))
        for path in (*expected, expected[0]):  # and one that was taken already
            assert content(ahead.take(path)) == content(load_checkpoint(path))
    for few in ([], [other]):
        with ReadAhead(few) as ahead:
            assert content(ahead.take(other)) == content(load_checkpoint(other))
            assert content(ahead.take(expected[0])) == content(load_checkpoint(expected[0]))


def test_a_broken_one_is_told_of_by_its_own_take_only(tmp_path: Path) -> None:
    """Among the first that are read, among the later ones, and one that is never taken."""
    paths = write_many(tmp_path)
    broken, untaken = {paths[1], paths[AHEAD + 2]}, paths[2]
    for path in (*broken, untaken):
        damage(path)
    with ReadAhead(paths) as ahead:
        for path in paths:
            if path in broken:
                with pytest.raises(GshareError) as raised:
                    ahead.take(path)
                with pytest.raises(GshareError) as alone:
                    load_checkpoint(path)
                assert str(raised.value) == str(alone.value)
                assert str(path) in str(raised.value)
            elif path != untaken:
                assert content(ahead.take(path)) == content(load_checkpoint(path))


# ---------------------------------------------------------------------- how many are read


def test_no_more_are_read_than_may_wait_to_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = Reading(monkeypatch)
    with ReadAhead(PATHS) as ahead:
        settle(ahead)
        assert sorted(reading.begun) == sorted(PATHS[:AHEAD])
        for taken, path in enumerate(PATHS, 1):
            assert ahead.take(path).job == path.name
            settle(ahead)
            assert sorted(reading.begun) == sorted(PATHS[: AHEAD + taken])
    assert reading.threads == {"read-ahead"}, "all of them ahead, and each once"


def test_as_many_as_may_be_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the others: one after the other none would be read."""
    together = threading.Barrier(AHEAD)
    Reading(monkeypatch, lambda: together.wait(PATIENCE))
    paths = PATHS[: 2 * AHEAD]
    with ReadAhead(paths) as ahead:
        assert [ahead.take(path).job for path in paths] == [path.name for path in paths]


@pytest.mark.parametrize(("expected", "read_by"), [(0, "main"), (1, "main"), (2, "read-ahead")])
def test_one_alone_costs_no_thread(monkeypatch: pytest.MonkeyPatch, expected: int, read_by: str) -> None:
    """Whoever takes it reads it no later."""
    reading = Reading(monkeypatch)
    with ReadAhead(PATHS[:expected]) as ahead:
        for path in PATHS[: max(expected, 1)]:
            ahead.take(path)
    assert reading.threads == {read_by}


# ---------------------------------------------------------------------- leaving


@pytest.mark.parametrize("by", ["end", "error"])
def test_who_leaves_waits_for_no_read_and_nothing_of_it_is_kept(
    monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """One is taken, the next ones are being read, the others not yet asked for."""
    let, in_vain = threading.Event(), []
    reached = threading.Semaphore(0)

    def before() -> None:
        reached.release()
        if len(reading.begun) > AHEAD and not let.wait(PATIENCE):
            in_vain.append(1)

    reading = Reading(monkeypatch, before)
    ahead = ReadAhead(PATHS)
    settle(ahead)
    assert ahead._pool is not None
    threads = list(ahead._pool._threads)
    try:
        with ahead:
            taken = ahead.take(PATHS[0])
            for _ in range(AHEAD + 1):  # the first ones, and one in place of that which was taken
                assert reached.acquire(timeout=PATIENCE)
            if by == "error":
                raise KeyError("a fault of whoever takes them")
    except KeyError:
        assert by == "error"
    assert not in_vain, "it waited for the one that is being read"
    let.set()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    gc.collect()
    assert len(reading.given) == AHEAD + 1, "no other was begun"
    assert [one() for one in reading.given if one() is not None] == [taken]
    assert ahead.take(PATHS[3]).job == PATHS[3].name, "who comes late is served"


def test_where_no_thread_can_be_started_each_is_read_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / str(number) for number in range(3)]
    monkeypatch.setattr(read_ahead, "load_checkpoint", lambda path: Snapshot(path.name, 0, {}, {}, {}))

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with ReadAhead(paths) as ahead:
        assert [ahead.take(path).job for path in paths] == ["0", "1", "2"]
