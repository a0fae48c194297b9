"""SSH to a real OpenSSH server: host keys on every hop, our keys, forwarding, black holes, cuts, timeouts."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sshd as sshd_support
from gshare.coordinator.config import NodeConfig
from gshare.coordinator.host_keys import HostKeys, HostKeyUnknown
from gshare.coordinator.node_fault import NodeFault
from gshare.coordinator.ssh import close, connect
from sshd import Sshd, make_key, start_sshd


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home on our side: no keys, no configuration, no agent."""
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Sshd]:
    with start_sshd(tmp_path / "node") as sshd:
        yield sshd


@pytest.fixture
def jump(tmp_path: Path) -> Iterator[Sshd]:
    with start_sshd(tmp_path / "jump") as sshd:
        yield sshd


def keys_of(home: Path, *servers: Sshd, **how: Any) -> HostKeys:
    """Known hosts that know `servers`."""
    file = home / ".ssh" / "known_hosts"
    file.write_text("".join(server.known_hosts_line for server in servers))
    return HostKeys(file, also_read=(), **how)


async def whoami(node: NodeConfig, keys: HostKeys, **how: Any) -> str:
    """Connects, runs one program, hangs up."""
    connection = await connect(node, keys, **how)
    try:
        result = await connection.run("whoami", check=True)
        return str(result.stdout).strip()
    finally:
        await close(connection)


def fault_of(node: NodeConfig, keys: HostKeys, **how: Any) -> NodeFault:
    with pytest.raises(NodeFault) as caught:
        asyncio.run(whoami(node, keys, **how))
    assert caught.value.node == node.name
    return caught.value


def test_a_known_host_lets_us_in(home: Path, sshd: Sshd) -> None:
    assert asyncio.run(whoami(sshd.node(), keys_of(home, sshd))) == sshd.user


def test_an_unknown_key_is_refused_with_its_fingerprint_and_nothing_is_written(
    home: Path, sshd: Sshd
) -> None:
    keys = keys_of(home)
    fault = fault_of(sshd.node(), keys)
    assert fault.kind == "host_key_unknown"
    assert sshd.fingerprint in fault.text
    assert "gshare cluster check" in fault.text
    assert keys.file.read_text() == ""


def test_a_confirmed_key_is_kept_and_not_asked_for_again(home: Path, sshd: Sshd) -> None:
    asked: list[HostKeyUnknown] = []

    async def ask(unknown: HostKeyUnknown) -> bool:
        asked.append(unknown)
        return True

    keys = keys_of(home, ask=ask)
    for _ in range(2):
        assert asyncio.run(whoami(sshd.node(), keys)) == sshd.user
    assert [unknown.fingerprint for unknown in asked] == [sshd.fingerprint]
    assert keys.file.read_text() == sshd.known_hosts_line
    assert asyncio.run(whoami(sshd.node(), HostKeys(keys.file, also_read=()))) == sshd.user


def test_a_key_that_the_person_does_not_confirm_is_refused(home: Path, sshd: Sshd) -> None:
    async def ask(unknown: HostKeyUnknown) -> bool:
        return False

    keys = keys_of(home, ask=ask, accept_new=True)
    assert fault_of(sshd.node(), keys).kind == "host_key_unknown"
    assert keys.file.read_text() == ""


def test_accept_new_takes_the_first_key_but_never_a_changed_one(home: Path, sshd: Sshd) -> None:
    keys = keys_of(home, accept_new=True)
    assert asyncio.run(whoami(sshd.node(), keys)) == sshd.user
    sshd.stop()
    make_key(sshd.host_key)
    sshd.start()
    fault = fault_of(sshd.node(), keys)
    assert fault.kind == "host_key_changed"
    assert f"{keys.file}:1" in fault.text
    assert "ssh-keygen -f" in fault.text


def test_a_key_of_another_type_counts_as_changed(home: Path, sshd: Sshd) -> None:
    keys = keys_of(home, sshd, accept_new=True)
    sshd.stop()
    make_key(sshd.host_key, "ecdsa")
    sshd.start()
    fault = fault_of(sshd.node(), keys)
    assert fault.kind == "host_key_changed"
    assert sshd.fingerprint in fault.text


def test_the_known_type_of_key_is_asked_for_when_a_host_has_several(home: Path, tmp_path: Path) -> None:
    second = make_key(tmp_path / "second", "ecdsa")
    with start_sshd(tmp_path / "two", more=(f"HostKey {second}",)) as sshd:
        sshd.host_key = second
        assert asyncio.run(whoami(sshd.node(), keys_of(home, sshd))) == sshd.user


