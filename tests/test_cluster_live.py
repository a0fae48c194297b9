"""Jobs of a cluster as they are followed: who waits is told why, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from gshare.cli import cluster_live
from gshare.cli.cluster_live import Shown
from gshare.cli.live import make_view
from gshare.coordinator.api_client import CoordinatorClient
from gshare.coordinator.api_protocol import JobMoved, JobRow, ListNodes, NodeChanged, NodeRow, NodeRows

KEY = "h: 1.2.3.4:22 is not known yet: confirm it in `gshare cluster check`"


class Cluster:
    """Its nodes, as a coordinator tells of them."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[str, str]] = {}
        self.asked = 0

    def ask(self, reply: type, make: type, **_: Any) -> NodeRows:
        assert make is ListNodes
        self.asked += 1
        rows = [
            NodeRow(node=name, transport="ssh", host=name, state=state, reason=reason)
            for name, (state, reason) in self.nodes.items()
        ]
        return NodeRows(reply_to=1, nodes=rows)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(cluster_live, "WAITS_SECONDS", 0.0)
    return Cluster()


@pytest.fixture
def shown() -> Shown:
    return Shown(make_view([("a", "/a"), ("b", "/b")], json_lines=False), {"a", "b"})


@pytest.fixture
def told(shown: Shown, cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Lines of so many looks, the nodes being so."""

    def look(looks: int = 1, **nodes: tuple[str, str]) -> list[str]:
        cluster.nodes = nodes
        for _ in range(looks):
            shown.tell_waits(cast("CoordinatorClient", cluster))
        return capsys.readouterr().err.splitlines()

    return look


def wait(shown: Shown, *jobs: str, state: str = "waiting") -> None:
    for job in jobs:
        shown.take_row(JobRow(job=job, state=state))


def test_what_keeps_a_node_from_taking_jobs_is_told_once_and_when_it_changes(
    shown: Shown, told: Callable[..., list[str]]
) -> None:
    """Of one that never came up the state stays, so no event tells of the key."""
    wait(shown, "a", "b")
    assert told(n=("new", "not connected yet")) == ["node n is new: not connected yet"]
    assert told(3, n=("new", f"node n: {KEY}"), m=("unreachable", "no heartbeat for 46 s")) == [
        f"node n is new: {KEY}",
        "node m is unreachable: no heartbeat for 46 s",
    ]
    version = "speaks version 2, this is 1"
    assert told(2, n=("new", version), m=("unreachable", "no heartbeat for 46 s")) == [
        f"node n is new: {version}"
    ]


def test_what_an_event_has_told_is_not_told_again(shown: Shown, told: Callable[..., list[str]]) -> None:
    wait(shown, "a")
    shown.take(NodeChanged(node="n", state="lost", reason="unreachable for 600 s"))
    shown.take(NodeChanged(node="m", state="ready"))
    assert told(2, n=("lost", "unreachable for 600 s"), m=("ready", "")) == [
        "node n is lost: unreachable for 600 s",
        "node m is ready",
        "1 job waits for a place: node m has none to give now",
    ]


def test_no_room_is_told_at_the_second_look_and_once_as_long_as_somebody_waits(
    shown: Shown, told: Callable[..., list[str]]
) -> None:
    wait(shown, "a", "b")
    nodes = {"n": ("busy", ""), "m": ("degraded", "the agent is draining")}
    assert told(1, **nodes) == ["node m is degraded: the agent is draining"]
    line = "2 jobs wait for a place: none of 2 nodes has one to give now"
    assert told(3, **nodes) == [line]
    shown.take(JobMoved(job="a", state="starting", node="n"))
    assert told(3, **nodes) == []
    wait(shown, "b", state="running")
    assert told(1, **nodes) == []
    wait(shown, "b")  # its node was lost, say
    assert told(2, **nodes) == [line.replace("2 jobs wait", "1 job waits")]


def test_nobody_is_asked_where_nobody_waits(
    shown: Shown, cluster: Cluster, told: Callable[..., list[str]]
) -> None:
    wait(shown, "a", "b", state="running")
    wait(shown, "c")  # of somebody else
    assert told(3, n=("new", KEY)) == []
    assert cluster.asked == 0


def test_the_coordinator_is_asked_now_and_then(
    shown: Shown, cluster: Cluster, told: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_live, "WAITS_SECONDS", 600.0)
    wait(shown, "a")
    told(50, n=("new", KEY))
    assert cluster.asked == 1
