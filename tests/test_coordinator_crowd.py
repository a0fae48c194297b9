"""More clients than the coordinator has places: who does nothing gives way, who uses his place keeps it, and
`gshare coordinator stop` needs none."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_of_straw import Straw, agents_of_straw
from gshare.agent.errors import GshareError, RetryLater
from gshare.coordinator import api
from gshare.coordinator.api_client import CoordinatorClient, CoordinatorGone
from gshare.coordinator.api_protocol import JobRows, ListClusterJobs
from local_cluster import LocalCluster

PLACES = 8


@pytest.fixture(autouse=True)
def few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MAX_CLIENTS", PLACES)


def run(tmp_path: Path, test: Callable[[list[CoordinatorClient], Straw], Awaitable[None]]) -> None:
    """`test` with clients that have said hello and take all places, the oldest first."""

    async def main() -> None:
        async with agents_of_straw(tmp_path, "a") as it, it.running():
            clients: list[CoordinatorClient] = []
            try:
                for _ in range(PLACES):
                    clients.append(await asyncio.to_thread(CoordinatorClient, it.state_dir, "crowd"))
                await asyncio.wait_for(test(clients, it), 60)
            finally:
                for client in clients:
                    client.close()

    asyncio.run(main())


async def ask(client: CoordinatorClient) -> Any:
    return await asyncio.to_thread(client.ask, JobRows, ListClusterJobs)


def test_the_one_idle_longest_gives_way_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "IDLE_SECONDS", 0.0)

    async def test(clients: list[CoordinatorClient], it: Straw) -> None:
        await ask(clients[0])  # so the second is the one idle longest
        await it.ask(JobRows, ListClusterJobs)
        for client in (clients[0], *clients[2:]):
            await ask(client)
        with pytest.raises(GshareError, match=r"idle while all|is gone"):
            await ask(clients[1])

    run(tmp_path, test)


def test_who_has_just_said_hello_keeps_his_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the one above: the same, before the time is over."""
    monkeypatch.setattr(api, "IDLE_SECONDS", 600.0)

    async def test(clients: list[CoordinatorClient], it: Straw) -> None:
        with pytest.raises(RetryLater, match=f"has {PLACES} clients already"):
            await it.ask(JobRows, ListClusterJobs)
        for client in clients:
            await ask(client)

    run(tmp_path, test)


def test_who_follows_keeps_his_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "IDLE_SECONDS", 0.0)

    async def test(clients: list[CoordinatorClient], it: Straw) -> None:
        for client in clients:
            await asyncio.to_thread(client.follow)
        with pytest.raises(RetryLater, match=f"has {PLACES} clients already"):
            await it.ask(JobRows, ListClusterJobs)
        with contextlib.suppress(CoordinatorGone):
            clients.pop().close()
        deadline = time.monotonic() + 20
        while True:  # the control: a place that was given back is given again
            try:
                await it.ask(JobRows, ListClusterJobs)
                break
            except RetryLater:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

    run(tmp_path, test)


def test_coordinator_stop_needs_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    cluster = LocalCluster(tmp_path / "it", "a")
    clients: list[CoordinatorClient] = []
    try:
        process = cluster.start_coordinator()
        with contextlib.suppress(RetryLater):  # until all of them are taken
            while True:
                clients.append(CoordinatorClient(cluster.home, "crowd"))
                clients[-1].follow()
        with pytest.raises(RetryLater, match="clients already"):
            CoordinatorClient(cluster.home, "one more")
        done = cluster.gshare("coordinator", "stop")
        assert (done.returncode, process.wait(30)) == (0, 0), done.stderr
        assert f"coordinator {process.pid} has ended" in done.stderr
    finally:
        for client in clients:
            client.close()
        cluster.close()
