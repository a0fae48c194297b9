"""A node's disk that is full, or fills up, under a real agent: refused for now, nothing half made."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gshare.agent.node import protocol
from gshare.agent.node.protocol import CHUNK_BYTES, BlobRef, NodeRefused

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from node_agents import AgentProcess, NodeClient, running_agent  # noqa: E402

MIB = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    monkeypatch.setenv("GSHARE_TEST_RUNNER", "fake_runner:FakeRunner")
    monkeypatch.setenv("GSHARE_TEST_PREPARE", "fake_prepare")
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if _libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, b"size=8m,mode=0700") != 0:
        pytest.skip(f"no mount here: {os.strerror(ctypes.get_errno())}")
    try:
        yield path
    finally:
        _libc.umount2(os.fsencode(path), 2)  # MNT_DETACH: whoever still has a file open


def chunk(client: NodeClient, data: bytes, offset: int, digest: str) -> object:
    return client.ask(
        protocol.PutChunk,
        sha256=digest,
        offset=offset,
        total=len(data),
        data=data[offset : offset + CHUNK_BYTES],
    )


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fill_up(path: Path) -> None:
    """A file that takes all the room there is."""
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(64 << 10)):
            pass
    assert os.statvfs(path.parent).f_bavail == 0


def files(agent: AgentProcess) -> list[str]:
    return sorted(
        str(path.relative_to(agent.state)) for path in agent.state.rglob("*") if path.name != "journal.jsonl"
    )


def test_a_file_that_cannot_fit_is_refused_before_its_first_byte(small_disk: Path) -> None:
    data = os.urandom(9 * MIB)
    with running_agent(small_disk / "node") as agent:
        client = agent.connect()
        before = files(agent)
        refused = chunk(client, data, 0, hash_of(data))
        assert isinstance(refused, NodeRefused)
        assert refused.retry
        assert "disk is full" in refused.reason
        assert "free some there" in refused.reason
        assert files(agent) == before
        # Negative control: one that fits is taken.
        assert client.push(data[:MIB], "a").size == MIB


def test_a_disk_that_fills_up_in_the_middle_is_waited_for(small_disk: Path) -> None:
    data = os.urandom(4 * MIB)
    digest = hash_of(data)
    with running_agent(small_disk / "node") as agent:
        client = agent.connect()
        reply = chunk(client, data, 0, digest)
        assert isinstance(reply, protocol.Received)
        fill = small_disk / "somebody-elses"
        fill_up(fill)
        held = reply.bytes_held
        while not isinstance(reply := chunk(client, data, held, digest), NodeRefused):
            held = reply.bytes_held  # type: ignore[attr-defined]
        assert reply.retry
        assert "disk is full" in reply.reason
        assert client.ask(protocol.HoldBlobs, blobs=[digest]).bytes_held == {digest: held}
        problems = client.ask(protocol.DescribeNode).problems
        assert any("disk is nearly full" in problem for problem in problems)
        # An attempt is not begun either, and leaves nothing.
        before = files(agent)
        small = client.start("a", "", data=BlobRef(name="a", sha256=digest, size=len(data)))
        assert isinstance(small, NodeRefused)
        assert files(agent) == before
        fill.unlink()
        while held < len(data):
            reply = chunk(client, data, held, digest)
            assert isinstance(reply, protocol.Received), reply
            held = reply.bytes_held
        assert reply.complete


def test_an_attempt_on_a_full_disk_is_refused_for_now(small_disk: Path) -> None:
    with running_agent(small_disk / "node") as agent:
        client = agent.connect()
        data = client.push(b"steps=3", "a.jsonl")
        fill = small_disk / "somebody-elses"
        fill_up(fill)
        before = files(agent)
        refused = client.start("a", "", data=data)
        assert isinstance(refused, NodeRefused)
        assert refused.retry
        assert "disk is full" in refused.reason
        assert files(agent) == before
        fill.unlink()
        assert isinstance(client.start("a", "", data=data), protocol.AttemptAccepted)
        assert client.wait_end("a").state == "completed"


def test_a_limit_on_file_sizes_is_a_full_disk_too(tmp_path: Path) -> None:
    """Needs no rights: the kernel's EFBIG in the middle of a chunk."""
    data = os.urandom(3 * CHUNK_BYTES)
    digest = hash_of(data)
    limit = CHUNK_BYTES + 1000
    with running_agent(tmp_path / "node") as agent:
        assert agent.process is not None
        client = agent.connect()
        before = resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, (limit, before[1]))
        assert isinstance(chunk(client, data, 0, digest), protocol.Received)
        refused = chunk(client, data, CHUNK_BYTES, digest)
        assert isinstance(refused, NodeRefused)
        assert refused.retry
        # The part of the chunk that was taken is not counted: it is sent again from its start.
        assert client.ask(protocol.HoldBlobs, blobs=[digest]).bytes_held == {digest: CHUNK_BYTES}
        resource.prlimit(agent.process.pid, resource.RLIMIT_FSIZE, before)
        for offset in (CHUNK_BYTES, 2 * CHUNK_BYTES):
            reply = chunk(client, data, offset, digest)
        assert isinstance(reply, protocol.Received)
        assert reply.complete
