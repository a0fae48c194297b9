"""Full disks under a cluster of real processes: on a node in the middle of its jobs, and at home."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_runner import let_go_to
from local_cluster import LocalCluster

_libc = ctypes.CDLL(None, use_errno=True)
MS_REMOUNT = 32


class SmallDisk:
    """A file system whose size can be changed: full at once, without writing gigabytes."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True)
        self.path = path
        if error := self._mount("8g", 0):
            pytest.skip(f"a disk that fills up needs a mount: {error}")

    def fill(self) -> None:
        """No byte can be written from now on."""
        used = os.statvfs(self.path)
        pages = used.f_blocks - used.f_bfree
        error = self._mount(str((pages + 4) * used.f_frsize), MS_REMOUNT)
        assert not error, error
        with contextlib.suppress(OSError), open(self.path / "rest", "wb", buffering=0) as file:
            while file.write(bytes(used.f_frsize)):
                pass
        assert os.statvfs(self.path).f_bavail == 0

    def make_room(self) -> None:
        error = self._mount("8g", MS_REMOUNT)
        assert not error, error

    def unmount(self) -> None:
        _libc.umount2(os.fsencode(self.path), 2)  # MNT_DETACH: whoever still has a file open

    def _mount(self, size: str, flags: int) -> str:
        """What was wrong, "" for nothing."""
        options = f"size={size},mode=0700".encode()
        done = _libc.mount(b"tmpfs", os.fsencode(self.path), b"tmpfs", flags, options)
        return "" if done == 0 else os.strerror(ctypes.get_errno())


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    made = LocalCluster(tmp_path / "it", "a", "b", max_adapters=2)
    yield made
    made.close()


@contextlib.contextmanager
def small_disk(cluster: LocalCluster, path: Path) -> Iterator[SmallDisk]:
    """At `path`; the cluster's processes are ended while their sockets there can still be found."""
    disk = SmallDisk(path)
    try:
        yield disk
    finally:
        cluster.close()
        disk.unmount()


@pytest.mark.timeout(300)
def test_the_disk_of_a_node_fills_up_under_its_job(cluster: LocalCluster) -> None:
    with small_disk(cluster, cluster.root / "nodes" / "b") as disk:
        cluster.start_coordinator()
        cluster.until(lambda: [row.state for row in cluster.nodes_now().values()] == ["ready", "ready"])
        upto = cluster.root / "upto"
        script = f"steps=45,sleep=0.1,save=5,files=1,{let_go_to(upto, 22)}"
        cluster.submit({"one": script, "two": script})
        # Between two saves: what is removed meanwhile would make room again.
        cluster.until(lambda: [job.step for job in cluster.jobs().values()] == [22, 22])
        (victim,) = (name for name, job in cluster.jobs().items() if job.node == "b")
        disk.fill()
        cluster.until(lambda: cluster.nodes_now()["b"].state == "degraded")
        assert "make room" in cluster.nodes_now()["b"].reason
        upto.unlink()
        cluster.until_ended("one", "two")
        cluster.assert_home({"one": 45, "two": 45})
        told = [line for line in cluster.log().splitlines() if f"of {victim} on b" in line]
        assert cluster.jobs()[victim].node == "a"
        assert any("disk" in line for line in told), cluster.log()
        cluster.submit({"three": "steps=3,files=1"})  # nothing new goes there
        cluster.until_ended("three")
        assert cluster.jobs()["three"].node == "a"
        disk.make_room()
        cluster.until(lambda: cluster.nodes_now()["b"].state == "ready")


@pytest.mark.timeout(300)
def test_the_disk_at_home_is_full_when_results_come(cluster: LocalCluster) -> None:
    with small_disk(cluster, cluster.root / "out") as disk:
        cluster.start_coordinator()
        upto = cluster.root / "upto"
        cluster.submit({"job": f"steps=30,sleep=0.1,save=5,files=1,{let_go_to(upto, 20)}"})
        cluster.until(lambda: cluster.jobs()["job"].step >= 6)
        disk.fill()
        upto.unlink()
        cluster.until(lambda: "free space there; nothing is lost" in cluster.log())
        assert re.search(
            re.escape(str(cluster.root / "out")) + r": \d+ KiB have to be free, but only 0 KiB are",
            cluster.log(),
        )
        assert not cluster.jobs()["job"].placed
        assert os.listdir(disk.path) == ["rest"]  # nothing half made
        time.sleep(2.5)  # it is tried again every second
        assert cluster.log().count("nothing is lost, it is tried again") == 1
        disk.make_room()
        cluster.until_ended("job")
        cluster.assert_home({"job": 30})
        assert sorted(os.listdir(disk.path)) == ["job", "rest"]
