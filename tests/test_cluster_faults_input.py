"""Hostile names on the command line and hostile bytes at the sockets of a running cluster, real processes."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from gshare.agent.node.bridge import connect_agent
from gshare.agent.node.protocol import NODE_PROTOCOL_VERSION, FollowNode, NodeClientHello
from gshare.agent.service.wire import encode
from gshare.coordinator.api_client import connect_coordinator
from gshare.coordinator.api_protocol import API_PROTOCOL_VERSION, ApiHello, FollowCluster
from local_cluster import LocalCluster

HOSTILE = ["../x", "$(touch pwned)", "[/]", "two\nlines", "\x1b[2Jx", "x" * 4096, ".hidden", "-rf", ""]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One node and a coordinator, for all of these tests: what one does must not hurt the next."""
    root = tmp_path_factory.mktemp("i")
    with pytest.MonkeyPatch.context() as environment:
        for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
            (root / name).mkdir(mode=0o700)
            environment.setenv(name, str(root / name))
        made = LocalCluster(root / "it", "a")
        made.start_coordinator()
        made.until(lambda: [row.state for row in made.nodes_now().values()] == ["ready"])
        yield made
        made.close()


def plain_lines(text: str, count: int, *words: str) -> None:
    """So many lines; nothing for a terminal to obey, nothing that hides what comes after it."""
    lines = text.removesuffix("\n").split("\n")
    assert len(lines) == count, text[:4000]
    for line in lines:
        assert line.isprintable(), ascii(line)
        assert len(line) < 600
        assert all(word in line for word in words), line


def test_hostile_names_of_jobs_and_nodes_are_each_refused_with_file_and_key(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    spec, nodes = tmp_path / "spec.toml", tmp_path / "cluster.toml"
    (tmp_path / "data.jsonl").write_text("steps=1")
    spec.write_text(
        f'model = "{cluster.model}"\n'
        + "".join(
            f'[[adapter]]\nname = {json.dumps(name)}\ndata = "data.jsonl"\noutput_dir = "out/{number}"\n'
            for number, name in enumerate(HOSTILE)
        )
    )
    job = cluster.gshare("submit", "--adapters-config", str(spec))
    assert job.returncode == 2, job.stderr
    plain_lines(job.stderr, len(HOSTILE), "name")
    assert str(spec) in job.stderr
    blocks = (f'[[node]]\nname = {json.dumps(name)}\ntransport = "local"\n' for name in HOSTILE)
    nodes.write_text("".join(blocks))
    good = cluster.file
    try:
        cluster.file = nodes
        node = cluster.gshare("cluster", "check")
    finally:
        cluster.file = good
    assert node.returncode == 2, node.stderr
    plain_lines(node.stderr, len(HOSTILE), "'name'")
    assert str(nodes) in node.stderr
    asked = cluster.gshare("jobs", "stop", *(name for name in HOSTILE if not name.startswith("-")))
    assert asked.returncode == 2, asked.stderr
    plain_lines(asked.stderr, 1)
    assert not list(tmp_path.rglob("*pwned*"))
    assert not Path("/pwned").exists()  # where the commands were run
    assert cluster.jobs() == {}


# --- bytes


def api_hello() -> bytes:
    return encode(ApiHello(protocol=API_PROTOCOL_VERSION, gshare="0", client="t"))


def agent_hello() -> bytes:
    hello = NodeClientHello(protocol=NODE_PROTOCOL_VERSION, gshare="0", client="t", role="observer")
    return encode(hello)


def hangs_up(sock: socket.socket, data: bytes) -> None:
    """Sends it all; the other side has to end the connection."""
    with contextlib.suppress(ConnectionError):
        sock.sendall(data)
        deadline = time.monotonic() + 30
        while True:
            readable, _, _ = select.select([sock], [], [], max(0.0, deadline - time.monotonic()))
            assert readable, "it did not hang up"
            if not sock.recv(1 << 16):
                return


LONG_TEXT = b"\x81\xa4type\xdb\x7f\xff\xff\xff"  # a text of 2 GiB is announced
METRIC = msgpack.packb({"type": "follow", "id": "$(touch pwned)", "after_seq": "[/]"})


def test_garbage_oversize_endless_and_silent_clients_cost_themselves_their_connection_alone(
    cluster: LocalCluster,
) -> None:
    cluster.submit({"through": "steps=60,sleep=0.1,save=5,files=1"})
    cluster.until(lambda: cluster.jobs()["through"].step >= 2)
    before = (cluster.coordinator_pid(), cluster.agent_pid("a"))
    doors = {
        api_hello: lambda: connect_coordinator(cluster.home),
        agent_hello: lambda: connect_agent(cluster.state_dir("a") / "socket"),
    }
    silent: list[socket.socket] = []
    for hello, connect in doors.items():
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",  # garbage
            b"\xc1",
            LONG_TEXT + bytes(17 << 20),  # oversize, and endless
            hello() + LONG_TEXT + bytes(17 << 20),
            hello() + hello(),
            hello() + METRIC,  # text where a number belongs
        ):
            with connect() as sock:
                hangs_up(sock, data)
        with connect() as sock:  # truncated: gone in the middle of a frame
            sock.sendall(hello()[:-3])
        with connect() as sock:
            sock.sendall(hello() + b"\x81\xa4ty")
        never_reads = connect()
        never_reads.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        follow = FollowCluster(id=1) if hello is api_hello else FollowNode(id=1)
        never_reads.sendall(hello() + encode(follow))
        silent += [connect(), never_reads]  # one says nothing at all
    cluster.until_ended("through")
    cluster.assert_home({"through": 60})
    assert (cluster.coordinator_pid(), cluster.agent_pid("a")) == before
    for sock in silent:
        sock.close()
