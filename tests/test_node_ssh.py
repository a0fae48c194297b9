"""`gshare agent --bind`: its own SSH server lets in whom it should, for one subsystem and nothing else."""

from __future__ import annotations

import asyncio
import getpass
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import asyncssh
import pytest
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.node import protocol
from gshare.agent.node.protocol import FromNode, NodeClientHello, NodeHello
from gshare.agent.node.ssh_server import check_authorized_keys, load_host_key, parse_bind
from gshare.agent.service.wire import FrameReader, convert, encode

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from node_agents import SECONDS, AgentProcess, running_agent  # noqa: E402


@dataclass
class Bound:
    """An agent with `--bind`, and who may come in."""

    agent: AgentProcess
    port: int
    fingerprint: str
    key: asyncssh.SSHKey
    authorized_keys: Path

    def connect(self, **options: object) -> Awaitable[asyncssh.SSHClientConnection]:
        host_key = asyncssh.read_private_key(self.agent.state / "ssh_host_key").convert_to_public()
        given = {
            "username": getpass.getuser(),
            "client_keys": [self.key],
            "known_hosts": ([host_key], [], []),
            "agent_path": None,
            "config": [],
            **options,
        }
        return asyncssh.connect("127.0.0.1", self.port, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bound]:
    folder = tmp_path_factory.mktemp("ssh")
    key = asyncssh.generate_private_key("ssh-ed25519")
    authorized = folder / "authorized_keys"
    authorized.write_bytes(key.export_public_key())
    authorized.chmod(0o600)
    with running_agent(
        folder / "node", "--bind", "127.0.0.1:0", "--authorized-keys", str(authorized)
    ) as agent:
        deadline = time.monotonic() + SECONDS
        pattern = r"SSH server on port (\d+); host key (SHA256:\S+)"
        while (said := re.search(pattern, agent.log.read_text())) is None:
            assert time.monotonic() < deadline, agent.log.read_text()
            time.sleep(0.05)
        yield Bound(agent, int(said[1]), said[2], key, authorized)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))  # type: ignore[arg-type]


async def say_hello(connection: asyncssh.SSHClientConnection) -> NodeHello:
    process = await connection.create_process(subsystem=protocol.SUBSYSTEM, encoding=None)
    process.stdin.write(
        encode(NodeClientHello(protocol=1, gshare=version("gshare"), client="t", role="observer"))
    )
    reader = FrameReader()
    while not (frames := reader.feed(await process.stdout.read(65536))):
        pass
    hello = convert(frames[0], FromNode)
    assert isinstance(hello, NodeHello)
    process.stdin.write(encode(protocol.ListAttempts(id=7)))
    while not (frames := reader.feed(await process.stdout.read(65536))):
        pass
    assert convert(frames[0], FromNode) == protocol.Attempts(reply_to=7, attempts=[])
    process.close()
    return hello


def test_the_subsystem_is_the_agent(bound: Bound) -> None:
    async def work() -> None:
        async with await bound.connect() as connection:
            hello = await say_hello(connection)
            again = await say_hello(connection)  # a second channel of the same login
        assert hello.agent_id == again.agent_id

    run(work)


def test_the_fingerprint_it_prints_is_its_keys_and_the_key_is_private(bound: Bound) -> None:
    path = bound.agent.state / "ssh_host_key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert asyncssh.read_private_key(path).get_fingerprint() == bound.fingerprint
    assert load_host_key(path).get_fingerprint() == bound.fingerprint


def test_a_changed_host_key_is_noticed_by_the_client(bound: Bound) -> None:
    """Negative control of the test above: with any other key there is no connection."""
    other = asyncssh.generate_private_key("ssh-ed25519").convert_to_public()

    async def work() -> None:
        with pytest.raises(asyncssh.HostKeyNotVerifiable):
            await bound.connect(known_hosts=([other], [], []))

    run(work)


def test_wrong_key_other_user_and_password_are_refused(bound: Bound) -> None:
    async def work() -> None:
        for options in (
            {"client_keys": [asyncssh.generate_private_key("ssh-ed25519")]},
            {"username": "somebody-else"},
            {"username": ""},
            {"client_keys": None, "password": "secret", "preferred_auth": "password"},
            {"client_keys": None, "preferred_auth": "none"},
        ):
            with pytest.raises(asyncssh.PermissionDenied):
                await bound.connect(**options)

    run(work)


def test_a_key_that_is_taken_out_opens_no_more(bound: Bound) -> None:
    other = asyncssh.generate_private_key("ssh-ed25519")

    async def work() -> None:
        before = bound.authorized_keys.read_bytes()
        bound.authorized_keys.write_bytes(other.export_public_key())
        try:
            async with await bound.connect(client_keys=[other]) as connection:
                await say_hello(connection)
            with pytest.raises(asyncssh.PermissionDenied):
                await bound.connect()
        finally:
            bound.authorized_keys.write_bytes(before)

    run(work)


