"""Nodes that cannot be used, or not as they are: keys, jump hosts, clocks, two coordinators."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_runner import let_go_to
from local_cluster import SUPPORT, LocalCluster
from sshd import Sshd, make_key, start_sshd

DAY = 86400


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "HOME"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Sshd, Sshd]]:
    """One that lets everything through, and one that forbids forwarding."""
    key = make_key(tmp_path / "client_key")
    with (
        start_sshd(tmp_path / "open", client_key=key) as gate,
        start_sshd(tmp_path / "shut", client_key=key, forwarding=False) as shut,
    ):
        yield gate, shut


@pytest.mark.timeout(300)
def test_each_node_that_cannot_be_used_says_why_and_costs_the_others_nothing(
    tmp_path: Path, servers: tuple[Sshd, Sshd]
) -> None:
    gate, shut = servers
    ssh = tmp_path / "HOME" / ".ssh"
    ssh.mkdir(mode=0o700)
    (ssh / "config").write_text(f"Host *\n  IdentityFile {gate.client_key}\n  User {gate.user}\n")
    # The same server under another name, for which another key is on file: set up anew, or an intruder.
    other = make_key(tmp_path / "other_host_key").with_suffix(".pub").read_text().split()[:2]
    lines = [gate.known_hosts_line, shut.known_hosts_line, f"[localhost]:{gate.port} {' '.join(other)}\n"]
    (ssh / "known_hosts").write_text("".join(lines))
    stranger = make_key(tmp_path / "stranger_key")
    bad = {
        "changed": f'host = "localhost"\nport = {gate.port}',
        "changed-gate": f'host = "127.0.0.1"\nport = {gate.port}\nproxy_jump = "localhost:{gate.port}"',
        "unknown": f'host = "127.0.0.2"\nport = {gate.port}\nproxy_jump = "127.0.0.1:{gate.port}"',
        "stranger": f'host = "127.0.0.1"\nport = {gate.port}\nidentity = "{stranger}"',
        "shut-gate": f'host = "127.0.0.1"\nport = {gate.port}\nproxy_jump = "127.0.0.1:{shut.port}"',
        "nobody": 'host = "127.0.0.1"\nport = 1',
    }
    cluster = LocalCluster(tmp_path / "it", "good")
    blocks = [f'[[node]]\nname = "{name}"\n{text}\n' for name, text in bad.items()]
    cluster.file.write_text(cluster.file.read_text() + "".join(blocks))
    known = (ssh / "known_hosts").read_text()
    try:
        checked = cluster.gshare("cluster", "check", "--json", "--accept-new")
        assert checked.returncode == 1, checked.stderr
        found = {node["node"]: node for node in map(json.loads, checked.stdout.splitlines())}
        told = {
            "changed": ("host_key_changed", f"{ssh / 'known_hosts'}:3 has another", "ssh-keygen -f"),
            "changed-gate": ("host_key_changed", f"jump host localhost:{gate.port}", "ssh-keygen -f"),
            "unknown": ("refused", "the jump host cannot reach it", ""),
            "stranger": ("auth", str(stranger), "authorized_keys"),
            "shut-gate": ("forwarding", "forbids forwarding", "AllowTcpForwarding yes"),
            "nobody": ("refused", "nothing listens there", "is the SSH server up?"),
        }
        assert {name: node["kind"] for name, node in found.items() if not node["ok"]} == {
            name: kind for name, (kind, _, _) in told.items()
        }
        for name, (_, what, mend) in told.items():
            (text,) = found[name]["faults"]
            assert what in text
            assert mend in text
        assert (ssh / "known_hosts").read_text() == known  # a changed key is never taken

        cluster.start_coordinator("--accept-new")
        cluster.submit({"job": "steps=6,files=1"})
        cluster.until_ended("job")
        cluster.assert_home({"job": 6})
        status: dict[str, dict[str, str]] = {}

        def all_told() -> bool:
            """Not by every try: on a busy machine one may have taken longer than four seconds."""
            status.update((node["node"], node) for node in cluster.status()["nodes"])
            return all(what in status[name]["reason"] for name, (_, what, _) in told.items())

        cluster.until(all_told)
        assert {status[name]["state"] for name in told} == {"new"}
    finally:
        cluster.close()


@pytest.mark.timeout(300)
def test_clocks_that_are_off_by_a_day_are_told_and_cost_nothing(tmp_path: Path) -> None:
    def clock(off: int) -> dict[str, str]:
        path = [str(SUPPORT / "off_clock"), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
        return {"GSHARE_TEST_CLOCK": str(off), "PYTHONPATH": os.pathsep.join(filter(None, path))}

    clocks = {"ahead": clock(DAY), "behind": clock(-DAY)}
    cluster = LocalCluster(tmp_path / "it", "ahead", "behind", max_adapters=1, more_environment=clocks)
    try:
        cluster.start_coordinator()
        cluster.submit({name: "steps=45,sleep=0.1,save=5,files=1" for name in ("one", "two")})
        cluster.until(lambda: all(job.step >= 10 for job in cluster.jobs().values()))
        nodes = cluster.nodes_now()
        for name in clocks:
            assert nodes[name].state == "degraded"
            assert f"s {name}: set it, for instance by NTP" in nodes[name].reason
        assert abs(nodes["ahead"].info.time - nodes["behind"].info.time - 2 * DAY) < 60  # it was off indeed
        # Journals and records with those times, read again by new processes.
        for node in clocks:
            pid = cluster.agent_pid(node)
            assert pid
            os.kill(pid, signal.SIGKILL)
        cluster.until_ended("one", "two")
        cluster.assert_home({"one": 45, "two": 45})
        assert {job.attempt for job in cluster.jobs().values()} == {1}
        best = {row["job"]: row["best_step"] for row in cluster.status()["leaderboard"]}
        assert best == {"one": 45, "two": 45}
    finally:
        cluster.close()


@pytest.mark.timeout(300)
def test_two_coordinators_on_one_node(tmp_path: Path) -> None:
    """Of two owners: beside each other, jobs of one name included. Of one (a copied state): one at a time."""
    cluster = LocalCluster(tmp_path / "it", "a")
    other = LocalCluster(tmp_path / "other", "a")
    other.file.write_text(cluster.file.read_text())
    copied = LocalCluster(tmp_path / "copied", "a")
    copied.file, copied.spec = cluster.file, cluster.spec
    try:
        first = cluster.start_coordinator()
        other.start_coordinator()
        upto = tmp_path / "upto"
        cluster.submit({"job": f"steps=80,sleep=0.1,save=5,files=1,{let_go_to(upto, 40)}"})
        other.submit({"job": "steps=8,files=1"})
        other.until_ended("job")
        other.assert_home({"job": 8})
        cluster.until(lambda: cluster.jobs()["job"].step >= 5)

        ignore = shutil.ignore_patterns("socket", "lock", "*.log")
        shutil.copytree(cluster.home, copied.home, ignore=ignore)
        copied.start_coordinator()
        copied.until(lambda: "two coordinators of one owner" in copied.nodes_now()["a"].reason)
        # Negative control of the fence: the first one still hears of its job and can command it.
        step = cluster.jobs()["job"].step
        let_go_to(upto, 60)
        cluster.until(lambda: cluster.jobs()["job"].step > step)
        assert not copied.jobs()["job"].placed
        first.kill()
        upto.unlink()
        copied.until_ended("job")  # the one that is left goes on with it
        assert copied.jobs()["job"].attempt == 1
        assert "job: completed" not in cluster.log()
        copied.root = cluster.root  # its submission was made there
        copied.assert_home({"job": 80})
    finally:
        copied.close()
        other.close()
        cluster.close()