def test_the_time_a_person_takes_is_not_counted(home: Path, sshd: Sshd) -> None:
    async def ask(unknown: HostKeyUnknown) -> bool:
        loop = asyncio.get_running_loop()
        clock = loop.time
        loop.time = lambda: clock() + 3600  # type: ignore[method-assign]  # an hour: every timer is due
        await asyncio.sleep(0.1)
        return True

    assert asyncio.run(whoami(sshd.node(), keys_of(home, ask=ask), timeout=60)) == sshd.user


def through(home: Path, jump: Sshd, sshd: Sshd) -> NodeConfig:
    (home / ".ssh" / "config").write_text(jump.ssh_config("gate"))
    return sshd.node(proxy_jump="gate")


def test_through_a_jump_host_of_cluster_toml_or_of_ssh_config(home: Path, sshd: Sshd, jump: Sshd) -> None:
    node = through(home, jump, sshd)
    keys = keys_of(home, sshd, jump)
    assert asyncio.run(whoami(node, keys)) == sshd.user
    (home / ".ssh" / "config").write_text(
        jump.ssh_config("gate") + sshd.ssh_config("far") + "  ProxyJump gate\n"
    )
    assert asyncio.run(whoami(NodeConfig(name="desk", host="far"), keys)) == sshd.user
    jump.stop()
    assert fault_of(node, keys).kind == "refused"  # so it did go through the jump host


@pytest.mark.parametrize("which", ["unknown", "changed"])
def test_a_jump_hosts_key_is_checked_like_the_nodes(home: Path, sshd: Sshd, jump: Sshd, which: str) -> None:
    node = through(home, jump, sshd)
    keys = keys_of(home, sshd, *([jump] if which == "changed" else []))
    if which == "changed":
        jump.stop()
        make_key(jump.host_key)
        jump.start()
    fault = fault_of(node, keys)
    assert fault.kind == f"host_key_{which}"
    assert fault.text.startswith("jump host gate")
    assert jump.fingerprint in fault.text


def test_behind_a_jump_host_the_nodes_key_is_checked_too(home: Path, sshd: Sshd, jump: Sshd) -> None:
    fault = fault_of(through(home, jump, sshd), keys_of(home, jump))
    assert (fault.kind, sshd.fingerprint in fault.text) == ("host_key_unknown", True)


def test_nodes_behind_one_new_jump_host_ask_once_for_it(home: Path, sshd: Sshd, jump: Sshd) -> None:
    asked: list[str] = []

    async def ask(unknown: HostKeyUnknown) -> bool:
        asked.append(unknown.fingerprint)
        await asyncio.sleep(0.2)
        return True

    node = through(home, jump, sshd)
    keys = keys_of(home, sshd, ask=ask)

    async def both() -> list[str]:
        return await asyncio.gather(whoami(node, keys), whoami(node, keys))

    assert asyncio.run(both()) == [sshd.user] * 2
    assert asked == [jump.fingerprint]


def test_ssh_config_cannot_switch_the_check_off(home: Path, sshd: Sshd) -> None:
    (home / ".ssh" / "config").write_text("Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile none\n")
    assert fault_of(sshd.node(), keys_of(home)).kind == "host_key_unknown"


def test_a_jump_host_that_forbids_forwarding_says_so(home: Path, sshd: Sshd, tmp_path: Path) -> None:
    with start_sshd(tmp_path / "strict", forwarding=False) as strict:
        fault = fault_of(through(home, strict, sshd), keys_of(home, sshd, strict))
    assert fault.kind == "forwarding"
    assert "AllowTcpForwarding" in fault.text


def test_a_wrong_client_key_is_named(home: Path, sshd: Sshd, tmp_path: Path) -> None:
    wrong = make_key(tmp_path / "wrong")
    fault = fault_of(sshd.node(identity=str(wrong)), keys_of(home, sshd))
    assert fault.kind == "auth"
    assert str(wrong) in fault.text
    assert not fault.transient


def test_an_identity_that_is_missing_is_named(home: Path, sshd: Sshd, tmp_path: Path) -> None:
    fault = fault_of(sshd.node(identity=str(tmp_path / "gone")), keys_of(home, sshd))
    assert fault.kind == "config"
    assert str(tmp_path / "gone") in fault.text


def test_nobody_listens_there(home: Path, sshd: Sshd) -> None:
    sshd.stop()
    fault = fault_of(sshd.node(), keys_of(home, sshd))
    assert (fault.kind, fault.transient) == ("refused", True)


