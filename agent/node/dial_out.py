"""`gshare agent --coordinator USER@HOST`: a node behind NAT calls its coordinator and serves that channel.

the node's ssh ──► the coordinator's machine: `gshare coordinator connect`, its socket
  DialIn{node} ──►
               ◄── NodeClientHello …       from here on as if a client had connected to us
"""

from __future__ import annotations

import asyncio
import random
import shlex
import socket
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import name_fault, shorten
from gshare.agent.node.connection import Writer
from gshare.agent.node.server import NodeServer
from gshare.agent.node.ssh_server import SshReader
from gshare.agent.service.wire import encode

if TYPE_CHECKING:
    import asyncssh

KEEPALIVE_SECONDS = 15.0
KEEPALIVE_COUNT = 3
CONNECT_SECONDS = 30.0
#: The command over there starts an interpreter, perhaps on a slow machine, before anybody says hello.
HELLO_SECONDS = 120.0
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
#: A connection that stood so long was a good one: the next pause starts small again.
GOOD_SECONDS = 60.0
#: What is run there; `--state-dir` and the like are the coordinator's to say, by its ssh configuration.
REMOTE_COMMAND = ("gshare", "coordinator", "connect")


class DialIn(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="dial_in"):
    """The first frame of a node that calls; `node` is its name in cluster.toml."""

    node: str
    gshare: str = ""


def parse_coordinator(text: str) -> tuple[str | None, str, int | None]:
    """`[USER@]HOST[:PORT]` → its parts. UsageError: none of it, or an option in disguise."""
    user, at, rest = text.rpartition("@")
    host, colon, port = rest.partition(":")
    bad = not host or host.startswith("-") or user.startswith("-") or not text.isprintable() or " " in text
    if bad or (at and not user) or (colon and not (port.isascii() and port.isdigit())):
        raise UsageError(f"--coordinator {shorten(text)}: write USER@HOST or USER@HOST:PORT")
    return user or None, host, int(port) if colon else None


def node_name(name: str | None) -> str:
    """The node's name, its host name by default. UsageError when it cannot be one."""
    chosen = socket.gethostname().partition(".")[0] if name is None else name
    fault = name_fault(chosen)
    if fault is not None:
        raise UsageError(f"--node: {fault}; it is the node's name in cluster.toml")
    return chosen


def next_pause(
    pause: float, stood_s: float, draw: Callable[[], float] = random.random
) -> tuple[float, float]:
    """(how long to wait now, the next `pause`), in s: doubled up to a minute; jitter takes up to half."""
    if stood_s >= GOOD_SECONDS:
        pause = FIRST_PAUSE
    return pause * (0.5 + 0.5 * draw()), min(2 * pause, LONGEST_PAUSE)


async def dial_out(
    server: NodeServer,
    target: tuple[str | None, str, int | None],
    node: str,
    *,
    command: tuple[str, ...] = REMOTE_COMMAND,
) -> None:
    """Calls, serves, and calls again, until it is cancelled. What fails is said once, until it changes."""
    loop = asyncio.get_running_loop()
    pause, said = FIRST_PAUSE, ""
    while True:
        started = loop.time()
        trouble = await _call_once(server, target, node, command)
        if trouble != said:
            said = trouble
            server.say("warning", f"coordinator {target[1]}: {trouble}")
        wait, pause = next_pause(pause, loop.time() - started)
        await asyncio.sleep(wait)


async def _call_once(
    server: NodeServer, target: tuple[str | None, str, int | None], node: str, command: tuple[str, ...]
) -> str:
    """One connection to its end; why it ended."""
    import asyncssh

    user, host, port = target
    options: dict[str, Any] = {
        "keepalive_interval": KEEPALIVE_SECONDS,
        "keepalive_count_max": KEEPALIVE_COUNT,
    }
    if user is not None:
        options["username"] = user
    if port is not None:
        options["port"] = port
    try:
        # known_hosts is checked by default, and nobody is here to be asked about an unknown key.
        connection = await asyncio.wait_for(asyncssh.connect(host, **options), CONNECT_SECONDS)
    except asyncssh.HostKeyNotVerifiable as error:
        return f"{error}; confirm its key once with: ssh {host}"
    except asyncssh.PermissionDenied as error:
        return f"{error.reason}; it takes none of this user's keys"
    except (asyncio.TimeoutError, TimeoutError):
        return f"no answer within {CONNECT_SECONDS:.0f} s"
    except (OSError, asyncssh.Error) as error:
        return str(error)
    try:
        return await _serve_call(connection, server, host, node, command)
    finally:
        connection.abort()


async def _serve_call(
    connection: asyncssh.SSHClientConnection,
    server: NodeServer,
    host: str,
    node: str,
    command: tuple[str, ...],
) -> str:
    import asyncssh

    try:
        process: asyncssh.SSHClientProcess[bytes] = await connection.create_process(
            shlex.join(command), encoding=None
        )
    except (OSError, asyncssh.Error) as error:
        return f"cannot run {shlex.join(command)}: {error}"
    writer: Writer = process.stdin
    writer.write(encode(DialIn(node=node, gshare=version("gshare"))))
    await server.serve(SshReader(process.stdout), writer, f"coordinator {host}", hello_seconds=HELLO_SECONDS)
    said = await _last_words(process)
    return said or "the connection ended"


async def _last_words(process: asyncssh.SSHClientProcess[bytes]) -> str:
    """The last line on the far side's stderr: why its command ended."""
    import asyncssh

    try:
        text = await asyncio.wait_for(process.stderr.read(4096), 1.0)
    except (asyncio.TimeoutError, TimeoutError, OSError, asyncssh.Error):
        return ""
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
