"""MPS is refused in every doubt, and otherwise the environment is complete. Daemons are sockets of ours."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.trace import Tracer
from gshare.agent.vram import mps
from gshare.agent.vram.devices import CPU_UUID, Device, HostMemory
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.mps import MpsPlan, mps_environment
from gshare.agent.vram.nvml import NvmlDevices
from gshare.agent.vram.store import locked

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import Say, WaitFor, child, device, files, make_ledger, take, until, write_devices

EXCLUSIVE = device(compute_mode='"EXCLUSIVE_PROCESS"')
OTHER_UID = 54321

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path, EXCLUSIVE)


@pytest.fixture
def pipes() -> Iterator[Path]:
    """A daemon's directory: short, because a socket's path has at most 107 bytes, and open to other users."""
    with tempfile.TemporaryDirectory(prefix="gshare-mps-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextlib.contextmanager
def listening(
    pipes: Path, kind: socket.SocketKind = socket.SOCK_SEQPACKET, backlog: int = 8
) -> Iterator[None]:
    """A control socket of this process; connections are taken by the kernel and never answered."""
    with socket.socket(socket.AF_UNIX, kind) as control:
        control.bind(str(pipes / "control"))
        os.chmod(pipes / "control", 0o666)
        control.listen(backlog)
        yield


def plan(ledger: Ledger, pipes: Path, share: int | None = 50, budget_mb: int = 8000) -> MpsPlan:
    (gpu,) = ledger.list_devices()
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    return mps_environment(gpu, share=share, budget_mb=budget_mb, ledger=ledger, environ=environ)


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_the_plan_has_everything_that_must_be_set_before_the_context(
    ledger: Ledger, pipes: Path, kind: socket.SocketKind
) -> None:
    with listening(pipes, kind):
        made = plan(ledger, pipes)
    assert made.environment == {
        "CUDA_VISIBLE_DEVICES": "GPU-aaaa-1",
        "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8000M",
    }
    assert made.warning.startswith("MPS enabled — a GPU fault in any job will crash all jobs on GPU-aaaa-1")
    assert "every 100 steps" in made.warning
    assert made.save_steps == 100


def test_a_relative_pipe_directory_is_refused_and_the_same_one_in_full_is_not(
    ledger: Ledger, pipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client and its trainer have different working directories: they would ask different daemons."""
    monkeypatch.chdir(pipes.parent)
    with listening(pipes):
        with pytest.raises(UsageError, match=f"CUDA_MPS_PIPE_DIRECTORY: '{pipes.name}' must be an absolute"):
            plan(ledger, Path(pipes.name))
        assert plan(ledger, pipes).environment["CUDA_MPS_PIPE_DIRECTORY"] == str(pipes)


def test_nothing_of_this_process_is_changed(ledger: Ledger, pipes: Path) -> None:
    before = dict(os.environ)
    with listening(pipes):
        plan(ledger, pipes)
    assert dict(os.environ) == before
    assert files(ledger) == []  # without a reservation no share is kept


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (None, "--gpu-share is missing; write a percentage: --gpu-share 50"),
        (0, "--gpu-share: 0 is no percentage"),
        (-5, "--gpu-share: -5 is no percentage"),
        (101, "--gpu-share: 101 is no percentage"),
    ],
)
def test_without_an_explicit_percentage_it_is_refused(
    ledger: Ledger, pipes: Path, share: int | None, text: str
) -> None:
    with listening(pipes), pytest.raises(UsageError, match=text):
        plan(ledger, pipes, share)


@pytest.mark.parametrize("share", [1, 29, 30, 100])
def test_below_30_percent_it_is_refused_on_a_jetson_only(tmp_path: Path, pipes: Path, share: int) -> None:
    jetson = device("GPU-orin", memory_type='"unified"', name='"Orin"', compute_mode='"EXCLUSIVE_PROCESS"')
    with listening(pipes):
        assert plan(make_ledger(tmp_path, EXCLUSIVE), pipes, share)
        on_jetson = make_ledger(tmp_path, jetson)
        if share < 30:
            with pytest.raises(UsageError, match=f"{share} is less than 30; below that Orin does not keep"):
                plan(on_jetson, pipes, share)
        else:
            assert plan(on_jetson, pipes, share)


@pytest.mark.parametrize("mode", ["DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED"])
def test_another_compute_mode_is_refused_with_the_command_that_changes_it(
    tmp_path: Path, pipes: Path, mode: str
) -> None:
    path = write_devices(tmp_path / "devices.toml", device(compute_mode=f'"{mode}"'))
    text = path.read_text(encoding="utf-8")
    with listening(pipes), pytest.raises(GshareError) as error:
        plan(make_ledger(tmp_path), pipes)
    assert f"is {mode};" in str(error.value)
    assert str(error.value).endswith("nvidia-smi -i GPU-aaaa-1 -c EXCLUSIVE_PROCESS")
    assert path.read_text(encoding="utf-8") == text


