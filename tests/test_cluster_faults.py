"""What happens to a cluster between and on its machines: three nodes, each behind a real OpenSSH server.

One cluster for all of these tests: each leaves it as it found it, or the next one fails. The coordinator and
the agents are processes of their own, the engine is of straw; `quick_coordinator.py` only has less patience.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_runner import let_go_to, weights_after
from local_cluster import SECONDS
from ssh_cluster import HOSTILE, SshCluster, ssh_cluster
from sshd import make_key

NODES = ("a", "b", "c")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshCluster]:
    with ssh_cluster(tmp_path_factory.mktemp("f"), *NODES) as made:
        yield made


def ready(cluster: SshCluster, lost_after: float) -> SshCluster:
    """With a coordinator of that patience and all of its nodes ready."""
    running = cluster.started[-1] if cluster.started else None
    if running is None or running.poll() is not None or cluster.lost_after != lost_after:
        if running is not None:
            running.terminate()
            running.wait(30)
        cluster.lost_after = lost_after
        cluster.start_coordinator(lost_after=lost_after)
    cluster.until(
        lambda: sorted(n for n, row in cluster.nodes_now().items() if row.state == "ready") == [*NODES]
    )
    return cluster


@pytest.fixture
def impatient(shared: SshCluster) -> SshCluster:
    """A node is lost after four seconds."""
    return ready(shared, 4.0)


@pytest.fixture
def cluster(shared: SshCluster) -> SshCluster:
    """A node is not lost while a test lasts."""
    return ready(shared, SECONDS)


@pytest.mark.timeout(300)
def test_a_black_holed_nodes_job_goes_on_elsewhere_and_its_stale_attempt_is_stopped_when_it_returns(
    impatient: SshCluster,
) -> None:
    upto = impatient.root / "upto-hole"
    impatient.submit({"hole": f"steps=60,sleep=0.1,save=5,files=1,{let_go_to(upto, 30)}"})
    impatient.until(lambda: impatient.jobs()["hole"].step >= 10)
    lost = impatient.jobs()["hole"].node
    impatient.black_hole(lost)
    try:
        impatient.until(lambda: impatient.nodes_now()[lost].state == "lost")
        assert f"{lost} is lost" in impatient.log()
        assert "1 jobs go on elsewhere" in impatient.log()
        impatient.until(lambda: impatient.jobs()["hole"].attempt == 2 and impatient.jobs()["hole"].step >= 10)
        assert impatient.jobs()["hole"].node not in ("", lost)
        # What was cut off trains on: the two halves do not know of each other.
        assert impatient.attempts(lost) == {("hole", 1): "running"}
    finally:
        impatient.heal(lost)
    impatient.until(lambda: impatient.attempts(lost) == {})  # stopped, then forgotten
    assert impatient.jobs()["hole"].state == "running"  # it is attempt 2 that goes on
    upto.unlink()
    impatient.until_ended("hole")
    impatient.assert_home({"hole": 60})
    assert impatient.jobs()["hole"].attempt == 2
    assert f"{lost} is back" in impatient.log()


@pytest.mark.timeout(300)
def test_a_changed_host_key_is_refused_and_what_ended_behind_it_is_not_published_a_second_time(
    impatient: SshCluster, tmp_path: Path
) -> None:
    upto = impatient.root / "upto-key"
    impatient.submit({"key": f"steps=60,sleep=0.1,save=5,files=1,{let_go_to(upto, 30)}"})
    impatient.until(lambda: impatient.jobs()["key"].step >= 5)
    node = impatient.jobs()["key"].node
    server = impatient.servers[node]
    config = list(server.config)
    server.config = [line.replace(str(server.host_key), str(make_key(tmp_path / "other"))) for line in config]
    server.stop()
    server.start()
    told: list[str] = []

    def is_refused() -> bool:
        told.append(impatient.nodes_now()[node].reason)
        return "Refused" in told[-1]

    try:
        impatient.until(is_refused)
        upto.unlink()
        reason = told[-1]
        assert "known_hosts:" in reason  # file and line
        assert "ssh-keygen -f" in reason  # and what to do if it is right
        impatient.until_ended("key")
        impatient.assert_home({"key": 60})
        assert impatient.jobs()["key"].attempt == 2
        impatient.until(lambda: impatient.attempts(node) == {("key", 1): "completed"})  # a second result
        placed = (impatient.root / "out" / "key" / "adapter_model.safetensors").stat()
    finally:
        server.stop()
        server.config = config
        server.start()
    impatient.until(lambda: impatient.attempts(node) == {})
    impatient.assert_home({"key": 60})
    now = (impatient.root / "out" / "key" / "adapter_model.safetensors").stat()
    assert (now.st_ino, now.st_mtime_ns) == (placed.st_ino, placed.st_mtime_ns)


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
    upto = cluster.root / "upto-names"
    cluster.submit(dict.fromkeys(names, f"steps=60,sleep=0.1,save=5,files=1,{let_go_to(upto, 30)}"))
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
    upto.unlink()
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


def largest_part(directory: Path) -> tuple[Path | None, int]:
    """The blob that is on its way there, the largest of them, and how many bytes have come."""
    found: tuple[Path | None, int] = (None, 0)
    for path in directory.glob("*.part"):
        with contextlib.suppress(FileNotFoundError):  # it has just become whole
            found = max(found, (path, path.stat().st_size), key=lambda part: part[1])
    return found


def cut(cluster: SshCluster, node: str, directory: Path, job: str) -> None:
    """Kills the connections of `node` in the middle of a file of 96 MiB, where `cluster.holding` keeps it,
    waits for the job's end, and looks that the file was gone on with where it was."""
    cluster.servers[node].signal_sessions(signal.SIGKILL)
    part, had = largest_part(directory)
    cluster.holding.unlink()
    assert part is not None
    assert 4 << 20 < had < 96 << 20  # in the middle
    least = []

    def ended() -> bool:
        with contextlib.suppress(FileNotFoundError):
            least.append(part.stat().st_size)
        return cluster.jobs()[job].state == "completed"

    cluster.until(lambda: f"{node} cannot be reached" in cluster.log())
    cluster.until(ended)
    assert min(least, default=had) >= had  # never begun anew
    assert (cluster.jobs()[job].attempt, cluster.jobs()[job].placed) == (1, True)


