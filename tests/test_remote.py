"""Programs on a node: arguments stay arguments, streams survive cuts, endless output ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from gshare.coordinator.channel import open_channel, open_socket
from gshare.coordinator.config import NodeConfig
from gshare.coordinator.deploy_plan import Deployed
from gshare.coordinator.host_keys import HostKeys
from gshare.coordinator.node_fault import NodeFault
from gshare.coordinator.remote import LocalRemote, Remote, reach
from sshd import Sshd, start_sshd

T = TypeVar("T")

#: Prints its arguments as a JSON list.
ECHO = "import json, sys; print(json.dumps(sys.argv[1:]))"
HOSTILE = [
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "a b",
    "a\nb\ntouch pwned",
    "'; touch pwned; '",
    '"$HOME"',
    "-rf",
    "[/]",
    "../x",
    "*",
    "",
    "x" * 4096,
    "ü\t\\",
]


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with start_sshd(tmp_path_factory.mktemp("node")) as sshd:
        yield sshd


def on(
    sshd: Sshd | None, tmp_path: Path, use: Callable[[Remote], Awaitable[T]], **how: tuple[float, int]
) -> T:
    """What `use` gives with the node behind `sshd`, or with this machine."""

    async def main() -> T:
        if sshd is None:
            remote: Remote = LocalRemote(NodeConfig(name="here", transport="local"))
        else:
            (tmp_path / "known_hosts").write_text(sshd.known_hosts_line)
            remote = await reach(sshd.node(), HostKeys(tmp_path / "known_hosts", also_read=()), **how)
        try:
            return await use(remote)
        finally:
            await remote.close()

    return asyncio.run(main())


@pytest.fixture(params=["local", "ssh"])
def where(request: pytest.FixtureRequest) -> Sshd | None:
    return request.getfixturevalue("sshd") if request.param == "ssh" else None


def test_hostile_arguments_arrive_as_they_are_and_run_nothing(where: Sshd | None, tmp_path: Path) -> None:
    import json

    async def echo(remote: Remote) -> None:
        done = await remote.run([sys.executable, "-c", ECHO, *HOSTILE], timeout=60)
        assert (done.code, json.loads(done.stdout)) == (0, HOSTILE)

    on(where, tmp_path, echo)
    for folder in (Path.home(), Path("/"), Path.cwd()):
        assert not (folder / "pwned").exists()


def test_stdin_stdout_stderr_and_code(where: Sshd | None, tmp_path: Path) -> None:
    copy_all = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"
    program = f"{copy_all}; sys.stderr.write('no'); sys.exit(3)"
    data = os.urandom(3_000_000)

    async def copy(remote: Remote) -> None:
        done = await remote.run([sys.executable, "-c", program], data, timeout=60)
        assert (done.code, done.stdout == data, done.stderr) == (3, True, b"no")

    on(where, tmp_path, copy)


def test_a_program_that_ignores_its_stdin(where: Sshd | None, tmp_path: Path) -> None:
    async def ignore(remote: Remote) -> None:
        done = await remote.run([sys.executable, "-c", "print('early')"], bytes(8_000_000), timeout=60)
        assert (done.code, done.stdout) == (0, b"early\n")

    on(where, tmp_path, ignore)


def test_endless_output_is_cut_off(where: Sshd | None, tmp_path: Path) -> None:
    async def flood(remote: Remote) -> None:
        with pytest.raises(NodeFault, match="bytes") as caught:
            await remote.run([sys.executable, "-c", "while True: print('y' * 60000)"], timeout=120)
        assert caught.value.kind == "protocol"

    on(where, tmp_path, flood)


def test_a_program_that_never_ends_is_given_up(where: Sshd | None, tmp_path: Path) -> None:
    async def hang(remote: Remote) -> None:
        with pytest.raises(NodeFault) as caught:
            await remote.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout=1.5)
        assert caught.value.kind == "timeout"
        # and the connection is as good as before
        assert (await remote.run([sys.executable, "-c", "print(1)"], timeout=60)).stdout == b"1\n"

    on(where, tmp_path, hang)


def test_a_program_that_is_not_there(where: Sshd | None, tmp_path: Path) -> None:
    async def missing(remote: Remote) -> str:
        try:
            return f"code {(await remote.run(['no-such-program'], timeout=60)).code}"
        except NodeFault as fault:
            return fault.kind

    assert on(where, tmp_path, missing) == ("no_python" if where is None else "code 127")


CAT = "import os\nwhile d := os.read(0, 65536): os.write(1, d)"


def test_a_channel_carries_bytes_both_ways_and_says_what_the_bridge_said(sshd: Sshd, tmp_path: Path) -> None:
    async def talk(remote: Remote) -> None:
        channel = await remote.start([sys.executable, "-c", f"{CAT}\nos.write(2, b'bye')"])
        data = os.urandom(2_000_000)

        async def send() -> None:
            for start in range(0, len(data), 50_000):
                channel.write(data[start : start + 50_000])
                await channel.drain()

        sending = asyncio.ensure_future(send())
        got = b""
        while len(got) < len(data):
            got += await channel.read()
        await sending
        assert got == data
        await channel.close()
        await channel.close()
        channel.write(b"late")  # dropped

    on(sshd, tmp_path, talk)


def test_the_bridges_last_words(sshd: Sshd, tmp_path: Path) -> None:
    async def listen(remote: Remote) -> None:
        channel = await remote.start([sys.executable, "-c", "import sys; sys.exit('no agent here')"])
        assert await channel.read() == b""
        assert channel.why_ended() == "no agent here"
        await channel.close()

    on(sshd, tmp_path, listen)


@pytest.mark.parametrize("how", ["killed", "black hole"])
def test_a_cut_in_the_middle_is_a_lost_connection(tmp_path: Path, how: str) -> None:
    with start_sshd(tmp_path / "own") as sshd:

        async def cut(remote: Remote) -> None:
            channel = await remote.start([sys.executable, "-c", CAT])
            channel.write(b"x" * 1000)
            assert await channel.read()
            sshd.signal_sessions(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            with pytest.raises(NodeFault) as caught:
                await asyncio.wait_for(channel.read(), 60)  # an orderly end would be b""
            assert (caught.value.kind, caught.value.transient) == ("lost", True)
            await asyncio.wait_for(remote.closed(), 60)
            with pytest.raises(NodeFault) as caught:
                await remote.run(["true"], timeout=5)
            assert caught.value.kind == "lost"
            await channel.close()

        # 6 s: a server that had no time for 1.5 s was given up before it was cut off.
        on(sshd, tmp_path, cut, keepalive=(2, 3))


def test_a_writer_waits_for_a_reader_that_does_not_read(sshd: Sshd, tmp_path: Path) -> None:
    async def fill(remote: Remote) -> int:
        channel = await remote.start([sys.executable, "-c", "import time; time.sleep(600)"])
        sent = 0
        try:
            while sent < 1 << 28:
                channel.write(bytes(65536))
                sent += 65536
                await asyncio.wait_for(channel.drain(), 1.0)
        except asyncio.TimeoutError:
            return sent
        finally:
            await channel.close()
        return sent

    assert on(sshd, tmp_path, fill) < 1 << 25


@pytest.mark.parametrize("switch", ["forwarding", "sftp"])
def test_the_bridge_works_where_forwarding_or_sftp_is_forbidden(tmp_path: Path, switch: str) -> None:
    """Nothing but "run a program" is asked of a server. The state directory has a hostile name, too."""
    state = tmp_path / "$(touch pwned) 'a\nb"
    bridge = "import sys\nsys.stdout.write(repr(sys.argv[1:]))"
    with start_sshd(tmp_path / "own", forwarding=switch != "forwarding", sftp=switch != "sftp") as sshd:

        async def use(remote: Remote) -> None:
            deployed = Deployed((sys.executable, "-c", bridge), str(state), "v", "")
            channel = await open_channel(remote, deployed)
            said = b""
            while data := await channel.read():
                said += data
            assert said.decode() == repr(["agent", "connect", "--state-dir", str(state)])
            await channel.close()

        on(sshd, tmp_path, use)
    assert not Path("pwned").exists()


def test_a_subsystem_that_is_not_there_is_named(sshd: Sshd, tmp_path: Path) -> None:
    """transport "agent" pointed at an ordinary SSH server."""

    async def main() -> None:
        (tmp_path / "known_hosts").write_text(sshd.known_hosts_line)
        keys = HostKeys(tmp_path / "known_hosts", also_read=())
        remote = await reach(sshd.node(transport="agent"), keys)
        with pytest.raises(NodeFault, match="subsystem") as caught:
            await open_channel(remote)
        assert caught.value.kind == "no_agent"
        await remote.close()

    asyncio.run(main())


def test_no_agent_at_the_socket_is_named(tmp_path: Path) -> None:
    with pytest.raises(NodeFault) as caught:
        asyncio.run(open_socket("here", tmp_path / "socket"))
    assert (caught.value.kind, str(tmp_path / "socket") in caught.value.text) == ("no_agent", True)


def test_a_socket_with_a_long_path(tmp_path: Path) -> None:
    from gshare.agent.service.server import socket_address

    folder = tmp_path / ("d" * 100) / ("e" * 100)
    folder.mkdir(parents=True)

    async def main() -> bytes:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello")
            writer.close()

        with socket_address(folder / "socket") as address:
            server = await asyncio.start_unix_server(greet, address)
        async with server:
            channel = await open_socket("here", folder / "socket")
            data = await channel.read()
            await channel.close()
            return data

    assert asyncio.run(main()) == b"hello"
