"""Where the ledger lies and what may happen to it: symlinks, users, filesystems, full disks, removal."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.vram import paths, store
from gshare.agent.vram.ledger import Grant, Ledger

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import (
    NO_CONFIG,
    Child,
    Say,
    WaitFor,
    child,
    files,
    make_ledger,
    rows,
    take,
    wanted,
)

OTHER_UID = 54321

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path)


@pytest.fixture
def open_ledger() -> Iterator[Ledger]:
    """One that other users can reach: pytest's own directories are 0700."""
    with tempfile.TemporaryDirectory(prefix="gshare-test-") as folder:
        os.chmod(folder, 0o755)
        yield make_ledger(Path(folder))


# Case 9


@pytest.mark.parametrize("place", ["lock", "directory"])
def test_a_symlink_at_the_lock_or_the_directory_is_an_error_and_its_target_untouched(
    tmp_path: Path, place: str
) -> None:
    ledger = make_ledger(tmp_path)
    target = tmp_path / "target"
    if place == "lock":
        target.write_text("precious", encoding="utf-8")
        ledger.directory.mkdir(mode=0o1777)
        (ledger.directory / "lock").symlink_to(target)
    else:
        target.mkdir()
        ledger.directory.symlink_to(target)
    with pytest.raises(GshareError, match="is a symlink; remove it"):
        take(ledger, 100)
    if place == "lock":
        assert target.read_text(encoding="utf-8") == "precious"
    else:
        assert list(target.iterdir()) == []


# Where it lies


def test_the_directory_is_sticky_and_open_to_all_whatever_the_umask(ledger: Ledger) -> None:
    def work(say: Say, wait: WaitFor) -> None:
        os.umask(0o077)
        with take(ledger, 100) as reservation:
            say(reservation.id)
            wait()

    with child(work) as one:
        row_id = one.line()
        assert stat.S_IMODE(ledger.directory.stat().st_mode) == 0o1777
        for name in ("lock", f"row-{row_id}.json", f"row-{row_id}.life"):
            assert stat.S_IMODE((ledger.directory / name).stat().st_mode) == 0o644


@as_root
def test_two_users_share_one_ledger(open_ledger: Ledger) -> None:
    ledger = open_ledger

    def stranger(say: Say, wait: WaitFor) -> None:
        os.setgid(OTHER_UID)
        os.setuid(OTHER_UID)
        say(json.dumps(rows(ledger)))
        say(str(take(ledger, 1000).row.uid))
        with pytest.raises(RetryLater):
            take(ledger, 7001)
        os.kill(os.getpid(), signal.SIGKILL)

    def successor(say: Say, wait: WaitFor) -> None:
        os.setgid(OTHER_UID + 1)
        os.setuid(OTHER_UID + 1)
        say(json.dumps(rows(ledger)))
        say(str(len([name for name in files(ledger) if name.endswith(".life")])))
        take(ledger, 8000).release()

    with take(ledger, 500) as mine:
        with child(stranger) as other:
            assert json.loads(other.line()) == {mine.id: 500}
            assert other.line() == str(OTHER_UID)
            assert other.wait() == -signal.SIGKILL
        with child(successor) as third:
            assert json.loads(third.line()) == {mine.id: 500}  # the dead row of another user counts nothing,
            assert third.line() == "2"  # though only its owner or root can remove it
            assert third.wait() == 0
        assert rows(ledger) == {mine.id: 500}
        assert files(ledger) == [f"row-{mine.id}.json", f"row-{mine.id}.life"]


@as_root
def test_permission_denied_is_one_line(open_ledger: Ledger) -> None:
    ledger = open_ledger
    rows(ledger)
    ledger.directory.chmod(0o755)

    def stranger(say: Say, wait: WaitFor) -> None:
        os.setuid(OTHER_UID)
        take(ledger, 100)

    with child(stranger) as other:
        line = other.line()
    assert line.startswith("GshareError: ")
    assert "mode 0755) is not writable for you" in line


