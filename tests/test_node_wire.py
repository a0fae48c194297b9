"""Clients that misbehave, against a real agent: each costs itself its connection and nobody else anything."""

from __future__ import annotations

import os
import random
import select
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import psutil
import pytest
from gshare.agent.node import connection as connection_module
from gshare.agent.node import protocol
from gshare.agent.node.bridge import connect_agent
from gshare.agent.node.connection import MAX_CLIENT_FRAME
from gshare.agent.node.protocol import CHUNK_BYTES, FromNode, NodeClientHello, NodeHello, NodeRefused
from gshare.agent.service.wire import FrameReader, convert, encode

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from node_agents import SECONDS, AgentProcess, NodeClient, running_agent  # noqa: E402


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """One agent for all of them: what one client does must not hurt the next."""
    environment = {
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
        "GSHARE_TEST_RUNNER": "fake_runner:FakeRunner",
        "GSHARE_TEST_PREPARE": "fake_prepare",
    }
    with running_agent(tmp_path_factory.mktemp("wire") / "node", **environment) as started:
        yield started


@pytest.fixture(autouse=True)
def unharmed(agent: AgentProcess) -> Iterator[None]:
    """After every one of these tests the agent still serves."""
    yield
    client = agent.connect()
    assert isinstance(client.ask(protocol.ListAttempts), protocol.Attempts)
    client.close()


def hello(**fields: object) -> bytes:
    values: dict[str, object] = {
        "protocol": 1,
        "gshare": "0",
        "client": "t",
        "owner": "owner-x",
        "session": "s",
    }
    return encode(NodeClientHello(**{**values, "role": "coordinator", **fields}))  # type: ignore[arg-type]


