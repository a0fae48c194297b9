"""Files to and from a node: cut, damaged, full, hostile; what is there is not sent again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from fake_agent import FakeAgent, FakeAttempt, run_with_agent, sha, start_fields, weights
from gshare.agent.node import protocol as p
from gshare.coordinator import blobs as blobs_module
from gshare.coordinator.blobs import BlobStore, Damaged, DiskFull, path_fault
from gshare.coordinator.file_transfer import Source, SourceChanged, check_bundle, pull_bundle, push_files
from gshare.coordinator.link import LinkGone, LinkRefused


def source(path: Path, data: bytes) -> Source:
    path.write_bytes(data)
    return Source(path, sha(data), len(data))


def puts(agent: FakeAgent) -> list[p.PutChunk]:
    return [request for request in agent.requests if isinstance(request, p.PutChunk)]


async def attempt_of(agent: FakeAgent, steps: int = 4) -> tuple[Any, FakeAttempt]:
    link = await agent.connect()
    await link.ask(p.AttemptAccepted, p.StartAttempt, **start_fields("a"))
    attempt = agent.running("a")
    for _ in range(steps):
        agent.advance(attempt)
    return link, attempt


def test_files_arrive_whole_and_are_not_sent_twice(tmp_path: Path) -> None:
    sizes = (0, 1, p.CHUNK_BYTES - 1, p.CHUNK_BYTES, 3 * p.CHUNK_BYTES + 7, 20 * p.CHUNK_BYTES)
    files = [source(tmp_path / str(size), os.urandom(size)) for size in sizes]

    async def test(agent: FakeAgent) -> None:
        link = await agent.connect()
        told: list[tuple[int, int]] = []
        await push_files(link, files, lambda done, total: told.append((done, total)))
        assert agent.complete == {file.sha256 for file in files}
        assert all(agent.blobs[file.sha256] == file.path.read_bytes() for file in files)
        assert told[-1] == (sum(sizes), sum(sizes))
        assert [done for done, _ in told] == sorted(done for done, _ in told)
        before = len(puts(agent))
        await push_files(link, files)
        assert len(puts(agent)) == before
        await link.close()

    run_with_agent(tmp_path, test)


def test_a_push_that_is_cut_goes_on_at_the_offset(tmp_path: Path) -> None:
    data = os.urandom(10 * p.CHUNK_BYTES + 5)
    file = source(tmp_path / "model", data)

    async def test(agent: FakeAgent) -> None:
        link = await agent.connect()
        agent.cut_after_bytes = 4 * p.CHUNK_BYTES
        with pytest.raises(LinkGone):
            await push_files(link, [file])
        assert file.sha256 not in agent.complete
        before = len(puts(agent))
        again = await agent.connect()
        await push_files(again, [file])
        assert bytes(agent.blobs[file.sha256]) == data
        assert puts(agent)[before].offset == 4 * p.CHUNK_BYTES
        await again.close()

    run_with_agent(tmp_path, test)


def test_what_the_node_had_of_another_content_is_replaced(tmp_path: Path) -> None:
    file = source(tmp_path / "f", os.urandom(3 * p.CHUNK_BYTES))

    async def test(agent: FakeAgent) -> None:
        agent.blobs[file.sha256] = bytearray(os.urandom(p.CHUNK_BYTES))  # damaged on its disk
        link = await agent.connect()
        await push_files(link, [file])
        assert bytes(agent.blobs[file.sha256]) == file.path.read_bytes()
        await link.close()

    run_with_agent(tmp_path, test)


@pytest.mark.parametrize("change", ["shorter", "other", "gone"])
def test_a_file_that_changed_since_its_submission_is_named(tmp_path: Path, change: str) -> None:
    file = source(tmp_path / "data.jsonl", os.urandom(2 * p.CHUNK_BYTES))
    if change == "gone":
        file.path.unlink()
    else:
        file.path.write_bytes(os.urandom(file.size - (1 if change == "shorter" else 0)))

    async def test(agent: FakeAgent) -> None:
        link = await agent.connect()
        with pytest.raises(SourceChanged, match=r"data\.jsonl"):
            await push_files(link, [file])
        assert not agent.complete
        assert not link.is_gone
        await link.close()

    run_with_agent(tmp_path, test)


def test_a_full_disk_there_is_a_refusal_to_try_again(tmp_path: Path) -> None:
    file = source(tmp_path / "f", b"x")

    async def test(agent: FakeAgent) -> None:
        agent.disk_full = True
        link = await agent.connect()
        with pytest.raises(LinkRefused, match="full") as caught:
            await push_files(link, [file])
        assert caught.value.retry
        agent.disk_full = False
        await push_files(link, [file])
        assert agent.complete == {file.sha256}
        await link.close()

    run_with_agent(tmp_path, test)


def test_a_bundle_comes_home_whole(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")

    async def test(agent: FakeAgent) -> None:
        link, _ = await attempt_of(agent)
        bundle = await pull_bundle(link, "a", 1, "best", store)
        names = ("adapter_config.json", "adapter_model.safetensors", "metadata.json")
        assert {ref.name for ref in bundle.files} == {f"best/{name}" for name in names}
        adapter = next(ref for ref in bundle.files if ref.name == "best/adapter_model.safetensors")
        assert store.path(adapter.sha256).read_bytes() == weights("a", 4)
        assert (bundle.step, bundle.val_loss) == (4, 0.5)
        assert not agent._bundles  # released
        await link.close()

    run_with_agent(tmp_path, test)


def big_file(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(FakeAgent, "files", lambda self, attempt, kind: {"big": data})


def test_a_pull_that_is_cut_goes_on_at_the_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(30 * p.CHUNK_BYTES + 5)
    big_file(monkeypatch, data)
    store = BlobStore(tmp_path / "blobs")

    async def test(agent: FakeAgent) -> None:
        link, _ = await attempt_of(agent)
        agent.cut_after_bytes = 12 * p.CHUNK_BYTES
        with pytest.raises(LinkGone):
            await pull_bundle(link, "a", 1, "final", store)
        part = store.path(sha(data)).with_name(sha(data) + ".part")
        held = part.stat().st_size
        assert 0 < held < len(data)
        before = len(agent.requests)
        again = await agent.connect()
        await pull_bundle(again, "a", 1, "final", store)
        assert store.path(sha(data)).read_bytes() == data
        reads = [request for request in agent.requests[before:] if isinstance(request, p.ReadChunk)]
        assert reads[0].offset == held
        await again.close()

    run_with_agent(tmp_path, test)


def test_a_flipped_byte_is_refused_and_the_next_try_brings_it(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")

    async def test(agent: FakeAgent) -> None:
        link, _ = await attempt_of(agent)
        agent.flip_byte_of = "adapter_model.safetensors"
        with pytest.raises(Damaged, match="adapter_model"):
            await pull_bundle(link, "a", 1, "final", store)
        assert not store.path(sha(weights("a", 4))).exists()
        assert not list((tmp_path / "blobs").glob("*.part"))
        await pull_bundle(link, "a", 1, "final", store)
        assert store.path(sha(weights("a", 4))).read_bytes() == weights("a", 4)
        await link.close()

    run_with_agent(tmp_path, test)


def test_a_full_disk_at_home_is_told_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path / "blobs")

    async def test(agent: FakeAgent) -> None:
        link, _ = await attempt_of(agent)
        monkeypatch.setattr(blobs_module, "DISK_RESERVE", 1 << 62)
        with pytest.raises(DiskFull, match="free space"):
            await pull_bundle(link, "a", 1, "final", store)
        assert not [request for request in agent.requests if isinstance(request, p.ReadChunk)]
        monkeypatch.undo()
        await pull_bundle(link, "a", 1, "final", store)
        await link.close()

    run_with_agent(tmp_path, test)


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/../../x",
        "",
        ".",
        "a//b",
        "$(touch pwned)\n",
        "x" * 4096,
        "a\\b",
        "..",
        "a/.",
    ],
)
def test_a_bundle_with_a_path_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    store = BlobStore(tmp_path / "blobs")
    assert path_fault(name) is not None

    async def test(agent: FakeAgent) -> None:
        agent.bundle_names = {"adapter_config.json": name}
        link, _ = await attempt_of(agent)
        with pytest.raises(Damaged, match="offers a file"):
            await pull_bundle(link, "a", 1, "final", store)
        assert not [request for request in agent.requests if isinstance(request, p.ReadChunk)]
        await link.close()

    run_with_agent(tmp_path, test)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent"]


@pytest.mark.parametrize("name", ["best/adapter_model.safetensors", "$(touch pwned)", "[/]", "a b", "…"])
def test_odd_but_harmless_names_are_only_names(name: str) -> None:
    assert path_fault(name) is None


@pytest.mark.parametrize(
    "files",
    [
        [p.BlobRef(name="a", sha256="../../x", size=1)],
        [p.BlobRef(name="a", sha256="0" * 64, size=-1)],
        [p.BlobRef(name="a", sha256="0" * 64, size=1 << 60)],
        [p.BlobRef(name="a", sha256="0" * 64, size=1), p.BlobRef(name="a", sha256="1" * 64, size=1)],
        [p.BlobRef(name=str(number), sha256="0" * 64, size=1) for number in range(1001)],
    ],
)
def test_a_bundle_that_no_honest_agent_offers_is_refused(files: list[p.BlobRef]) -> None:
    with pytest.raises(Damaged, match="the node offers"):
        check_bundle(files)


def test_blobs_that_nobody_needs_are_collected(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    store.make_room(10)
    refs = [p.BlobRef(name=str(n), sha256=sha(bytes([n])), size=1) for n in range(3)]
    for number, ref in enumerate(refs):
        store.append(ref, 0, bytes([number]))
    store.finish(refs[0])
    store.finish(refs[1])
    assert store.collect({refs[0].sha256}) == 2  # a blob and a part
    assert store.has(refs[0])
    assert not store.has(refs[1])
