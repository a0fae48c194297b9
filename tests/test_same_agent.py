"""Two nodes of a cluster file that reach one agent: told before they stop each other's jobs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from cluster_of_straw import Straw, agents_of_straw
from gshare.agent.errors import UsageError
from gshare.coordinator.api_protocol import ListNodes, NodeRows
from gshare.coordinator.config import load_cluster
from local_cluster import LocalCluster


def test_the_second_node_of_an_agent_is_refused_and_the_jobs_end_well(tmp_path: Path) -> None:
    names = [f"job{number}" for number in range(4)]

    async def test(it: Straw) -> None:
        it.agents["b"] = it.agents["a"]
        async with it.running():
            await it.submit(*names)
            await it.until(lambda: all(it.job(name).state == "completed" for name in names))
            assert {it.job(name).attempt for name in names} == {1}
            # The jobs may be done before the second node has connected.
            nodes = it.coordinator.cluster.nodes
            await it.until(lambda: any("same agent" in node.reason for node in nodes.values()))
            rows = {row.node: row for row in (await it.ask(NodeRows, ListNodes)).nodes}
            states = sorted(row.state for row in rows.values())
            assert states == ["new", "ready"]
            first = next(row.node for row in rows.values() if row.state == "ready")
            second = next(row for row in rows.values() if row.node != first)
            assert f"same agent as node {first}" in second.reason

    async def main() -> None:
        async with agents_of_straw(tmp_path, "a", "b", auto=True) as it:
            await asyncio.wait_for(test(it), 60)

    asyncio.run(main())


def test_when_the_first_is_gone_the_second_takes_its_place(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        it.agents["b"] = it.agents["a"]
        async with it.running():
            await it.until(
                lambda: any(node.state == "ready" for node in it.coordinator.cluster.nodes.values())
            )
            up = next(name for name, node in it.coordinator.cluster.nodes.items() if node.state == "ready")
            other = {"a": "b", "b": "a"}[up]
            it.unreachable.add(up)
            it.agents["a"].hang_up()
            await it.until(lambda: it.coordinator.cluster.nodes[other].state == "ready")

    async def main() -> None:
        async with agents_of_straw(tmp_path, "a", "b") as it:
            await asyncio.wait_for(test(it), 60)

    asyncio.run(main())


LOCAL = '[[node]]\nname = "a"\ntransport = "local"\n{a}[[node]]\nname = "b"\ntransport = "local"\n{b}'
OVER_SSH = '[[node]]\nname = "a"\nhost = "h"\n{a}[[node]]\nname = "b"\nhost = "H"\n{b}'


@pytest.mark.parametrize(
    ("text", "a", "b", "same"),
    [
        (LOCAL, "", "", True),
        (LOCAL, 'state_dir = "x"\n', 'state_dir = "./x"\n', True),
        (LOCAL, 'state_dir = "x"\n', 'state_dir = "y"\n', False),
        (LOCAL, "", 'state_dir = "y"\n', False),
        (OVER_SSH, "", "", True),
        (OVER_SSH, 'user = "u"\n', 'user = "v"\n', False),
        (OVER_SSH, "", "port = 2222\n", False),
        (OVER_SSH, 'state_dir = "x"\n', 'state_dir = "x"\n', True),
        (OVER_SSH, 'transport = "agent"\nuser = "u"\n', 'transport = "agent"\nuser = "v"\n', True),
        (OVER_SSH, 'transport = "agent"\n', "", False),
    ],
)
def test_the_file_is_refused_where_it_can_be_told(
    tmp_path: Path, text: str, a: str, b: str, same: bool
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text.format(a=a, b=b))
    if not same:
        assert len(load_cluster(path).nodes) == 2
        return
    with pytest.raises(UsageError, match="same agent as node a") as caught:
        load_cluster(path)
    assert len(str(caught.value).splitlines()) == 1
    assert "'b'" in str(caught.value)


def test_cluster_check_says_it_of_two_paths_to_one_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    cluster = LocalCluster(tmp_path / "it", "a", "b", "c")
    (cluster.root / "nodes" / "a").mkdir(parents=True, mode=0o700)
    (cluster.root / "nodes" / "b").symlink_to("a")
    try:
        done = cluster.gshare("cluster", "check", "--json")
        said = {node["node"]: node for node in map(json.loads, done.stdout.splitlines())}
    finally:
        cluster.close()
    assert done.returncode == 1, done.stderr
    assert [said[name]["ok"] for name in "abc"] == [True, False, True]
    assert said["b"]["kind"] == "config", said
    assert "same agent as node a" in said["b"]["faults"][0]
    assert all("agent" not in node for node in said.values())
