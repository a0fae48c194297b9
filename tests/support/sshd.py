"""A throwaway OpenSSH server on 127.0.0.1, with switches for what a server may forbid.

    with start_sshd(tmp_path / "sshd") as sshd: connect(sshd.node("a"), …)

Everything lies in the directory given: host key, client key, configuration, log. As root the server can let
in a user of its own, `gshare-test` (made when missing, removed at the end when it was made here): signals,
permissions and empty homes are real then. Without sshd the tests are skipped, and with GSHARE_REQUIRE_SSHD=1
they fail.
"""

from __future__ import annotations

import contextlib
import getpass
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from gshare.coordinator.config import NodeConfig

TEST_USER = "gshare-test"
#: A busy machine has taken 10 s to start a process.
START_SECONDS = 120.0
SSHD = shutil.which("sshd") or next(
    (str(path) for path in (Path("/usr/sbin/sshd"), Path("/usr/local/sbin/sshd")) if path.exists()), None
)


def require_sshd() -> str:
    """The server's path; skips the test, or fails it where it has to run."""
    if SSHD is not None and shutil.which("ssh-keygen"):
        return SSHD
    reason = "no OpenSSH server here (apt-get install openssh-server)"
    if os.environ.get("GSHARE_REQUIRE_SSHD") == "1":
        pytest.fail(f"GSHARE_REQUIRE_SSHD=1, but {reason}")
    pytest.skip(reason)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at now, nor takes soon: of this process's own hundred, below
    those that the kernel gives to outgoing connections."""
    for number in itertools.islice(_ports, 100):
        port = 20_000 + os.getpid() % 100 * 100 + number
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


_ports = itertools.cycle(range(100))


def hold_port() -> socket.socket:
    """Bound to a port of 127.0.0.1 that the kernel then gives to nobody else, and that sshd may listen at.

    It never listens itself, and both sides have SO_REUSEADDR. A port that was only free a moment ago may be
    another test's by now.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def make_key(path: Path, kind: str = "ed25519") -> Path:
    """A key pair at `path` and `path`.pub, without passphrase."""
    path.unlink(missing_ok=True)
    command = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "test", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=60)
    return path


@dataclass
class Sshd:
    """A running server."""

    directory: Path
    port: int
    user: str
    home: Path
    client_key: Path
    host_key: Path
    process: subprocess.Popen[bytes] | None = None
    host: str = "127.0.0.1"
    config: list[str] = field(default_factory=list)

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    @property
    def known_hosts_line(self) -> str:
        kind, data = self.host_key.with_suffix(".pub").read_text().split()[:2]
        return f"[{self.host}]:{self.port} {kind} {data}\n"

    @property
    def fingerprint(self) -> str:
        command = ["ssh-keygen", "-lf", str(self.host_key.with_suffix(".pub"))]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[1]

    def node(self, name: str = "desk", **more: object) -> NodeConfig:
        """A node behind this server; `more` are NodeConfig's fields."""
        values: dict[str, object] = {
            "name": name,
            "host": self.host,
            "port": self.port,
            "user": self.user,
            "identity": str(self.client_key),
            **more,
        }
        return NodeConfig(**values)  # pyright: ignore[reportArgumentType]

    def ssh_config(self, alias: str) -> str:
        """A Host block that says how to reach this server."""
        lines = [f"Host {alias}", f"HostName {self.host}", f"Port {self.port}", f"User {self.user}"]
        return "\n  ".join([*lines, f"IdentityFile {self.client_key}"]) + "\n"

    def start(self) -> None:
        assert SSHD is not None
        (self.directory / "sshd_config").write_text("\n".join(self.config) + "\n")
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(self.directory / "sshd_config")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"sshd ended with {self.process.returncode}:\n{self.log}")
            with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), 1):
                return
            time.sleep(0.02)
        raise AssertionError(f"sshd does not listen:\n{self.log}")

    def sessions(self) -> list[psutil.Process]:
        """The processes that serve the connections, and what they started."""
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def signal_sessions(self, number: signal.Signals) -> None:
        """To the processes of the connections alone: SIGSTOP is a black hole, SIGKILL a cut."""
        for process in self.sessions():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def stop(self) -> None:
        """Ends the server and all that runs under it; idempotent."""
        if self.process is None:
            return
        processes = self.sessions() if self.process.poll() is None else []
        self.process.terminate()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(START_SECONDS)
        self.process = None