def test_no_shell_no_command_no_files_no_other_subsystem(bound: Bound) -> None:
    marker = bound.agent.state / "pwned"

    async def work() -> None:
        async with await bound.connect() as connection:
            shell = await connection.create_process()
            assert (await shell.wait()).exit_status == 1
            done = await connection.run(f"touch {marker}")
            assert done.exit_status == 1
            with pytest.raises(asyncssh.Error):
                async with connection.start_sftp_client():
                    pass
            other = await connection.create_process(subsystem="shell", encoding=None)
            assert (await other.wait()).exit_status == 1
            with pytest.raises(asyncssh.ChannelOpenError):
                await connection.create_process(term_type="xterm", subsystem=protocol.SUBSYSTEM)
            await say_hello(connection)

    run(work)
    assert not marker.exists()


def test_no_forwarding_of_any_kind(bound: Bound, tmp_path: Path) -> None:
    async def work() -> None:
        async with await bound.connect() as connection:
            with pytest.raises(asyncssh.ChannelOpenError):
                await connection.open_connection("127.0.0.1", bound.port)
            with pytest.raises(asyncssh.ChannelOpenError):
                await connection.open_unix_connection(str(bound.agent.socket))
            with pytest.raises(asyncssh.ChannelListenError):
                await connection.start_server(lambda host, port: asyncssh.SSHTCPSession(), "", 0)
            with pytest.raises(asyncssh.ChannelListenError):
                await connection.start_unix_server(asyncssh.SSHUNIXSession, str(tmp_path / "s"))

    run(work)
    assert not (tmp_path / "s").exists()


def test_openssh_can_use_it(bound: Bound, tmp_path: Path) -> None:
    key, hosts = tmp_path / "key", tmp_path / "known_hosts"
    bound.key.write_private_key(str(key))
    key.chmod(0o600)
    public = asyncssh.read_private_key(bound.agent.state / "ssh_host_key").export_public_key().decode()
    hosts.write_text(f"[127.0.0.1]:{bound.port} {public}")
    options = {"IdentityFile": key, "IdentitiesOnly": "yes", "UserKnownHostsFile": hosts, "BatchMode": "yes"}
    flags = [text for name, value in options.items() for text in ("-o", f"{name}={value}")]
    message = NodeClientHello(protocol=1, gshare=version("gshare"), client="t", role="observer")
    try:
        done = subprocess.run(
            ["ssh", "-F", "/dev/null", *flags, "-p", str(bound.port), "-s", "127.0.0.1", protocol.SUBSYSTEM],
            input=encode(message),
            capture_output=True,
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("no ssh command here")
    (frame,) = FrameReader().feed(done.stdout)
    assert isinstance(convert(frame, FromNode), NodeHello), done.stderr


def test_a_port_in_use_ends_the_agent_with_one_line(bound: Bound, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gshare.cli.main", "agent", "--state-dir", str(tmp_path / "second")]
    command += [f"--bind=127.0.0.1:{bound.port}", "--authorized-keys", str(bound.authorized_keys)]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    started, why = done.stderr.splitlines()
    assert re.fullmatch(r"agent \d+ runs; .*", started), done.stderr
    assert re.fullmatch(rf"gshare: --bind 127.0.0.1:{bound.port}: .*in use.*", why), done.stderr
    assert not (tmp_path / "second" / "socket").exists()


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (":7433", ("", 7433)),
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("host", ("host", 7433)),
        (":9000", ("", 9000)),
        ("[::1]:9000", ("::1", 9000)),
    ],
)
def test_bind(text: str, where: tuple[str, int]) -> None:
    assert parse_bind(text) == where


@pytest.mark.parametrize("text", ["host:port", "host:99999", "a b:1", "host:", "host:-1"])
def test_bind_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="--bind"):
        parse_bind(text)


def test_keys_that_nobody_or_everybody_could_have_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="put the public keys there"):
        check_authorized_keys(tmp_path / "none")
    path = tmp_path / "keys"
    path.write_text("")
    path.chmod(0o622)
    with pytest.raises(UsageError, match="chmod go-w"):
        check_authorized_keys(path)
    path.chmod(0o644)
    check_authorized_keys(path)


def test_a_broken_host_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("nothing")
    with pytest.raises(GshareError, match=f"{tmp_path / 'key'}: .*remove it"):
        load_host_key(tmp_path / "key")
    assert os.listdir(tmp_path) == ["key"]
