"""States of a node, what its problems forbid, who is missing of the expected, and the leaderboard's order."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import msgspec
import pytest
from gshare.coordinator.expecting import Expecting
from gshare.coordinator.leaderboard import Row, better, ranked, same_best
from gshare.coordinator.node_state import NodeMachine, problems_of

sys.path.insert(0, str(Path(__file__).parent / "support"))
from cluster_model import node_info


def up(**changes: object) -> NodeMachine:
    node = NodeMachine("n")
    node.came_up(100.0, 0.0, node_info("n", **changes), 0, False)  # pyright: ignore[reportArgumentType]
    return node


def test_the_way_of_a_node() -> None:
    node = NodeMachine("n", lost_after_s=600.0)
    info = node_info()
    seen = [node.state]
    for became in (
        node.deploying(1.0, "installing"),
        node.came_up(2.0, 0.0, info, 0, False),
        node.counts(3.0, 2),
        node.beat(10.0, 0.0, info, 2),
        node.tick(55.0),
        node.tick(55.1),
        node.went_down(60.0, "no route"),
        node.tick(655.0),
        node.tick(655.1),
        node.deploying(656.0, "again"),
        node.came_up(700.0, 0.0, info, 0, False),
    ):
        seen.append(became.state if became else "")
    assert seen == ["new", "deploying", "ready", "busy", "", "", "unreachable", "", "", "lost", "", "ready"]


def test_what_never_was_up_is_not_lost() -> None:
    node = NodeMachine("n")
    node.deploying(0.0, "installing")
    node.went_down(1.0, "no python")
    node.tick(10_000.0)
    assert (node.state, node.reason) == ("new", "no python")


def test_a_restart_gives_a_node_with_jobs_its_whole_time() -> None:
    node = up()
    node.restarted(5000.0, has_jobs=True)
    assert node.tick(5599.0) is None
    became = node.tick(5600.0)
    assert became is not None
    assert became.state == "lost"


def test_a_late_beat_over_a_broken_channel_does_not_bring_it_back() -> None:
    node = up()
    node.went_down(110.0, "cut")
    assert node.beat(111.0, 0.0, node_info(), 0) is None
    assert node.state == "unreachable"


@pytest.mark.parametrize(
    ("changes", "forbids", "text"),
    [
        ({"torch": ""}, True, "no torch"),
        ({"disk_free_mb": 1000}, True, "1000 MiB of disk"),
        ({"disk_free_mb": 4000}, False, "4000 MiB of disk"),
        ({"time": 86_400.0}, False, "86400 s ahead"),
        ({"time": -400.0}, False, "400 s behind"),
        ({"problems": ["the ledger is damaged"]}, False, "the ledger is damaged"),
    ],
)
def test_problems_degrade_and_some_forbid(changes: dict[str, object], forbids: bool, text: str) -> None:
    node = up(**changes)
    assert (node.state, node.placeable) == ("degraded", not forbids)
    assert text in node.reason


def test_small_things_are_noted_only() -> None:
    node = up(linger=False, time=299.0, disk_free_mb=None)
    assert (node.state, node.placeable, node.reason) == ("ready", True, "")
    assert "enable-linger" in node.problems[0].text


def test_one_gpu_in_trouble_warns_all_forbid() -> None:
    info = node_info(gpus=("x", "y"))
    ill = msgspec.structs.replace(info.gpus[0], problem="fell off the bus")
    some = msgspec.structs.replace(info, gpus=[ill, info.gpus[1]])
    assert [p.forbids for p in problems_of(some, wall=0.0)] == [False]
    assert [p.forbids for p in problems_of(some, wall=0.0, listed=frozenset({"x"}))] == [True]
    (missing,) = problems_of(info, wall=0.0, listed=frozenset({"x", "z"}))
    assert (missing.forbids, "GPU z of cluster.toml is not there" in missing.text) == (False, True)
    assert problems_of(info, wall=0.0, draining=True)[0].forbids


def test_who_is_missing_and_why() -> None:
    away, ill, new = NodeMachine("away"), up(torch=""), NodeMachine("new")
    away.went_down(1.0, "connection refused: is sshd running?")
    good = up()
    good.name = "good"
    nodes = [away, ill, new, good]
    expecting = Expecting(workers=2, timeout_s=60.0, since=0.0)
    assert not expecting.ready(nodes)
    assert expecting.too_late(nodes, 59.9) is None
    assert expecting.too_late(nodes, 60.0) == (
        "1 of 2 workers are ready after 60 s; missing:\n"
        "  away: new, connection refused: is sshd running?\n"
        "  n: degraded, its Python has no torch: name one that has with `python` in cluster.toml\n"
        "  new: new, it has not answered yet"
    )
    assert Expecting(workers=1, timeout_s=60.0, since=0.0).too_late(nodes, 99.0) is None
    few = Expecting(workers=9, timeout_s=0.0, since=0.0).too_late(nodes, 1.0)
    assert few is not None
    assert few.endswith("cluster.toml names 4 nodes: add some, or expect fewer workers")


def test_the_order_of_the_leaderboard() -> None:
    def row(job: str, val_loss: float | None, step: int | None = 1) -> Row:
        return Row(job, "n", "running", val_loss, step, 1, 9)

    rows = [
        row("nan", math.nan),
        row("none", None, None),
        row("inf", math.inf),
        row("b", 0.5),
        row("a", 0.5),
        row("late", 0.5, 2),
        row("best", -1.0),
    ]
    assert [r.job for r in ranked(rows)] == ["best", "a", "b", "late", "inf", "nan", "none"]
    assert [r.job for r in ranked(reversed(rows))] == ["best", "a", "b", "late", "inf", "nan", "none"]


def test_better_and_same() -> None:
    assert better(0.5, None)
    assert better(0.5, math.nan)
    assert not better(0.5, 0.5)
    assert not better(math.nan, None)
    assert not better(math.inf, None)
    assert same_best((math.nan, 1), (math.nan, 1))
    assert not same_best((0.5, 1), (0.5, 2))
    assert not same_best((None, 1), (0.5, 1))