@contextlib.contextmanager
def start_sshd(
    directory: Path,
    *,
    user: str | None = None,
    home: Path | None = None,
    forwarding: bool = True,
    sftp: bool = True,
    host_key: Path | None = None,
    client_key: Path | None = None,
    more: tuple[str, ...] = (),
) -> Iterator[Sshd]:
    """A server that lets `client_key` in as `user` (default: whoever runs the tests).

    `home`: $HOME of what runs there, by SetEnv; default the user's own. `more`: lines of sshd_config.
    """
    require_sshd()
    directory.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # the privilege separation directory
    user = user or getpass.getuser()
    host_key = host_key or make_key(directory / "host_key")
    client_key = client_key or make_key(directory / "client_key")
    authorized = client_key.with_suffix(".pub").read_text()
    # Read by the server as the user: in a folder that everybody may enter.
    public = Path(tempfile.mkdtemp(prefix="gshare-sshd-"))
    public.chmod(0o755)
    (public / "authorized_keys").write_text(authorized)
    (public / "authorized_keys").chmod(0o644)
    held = hold_port()  # while it is stopped and started again, too
    port = held.getsockname()[1]
    environment = f"SetEnv HOME={home}" if home is not None else ""
    config = [
        f"ListenAddress 127.0.0.1:{port}",
        f"HostKey {host_key}",
        f"PidFile {directory / 'pid'}",
        f"AuthorizedKeysFile {public / 'authorized_keys'}",
        "StrictModes no",
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "PermitUserEnvironment no",
        "PrintMotd no",
        f"AllowTcpForwarding {'yes' if forwarding else 'no'}",
        f"AllowStreamLocalForwarding {'yes' if forwarding else 'no'}",
        "MaxStartups 100:30:200",
        *(["Subsystem sftp internal-sftp"] if sftp else []),
        *([environment] if environment else []),
        *more,
    ]
    its_home = home or Path(pwd.getpwnam(user).pw_dir)
    sshd = Sshd(directory, port, user, its_home, client_key, host_key, config=config)
    try:
        sshd.start()
        yield sshd
    finally:
        sshd.stop()
        held.close()
        shutil.rmtree(public, ignore_errors=True)


@contextlib.contextmanager
def other_user() -> Iterator[tuple[str, Path]]:
    """`gshare-test` and an empty home that only it may use; skips where we are not root.

    The home is a new folder each time: what a test leaves there is gone with it.
    """
    if os.geteuid() != 0 or shutil.which("useradd") is None:
        pytest.skip("only root can make another user")
    made = False
    try:
        entry = pwd.getpwnam(TEST_USER)
    except KeyError:
        # "*": no password, and not locked, which sshd would refuse.
        command = ["useradd", "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/bin/bash"]
        subprocess.run([*command, "--password", "*", TEST_USER], check=True, capture_output=True)
        made = True
        entry = pwd.getpwnam(TEST_USER)
    home = Path(tempfile.mkdtemp(prefix="gshare-home-"))
    os.chown(home, entry.pw_uid, entry.pw_gid)
    try:
        yield TEST_USER, home
    finally:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.uids().real == entry.pw_uid and str(home) in process.environ().get("HOME", ""):
                    process.kill()
        shutil.rmtree(home, ignore_errors=True)
        if made:
            subprocess.run(["userdel", TEST_USER], check=False, capture_output=True)