def answers(sock: socket.socket, seconds: float = SECONDS) -> list[object]:
    """Everything until the agent hangs up."""
    reader, messages = FrameReader(), []
    deadline = time.monotonic() + seconds
    while True:
        readable, _, _ = select.select([sock], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"the agent did not hang up; it said {messages}"
        try:
            data = sock.recv(1 << 16)
        except ConnectionResetError:
            return messages
        if not data:
            return messages
        messages += [convert(frame, FromNode) for frame in reader.feed(data)]


def refusal(agent: AgentProcess, *parts: bytes) -> str:
    """What a client that sends this is told before the agent hangs up."""
    with connect_agent(agent.socket) as sock:
        try:
            for part in parts:
                sock.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass
        said = answers(sock)
    assert said, "hung up without a word"
    last = said[-1]
    assert isinstance(last, NodeRefused), last
    assert last.reply_to == 0
    assert len(last.reason) < 500
    return last.reason


def test_garbage(agent: AgentProcess) -> None:
    draw = random.Random(1)
    for _ in range(20):
        with connect_agent(agent.socket) as sock:
            sock.sendall(b"\xc1" + draw.randbytes(200))
            assert all(isinstance(said, NodeRefused) for said in answers(sock))
    assert "not a MessagePack stream" in refusal(agent, b"\xc1")
    assert "GET" not in refusal(agent, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert "expected a map" in refusal(agent, msgpack.packb([1, 2]) or b"")


def test_a_frame_that_is_too_large_or_never_ends(agent: AgentProcess) -> None:
    header = b"\x81\xa4type\xc6" + (1 << 31).to_bytes(4, "big")
    assert "larger than" in refusal(agent, header, b"x" * (MAX_CLIENT_FRAME + (1 << 17)))
    endless = b"\x81\xa4type\xdd\x00\x0f\xff\xff" + b"\xa3abc" * (MAX_CLIENT_FRAME // 3)
    assert "larger than" in refusal(agent, hello(), endless)


def test_a_frame_cut_off_by_the_end_of_the_stream(agent: AgentProcess) -> None:
    for cut in (1, 5, 20):
        with connect_agent(agent.socket) as sock:
            sock.sendall(hello()[:cut])
            sock.shutdown(socket.SHUT_WR)
            assert answers(sock) == []


def test_what_is_no_hello(agent: AgentProcess) -> None:
    assert "first message must be a hello" in refusal(agent, encode(protocol.ListAttempts(id=1)))
    assert "unexpected message" in refusal(agent, msgpack.packb({"type": "node_client_hello"}) or b"")
    assert "unexpected message" in refusal(agent, msgpack.packb({"type": "pickle"}) or b"")
    assert "a second hello" in refusal(agent, hello(), hello())
    old = refusal(agent, hello(protocol=0, gshare="0.0.1"))
    assert "speaks protocol 1" in old
    assert "0.0.1" in old


@pytest.mark.parametrize("owner", ["", "../x", "$(touch pwned)", "a\nb", "x" * 4096, "[/]"])
def test_owners_that_cannot_be_one(agent: AgentProcess, owner: str) -> None:
    assert "owner" in refusal(agent, hello(owner=owner))


def test_a_coordinator_without_a_session_and_one_that_talks_too_much(agent: AgentProcess) -> None:
    assert "session" in refusal(agent, hello(session=""))
    assert "at most 200" in refusal(agent, hello(client="x" * 4096))


def test_a_wrong_request_ends_the_connection_and_names_the_field(agent: AgentProcess) -> None:
    bad = (
        msgpack.packb({"type": "put_chunk", "id": 1, "sha256": 5, "offset": 0, "total": 1, "data": b""})
        or b""
    )
    assert "$.sha256" in refusal(agent, hello(), bad)


def test_a_refused_request_leaves_the_connection(agent: AgentProcess) -> None:
    client = agent.connect()
    for make, fields in (
        (protocol.PutChunk, {"sha256": "../" * 20, "offset": 0, "total": 1, "data": b"x"}),
        (protocol.HoldBlobs, {"blobs": ["/etc/passwd"]}),
        (protocol.PinBundle, {"job": "../../x", "attempt": 1, "kind": "best"}),
        (protocol.ReadChunk, {"bundle": "..", "name": "/etc/passwd", "offset": 0, "length": 1}),
        (protocol.ReadSamples, {"job": "$(touch pwned)", "attempt": -1}),
        (protocol.ReadLog, {"job": "../x", "attempt": 1}),
        (protocol.ReadLog, {"max_bytes": 1 << 40}),
    ):
        refused = client.ask(make, **fields)
        assert isinstance(refused, NodeRefused), (make, fields)
        assert len(refused.reason) < 400
    assert isinstance(client.ask(protocol.ListAttempts), protocol.Attempts)


def test_one_who_sends_and_never_reads_costs_little_memory(agent: AgentProcess) -> None:
    """Replies pile up only until the next request is no longer read."""
    assert agent.process is not None
    client = agent.connect(owner="owner-flood")
    data = b"x" * CHUNK_BYTES * 8
    client.start("a", "steps=2,files=1", model=protocol.ModelRef(name="m", path="fake"))
    client.wait_end("a")
    (Path(agent.state) / "agent.log").write_bytes(data[: 1 << 20])
    before = psutil.Process(agent.process.pid).memory_info().rss
    request = encode(protocol.ReadLog(id=1, max_bytes=1 << 20))
    client.socket.setblocking(False)
    sent, deadline = 0, time.monotonic() + 4
    while time.monotonic() < deadline:
        try:
            sent += client.socket.send(request * 100)
        except BlockingIOError:
            time.sleep(0.05)
    assert sent > 0
    grown = psutil.Process(agent.process.pid).memory_info().rss - before
    # 16 MiB of replies wait, one more is made, and the allocator keeps some of what was freed.
    assert grown < 80 << 20, f"{grown >> 20} MiB after {sent // len(request)} requests of 1 MiB each"
    client.close()


def test_one_who_follows_and_never_reads_holds_up_nobody(agent: AgentProcess) -> None:
    assert agent.process is not None
    deaf = agent.connect(role="observer", session="")
    deaf.write(protocol.FollowNode(id=1))
    client = agent.connect(owner="owner-busy")
    client.follow()
    client.start("a", "steps=3000,save=100")
    assert client.wait_end("a").step == 3000
    client.until(lambda: [change.state for change in client.changes("a")][-1:] == ["completed"])
    # What it did not read is bounded: the samples that it was too slow for were dropped.
    deaf.until(lambda: [change.state for change in deaf.changes("a")][-1:] == ["completed"])
    samples = [frame for frame in deaf.events if frame.seq == 0]
    assert len(samples) < 3000
    durable = [frame.seq for frame in deaf.events if frame.seq]
    assert durable == sorted(set(durable))
    deaf.close()


def test_a_stalled_client_is_cut_off() -> None:
    """In this process, with a short patience: the writer's side of a client that takes nothing."""
    import asyncio

    class Stuck:
        closed = False

        def write(self, data: bytes) -> None:
            pass

        async def drain(self) -> None:
            await asyncio.sleep(3600)

        def close(self) -> None:
            self.closed = True

    class Silent:
        async def read(self, n: int = -1) -> bytes:
            await asyncio.sleep(3600)
            return b""

    async def run() -> tuple[str, bool]:
        stuck = Stuck()
        one = connection_module.Connection(Silent(), stuck, "test")
        one.send(protocol.NodeDone(reply_to=1))

        async def handle(message: object) -> None:
            raise AssertionError("nothing was asked")

        with pytest.raises(connection_module.Gone) as gone:
            await one.talk(handle, lambda: None)
        await one.hang_up()
        return str(gone.value), stuck.closed

    patience = connection_module.STALL_SECONDS, connection_module.LINGER_SECONDS
    connection_module.STALL_SECONDS = connection_module.LINGER_SECONDS = 0.05
    try:
        text, closed = asyncio.run(run())
    finally:
        connection_module.STALL_SECONDS, connection_module.LINGER_SECONDS = patience
    assert "cut off" in text
    assert closed


def test_too_many_clients_are_told_to_come_back(agent: AgentProcess) -> None:
    clients: list[NodeClient] = []
    try:
        while isinstance((client := agent.connect(role="observer", session="")).hello, NodeHello):
            clients.append(client)
            assert len(clients) <= 64
        assert client.hello.retry
        assert len(clients) > 50
    finally:
        for one in clients:
            one.close()
    deadline = time.monotonic() + SECONDS
    while isinstance(agent.connect(role="observer", session="").hello, NodeRefused):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_socket_and_what_lies_beside_it_are_for_this_user_alone(agent: AgentProcess) -> None:
    assert agent.socket.stat().st_mode & 0o777 == 0o600
    assert agent.state.stat().st_mode & 0o777 == 0o700