def test_a_name_without_an_address(home: Path, sshd: Sshd) -> None:
    assert fault_of(sshd.node(host="no-such-host.invalid"), keys_of(home)).kind == "unresolved"


def test_something_that_is_no_ssh_server(home: Path) -> None:
    async def talk() -> NodeFault:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail ready\r\n" * 2000)
            await reader.read()
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            with pytest.raises(NodeFault) as caught:
                await connect(
                    NodeConfig(name="mail", host="127.0.0.1", port=port), HostKeys(home / "k"), timeout=60
                )
        return caught.value

    assert asyncio.run(talk()).kind in {"protocol", "lost"}


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where connections are taken and nothing is ever said."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(64)
        yield sock.getsockname()[1]


def test_timeouts_of_silent_nodes_run_side_by_side(home: Path, silent: int, sshd: Sshd) -> None:
    keys = keys_of(home, sshd)
    dark = [NodeConfig(name=f"dark{n}", host="127.0.0.1", port=silent) for n in range(50)]

    async def all_of_them() -> list[str | BaseException]:
        tries = [whoami(node, keys, timeout=2) for node in dark]
        return await asyncio.gather(*tries, whoami(sshd.node(), keys), return_exceptions=True)

    start = time.monotonic()
    *faults, user = asyncio.run(all_of_them())
    took = time.monotonic() - start
    assert user == sshd.user
    assert {fault.kind for fault in faults if isinstance(fault, NodeFault)} == {"timeout"}
    assert len(faults) == 50
    assert took < 50  # summed they are 100 s


def test_the_connect_timeout_of_ssh_config_counts_too(home: Path, silent: int) -> None:
    (home / ".ssh" / "config").write_text("Host *\n  ConnectTimeout 1\n")
    node = NodeConfig(name="dark", host="127.0.0.1", port=silent)
    assert fault_of(node, keys_of(home), timeout=60).kind == "timeout"


def test_a_black_hole_in_the_middle_ends_the_connection(home: Path, sshd: Sshd) -> None:
    """SIGSTOP: TCP acknowledges, nobody answers. Without keepalive it would wait for ever."""

    async def wait_for_the_end() -> bool:
        connection = await connect(sshd.node(), keys_of(home, sshd), keepalive=(0.3, 3))
        sshd.signal_sessions(signal.SIGSTOP)
        try:
            await asyncio.wait_for(connection.wait_closed(), 30)
            return connection.is_closed()
        finally:
            sshd.signal_sessions(signal.SIGCONT)

    assert asyncio.run(wait_for_the_end())


def test_without_keepalive_a_black_hole_is_not_noticed(home: Path, sshd: Sshd) -> None:
    """The control of the test above."""

    async def wait_for_the_end() -> bool:
        connection = await connect(sshd.node(), keys_of(home, sshd), keepalive=(0, 3))
        sshd.signal_sessions(signal.SIGSTOP)
        try:
            await asyncio.wait_for(connection.wait_closed(), 4)
            return True
        except asyncio.TimeoutError:
            return False
        finally:
            sshd.signal_sessions(signal.SIGCONT)
            await close(connection)

    assert not asyncio.run(wait_for_the_end())


def test_a_circle_of_jump_hosts_is_named(home: Path, sshd: Sshd) -> None:
    (home / ".ssh" / "config").write_text("Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    fault = fault_of(sshd.node(proxy_jump="a"), keys_of(home, sshd))
    assert (fault.kind, "circle" in fault.text) == ("config", True)


@pytest.mark.parametrize("jump", ["a@", "@b", "host:port", "a,,b"])
def test_a_jump_host_that_cannot_be_read_is_named(home: Path, jump: str) -> None:
    node = NodeConfig(name="desk", host="127.0.0.1", proxy_jump=jump)
    fault = fault_of(node, HostKeys(home / "known_hosts", also_read=()))
    assert (fault.kind, "proxy_jump" in fault.text) == ("config", True)


def test_without_sshd_these_tests_are_skipped_or_fail_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sshd_support, "SSHD", None)
    monkeypatch.delenv("GSHARE_REQUIRE_SSHD", raising=False)
    with pytest.raises(pytest.skip.Exception):
        sshd_support.require_sshd()
    monkeypatch.setenv("GSHARE_REQUIRE_SSHD", "1")
    with pytest.raises(pytest.fail.Exception):
        sshd_support.require_sshd()
