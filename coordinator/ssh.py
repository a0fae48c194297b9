"""SSH connections to nodes: ssh_config, jump hosts, keys, and every hop's host key checked.

asyncssh opens jump hosts with its own defaults, so the chain is walked here, one hop at a time, each with
the same check. A new key ends the try; when it is trusted the chain is opened again and has to show the key
that was confirmed. Timeouts cover all hops of a node together, without the time a person takes to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path

import asyncssh
from asyncssh.constants import OPEN_ADMINISTRATIVELY_PROHIBITED
from asyncssh.public_key import get_default_certificate_algs, get_default_public_key_algs
from gshare.agent.errors import UsageError
from gshare.coordinator.config import NodeConfig
from gshare.coordinator.host_keys import (
    SSH_PORT,
    HostKeyChanged,
    HostKeyFault,
    HostKeys,
    HostKeyUnknown,
    Known,
)
from gshare.coordinator.node_fault import NodeFault

CONNECT_SECONDS = 20.0
KEEPALIVE_SECONDS = 15.0  # asyncssh's own default is none at all
KEEPALIVE_COUNT = 3
MAX_HOPS = 8
SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
AGENT_PORT = 7433


@dataclass(frozen=True)
class Hop:
    """One SSH server on the way, as cluster.toml and ssh_config name it."""

    label: str  # "the node" or "jump host gate:2222"
    host: str  # what ssh_config is asked for
    options: asyncssh.SSHClientConnectionOptions

    @property
    def address(self) -> str:
        return f"{self.options.host}:{self.options.port}"

    @property
    def key_name(self) -> tuple[str, int]:
        """Host and port that its key is filed under; an alias has no port (ssh_config(5), HostKeyAlias)."""
        if self.options.host_key_alias:
            return self.options.host_key_alias, SSH_PORT
        return self.options.host, self.options.port

    @property
    def known_hosts(self) -> tuple[Path, ...]:
        """UserKnownHostsFile of ssh_config: read too. "none" adds nothing, and switches nothing off."""
        files = self.options.config.get("UserKnownHostsFile", ())
        return tuple(Path(str(file)).expanduser() for file in files) if isinstance(files, list) else ()


class _Client(asyncssh.SSHClient):
    """Says whether the host's key is trusted, and keeps what was wrong with it."""

    def __init__(self, keys: HostKeys, hop: Hop) -> None:
        self._keys = keys
        self._hop = hop
        self.fault: HostKeyFault | None = None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        name, its_port = self._hop.key_name
        self.fault = self._keys.check(name, its_port, key, self._hop.label, self._hop.known_hosts)
        return self.fault is None


async def connect(
    node: NodeConfig,
    keys: HostKeys,
    *,
    timeout: float = CONNECT_SECONDS,
    keepalive: tuple[float, int] = (KEEPALIVE_SECONDS, KEEPALIVE_COUNT),
) -> asyncssh.SSHClientConnection:
    """A connection to `node`, through its jump hosts; closing it closes those too.

    `timeout`: seconds for all hops together. NodeFault says what is wrong with which hop.
    """
    for _ in range(MAX_HOPS + 1):  # each hop's key is new at most once: then it is known, or changed
        progress = _Progress(node)
        try:
            return await asyncio.wait_for(_open(progress, keys, keepalive), timeout)
        except asyncio.TimeoutError:
            raise NodeFault(
                node.name,
                "timeout",
                f"{progress.where} did not answer within {timeout:g} s; is it up, and does no firewall drop "
                "the connection?",
            ) from None
        except HostKeyUnknown as unknown:
            if not await keys.decide(unknown):
                raise NodeFault(node.name, "host_key_unknown", _unknown_text(unknown)) from unknown
        except HostKeyChanged as changed:
            raise NodeFault(node.name, "host_key_changed", _changed_text(changed)) from changed
    raise NodeFault(node.name, "host_key_unknown", "its host keys keep changing; nothing was trusted")


class _Progress:
    """Where a try is, for the message of a timeout."""

    def __init__(self, node: NodeConfig) -> None:
        self.node = node
        self.where = "ssh_config"


async def _open(
    progress: _Progress, keys: HostKeys, keepalive: tuple[float, int]
) -> asyncssh.SSHClientConnection:
    node = progress.node
    opened: list[asyncssh.SSHClientConnection] = []
    try:
        for hop in await _hops(node):
            progress.where = f"{hop.label} ({hop.address})"
            opened.append(await _open_hop(node, hop, keys, keepalive, opened[-1] if opened else None))
    except BaseException:  # cancelled by the timeout, too
        for connection in reversed(opened):
            connection.abort()
        raise
    for tunnel, connection in itertools.pairwise(opened):
        connection.set_tunnel(tunnel)  # closed with what runs through it
    return opened[-1]


