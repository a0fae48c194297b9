"""Atomic publication: exchange, its fallback, links, full disks, leftovers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from gshare.agent.errors import GshareError
from gshare.agent.train import files


def make(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "a").write_text(text)
    return path


def read(path: Path) -> str:
    return (path / "a").read_text()


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


@pytest.fixture(params=["exchange", "aside"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of replacing a directory."""
    if request.param == "aside":
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    return request.param


def test_publish_creates_then_replaces_and_leaves_nothing_else(tmp_path: Path, how: str) -> None:
    final = tmp_path / "best"
    for text in ("one", "two", "three"):
        files.publish_dir(make(files.temporary_name(final), text), final)
        assert read(final) == text
        assert names(tmp_path) == ["best"], how


def test_this_machine_exchanges_in_one_call(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one", "1"), make(tmp_path / "two", "2")
    if not files._exchange(one, two):
        pytest.skip("no renameat2(RENAME_EXCHANGE) here")
    assert (read(one), read(two)) == ("2", "1")


def test_death_at_every_operation_leaves_an_old_or_a_new_directory(tmp_path: Path, how: str) -> None:
    """The process dies before its k-th rename, unlink or fsync, for every k; recovery finds old or new."""
    outcomes = set()
    for k in range(40):
        root = tmp_path / str(k)
        root.mkdir()
        final = make(root / "best", "old")
        temporary = make(files.temporary_name(final), "new")
        pid = os.fork()
        if pid == 0:
            die_at(k)
            files.publish_dir(temporary, final)
            os._exit(0)
        survived = os.waitpid(pid, 0)[1] == 0
        files.remove_leftovers(root)
        assert read(final) in ("old", "new")
        assert names(root) == ["best"]
        outcomes.add(read(final))
        if survived:
            assert read(final) == "new"
            break
    assert survived, "never ran through: more operations than 40?"
    assert k > 5, "the deaths were not spread over the operations"
    assert outcomes == {"old", "new"}


def die_at(k: int) -> None:
    """From now on the k-th file operation of this process is its death (in a forked child only)."""
    left = k

    def before(function):
        def wrapper(*args, **kwargs):
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), 9)
            left -= 1
            return function(*args, **kwargs)

        return wrapper

    for name in ("rename", "replace", "unlink", "rmdir", "fsync", "write", "mkdir"):
        setattr(os, name, before(getattr(os, name)))
    files._exchange = before(files._exchange)


def test_everything_is_flushed_before_the_name_appears_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut keeps what was fsynced: files, their directory, then the rename, then its parent."""
    done: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        done.append("fsync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        real_fsync(fd)

    def rename(source: Path, target: Path) -> None:
        done.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    temporary = make(files.temporary_name(tmp_path / "best"), "x")
    (temporary / "b").write_text("y")
    files.publish_dir(temporary, tmp_path / "best")
    at = done.index("rename")
    assert {"fsync a", "fsync b", f"fsync {temporary.name}"} == set(done[:at])
    assert done[at + 1 :] == [f"fsync {tmp_path.name}"]


@pytest.mark.parametrize("in_the_way", ["file", "link"])
def test_a_file_or_link_in_the_way_is_refused_and_kept(tmp_path: Path, in_the_way: str) -> None:
    final, elsewhere = tmp_path / "best", make(tmp_path / "elsewhere", "theirs")
    if in_the_way == "file":
        final.write_text("mine")
    else:
        final.symlink_to(elsewhere)
    with pytest.raises(GshareError, match=r"a file or link is in the way while publishing .*best"):
        files.publish_dir(make(files.temporary_name(final), "new"), final)
    assert final.is_symlink() or final.read_text() == "mine"
    assert read(elsewhere) == "theirs"


def test_json_is_replaced_not_written_through_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "run.json"
    target.write_text("theirs")
    link.symlink_to(target)
    files.write_json_atomic(link, {"b": 0.1, "a": None})
    assert target.read_text() == "theirs"
    assert not link.is_symlink()
    assert link.read_text() == '{\n  "a": null,\n  "b": 0.1\n}\n'
    with pytest.raises(OSError, match="exists"):
        files.write_file(link, [b"x"])
    os.unlink(link)
    link.symlink_to(target)
    with pytest.raises(OSError, match=r"symbolic link"):
        files.read_file(link)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_keeps_the_old_file_and_leaves_no_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    path = tmp_path / "run.json"
    files.write_json_atomic(path, {"old": 1})

    def full(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(GshareError, match=r"^disk full while writing .*run\.json, last checkpoint"):
            files.write_json_atomic(path, {"new": 2})
    assert "old" in path.read_text()
    assert names(tmp_path) == ["run.json"]


def test_a_failed_second_rename_puts_the_old_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = make(tmp_path / "best", "old")
    temporary = make(files.temporary_name(final), "new")
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    real, calls = os.rename, []

    def rename(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "full")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(GshareError, match="disk full while publishing"):
        files.publish_dir(temporary, final)
    assert read(final) == "old"


def test_leftovers_go_and_nothing_else_does(tmp_path: Path) -> None:
    make(files.temporary_name(tmp_path / "checkpoint-3"), "half")
    files.temporary_name(tmp_path / "metrics.jsonl").write_text("half")
    outside = make(tmp_path / "outside", "theirs")
    files.temporary_name(tmp_path / "x").symlink_to(outside)
    make(tmp_path / ".gshare-old-best", "the only copy")
    make(tmp_path / "checkpoint-2", "whole")
    make(tmp_path / ".gshare-old-checkpoint-2", "replaced")
    for name in (".hidden", ".gshare-tmp-no-digits", "tmp-1"):
        make(tmp_path / name, "theirs")
    files.remove_leftovers(tmp_path)
    assert names(tmp_path) == [".gshare-tmp-no-digits", ".hidden", "best", "checkpoint-2", "outside", "tmp-1"]
    assert read(tmp_path / "best") == "the only copy"
    assert read(tmp_path / "checkpoint-2") == "whole"
    assert read(outside) == "theirs"
    files.remove_leftovers(tmp_path / "none")
