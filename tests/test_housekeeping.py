"""What somebody else put among the files of coordinator and agent, and disks that fail: housekeeping goes on
with the rest, and ends nobody."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster_of_straw import Straw, agents_of_straw
from gshare.agent.node import blobs as node_blobs
from gshare.agent.node import daemon as daemon_module
from gshare.agent.node import models as node_models
from gshare.agent.node.daemon import Daemon
from gshare.agent.node.state_dir import open_state_dir
from gshare.coordinator import service
from gshare.coordinator.home import Home

OLD = "a" * 64


def litter(folder: Path) -> list[Path]:
    """Entries that are nobody's here, some of them named like ours."""
    folder.mkdir(parents=True, exist_ok=True)
    links = [folder / "dangling", folder / ("b" * 64)]
    for link in links:
        link.symlink_to("/nonexistent")
    directories = [folder / "directory", folder / ("c" * 64), folder / f"{'d' * 64}.part"]
    for directory in directories:
        directory.mkdir()
    (folder / "note.txt").write_text("kept")
    return [*links, *directories, folder / "note.txt"]


def assert_there(entries: list[Path]) -> None:
    assert [path for path in entries if not os.path.lexists(path)] == []


def run(tmp_path: Path, test: Any) -> None:
    async def main() -> None:
        async with agents_of_straw(tmp_path, "a", auto=True) as it:
            await asyncio.wait_for(test(it), 60)

    asyncio.run(main())


def test_the_coordinator_lives_with_foreign_entries_and_collects_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HOUSEKEEPING_SECONDS", 0.0)
    foreign = litter(tmp_path / "home" / "blobs")
    ours = tmp_path / "home" / "blobs" / OLD
    ours.write_text("nobody needs it")
    (tmp_path / "home" / "brought" / "x-1.json").mkdir(parents=True)

    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0")
            await it.until(lambda: it.job("job0").state == "completed" and not ours.exists())
        assert_there([*foreign, tmp_path / "home" / "brought" / "x-1.json"])
        assert not any("what nobody needs stays" in text for text in it.said)

    run(tmp_path, test)


def test_a_disk_that_refuses_to_remove_is_told_of_once_and_ends_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HOUSEKEEPING_SECONDS", 0.0)
    tries: list[float] = []

    def collect(*_: object, **__: object) -> None:
        tries.append(time.monotonic())
        raise OSError(errno.EIO, "Input/output error", "/disk/blobs")

    monkeypatch.setattr(Home, "collect", collect)

    async def test(it: Straw) -> None:
        async with it.running():
            await it.until(lambda: len(tries) > 5)
            await it.submit("job0")
            await it.until(lambda: it.job("job0").state == "completed")
        told = [text for text in it.said if "what nobody needs stays" in text]
        assert len(told) == 1
        assert "/disk/blobs: Input/output error" in told[0]

    run(tmp_path, test)


def test_an_agents_files_are_collected_beside_foreign_ones(tmp_path: Path) -> None:
    late = time.time() + 30 * 24 * 3600.0
    store = node_blobs.BlobStore(tmp_path / "blobs")
    foreign = litter(tmp_path / "blobs")
    for path in foreign[2:]:
        os.utime(path, (0, 0))
    (tmp_path / "blobs" / OLD).write_text("x")
    # The litter's note is a file like a blob's, and as old: it goes with them.
    assert store.collect(late) == 2
    assert_there(foreign[:-1])
    models = tmp_path / "models"
    foreign = litter(models)
    assert node_models.collect_models(models, {path.name for path in foreign if path.is_dir()}, late) == 0
    (models / "unused").mkdir()
    assert node_models.collect_models(models, {path.name for path in foreign if path.is_dir()}, late) == 1
    assert_there(foreign)
    assert not (models / "unused").exists()


def test_a_chore_of_the_agent_that_fails_keeps_no_other_from_being_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "HOUSEKEEPING_SECONDS", 0.01)
    done: list[str] = []
    told: list[str] = []

    def collect() -> None:
        done.append("collect")
        raise RuntimeError("a defect") if len(done) > 4 else OSError(errno.EIO, "I/O")

    server: Any = SimpleNamespace(
        attempts=SimpleNamespace(collect=collect),
        bundles=SimpleNamespace(expire=lambda: done.append("expire")),
    )

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(str(context["exception"])))
        keeping = asyncio.create_task(Daemon(open_state_dir(tmp_path / "s"))._keep_house(server))
        deadline = time.monotonic() + 20
        while len(done) < 10:
            assert not keeping.done()
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping

    asyncio.run(main())
    assert done[:4] == ["collect", "expire"] * 2
    assert told == ["[Errno 5] I/O", "a defect"]