def test_a_directory_where_others_could_delete_our_rows_is_refused(ledger: Ledger) -> None:
    ledger.directory.mkdir()
    ledger.directory.chmod(0o777)
    with pytest.raises(GshareError, match=r"chmod \+t"):
        take(ledger, 100)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_filesystem_that_hosts_may_share_is_refused(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(paths, "filesystem_of", lambda path: kind)
    with pytest.raises(GshareError, match=f"is on {kind}, where locks may not hold"):
        take(ledger, 100)


def test_the_probe_finds_a_flock_that_does_not_exclude(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths.fcntl, "flock", lambda fd, how: None)
    with pytest.raises(GshareError, match="flock does not exclude"):
        take(ledger, 100)


def test_the_filesystem_is_that_of_the_last_mount_over_the_longest_point(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 0:2 / /home rw shared:1 - nfs4 server:/home rw\n"
        "3 1 0:3 / /home\\040x rw - xfs /dev/b rw\n"
        "4 2 0:4 / /home/local rw - tmpfs tmpfs rw\n"
        "5 2 0:5 / /home/local rw - overlay overlay rw\n",
        encoding="utf-8",
    )
    found = [
        paths.filesystem_of(Path(p), mounts) for p in ("/x", "/home/u", "/home x", "/home/local/d", "/homes")
    ]
    assert found == ["ext4", "nfs4", "xfs", "overlay", "ext4"]
    assert paths.filesystem_of(Path("/x"), tmp_path / "none") == ""


def test_where_the_ledger_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paths, "ADMINISTRATOR", tmp_path / "run")
    monkeypatch.setattr(paths, "SHARED_MEMORY", tmp_path / "shm")
    assert paths.ledger_directory({}) == Path("/tmp/gshare")
    (tmp_path / "shm").mkdir()
    assert paths.ledger_directory({}) == tmp_path / "shm" / "gshare"
    (tmp_path / "run").mkdir()
    assert paths.ledger_directory({}) == tmp_path / "run"
    assert paths.ledger_directory({"GSHARE_LEDGER_DIR": "/else"}) == Path("/else")
    with pytest.raises(UsageError, match="must be an absolute path"):
        paths.ledger_directory({"GSHARE_LEDGER_DIR": "else"})


