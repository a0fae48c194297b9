"""`gshare agent --bind`: the agent's own SSH server, for nodes without an sshd that may be used.

It offers the subsystem `gshare` and nothing else: no shell, no command, no file transfer, no forwarding of
any kind. Who may come in says `authorized_keys`, and only under the name of the user the agent runs as. The
host key is the agent's own, made at the first start.
"""

from __future__ import annotations

import asyncio
import getpass
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.names import shorten
from gshare.agent.node.durable import write_new
from gshare.agent.node.protocol import DEFAULT_PORT, SUBSYSTEM
from gshare.agent.node.server import NodeServer

if TYPE_CHECKING:
    import asyncssh

#: A client that has not proved who it is by then is cut off.
LOGIN_SECONDS = 20.0
#: Logins and what is on its way to be one: the port may be open to the world.
MAX_CONNECTIONS = 128
KEEPALIVE_SECONDS = 15.0
KEEPALIVE_COUNT = 3


def parse_bind(value: str) -> tuple[str, int]:
    """`--bind HOST:PORT` → (host, port); without a host all interfaces. UsageError: neither."""
    host, colon, port = value.rpartition(":")
    if not colon:
        host, port = value, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16) or any(c.isspace() for c in host):
        raise UsageError(f"--bind {shorten(value)}: write HOST:PORT, such as 127.0.0.1:{DEFAULT_PORT}")
    return host, int(port)


def load_host_key(path: Path) -> asyncssh.SSHKey:
    """The agent's host key, made (0600) when there is none. GshareError: it cannot be read or made."""
    import asyncssh

    try:
        if not path.exists():
            key = asyncssh.generate_private_key("ssh-ed25519", comment="gshare agent")
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.unlink(missing_ok=True)
            write_new(temporary, key.export_private_key())
            os.replace(temporary, path)
        return asyncssh.read_private_key(path)
    except OSError as error:
        raise GshareError(f"{path}: {error.strerror}") from None
    except asyncssh.KeyImportError as error:
        raise GshareError(f"{path}: {error}; remove it and a new one is made") from None


def check_authorized_keys(path: Path) -> None:
    """UsageError when nobody could ever log in, or everybody may write the file."""
    try:
        status = path.stat()
        path.open("rb").close()
    except OSError as error:
        raise UsageError(
            f"--authorized-keys {path}: {error.strerror}; put the public keys there that may connect"
        ) from None
    if status.st_mode & 0o022:
        raise UsageError(f"--authorized-keys {path}: others may write to it; run: chmod go-w {path}")


async def serve_ssh(
    server: NodeServer,
    host: str,
    port: int,
    *,
    host_key: Path,
    authorized_keys: Path,
    on_listening: Callable[[int, str], None],
) -> None:
    """Listens until it is cancelled; `on_listening` gets the port and the key's fingerprint.

    GshareError: the address cannot be had.
    """
    import asyncssh

    key = load_host_key(host_key)
    user = getpass.getuser()
    open_now: set[asyncssh.SSHServerConnection] = set()

    class Gate(asyncssh.SSHServer):
        """One login. What is not offered here is refused by asyncssh's own defaults."""

        def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
            self._connection = conn
            open_now.add(conn)
            if len(open_now) > MAX_CONNECTIONS:
                conn.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            open_now.discard(self._connection)

        def begin_auth(self, username: str) -> bool:
            if username == user:
                # Read at each login: a key that was taken out must not open any more.
                try:
                    self._connection.set_authorized_keys(str(authorized_keys))
                except (OSError, ValueError) as error:
                    server.say("warning", f"{authorized_keys}: {error}")
            return True

        def password_auth_supported(self) -> bool:
            return False

        def kbdint_auth_supported(self) -> bool:
            return False

        def public_key_auth_supported(self) -> bool:
            return True

    async def session(process: asyncssh.SSHServerProcess[bytes]) -> None:
        if process.subsystem != SUBSYSTEM:
            process.exit(1)
            return
        peer = process.get_extra_info("peername")
        await server.serve(SshReader(process.stdin), process.stdout, f"{peer[0]}:{peer[1]}")
        process.exit(0)

    try:
        acceptor = await asyncssh.create_server(
            Gate,
            host,
            port,
            server_host_keys=[key],
            process_factory=session,
            encoding=None,
            allow_pty=False,
            agent_forwarding=False,
            x11_forwarding=False,
            sftp_factory=None,
            allow_scp=False,
            gss_host=None,
            login_timeout=LOGIN_SECONDS,
            keepalive_interval=KEEPALIVE_SECONDS,
            keepalive_count_max=KEEPALIVE_COUNT,
        )
    except OSError as error:
        raise GshareError(f"--bind {host or '*'}:{port}: {error.strerror or error}") from None
    async with acceptor:
        on_listening(acceptor.get_port(), key.get_fingerprint())
        await asyncio.Event().wait()


class SshReader:
    """asyncssh's reader with asyncio's errors: whatever broke the connection is an OSError."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    async def read(self, n: int = -1, /) -> bytes:
        import asyncssh

        try:
            return await self._reader.read(n)
        except (asyncssh.Error, asyncssh.BreakReceived, asyncssh.SignalReceived) as error:
            raise ConnectionResetError(str(error)) from None
