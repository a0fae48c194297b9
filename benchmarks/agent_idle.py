"""What an idle agent costs: resident memory and processor time, with a coordinator that asks every 15 s.

    python benchmarks/agent_idle.py [--seconds 60] [--bind]

Aims: at most 80 MiB resident and less than 1 % of a core. Exit code 1 when one is missed.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import psutil
from gshare.agent.errors import GshareError
from gshare.agent.node.bridge import connect_agent
from gshare.agent.node.protocol import (
    NODE_PROTOCOL_VERSION,
    DescribeNode,
    FollowNode,
    FromNode,
    NodeClientHello,
    NodeInfo,
)
from gshare.agent.service.wire import FrameReader, convert, encode

MAX_RESIDENT_MIB = 80
MAX_CORE_PERCENT = 1.0
HEARTBEAT_SECONDS = 15.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to watch (60)")
    parser.add_argument("--bind", action="store_true", help="with its own SSH server, on 127.0.0.1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gshare-idle-") as folder:
        command = [sys.executable, "-m", "gshare.cli.main", "agent", "--state-dir", folder]
        if options.bind:
            keys = Path(folder) / "authorized_keys"
            keys.touch(mode=0o600)
            command += ["--bind=127.0.0.1:0", "--authorized-keys", str(keys)]
        agent = subprocess.Popen(command, cwd="/", stdin=subprocess.DEVNULL, env=dict(os.environ))
        try:
            return watch(agent.pid, Path(folder) / "socket", options.seconds)
        finally:
            agent.terminate()
            agent.wait()


def watch(pid: int, path: Path, seconds: float) -> int:
    """Prints both figures; 1 when one misses its aim."""
    process = psutil.Process(pid)
    with connect(path) as sock:
        frames = FrameReader()
        hello = NodeClientHello(
            protocol=NODE_PROTOCOL_VERSION,
            gshare=version("gshare"),
            client="agent_idle",
            role="coordinator",
            owner="benchmark",
            session="1",
        )
        sock.sendall(encode(hello))
        sock.sendall(encode(FollowNode(id=1)))
        beats = 0
        ask(sock, frames)  # what the first answer loads (the driver's library) is no idle time
        begin, used = time.monotonic(), process.cpu_times()
        while (left := seconds - (time.monotonic() - begin)) > 0:
            time.sleep(min(left, HEARTBEAT_SECONDS))
            ask(sock, frames)
            beats += 1
        elapsed, after = time.monotonic() - begin, process.cpu_times()
    core = 100 * (after.user + after.system - used.user - used.system) / elapsed
    resident = process.memory_info().rss / (1 << 20)
    print(f"resident  {resident:6.1f} MiB  (aim: {MAX_RESIDENT_MIB})")
    print(
        f"core      {core:6.2f} %    (aim: below {MAX_CORE_PERCENT:g}; {beats} heartbeats in {elapsed:.0f} s)"
    )
    return int(resident > MAX_RESIDENT_MIB or core >= MAX_CORE_PERCENT)


def connect(path: Path) -> socket.socket:
    """A connection to the agent that is just starting."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return connect_agent(path)
        except GshareError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def ask(sock: socket.socket, frames: FrameReader) -> None:
    """One heartbeat, as a coordinator makes it."""
    sock.sendall(encode(DescribeNode(id=2)))
    while True:
        for frame in frames.feed(sock.recv(1 << 16)):
            if isinstance(convert(frame, FromNode), NodeInfo):
                return


if __name__ == "__main__":
    sys.exit(main())
