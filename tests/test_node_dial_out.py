"""A node that calls its coordinator: over SSH, its host key checked, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import asyncssh
import pytest
from gshare.agent.errors import UsageError
from gshare.agent.node import protocol
from gshare.agent.node.dial_out import (
    FIRST_PAUSE,
    GOOD_SECONDS,
    LONGEST_PAUSE,
    DialIn,
    next_pause,
    node_name,
    parse_coordinator,
)
from gshare.agent.node.protocol import NodeClientHello, NodeHello
from gshare.agent.service.wire import FrameReader, convert, encode

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from node_agents import AgentProcess  # noqa: E402


class Coordinator:
    """An SSH server that plays the machine of a coordinator; `calls` gets each channel's first message."""

    def __init__(self, folder: Path) -> None:
        self.host_key = asyncssh.generate_private_key("ssh-ed25519")
        self.client_key = asyncssh.generate_private_key("ssh-ed25519")
        self.calls: asyncio.Queue[tuple[str | None, Any, asyncssh.SSHServerProcess[bytes], FrameReader]]
        self.folder = folder
        self.port = 0
        (folder / ".ssh").mkdir(mode=0o700)
        self.client_key.write_private_key(str(folder / ".ssh" / "id_ed25519"))
        (folder / "authorized_keys").write_bytes(self.client_key.export_public_key())

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        self.calls = asyncio.Queue()

        async def session(process: asyncssh.SSHServerProcess[bytes]) -> None:
            reader = FrameReader()
            while not (frames := reader.feed(await process.stdin.read(65536))):
                pass
            await self.calls.put((process.command, frames[0], process, reader))
            await process.wait_closed()

        server = await asyncssh.create_server(
            asyncssh.SSHServer,
            "127.0.0.1",
            self.port,
            server_host_keys=[self.host_key],
            authorized_client_keys=str(self.folder / "authorized_keys"),
            process_factory=session,
            encoding=None,
        )
        async with server:
            self.port = server.get_port()
            yield

    def trust(self, key: asyncssh.SSHKey) -> None:
        line = f"[127.0.0.1]:{self.port} {key.export_public_key().decode()}"
        (self.folder / ".ssh" / "known_hosts").write_text(line)


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return Coordinator(home)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 90))  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.05)


def agent_for(coordinator: Coordinator, tmp_path: Path) -> AgentProcess:
    where = f"{getpass.getuser()}@127.0.0.1:{coordinator.port}"
    return AgentProcess(
        tmp_path / "node",
        ("--coordinator", where, "--node", "lab-7"),
        {"HOME": os.environ["HOME"]},
    )


def test_it_calls_says_who_it_is_and_serves(coordinator: Coordinator, tmp_path: Path) -> None:
    async def work() -> None:
        async with coordinator.listening():
            coordinator.trust(coordinator.host_key)
            agent = agent_for(coordinator, tmp_path)
            await asyncio.to_thread(agent.start)
            try:
                for _ in range(2):  # it calls again when the channel ended
                    command, first, process, reader = await coordinator.calls.get()
                    assert command == "gshare coordinator connect"
                    assert convert(first, DialIn) == DialIn(node="lab-7", gshare=version("gshare"))
                    process.stdout.write(
                        encode(
                            NodeClientHello(
                                protocol=1,
                                gshare=version("gshare"),
                                client="c",
                                role="coordinator",
                                owner="owner-one",
                                session="s",
                            )
                        )
                    )
                    process.stdout.write(encode(protocol.ListAttempts(id=3)))
                    messages: list[Any] = []
                    while len(messages) < 2:
                        messages += reader.feed(await process.stdin.read(65536))
                    hello, attempts = (convert(one, protocol.FromNode) for one in messages)
                    assert isinstance(hello, NodeHello)
                    assert attempts == protocol.Attempts(reply_to=3, attempts=[])
                    process.exit(1)
                await until(lambda: "the connection ended" in agent.log.read_text())
            finally:
                await asyncio.to_thread(agent.kill)

    run(work)


def test_an_unknown_and_a_changed_host_key_are_never_accepted(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    async def work() -> None:
        async with coordinator.listening():
            agent = agent_for(coordinator, tmp_path)
            await asyncio.to_thread(agent.start)
            try:
                await until(lambda: "confirm its key once with: ssh 127.0.0.1" in agent.log.read_text())
                coordinator.trust(asyncssh.generate_private_key("ssh-ed25519"))
                await asyncio.sleep(3)
                assert coordinator.calls.empty()
                # Negative control: with the right key the same agent gets through by itself.
                coordinator.trust(coordinator.host_key)
                await coordinator.calls.get()
            finally:
                await asyncio.to_thread(agent.kill)

    run(work)


def test_it_comes_back_when_the_coordinators_machine_does(coordinator: Coordinator, tmp_path: Path) -> None:
    async def work() -> None:
        async with coordinator.listening():
            coordinator.trust(coordinator.host_key)
        agent = agent_for(coordinator, tmp_path)  # nobody listens now
        await asyncio.to_thread(agent.start)
        try:
            await until(lambda: "warning: coordinator 127.0.0.1: " in agent.log.read_text())
            async with coordinator.listening():
                await coordinator.calls.get()
            # What fails again for the same reason is said once.
            assert agent.log.read_text().count("Connect call failed") == 1
        finally:
            await asyncio.to_thread(agent.kill)

    run(work)


def test_pauses_double_up_to_a_minute_and_a_good_connection_starts_anew() -> None:
    pause, waits = FIRST_PAUSE, []
    for _ in range(10):
        wait, pause = next_pause(pause, 1.0, lambda: 1.0)
        waits.append(wait)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert next_pause(LONGEST_PAUSE, GOOD_SECONDS, lambda: 0.0) == (0.5 * FIRST_PAUSE, 2 * FIRST_PAUSE)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("ada@home", ("ada", "home", None)),
        ("home", (None, "home", None)),
        ("ada@home:22", ("ada", "home", 22)),
    ],
)
def test_coordinators(text: str, target: tuple[str | None, str, int | None]) -> None:
    assert parse_coordinator(text) == target


@pytest.mark.parametrize(
    "text", ["", "@home", "ada@", "-oProxyCommand=x", "ada@-x", "a b", "ada@h:x", "a\nb"]
)
def test_coordinators_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--coordinator"):
        parse_coordinator(text)


def test_node_names() -> None:
    assert node_name("lab-7") == "lab-7"
    with pytest.raises(UsageError, match="--node"):
        node_name("../x")
