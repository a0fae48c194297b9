"""What happens to a cluster between and on its machines: three nodes, each behind a real OpenSSH server.

One cluster for all of these tests: each leaves it as it found it, or the next one fails. The coordinator and
the agents are processes of their own, the engine is of straw; `quick_coordinator.py` only has less patience.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_runner import weights_after
from ssh_cluster import HOSTILE, SshCluster, ssh_cluster
from sshd import make_key

NODES = ("a", "b", "c")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshCluster]:
    with ssh_cluster(tmp_path_factory.mktemp("f"), *NODES) as made:
        yield made


@pytest.fixture
def cluster(shared: SshCluster) -> SshCluster:
    """With a coordinator and all of its nodes ready."""
    if shared.coordinator_pid() is None:
        shared.start_coordinator()
    shared.until(lambda: sorted(n for n, row in shared.nodes_now().items() if row.state == "ready") == [*NODES])
    return shared


@pytest.mark.timeout(300)
def test_a_black_holed_nodes_job_goes_on_elsewhere_and_its_stale_attempt_is_stopped_when_it_returns(
    cluster: SshCluster,
) -> None:
    cluster.submit({"hole": "steps=180,sleep=0.1,save=5,files=1"})
    cluster.until(lambda: cluster.jobs()["hole"].step >= 10)
    lost = cluster.jobs()["hole"].node
    cluster.black_hole(lost)
    try:
        cluster.until(lambda: cluster.nodes_now()[lost].state == "lost")
        assert f"{lost} is lost" in cluster.log()
        assert "1 jobs go on elsewhere" in cluster.log()
        cluster.until(lambda: cluster.jobs()["hole"].attempt == 2 and cluster.jobs()["hole"].step >= 10)
        assert cluster.jobs()["hole"].node not in ("", lost)
        # What was cut off trains on: the two halves do not know of each other.
        assert cluster.attempts(lost) == {("hole", 1): "running"}
    finally:
        cluster.heal(lost)
    cluster.until(lambda: cluster.attempts(lost) == {})  # stopped, then forgotten
    assert cluster.jobs()["hole"].state == "running"  # it is attempt 2 that goes on
    cluster.until_ended("hole")
    cluster.assert_home({"hole": 180})
    assert cluster.jobs()["hole"].attempt == 2
    assert f"{lost} is back" in cluster.log()


@pytest.mark.timeout(300)
def test_a_partition_that_is_short_costs_nothing(cluster: SshCluster) -> None:
    """Negative control of the one above: the same fault, shorter than what makes a node lost."""
    cluster.submit({"short": "steps=80,sleep=0.1,save=5,files=1"})
    cluster.until(lambda: cluster.jobs()["short"].step >= 5)
    node = cluster.jobs()["short"].node
    cluster.black_hole(node)
    try:
        cluster.until(lambda: cluster.nodes_now()[node].state == "unreachable")
    finally:
        cluster.heal(node)
    cluster.until_ended("short")
    cluster.assert_home({"short": 80})
    assert cluster.jobs()["short"].attempt == 1


@pytest.mark.timeout(300)
def test_agent_trainer_and_coordinator_are_killed_at_once(cluster: SshCluster) -> None:
    names = ("one", "two", "three")
    cluster.submit({name: "steps=60,sleep=0.1,save=5,files=1" for name in names})
    cluster.until(lambda: all(cluster.jobs()[name].step >= 6 for name in names))
    of = {cluster.jobs()[name].node: name for name in names}
    assert sorted(of) == [*NODES]
    agents = {node: cluster.agent_pid(node) for node in NODES}
    assert agents["a"]
    assert agents["b"]
    trainers = psutil.Process(agents["b"]).children()
    coordinator = cluster.coordinator_pid()
    assert trainers
    assert coordinator
    for pid in (coordinator, agents["a"], *(trainer.pid for trainer in trainers)):
        os.kill(pid, signal.SIGKILL)
    cluster.start_coordinator()
    cluster.until_ended(*names)
    cluster.assert_home(dict.fromkeys(names, 60))
    assert {cluster.jobs()[name].attempt for name in names} == {1}
    assert cluster.agent_pid("a") not in (None, agents["a"])
    assert (cluster.agent_pid("b"), cluster.agent_pid("c")) == (agents["b"], agents["c"])


@pytest.mark.timeout(300)
def test_hostile_paths_are_only_paths(cluster: SshCluster) -> None:
    """Of data, output and (by `ssh_cluster.py`) a node's state directory, through the node's login shell."""
    names = ("plain", "worse", "worst")
    cluster.write_jobs({name: "steps=6,files=1" for name in names})
    spec = Path(cluster.spec)
    text = spec.read_text().replace('"out/', json.dumps(f"out {HOSTILE}/")[:-1])
    for name in names:
        (cluster.root / "data" / f"{name}.jsonl").rename(cluster.root / "data" / f"{name} {HOSTILE}.jsonl")
        text = text.replace(f'"data/{name}.jsonl"', json.dumps(f"data/{name} {HOSTILE}.jsonl"))
    spec.write_text(text)
    done = cluster.gshare("submit", "--adapters-config", cluster.spec, "--watch")
    assert done.returncode == 0, done.stderr
    assert {cluster.jobs()[name].node for name in names} == {*NODES}
    for name in names:
        adapter = cluster.root / f"out {HOSTILE}" / name / "adapter_model.safetensors"
        assert adapter.read_text() == weights_after(name, 6)
    # The shells start at home; the processes at "/".
    for folder in (Path.home(), *(s.home for s in cluster.servers.values()), Path("/"), Path.cwd()):
        assert not (folder / "pwned").exists()
    assert not list(cluster.root.rglob("pwned"))


def part_size(directory: Path) -> int:
    """Bytes of the blobs that are on their way there."""
    sizes = [0]
    for path in directory.glob("*.part"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # it has just become whole
            continue
    return max(sizes)


@pytest.mark.timeout(300)
def test_ssh_is_cut_while_a_file_is_sent_and_it_goes_on_at_the_offset(cluster: SshCluster) -> None:
    cluster.submit({"big": "steps=6,files=1" + " " * (96 << 20)})
    sending: list[str] = []

    def under_way() -> bool:
        sending[:] = [n for n in NODES if part_size(cluster.state_dir(n) / "blobs") > 4 << 20]
        return bool(sending)

    cluster.until(under_way)
    (node,) = sending
    cluster.servers[node].signal_sessions(signal.SIGKILL)
    had = part_size(cluster.state_dir(node) / "blobs")
    assert 4 << 20 < had < 96 << 20  # cut in the middle
    cluster.until(lambda: f"{node} cannot be reached" in cluster.log())
    least = []

    def ended() -> bool:
        if size := part_size(cluster.state_dir(node) / "blobs"):
            least.append(size)
        return cluster.jobs()["big"].state == "completed"

    cluster.until(ended)
    assert min(least) >= had  # never begun anew
    cluster.assert_home({"big": 6})
    assert (cluster.jobs()["big"].attempt, cluster.jobs()["big"].node) == (1, node)


@pytest.mark.timeout(300)
def test_ssh_is_cut_while_a_result_comes_home_and_it_goes_on_at_the_offset(cluster: SshCluster) -> None:
    cluster.submit({"heavy": "steps=6,files=1,pad=96"})
    blobs = cluster.home / "blobs"
    cluster.until(lambda: part_size(blobs) > 4 << 20)
    node = cluster.jobs()["heavy"].node
    cluster.servers[node].signal_sessions(signal.SIGKILL)
    had = part_size(blobs)
    assert 4 << 20 < had < 96 << 20
    least = []

    def ended() -> bool:
        if size := part_size(blobs):
            least.append(size)
        return cluster.jobs()["heavy"].state == "completed"

    cluster.until(ended)
    assert min(least) >= had
    adapter = cluster.adapter("heavy")
    assert adapter == weights_after("heavy", 6).encode() + b" " * (96 << 20)
    assert cluster.jobs()["heavy"].attempt == 1
    assert "bringing the results home waits" in cluster.log()


@pytest.mark.timeout(300)
def test_a_changed_host_key_is_refused_and_what_ended_behind_it_is_not_published_a_second_time(
    cluster: SshCluster, tmp_path: Path
) -> None:
    cluster.submit({"key": "steps=60,sleep=0.1,save=5,files=1"})
    cluster.until(lambda: cluster.jobs()["key"].step >= 5)
    node = cluster.jobs()["key"].node
    server = cluster.servers[node]
    config = list(server.config)
    server.config = [line.replace(str(server.host_key), str(make_key(tmp_path / "other"))) for line in config]
    server.stop()
    server.start()
    try:
        cluster.until(lambda: "Refused" in cluster.nodes_now()[node].reason)
        reason = cluster.nodes_now()[node].reason
        assert "known_hosts:" in reason  # file and line
        assert "ssh-keygen -f" in reason  # and what to do if it is right
        cluster.until_ended("key")
        cluster.assert_home({"key": 60})
        assert cluster.jobs()["key"].attempt == 2
        cluster.until(lambda: cluster.attempts(node) == {("key", 1): "completed"})  # a second result
        placed = (cluster.root / "out" / "key" / "adapter_model.safetensors").stat()
    finally:
        server.stop()
        server.config = config
        server.start()
    cluster.until(lambda: cluster.attempts(node) == {})
    cluster.assert_home({"key": 60})
    now = (cluster.root / "out" / "key" / "adapter_model.safetensors").stat()
    assert (now.st_ino, now.st_mtime_ns) == (placed.st_ino, placed.st_mtime_ns)