def test_a_compute_mode_that_the_driver_does_not_say_is_refused(tmp_path: Path, pipes: Path) -> None:
    lost = device(state='"lost"', compute_mode='"EXCLUSIVE_PROCESS"')
    with listening(pipes), pytest.raises(GshareError, match="does not say the compute mode of GPU-aaaa-1"):
        plan(make_ledger(tmp_path, lost), pipes)


def test_without_a_gpu_it_is_refused(tmp_path: Path, pipes: Path) -> None:
    cpu = Device(uuid=CPU_UUID, name="x86_64 CPU", index=0, memory_type="cpu")
    ledger = Ledger(directory=tmp_path / "ledger", source=HostMemory(cpu))
    with listening(pipes), pytest.raises(UsageError, match="x86_64 CPU is no GPU"):
        plan(ledger, pipes)


def test_no_daemon_is_started_where_none_runs(
    ledger: Ledger, pipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    for name in ("posix_spawn", "posix_spawnp", "fork", "system"):
        monkeypatch.setattr(os, name, lambda *_, name=name: started.append(name))
    with pytest.raises(GshareError, match=r"no MPS daemon runs, there is no .*nvidia-cuda-mps-control -d"):
        plan(ledger, pipes)
    assert started == []
    assert os.listdir(pipes) == []


def test_a_dead_daemons_socket_is_known(ledger: Ledger, pipes: Path) -> None:
    with listening(pipes):
        pass
    assert (pipes / "control").exists()
    with pytest.raises(GshareError, match=r"the MPS daemon of .*/control is dead"):
        plan(ledger, pipes)


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_a_daemon_that_hangs_is_given_up(pipes: Path, kind: socket.SocketKind) -> None:
    """Stopped, with as many waiting as its queue takes: a blocking connect would never come back."""
    with listening(pipes, kind, backlog=0), socket.socket(socket.AF_UNIX, kind) as first:
        first.connect(str(pipes / "control"))
        with pytest.raises(GshareError, match=r"does not answer within 0.1 s; end it, then start it"):
            mps._probe_daemon(pipes, timeout_s=0.1)


def test_a_path_that_is_too_long_for_a_socket_is_one_line(ledger: Ledger, pipes: Path) -> None:
    with pytest.raises(GshareError, match=r"cannot be reached at .*too long"):
        plan(ledger, pipes / ("x" * 120))


@as_root
def test_a_daemon_of_another_user_is_refused(ledger: Ledger, pipes: Path) -> None:
    os.chown(pipes, OTHER_UID, OTHER_UID)

    def work(say: Say, wait: WaitFor) -> None:
        os.setuid(OTHER_UID)
        with listening(pipes):
            say("listens")
            wait()

    with child(work) as daemon:
        assert daemon.line() == "listens"
        assert mps._probe_daemon(pipes) == (daemon.pid, OTHER_UID)
        with pytest.raises(GshareError, match=rf"is of user id {OTHER_UID}, not yours \(0\)"):
            plan(ledger, pipes)


def test_roots_daemon_serves_other_users(
    ledger: Ledger, pipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(pipes):
        monkeypatch.setattr(mps, "_probe_daemon", lambda pipes: mps.Daemon(os.getpid(), 0))
        assert plan(ledger, pipes)


@as_root
def test_roots_daemon_that_serves_another_user_now_is_refused(ledger: Ledger, pipes: Path) -> None:
    server = pipes / "nvidia-cuda-mps-server"
    shutil.copy("/bin/sleep", server)

    def work(say: Say, wait: WaitFor) -> None:
        os.setuid(OTHER_UID)
        os.execv(server, [str(server), "60"])

    with listening(pipes), child(work):
        (pipes / mps.CONTROL_PID).write_text(f"{os.getpid()}\n", encoding="ascii")
        until(lambda: bool(mps._served_users(pipes, mps.Daemon(0, 0))))
        with pytest.raises(
            GshareError, match=rf"serves user id {OTHER_UID} now and would let you \(0\) wait"
        ):
            plan(ledger, pipes)
    assert plan_alone(ledger, pipes)


def plan_alone(ledger: Ledger, pipes: Path) -> MpsPlan:
    """With the other user's server gone the same is granted."""
    (pipes / "control").unlink()
    with listening(pipes):
        return plan(ledger, pipes)


def test_shares_of_one_gpu_are_at_most_100_percent_together(ledger: Ledger, pipes: Path) -> None:
    def work(say: Say, wait: WaitFor) -> None:
        with take(ledger, 1000) as reservation:
            plan(ledger, pipes, 60)
            say(reservation.id)
            wait()

    with listening(pipes):
        with child(work) as other:
            other_id = other.line()
            with take(ledger, 1000) as reservation:
                with pytest.raises(RetryLater, match=rf"41 % asked, 40 % left .*\({other_id} 60 %\)"):
                    plan(ledger, pipes, 41)
                assert plan(ledger, pipes, 40)
                assert plan(ledger, pipes, 40)  # our own share is replaced, not added
                assert f"mps-{reservation.id}.json" in files(ledger)
            other.go_on()
            assert other.wait() == 0
        with take(ledger, 1000):
            assert plan(ledger, pipes, 100)
    ledger.look()
    assert files(ledger) == []


@pytest.mark.parametrize(
    "damage",
    ["{", *(f'{{"gpu_uuid":"GPU-aaaa-1","share":{share}}}' for share in ("-1000", "0", "101", "9" * 400))],
    ids=lambda value: str(value)[:40],
)
def test_a_share_that_cannot_be_read_is_all_of_it(ledger: Ledger, pipes: Path, damage: str) -> None:
    with listening(pipes), child(lambda say, wait: hold(ledger, say, wait)) as other:
        name = f"mps-{other.line()}.json"
        assert plan(ledger, pipes, 100)
        (ledger.directory / name).write_text(damage, encoding="utf-8")
        with pytest.raises(RetryLater, match="0 % left"):
            plan(ledger, pipes, 1)


def hold(ledger: Ledger, say: Say, wait: WaitFor) -> None:
    with take(ledger, 100) as reservation:
        say(reservation.id)
        wait()


def test_launches_go_one_after_another_under_the_ledgers_lock(ledger: Ledger, pipes: Path) -> None:
    done = threading.Event()

    def launch() -> None:
        plan(ledger, pipes)
        done.set()

    with listening(pipes):
        with locked(ledger.directory, Tracer()):
            thread = threading.Thread(target=launch)
            thread.start()
            assert not done.wait(0.2)
        assert done.wait(60)
        thread.join()


def test_two_at_once_that_do_not_fit_together_are_not_both_granted(ledger: Ledger, pipes: Path) -> None:
    def work(say: Say, wait: WaitFor) -> None:
        with take(ledger, 100):
            say("ready")
            wait()
            try:
                plan(ledger, pipes, 60)
                say("granted")
            except RetryLater:
                say("later")
            wait()

    with listening(pipes, backlog=64), contextlib.ExitStack() as stack:
        several = [stack.enter_context(child(work)) for _ in range(8)]
        assert [one.line() for one in several] == ["ready"] * 8
        for one in several:
            one.go_on()
        assert sorted(one.line() for one in several) == ["granted", *["later"] * 7]


class OneCard:
    """As much of `pynvml` as finding one card and asking its compute mode needs; `mode` None: N/A."""

    def __init__(self, mode: int | None) -> None:
        self.mode = mode

    def __getattr__(self, name: str) -> object:
        if name.startswith("NVML") or name == "nvmlMemory_v2":
            return getattr(pynvml, name)
        answers = {"nvmlDeviceGetUUID": "GPU-aaaa-1", "nvmlDeviceGetName": "Fake", "nvmlDeviceGetCount": 1}
        return lambda *_: answers.get(name, 0)

    def nvmlDeviceGetMigMode(self, card: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetMemoryInfo(self, card: object, version: int) -> SimpleNamespace:
        return SimpleNamespace(total=1 << 34, used=0)

    def nvmlDeviceGetComputeMode(self, card: object) -> int:
        if self.mode is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.mode


@pytest.mark.parametrize(
    ("number", "mode"),
    [
        (pynvml.NVML_COMPUTEMODE_DEFAULT, "DEFAULT"),
        (pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD, "EXCLUSIVE_THREAD"),
        (pynvml.NVML_COMPUTEMODE_PROHIBITED, "PROHIBITED"),
        (pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS, "EXCLUSIVE_PROCESS"),
        (99, None),
        (None, None),
    ],
)
def test_the_drivers_compute_modes(number: int | None, mode: str | None) -> None:
    source = NvmlDevices(OneCard(number), host_pids=True)
    (card,) = source.devices()
    assert source.compute_mode(card) == mode
    assert source.compute_mode(Device(uuid="GPU-gone", name="Gone", index=1)) is None