@pytest.mark.timeout(300)
def test_ssh_is_cut_while_a_file_is_sent_and_it_goes_on_at_the_offset(cluster: SshCluster) -> None:
    cluster.holding.touch()
    cluster.submit({"big": "steps=6,files=1" + " " * (96 << 20)})
    sending: list[str] = []

    def under_way() -> bool:
        blobs = {node: cluster.state_dir(node) / "blobs" for node in NODES}
        sending[:] = [node for node, directory in blobs.items() if largest_part(directory)[1] > 4 << 20]
        return bool(sending)

    cluster.until(under_way)
    cut(cluster, sending[0], cluster.state_dir(sending[0]) / "blobs", "big")
    cluster.assert_home({"big": 6})
    assert cluster.jobs()["big"].node in ("", sending[0])


@pytest.mark.timeout(300)
def test_ssh_is_cut_while_a_result_comes_home_and_it_goes_on_at_the_offset(cluster: SshCluster) -> None:
    cluster.holding.touch()
    cluster.submit({"heavy": "steps=6,files=1,pad=96"})
    cluster.until(lambda: largest_part(cluster.home / "blobs")[1] > 4 << 20)
    cut(cluster, cluster.jobs()["heavy"].node, cluster.home / "blobs", "heavy")
    assert cluster.adapter("heavy") == weights_after("heavy", 6).encode() + b" " * (96 << 20)
    assert "heavy: bringing the results home waits" in cluster.log()
