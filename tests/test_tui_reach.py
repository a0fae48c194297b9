"""Agents that the dashboard reaches through SSH, holds that it ends there, and what it shows with no flag."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_of_straw import agents_of_straw
from gshare.agent.node.protocol import ReservationInfo
from gshare.agent.vram.leases import end_leases
from gshare.agent.vram.ledger import Ledger
from gshare.coordinator.host_keys import HostKeys, HostKeyUnknown
from gshare.coordinator.node_fault import NodeFault
from gshare.tui.agent_source import AgentSource
from gshare.tui.connected import Hopeless
from gshare.tui.coordinator_source import CoordinatorSource
from gshare.tui.finding import find_source
from node_agents import running_agent
from sshd import Sshd, start_sshd
from watching import Watched, watching


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "GSHARE_LEDGER_DIR", "HOME"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(folder))
    devices = tmp_path / "devices.toml"
    devices.write_text('[[device]]\nuuid = "GPU-sim"\nname = "Sim 8 GB"\ntotal_mb = 8192\n')
    monkeypatch.setenv("GSHARE_DEVICES", str(devices))


async def hold() -> str:
    """The id of a new hold of 1 GiB for an hour."""
    command = [sys.executable, "-m", "gshare.cli.main", "gpu", "hold", "--vram", "1", "--for", "1h"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd="/")
    printed = (await process.communicate())[0].decode().strip()
    assert process.returncode == 0
    return printed


def held(w: Watched) -> list[ReservationInfo]:
    return [row for _, row in w.state.reservations() if row.state == "held"]


# --- holds on other nodes


def test_a_hold_on_an_agents_node_is_ended_and_what_lives_is_not(tmp_path: Path) -> None:
    async def main() -> None:
        identity = await hold()
        command = [sys.executable, "-m", "gshare.cli.main", "gpu", "run", "--vram", "1", "--", "sleep", "600"]
        running = await asyncio.create_subprocess_exec(*command, cwd="/", stderr=asyncio.subprocess.DEVNULL)
        try:
            with running_agent(tmp_path / "node") as agent:
                async with watching(AgentSource(agent.socket)) as w:
                    await w.until(lambda: w.live and len(held(w)) == 2)
                    lease = {row.id: row.lease for row in held(w)}
                    other = next(id for id in lease if id != identity)
                    assert lease == {identity: True, other: False}
                    failed = await w.source.act("release", [identity, other, "nothing"])
                    assert failed.keys() == {other, "nothing"}
                    assert "is held by process" in failed[other]
                    await w.until(lambda: [row.id for row in held(w)] == [other])
                    told = f"gshare tui ended the hold {identity}"
                    await w.until(lambda: any(told in entry.text for entry in w.state.entries))
        finally:
            running.terminate()
            await running.wait()

    asyncio.run(asyncio.wait_for(main(), 120))


def test_another_users_hold_stays_even_where_the_agent_is_root(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = asyncio.run(hold())
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: 12345)
        assert "belongs to uid" in end_leases([identity])[identity]
    assert Ledger().end_lease(identity).id == identity  # it was there, and its own user's command ends it


def test_a_coordinator_ends_holds_on_the_node_that_has_them(tmp_path: Path) -> None:
    async def main() -> None:
        async with agents_of_straw(tmp_path, "a", "b") as it:
            row = ReservationInfo(
                id="r1",
                gpu_uuid="GPU-sim",
                budget_mb=9,
                peak_mb=None,
                task="",
                pid=1,
                user="u",
                created=1.0,
                state="held",
                lease=True,
            )
            agent = it.agents["b"]
            agent.node_info["reservations"] = [row]
            agent.leases = {"r1": ""}
            async with it.running(), watching(CoordinatorSource(it.state_dir)) as w:
                await w.until(lambda: w.live and held(w))
                assert await w.source.act("release", ["r1", "r2"]) == {"r2": "no node has it any more"}
                assert (agent.leases, it.agents["a"].leases) == ({}, {})
                agent.leases = {"r1": "reservation r1 is held by process 1"}
                assert await w.source.act("release", ["r1"]) == agent.leases

    asyncio.run(asyncio.wait_for(main(), 120))


# --- through SSH


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    home = Path(os.environ["HOME"])
    with start_sshd(tmp_path / "sshd", home=home, forwarding=False) as server:
        (home / ".ssh").mkdir(mode=0o700)
        (home / ".ssh" / "config").write_text(server.ssh_config("desk"))
        yield server


@pytest.fixture
def agent_there(sshd: Sshd) -> Iterator[None]:
    """In the default state directory of that login, started by hand with this interpreter."""
    state = Path(os.environ["HOME"]) / ".local" / "state" / "gshare" / "agent"
    state.parent.mkdir(parents=True)
    with running_agent(state):
        yield


def known(server: Sshd) -> Path:
    return Path(os.environ["HOME"]) / ".ssh" / "known_hosts"


def test_an_agent_is_watched_through_a_login_that_forbids_forwarding(sshd: Sshd, agent_there: None) -> None:
    known(sshd).write_text(sshd.known_hosts_line)

    async def main() -> None:
        source = AgentSource(f"{sshd.user}@desk")
        async with watching(source) as w:
            await w.until(lambda: w.live, 60)
            (node,) = w.state.nodes.values()
            assert (node.transport, node.host) == ("ssh", "desk")
            assert node.info is not None
            sshd.stop()
            await w.until(lambda: w.said[-1] == "lost")
            sshd.start()
            await w.until(lambda: w.live, 60)

    asyncio.run(asyncio.wait_for(main(), 150))


def test_a_new_host_key_is_asked_about_and_a_changed_one_ends_it(sshd: Sshd) -> None:
    asked: list[HostKeyUnknown] = []

    def keys(answer: bool) -> HostKeys:
        async def ask(unknown: HostKeyUnknown) -> bool:
            asked.append(unknown)
            return answer

        return HostKeys(ask=ask)

    async def main() -> None:
        source = AgentSource(f"{sshd.user}@desk")
        with pytest.raises(NodeFault) as refused:
            await source.meet(keys(False))
        assert refused.value.kind == "host_key_unknown"
        assert not known(sshd).exists()
        await source.meet(keys(True))
        assert [unknown.fingerprint for unknown in asked] == [sshd.fingerprint] * 2
        await source.meet(keys(False))  # it is known now: nobody is asked
        assert len(asked) == 2
        data = sshd.known_hosts_line.split()
        data[2] = data[2][:-9] + "AAAAAAAA" + data[2][-1]
        known(sshd).write_text(" ".join(data) + "\n")
        with pytest.raises(NodeFault) as changed:
            await source.meet(keys(True))
        assert changed.value.kind == "host_key_changed"
        with pytest.raises(Hopeless, match="shows the ssh-ed25519 key"):
            await source.run(lambda _: None)

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_machine_without_an_agent_is_waited_for(sshd: Sshd) -> None:
    known(sshd).write_text(sshd.known_hosts_line)

    async def main() -> None:
        async with watching(AgentSource(f"{sshd.user}@desk")) as w:
            await w.until(lambda: w.state.source and w.state.source.retry_in, 60)
            assert w.state.source is not None
            assert w.state.source.state == "connecting"
            assert "no agent runs in" in w.state.source.text

    asyncio.run(asyncio.wait_for(main(), 120))


# --- without a flag


def test_who_opens_it_first_and_submits_afterwards_sees_the_cluster(tmp_path: Path) -> None:
    home = Path(os.environ["XDG_STATE_HOME"]) / "gshare" / "coordinator"

    async def main() -> None:
        source = find_source()
        assert source.kind == "machine"
        async with watching(source) as w, agents_of_straw(tmp_path, "a") as it:
            await w.until(lambda: w.live)
            machine = set(w.state.nodes)
            home.parent.mkdir(parents=True, exist_ok=True)
            home.symlink_to(it.state_dir)
            async with it.running():
                await w.until(lambda: source.kind == "coordinator" and w.live and "a" in w.state.nodes)
                assert not machine & w.state.nodes.keys()  # nothing of the machine is left
                assert "stop" in source.can
                told = "a coordinator runs here now and is shown instead of this machine"
                assert told in [entry.text for entry in w.state.entries]
                await it.submit("one")
                await w.until(lambda: "one" in w.state.jobs)
            assert source.kind == "coordinator"
            await w.until(lambda: w.said[-1] == "lost")  # it was there: it is lost, and waited for

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_coordinator_that_never_was_is_not_called_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with watching(CoordinatorSource(tmp_path, cluster=tmp_path / "lab.toml")) as w:
            await w.until(lambda: w.state.source and w.state.source.retry_in)
            assert w.state.source is not None
            first = w.state.source.since
            assert "`gshare submit` starts one" in w.state.source.text
            tries = len(w.said)
            await w.until(lambda: len(w.said) > tries + 1)
            assert set(w.said) == {"connecting"}
            assert w.state.source.since == first
            assert w.source.title == "cluster lab"
            assert not [entry for entry in w.state.entries if "connecting" in entry.text]

    asyncio.run(asyncio.wait_for(main(), 60))