async def _open_hop(
    node: NodeConfig,
    hop: Hop,
    keys: HostKeys,
    keepalive: tuple[float, int],
    tunnel: asyncssh.SSHClientConnection | None,
) -> asyncssh.SSHClientConnection:
    known = keys.lookup(*hop.key_name, hop.known_hosts)
    client = _Client(keys, hop)
    try:
        return await asyncssh.connect(
            options=hop.options,
            host=hop.host,
            port=hop.options.port,
            tunnel=tunnel,
            client_factory=lambda: client,
            keepalive_interval=keepalive[0],
            keepalive_count_max=keepalive[1],
            # Empty, not None, which would switch the check off: keys are judged by the client above.
            known_hosts=([], list(known.authorities), [key for key, _ in known.revoked])
            if known.authorities
            else ([], [], []),
            server_host_key_algs=_key_algorithms(hop, known),
        )
    except asyncssh.HostKeyNotVerifiable as error:
        if client.fault is not None:
            raise client.fault from None
        text = f"{hop.label} ({hop.address}): its host key is not accepted: {error.reason}"
        raise NodeFault(node.name, "host_key_changed", text) from None
    except (OSError, asyncssh.Error, ValueError) as error:
        raise connection_fault(node, hop, error, jumped=tunnel is not None) from error


def _key_algorithms(hop: Hop, known: Known) -> tuple[()] | list[str]:
    """Which kind of host key the server is asked to show: the known one first, then any.

    Any: a host that now shows another kind than the known one must end as "changed", not as "no common
    algorithm". Certificates only where an authority is known; elsewhere the plain key is what counts.
    """
    if hop.options.config.get("HostKeyAlgorithms"):
        return ()
    names = [*known.key_algorithms, *(name.decode() for name in get_default_public_key_algs())]
    if known.authorities:
        names = [name.decode() for name in get_default_certificate_algs()] + names
    return list(dict.fromkeys(names))


async def _hops(node: NodeConfig) -> list[Hop]:
    """The servers to pass, the node last. NodeFault "config" when a setting cannot be understood."""
    port = node.port if node.port is not None or node.transport != "agent" else AGENT_PORT
    last = await _hop(node, "the node", node.host, node.user, port, node.identity)
    jump = node.proxy_jump if node.proxy_jump is not None else last.options.tunnel
    return [*await _jumps(node, jump, depth=0), last]


async def _jumps(node: NodeConfig, jump: object, depth: int) -> list[Hop]:
    """The hops of a ProxyJump value; the first one may have a ProxyJump of its own in ssh_config."""
    if not isinstance(jump, str) or jump.lower() == "none":
        return []
    hops: list[Hop] = []
    for number, text in enumerate(jump.split(",")):
        user, host, port = _split_jump(node, text)
        hop = await _hop(node, f"jump host {text}", host, user, port, None)
        if number == 0:
            if depth >= MAX_HOPS:
                raise NodeFault(
                    node.name, "config", f"ProxyJump of {text} leads in a circle; see ~/.ssh/config"
                )
            hops += await _jumps(node, hop.options.tunnel, depth + 1)
        hops.append(hop)
    if len(hops) > MAX_HOPS:
        raise NodeFault(node.name, "config", f"{len(hops)} jump hosts; at most {MAX_HOPS} are passed")
    return hops


def _split_jump(node: NodeConfig, text: str) -> tuple[str | None, str, int | None]:
    """`[user@]host[:port]`, an IPv6 address in brackets."""
    user, at, rest = text.strip().rpartition("@")
    host, colon, port = rest.rpartition(":")
    if not colon or rest.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = rest, ""
    host = host.strip("[]")
    if not host or (at and not user) or (port and not (port.isascii() and port.isdecimal())):
        raise NodeFault(
            node.name,
            "config",
            f"proxy_jump: {text!r} is not [user@]host[:port], several separated by commas",
        )
    return user or None, host, int(port) if port else None


async def _hop(
    node: NodeConfig, label: str, host: str, user: str | None, port: int | None, identity: str | None
) -> Hop:
    try:
        options = await asyncssh.SSHClientConnectionOptions.construct(
            host=host,
            port=() if port is None else port,
            username=() if user is None else user,
            client_keys=() if identity is None else [identity],
            # A key with a passphrase is skipped here and used through ssh-agent: nobody is there to type it.
            ignore_encrypted=True,
            config=_config_files(),
            x509_trusted_certs=[],
            x509_trusted_cert_paths=[],
        )
    except (asyncssh.KeyImportError, OSError, ValueError) as error:
        what = (
            f"identity {identity}: "
            if isinstance(error, (asyncssh.KeyImportError, OSError)) and identity
            else ""
        )
        raise NodeFault(
            node.name, "config", f"{label}: {what}{error}; see cluster.toml and ~/.ssh/config"
        ) from None
    assert isinstance(options, asyncssh.SSHClientConnectionOptions)
    return Hop(label=label, host=host, options=options)


