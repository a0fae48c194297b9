"""A cluster whose nodes are reached through OpenSSH servers of their own on 127.0.0.1.

    with ssh_cluster(tmp_path, "a", "b") as cluster: cluster.start_coordinator(); cluster.black_hole("a")

Each node has its own server and state directory, so one can be cut off alone. gshare is installed once, as
deploy does it, and the other nodes get a copy of that installation's record: making an environment takes
ten seconds a node, and `test_deploy.py` is about it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_cluster import SUPPORT, LocalCluster
from sshd import Sshd, make_key, start_sshd


#: The last node's state directory is called so: it goes through a login shell there, on every connection.
HOSTILE = """$(touch pwned) [bold]"';`touch pwned`&"""


class SshCluster(LocalCluster):
    """`servers`: node → its OpenSSH server, in the order of the nodes."""

    def __init__(self, root: Path, servers: dict[str, Sshd], *, max_adapters: int) -> None:
        super().__init__(root, *servers, max_adapters=max_adapters)
        self.servers = servers
        self.lost_after = 0.0  # the patience of the coordinator that runs
        self.max_adapters = max_adapters
        self.write_nodes(*servers)

    def write_nodes(self, *names: str, more: str = "") -> None:
        """cluster.toml with these nodes, and `more` after them."""
        self.file.write_text("\n".join(self.block(name) for name in names) + more)

    def block(self, name: str) -> str:
        server = self.servers[name]
        environment = {
            "GSHARE_TEST_RUNNER": "fake_runner:FakeRunner",
            "GSHARE_TEST_PREPARE": "fake_prepare",
            "PYTHONPATH": str(SUPPORT),
            "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"],
            "GSHARE_LEDGER_DIR": os.environ["GSHARE_LEDGER_DIR"],
        }
        lines = [
            "[[node]]",
            f'name = "{name}"',
            f'host = "{server.host}"\nport = {server.port}\nuser = "{server.user}"',
            f'identity = "{server.client_key}"\npython = "{sys.executable}"',
            f'state_dir = {json.dumps(str(self.state_dir(name)))}\nmax_adapters = {self.max_adapters}\ngpus = []',
            "[node.environment]",
            *(f'{key} = "{value}"' for key, value in environment.items()),
        ]
        return "\n".join(lines) + "\n"

    def state_dir(self, node: str) -> Path:
        return super().state_dir(f"{node}{HOSTILE}" if node == self.nodes[-1] else node)

    def install(self) -> None:
        """On the first node by deploy, on the others by copying its record, which names its environment."""
        first, *others = self.nodes
        self.write_nodes(first)
        checked = self.gshare("cluster", "check", seconds=300)
        assert checked.returncode == 0, checked.stdout + checked.stderr
        (complete,) = (self.state_dir(first) / "install").glob("*/complete.json")
        installed = complete.parent
        for name in others:
            there = self.state_dir(name) / "install" / installed.name
            there.mkdir(parents=True, mode=0o700)
            self.state_dir(name).chmod(0o700)
            for path in installed.iterdir():
                if path.is_file():
                    shutil.copy2(path, there)
        self.write_nodes(*self.nodes)

    # --- faults

    def black_hole(self, name: str) -> None:
        """Nothing of that machine answers any more; connections stand. What runs there runs on."""
        server = self.servers[name]
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        server.signal_sessions(signal.SIGSTOP)

    def heal(self, name: str) -> None:
        server = self.servers[name]
        assert server.process is not None
        server.signal_sessions(signal.SIGCONT)
        server.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def ssh_cluster(root: Path, *names: str, max_adapters: int = 2) -> Iterator[SshCluster]:
    """Servers, known host keys, gshare on every node; no coordinator yet. A home of its own in `root`."""
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for variable in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "HOME"):
            folder = root / variable
            folder.mkdir(mode=0o700, parents=True)
            environment.setenv(variable, str(folder))
        key = make_key(root / "client_key")
        servers = {
            name: stack.enter_context(start_sshd(root / f"sshd-{name}", client_key=key)) for name in names
        }
        known = root / "HOME" / ".ssh" / "known_hosts"
        known.parent.mkdir(mode=0o700)
        known.write_text("".join(server.known_hosts_line for server in servers.values()))
        cluster = SshCluster(root / "it", servers, max_adapters=max_adapters)
        stack.callback(cluster.close)
        cluster.install()
        yield cluster
        for name in names:
            cluster.heal(name)
