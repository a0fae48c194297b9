"""A node of the cluster file that is another agent than before: no attempt runs twice, none runs unseen."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_of_straw import LIMITS, Straw, adapter, is_ended, run
from fake_agent import FakeAgent, FakeAttempt, weights
from gshare.agent.errors import GshareError
from gshare.agent.node import protocol as p
from gshare.coordinator import service as service_module
from gshare.coordinator.api_protocol import ReloadCluster, Reloaded
from gshare.coordinator.config import ClusterConfig, NodeConfig
from gshare.coordinator.link import StreamPair


def cluster(**nodes: str) -> ClusterConfig:
    """Nodes and the agents that their state directories are of."""
    made = tuple(
        NodeConfig(name=name, transport="local", gpus=(), state_dir=f"/{agent}")
        for name, agent in nodes.items()
    )
    return ClusterConfig(nodes=made, source="cluster.toml")


def by_state_dir(it: Straw) -> None:
    """Connections lead to the agent that `state_dir` names."""

    async def connect(node: NodeConfig, say: Callable[[str], None]) -> StreamPair:
        assert node.state_dir is not None
        agent = node.state_dir.removeprefix("/")
        if agent in it.unreachable:
            raise GshareError(f"{agent} is away")
        return await it.agents[agent].stream()

    it.connect = connect  # type: ignore[method-assign]


async def reload(it: Straw, monkeypatch: pytest.MonkeyPatch, config: ClusterConfig) -> None:
    monkeypatch.setattr(service_module, "load_cluster", lambda path: config)
    await it.ask(Reloaded, ReloadCluster)


def given(agent: FakeAgent) -> list[tuple[str, int]]:
    """The attempts that an agent was ever told to start."""
    return [(one.job, one.attempt) for one in agent.requests if isinstance(one, p.StartAttempt)]


async def begun(it: Straw, agent: FakeAgent, number: int = 1, *, steps: int = 0) -> FakeAttempt:
    """That attempt at `job0`, on that agent, known to run there and after so many steps more."""
    await it.until(lambda: ("job0", number) in given(agent))
    attempt = agent.running("job0")
    assert attempt.request.attempt == number
    for _ in range(steps):
        agent.advance(attempt)
    if steps:
        await it.until(lambda: it.job("job0").state == "running")
    return attempt


async def to_the_end(it: Straw, tmp_path: Path, agent: FakeAgent, number: int) -> None:
    attempt = await begun(it, agent, number)
    while attempt.step < 6:
        agent.advance(attempt)
    await it.until(lambda: is_ended(it, "job0"))
    assert (it.job("job0").state, it.job("job0").published) == ("completed", number)
    assert adapter(tmp_path, "job0") == weights("job0", 6)


def test_a_node_whose_state_dir_is_edited_stops_there_and_goes_on_here_under_a_new_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(it: Straw) -> None:
        by_state_dir(it)
        async with it.running(config=cluster(a="one")):
            await it.submit("job0")
            attempt = await begun(it, it.agents["one"], steps=2)
            await reload(it, monkeypatch, cluster(a="two"))
            await it.until(lambda: attempt.state == "stopped")
            assert attempt.reason == "node a is elsewhere in the cluster file now"
            await to_the_end(it, tmp_path, it.agents["two"], 2)
            assert (given(it.agents["one"]), given(it.agents["two"])) == ([("job0", 1)], [("job0", 2)])
            assert not it.agents["one"]._writers  # nobody is connected there any more

    run(tmp_path, test, "one", "two")


def test_what_cannot_be_told_to_stop_there_is_told_to_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(it: Straw) -> None:
        by_state_dir(it)
        async with it.running(config=cluster(a="one")):
            await it.submit("job0")
            agent = it.agents["one"]
            attempt = await begun(it, agent, steps=2)
            it.unreachable.add("one")
            agent.hang_up()
            await it.until(lambda: it.coordinator.sessions["a"].link is None)
            await reload(it, monkeypatch, cluster(a="two"))
            await to_the_end(it, tmp_path, it.agents["two"], 2)
            assert attempt.state == "running"
            (told,) = [text for text in it.said if "node a is elsewhere in the cluster file now" in text]
            assert "could not be told to stop its jobs (it is away): 'job0' may go on training there" in told

    run(tmp_path, test, "one", "two")


def test_two_nodes_that_change_places_run_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(it: Straw) -> None:
        by_state_dir(it)
        async with it.running(config=cluster(a="one", b="two")):
            await it.submit("job0")
            await it.until(lambda: any(given(agent) for agent in it.agents.values()))
            first = next(agent for agent in it.agents.values() if given(agent))
            attempt = await begun(it, first, steps=2)
            await reload(it, monkeypatch, cluster(a="two", b="one"))
            await it.until(lambda: attempt.state == "stopped")
            await it.until(lambda: it.job("job0").attempt > 1 and bool(it.job("job0").node))
            await it.until(lambda: (nodes := it.coordinator.cluster.nodes)["a"].up and nodes["b"].up)
            starts = given(it.agents["one"]) + given(it.agents["two"])
            assert len(starts) == len(set(starts))
            await it.until(lambda: any(one.state in ("queued", "running") for one in running_now(it)))
            assert len({(one.request.job) for one in running_now(it)}) == len(running_now(it)) == 1

    run(tmp_path, test, "one", "two")


def running_now(it: Straw) -> list[Any]:
    attempts = [one for agent in it.agents.values() for one in agent.attempts.values()]
    return [one for one in attempts if one.state in ("queued", "running", "paused")]


def test_a_file_that_was_edited_while_no_coordinator_ran_gives_no_number_twice(tmp_path: Path) -> None:
    """Nobody can tell the agent of before; what it runs is not given to the new one as the same attempt."""

    async def test(it: Straw) -> None:
        by_state_dir(it)
        async with it.running(config=cluster(a="one")):
            await it.submit("job0")
            await begun(it, it.agents["one"], steps=2)
        # Who is connected late is lost first, and its jobs go on elsewhere for that reason.
        patient = dataclasses.replace(LIMITS, lost_after_s=60.0)
        async with it.running(config=cluster(a="two"), limits=patient):
            await to_the_end(it, tmp_path, it.agents["two"], 2)
            assert given(it.agents["two"]) == [("job0", 2)]
            told = "warning: a is another agent than before: job0 may go on training unseen where that one is"
            assert told in [text.replace("'job0'", "job0") for text in it.said]

    run(tmp_path, test, "one", "two")


@pytest.mark.parametrize("how", ["reload", "restart"])
def test_the_control_a_node_that_is_the_same_agent_goes_on_with_its_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def test(it: Straw) -> None:
        by_state_dir(it)
        before = cluster(a="one")
        after = ClusterConfig(
            nodes=(NodeConfig(name="a", transport="local", gpus=(), state_dir="/one", max_adapters=3),),
            source="cluster.toml",
        )
        agent = it.agents["one"]
        async with it.running(config=before):
            await it.submit("job0")
            await begun(it, it.agents["one"], steps=2)
            if how == "reload":
                connections = agent.connections
                await reload(it, monkeypatch, after)
                await it.until(lambda: agent.connections > connections)
                await to_the_end(it, tmp_path, agent, 1)
        async with it.running(config=after):
            if how == "restart":
                await to_the_end(it, tmp_path, agent, 1)
            assert given(agent) == [("job0", 1)]
            assert not any("another agent" in text for text in it.said)

    run(tmp_path, test, "one")


def test_a_new_name_for_the_same_agent_costs_its_jobs_a_new_attempt_from_their_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(it: Straw) -> None:
        by_state_dir(it)
        it.agents["alias"] = it.agents["one"]
        async with it.running(config=cluster(a="one")):
            await it.submit("job0")
            agent = it.agents["one"]
            attempt = await begun(it, agent, steps=4)
            await reload(it, monkeypatch, cluster(a="alias"))
            await it.until(lambda: ("job0", 2) in given(agent))
            assert attempt.state == "stopped"
            assert agent.running("job0").step == 4
            await to_the_end(it, tmp_path, agent, 2)
            await asyncio.sleep(0.2)
            assert given(agent) == [("job0", 1), ("job0", 2)]

    run(tmp_path, test, "one")
