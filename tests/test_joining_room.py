"""A full runtime directory, of a crash that was somebody else's: cleared away and waited for, then named."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from gshare.agent.errors import GshareError
from gshare.agent.jobs.events import Event
from gshare.agent.service import finding, hold, joining, registry
from gshare.agent.service.client import TrainerClient
from gshare.agent.service.finding import Finder, Found
from gshare.agent.service.registry import NoRoom, TrainerConfig

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from joining_clients import Client, job, make_base, make_config, wait_for  # noqa: E402


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(folder))


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    return make_config(make_base(tmp_path / "base", b"weights"))


def full_while(monkeypatch: pytest.MonkeyPatch, is_full: object, number: int = errno.ENOSPC) -> None:
    """`trainer.json` of a new directory cannot be written while `is_full()`."""
    write = registry.write_json

    def write_json(path: Path, value: object) -> None:
        if path.name == "trainer.json" and is_full():  # type: ignore[operator]
            raise OSError(number, os.strerror(number), str(path))
        write(path, value)  # type: ignore[arg-type]

    monkeypatch.setattr(registry, "write_json", write_json)


def dead_trainer(config: TrainerConfig) -> Path:
    """What a trainer and its client leave when both are killed."""
    directory, lock, supervisor = registry.create_trainer_dir(config)
    os.close(lock)
    os.close(supervisor)
    return directory


def test_a_lock_that_there_is_no_room_for_is_waited_for_too(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's first file in the runtime directory is the lock of its look for trainers."""
    dead = dead_trainer(config)
    make = joining.private_dir

    def private_dir(path: Path) -> Path:
        if dead.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return make(path)

    monkeypatch.setattr(joining, "private_dir", private_dir)
    client = Client(config, [job("a", tmp_path, "steps=3")], "A")
    assert client.wait() == 0
    assert client.says("joins: No space left on device")


@pytest.mark.parametrize("join", [True, False])
def test_what_dead_trainers_left_is_cleared_away_and_the_job_is_trained(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, join: bool
) -> None:
    dead = dead_trainer(config)
    full_while(monkeypatch, dead.exists)
    client = Client(config, [job("a", tmp_path, "steps=3")], "A", join=join)
    assert client.wait() == 0
    assert client.says("No space left on device")
    assert not dead.exists()


def test_a_socket_that_there_is_no_room_for_is_waited_for_too(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made before the trainer is: a trainer without one would have died, twice, and its job failed."""
    dead = dead_trainer(config)
    make = hold.bound_socket

    def bound_socket(path: Path) -> socket.socket:
        if dead.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return make(path)

    monkeypatch.setattr(hold, "bound_socket", bound_socket)
    client = Client(config, [job("a", tmp_path, "steps=3")], "A")
    assert client.wait() == 0
    assert client.says("No space left on device; a trainer needs its files there")
    assert not client.says("died")


@pytest.fixture
def mount_runtime(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """Gives the runtime directory a file system of its own with room for so many files."""
    libc, path = ctypes.CDLL(None, use_errno=True), os.fsencode(tmp_path / "XDG_RUNTIME_DIR")

    def mount(files: int) -> None:
        libc.umount2(path, 2)
        if libc.mount(b"tmpfs", path, b"tmpfs", 0, f"size=1m,mode=0700,nr_inodes={files}".encode()):
            pytest.skip(f"a full disk needs a mount: {os.strerror(ctypes.get_errno())}")

    yield mount
    libc.umount2(path, 2)


def test_whatever_there_is_no_room_for_it_is_said_before_a_trainer_is_started(
    config: TrainerConfig, mount_runtime: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a disk without room for a single directory to one that has room for all that a trainer needs."""
    monkeypatch.setattr(finding, "ROOM_SECONDS", 0.1)
    config, found = joining.with_identity(config, join=True), None
    refused: list[str] = []
    while found is None:
        assert len(refused) < 20
        mount_runtime(2 + len(refused))
        finder = Finder(config, "A", ["a"], lambda event: None)
        finder.search(config, alone=False)
        try:
            found = until_found(finder)
        except NoRoom as error:
            refused.append(str(error))
    assert len(refused) > 8  # gshare, joins and its lock, trainers, one for the trainer with six files in it
    assert [text for text in refused if "No space left on device; a " not in text] == []
    client = TrainerClient(found.trainer.directory, "A")
    assert client.hello.trainer_id == found.trainer.directory.name
    client.close()
    found.trainer.release()
    assert found.trainer.wait_dead() == 0


def until_found(finder: Finder) -> Found:
    while (found := finder.poll(0.02)) is None:
        pass
    return found


def test_a_directory_that_stays_full_is_named_in_the_end(
    config: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "ROOM_SECONDS", 0.3)
    now = [0.0]  # s; it goes on while the finder sleeps, and not while it waits for a processor
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
    monkeypatch.setattr(finding, "time", clock)
    tries = []
    full_while(monkeypatch, lambda: tries.append(1) or True)
    said: list[Event] = []
    finder = Finder(config, "A", ["a"], said.append)
    finder.search(config, alone=True)
    with pytest.raises(NoRoom, match=r"No space left.*make room or set XDG_RUNTIME_DIR"):
        wait_for(lambda: finder.poll(0.05) is not None)
    assert len(tries) > 2
    assert len(said) == 1  # told once, not at every try
    # A later search, after another crash, has its time again.
    finder.search(config, alone=True)
    assert finder.poll(0.0) is None


def test_the_control_a_directory_that_may_not_be_written_is_not_waited_for(
    config: TrainerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_while(monkeypatch, lambda: True, errno.EACCES)
    finder = Finder(config, "A", ["a"], lambda event: None)
    finder.search(config, alone=True)
    with pytest.raises(GshareError, match="Permission denied"):
        finder.poll(0.0)