# Faults


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_a_full_disk_is_one_line_and_the_ledger_is_as_before(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*args: object, **keys: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with take(ledger, 500) as one:
        before = (ledger.directory / f"row-{one.id}.json").read_bytes()
        monkeypatch.setattr(store.os, call, full)
        with pytest.raises(GshareError, match="cannot be changed: No space left on device"):
            ledger.reserve(wanted(ledger, 100))
        with pytest.raises(GshareError, match="No space left"):
            one.record_use("load", 400)
        monkeypatch.undo()
        assert files(ledger) == [f"row-{one.id}.json", f"row-{one.id}.life"]
        assert (ledger.directory / f"row-{one.id}.json").read_bytes() == before
        one.record_use("load", 401)


def test_the_holder_puts_its_row_back_when_somebody_emptied_the_directory(ledger: Ledger) -> None:
    def work(say: Say, wait: WaitFor) -> None:
        with take(ledger, 500) as reservation:
            say(reservation.id)
            wait()
            reservation.record_use("load", 300)
            say("back")
            wait()

    with child(work) as one:
        row_id = one.line()
        for name in os.listdir(ledger.directory):
            (ledger.directory / name).unlink()
        ledger.directory.rmdir()
        assert rows(ledger) == {}
        one.go_on()
        assert one.line() == "back"
        assert rows(ledger) == {row_id: 500}
    assert rows(ledger) == {}


def killed_at(step: int, ledger: Ledger) -> int:
    """Exit code of a first user who dies just before its `step`-th change of the directory or the lock."""
    calls = ("mkdir", "open", "fchmod", "chmod", "rename", "link", "unlink", "close")

    class KillingOs:
        left = step

        def __getattr__(self, name: str) -> object:
            value = getattr(os, name)
            if name not in calls:
                return value

            def call(*arguments: object, **keys: object) -> object:
                if self.left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.left -= 1
                return value(*arguments, **keys)

            return call

    def work(say: Say, wait: WaitFor) -> None:
        paths.os = KillingOs()  # pyright: ignore[reportAttributeAccessIssue]
        rows(ledger)
        os._exit(0)

    with child(work) as first:
        return first.wait()


@as_root
@pytest.mark.parametrize("what", ["directory", "lock"])
def test_whenever_the_first_user_is_killed_the_others_are_not_locked_out(
    open_ledger: Ledger, what: str
) -> None:
    folder = open_ledger.directory.parent
    folder.chmod(0o1777)
    died = 0
    for step in range(100):
        ledger = Ledger(directory=folder / f"ledger-{step}", source=open_ledger.source, environ=NO_CONFIG)
        if what == "lock":
            ledger.directory.mkdir()
            ledger.directory.chmod(0o1777)
        code = killed_at(step, ledger)

        def stranger(say: Say, wait: WaitFor, ledger: Ledger = ledger) -> None:
            os.setgid(OTHER_UID)
            os.setuid(OTHER_UID)
            with take(ledger, 1000):
                say(str(len(rows(ledger))))

        with child(stranger) as other:
            assert other.line() == "1", step
        assert stat.S_IMODE(ledger.directory.stat().st_mode) == 0o1777
        if code == 0:
            break
        assert code == -signal.SIGKILL
        died += 1
    assert died > 4  # mkdir, open, chmod, rename or link, …


def test_a_maker_that_comes_late_does_not_replace_the_directory_of_the_first(ledger: Ledger) -> None:
    paths._make(ledger.directory)
    first = ledger.directory.stat().st_ino
    paths._make(ledger.directory)  # it looked before the first one's was there
    assert ledger.directory.stat().st_ino == first
    assert [path.name for path in ledger.directory.parent.glob(".ledger-*")] == []
    assert files(ledger) == []


def test_many_first_users_at_once_make_one_ledger(ledger: Ledger) -> None:
    def work(say: Say, wait: WaitFor) -> None:
        wait()
        with take(ledger, 100):
            say("has")
            wait()

    for _ in range(10):
        children = [Child(work) for _ in range(8)]
        try:
            for one in children:
                one.go_on()
            assert [one.line() for one in children] == ["has"] * 8
            assert sum(rows(ledger).values()) == 800
        finally:
            for one in children:
                one.kill()
        assert [path.name for path in ledger.directory.parent.glob(".ledger-*")] == []
        shutil.rmtree(ledger.directory)


@as_root
def test_a_hold_that_root_renews_stays_its_users(open_ledger: Ledger) -> None:
    ledger = open_ledger
    rows(ledger)

    def user(say: Say, wait: WaitFor) -> None:
        os.setgid(OTHER_UID)
        os.setuid(OTHER_UID)
        lease = ledger.reserve(wanted(ledger, 300, kind="hold", lease_s=60.0))
        assert isinstance(lease, Grant)
        say(lease.row.id)
        wait()
        ledger.renew_lease(lease.row.id, 70.0)
        ledger.end_lease(lease.row.id)
        say("released")

    with child(user) as one:
        row_id = one.line()
        path = ledger.directory / f"lease-{row_id}.json"
        before = path.stat()
        ledger.renew_lease(row_id, 7200.0)
        after = path.stat()
        assert after.st_ino != before.st_ino
        assert (after.st_uid, after.st_gid, after.st_mode) == (OTHER_UID, OTHER_UID, before.st_mode)
        one.go_on()
        assert one.line() == "released"
    assert rows(ledger) == {}


@as_root
def test_nobody_but_root_renews_another_users_hold(open_ledger: Ledger) -> None:
    ledger = open_ledger
    lease = ledger.reserve(wanted(ledger, 300, kind="hold", lease_s=60.0))
    assert isinstance(lease, Grant)
    before = (ledger.directory / f"lease-{lease.row.id}.json").read_bytes()

    def stranger(say: Say, wait: WaitFor) -> None:
        os.setuid(OTHER_UID)
        ledger.renew_lease(lease.row.id, 7200.0)

    with child(stranger) as other:
        assert "belongs to uid 0; only they can renew it" in other.line()
    assert (ledger.directory / f"lease-{lease.row.id}.json").read_bytes() == before
    assert files(ledger) == [f"lease-{lease.row.id}.json"]


def test_a_lock_file_that_was_replaced_is_noticed(ledger: Ledger) -> None:
    rows(ledger)
    old = os.open(ledger.directory / "lock", os.O_RDONLY)
    fcntl.flock(old, fcntl.LOCK_EX)

    def work(say: Say, wait: WaitFor) -> None:
        say("tries")
        say(str(len(rows(ledger))))

    with child(work) as one:
        assert one.line() == "tries"
        time.sleep(0.1)  # it waits for the old lock now
        (ledger.directory / "lock").unlink()
        (ledger.directory / "lock").touch(mode=0o644)
        fcntl.flock(old, fcntl.LOCK_UN)
        with store.locked(ledger.directory, ledger.tracer):
            assert not store._is_current(old, os.open(ledger.directory, os.O_RDONLY), ledger.directory)
        assert one.line() == "0"
    os.close(old)