def _config_files() -> list[Path]:
    """The user's ssh_config and the system's; the first value counts. asyncssh reads none by itself here."""
    return [file for file in (Path.home() / ".ssh" / "config", SYSTEM_CONFIG) if os.access(file, os.R_OK)]


def connection_fault(node: NodeConfig, hop: Hop, error: Exception, *, jumped: bool) -> NodeFault:
    """What went wrong at `hop`, in words; `jumped`: it is reached through another one."""
    at = f"{hop.label} ({hop.address})"
    if isinstance(error, socket.gaierror):
        return NodeFault(
            node.name, "unresolved", f"{at}: no address for {hop.options.host!r}; check the name"
        )
    if isinstance(error, ConnectionRefusedError):
        return NodeFault(node.name, "refused", f"{at}: nothing listens there; is the SSH server up?")
    if isinstance(error, asyncssh.ChannelOpenError):
        if error.code == OPEN_ADMINISTRATIVELY_PROHIBITED:
            return NodeFault(
                node.name,
                "forwarding",
                f"{at}: the jump host before it forbids forwarding; set AllowTcpForwarding yes there, "
                "or choose another proxy_jump",
            )
        return NodeFault(node.name, "refused", f"{at}: the jump host cannot reach it: {error.reason}")
    if isinstance(error, asyncssh.PermissionDenied):
        identity = f" with the key {node.identity}" if node.identity and hop.label == "the node" else ""
        return NodeFault(
            node.name,
            "auth",
            f"{at}: user {hop.options.username!r} is not let in{identity}; add your public key to "
            "~/.ssh/authorized_keys there, name another `user` or `identity`, or (a key with a passphrase) "
            "put it into ssh-agent with ssh-add; jump hosts take their user and key from ~/.ssh/config",
        )
    if isinstance(error, (asyncssh.ProtocolError, asyncssh.ProtocolNotSupported, asyncssh.KeyExchangeFailed)):
        return NodeFault(
            node.name, "protocol", f"{at}: no SSH connection: {error.reason}; is it an SSH server?"
        )
    if isinstance(error, asyncssh.Error):
        text = f"{at}: the connection was lost: {error.reason or 'closed by the other side'}"
        return NodeFault(node.name, "lost", text + (" (through the jump host)" if jumped else ""))
    if isinstance(error, OSError):
        # For ssh_config's ConnectTimeout asyncssh raises a bare TimeoutError, an OSError from Python 3.11 on.
        timed_out = isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT
        kind = "timeout" if timed_out else "unreachable"
        why = error.strerror or str(error) or "no answer within ConnectTimeout"
        return NodeFault(node.name, kind, f"{at}: {why}; check the network")
    return NodeFault(node.name, "config", f"{at}: {error}; see ~/.ssh/config")


def _unknown_text(unknown: HostKeyUnknown) -> str:
    family = unknown.key_type.removeprefix("ssh-").split("-")[0]  # ed25519, rsa, ecdsa
    return (
        f"{unknown.hop}: {unknown.host}:{unknown.port} is not known yet. Its {unknown.key_type} key is "
        f"{unknown.fingerprint}; compare with `ssh-keygen -lf /etc/ssh/ssh_host_{family}_key.pub` on that "
        "machine, then confirm it in `gshare cluster check` (or pass --accept-new)"
    )


def _changed_text(changed: HostKeyChanged) -> str:
    shown = (
        f"{changed.hop}: {changed.host}:{changed.port} shows the {changed.key_type} key {changed.fingerprint}"
    )
    where = f"{changed.file}:{changed.line}"
    if changed.revoked:
        return f"{shown}, which {where} has revoked; refused. The host needs a new key"
    name = changed.host if changed.port == SSH_PORT else f"[{changed.host}]:{changed.port}"
    return (
        f"{shown}, but {where} has another: the host was set up anew, or somebody is in between. Refused. If "
        f"its administrator confirms the new key: ssh-keygen -f {shlex.quote(str(changed.file))} -R "
        f"{shlex.quote(name)}"
    )


async def close(connection: asyncssh.SSHClientConnection, seconds: float = 2.0) -> None:
    """Hangs up; a peer that does not answer is dropped after `seconds`."""
    connection.close()
    with contextlib.suppress(asyncio.TimeoutError, UsageError, OSError, asyncssh.Error):
        await asyncio.wait_for(connection.wait_closed(), seconds)
        return
    connection.abort()
