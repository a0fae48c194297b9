"""CUDA MPS for those who ask for it: what the environment of a process must hold *before* its context exists.

    plan = mps_environment(device, share=50, budget_mb=8192, ledger=ledger)
    subprocess.Popen(command, env={**os.environ, **plan.environment})       # and print plan.warning

Off by default, and refused in every doubt. Under MPS a fault of one client ends all of them; without an
explicit percentage of the threads kernels were seen to take 1500 times as long; the percentage is fixed when
the context is made and never balanced again. Training several adapters in one trainer needs none of it.

Nothing is started or changed here: the daemon and the compute mode are the administrator's. A daemon that
runs as root serves one user at a time: it lets a client of another user wait until the first one's are done.

The shares given out on a GPU are kept beside the reservations (`mps-ID.json`) and may not be more than 100 %
together. They are added up under the ledger's lock, so that two launches at once cannot both take the rest.

Sources: NVIDIA, "Multi-Process Service", environment variables and provisioning sequence.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.jobs.names import shorten
from gshare.agent.vram.clock import holder, now
from gshare.agent.vram.devices import Device
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.store import Store, Unreadable, locked
from gshare.agent.vram.view import View

#: Below this the percentage is not kept to on a Jetson.
JETSON_MIN_SHARE = 30
#: A fault of a neighbour costs at most so many steps.
SAVE_STEPS = 100
WARNING = "MPS enabled — a GPU fault in any job will crash all jobs"

#: Where the daemon's sockets are when CUDA_MPS_PIPE_DIRECTORY does not say.
PIPE_DIRECTORY = Path("/tmp/nvidia-mps")
CONTROL_SOCKET = "control"
CONTROL_PID = "nvidia-cuda-mps-control.pid"
#: The ledger's lock is held meanwhile. A daemon that runs takes a connection at once, by the kernel; only one
#: that is stopped with a full queue lets us wait.
PROBE_S = 1.0
_ASK_AGAIN_S = 0.01

#: The server's name; the kernel keeps the first 15 characters of it.
_SERVER = "nvidia-cuda-mps"
_UCRED = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED


class MpsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What an MPS client is started with. `save_steps`: it checkpoints at least so often."""

    environment: dict[str, str]
    warning: str
    save_steps: int


class MpsShare(msgspec.Struct, frozen=True, kw_only=True):
    """`mps-ID.json`: what the reservation ID has of its GPU's threads, percent."""

    gpu_uuid: str
    share: int


class Daemon(NamedTuple):
    """Who listens at the control socket; `pid` 0: in a PID namespace that we cannot see."""

    pid: int
    uid: int


def mps_environment(
    device: Device,
    *,
    share: int | None,
    budget_mb: int,
    ledger: Ledger,
    environ: Mapping[str, str] | None = None,
) -> MpsPlan:
    """The environment of one MPS client on `device`: `share` percent of its threads, `budget_mb` MiB.

    To be called by the process that holds the reservation: its share is kept as long as that stands. The
    share of a process without one is checked and not kept.
    UsageError: no or no sensible share, below 30 % on a Jetson, no GPU, a relative pipe directory.
    GshareError: the compute mode is not EXCLUSIVE_PROCESS, no daemon answers, it is another user's.
    RetryLater: the GPU's threads are given out.
    """
    assert budget_mb > 0
    percent = _check_share(device, share)
    environ = os.environ if environ is None else environ
    pipes = _pipe_directory(environ)
    with ledger.tracer.span("LedgerReserve", mps_share=percent):
        _check_compute_mode(device, ledger)
        with locked(ledger.directory, ledger.tracer) as store:
            with ledger.tracer.phase("vram_qry"):
                _check_daemon(pipes)
            view = ledger.view(store, now(), {})
            with ledger.tracer.phase("ledger_wr"):
                _take_share(store, view, device, percent)
    visible = device.cuda_name
    assert visible is not None
    return MpsPlan(
        environment={
            # By its UUID the device is number 0 to the process, which the limit below counts on.
            "CUDA_VISIBLE_DEVICES": visible,
            "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent),
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={budget_mb}M",
        },
        warning=f"{WARNING} on {device.uuid}; checkpoints every {SAVE_STEPS} steps at least",
        save_steps=SAVE_STEPS,
    )


def _check_share(device: Device, share: int | None) -> int:
    if device.memory_type == "cpu":
        raise UsageError(f"--experimental-mps: {device.name} is no GPU; leave it out")
    if share is None:
        raise UsageError("--experimental-mps: --gpu-share is missing; write a percentage: --gpu-share 50")
    if not 1 <= share <= 100:
        raise UsageError(f"--gpu-share: {share} is no percentage; write 1 to 100")
    # The GPU of a Jetson shares the CPU's memory; of the others that do nobody has measured it.
    if device.memory_type == "unified" and share < JETSON_MIN_SHARE:
        raise UsageError(
            f"--gpu-share: {share} is less than {JETSON_MIN_SHARE}; "
            f"below that {device.name} does not keep to it"
        )
    return share


def _pipe_directory(environ: Mapping[str, str]) -> Path:
    """Where the daemon's sockets are. UsageError for a relative path: each process would look below its own
    working directory, and a trainer's is not its client's."""
    text = environ.get("CUDA_MPS_PIPE_DIRECTORY")
    if not text:
        return PIPE_DIRECTORY
    if not os.path.isabs(text):
        raise UsageError(f"CUDA_MPS_PIPE_DIRECTORY: {shorten(text)} must be an absolute path")
    return Path(text)


def _check_compute_mode(device: Device, ledger: Ledger) -> None:
    mode = ledger.compute_mode(device)
    if mode == "EXCLUSIVE_PROCESS":
        return
    if mode is None:
        raise GshareError(
            f"--experimental-mps: the driver does not say the compute mode of {device.uuid}, which must be "
            "EXCLUSIVE_PROCESS; leave it out"
        )
    raise GshareError(
        f"--experimental-mps: the compute mode of {device.uuid} is {mode}; an administrator changes it with: "
        f"nvidia-smi -i {device.uuid} -c EXCLUSIVE_PROCESS"
    )


def _check_daemon(pipes: Path) -> None:
    """GshareError unless a daemon of ours or root's answers, and serves nobody else now."""
    daemon = _probe_daemon(pipes)
    us = os.geteuid()
    if daemon.uid not in (0, us):
        raise GshareError(
            f"--experimental-mps: the MPS daemon in {pipes} is of user id {daemon.uid}, not yours ({us}); "
            "start your own and set CUDA_MPS_PIPE_DIRECTORY"
        )
    others = _served_users(pipes, daemon) - {0, us}  # root's server (--multiuser-server) serves everybody
    if others:
        raise GshareError(
            f"--experimental-mps: the MPS daemon in {pipes} serves user id {min(others)} now and would let "
            f"you ({us}) wait; start your own and set CUDA_MPS_PIPE_DIRECTORY"
        )


def _probe_daemon(pipes: Path, timeout_s: float = PROBE_S) -> Daemon:
    """Who listens at the control socket in `pipes`; no word is said to them. GshareError when nobody does."""
    path = str(pipes / CONTROL_SOCKET)
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        with socket.socket(socket.AF_UNIX, kind) as control:
            try:
                _connect(control, path, time.monotonic() + timeout_s)
                pid, uid, _ = _UCRED.unpack(
                    control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
                )
                return Daemon(pid, uid)
            except OSError as error:
                if error.errno == errno.EPROTOTYPE and kind == socket.SOCK_SEQPACKET:
                    continue
                raise GshareError(f"--experimental-mps: {_probe_fault(error, path, timeout_s)}") from None
    raise AssertionError("one of the two answers or fails")


def _connect(control: socket.socket, path: str, deadline: float) -> None:
    """connect(2) with a deadline: a Unix socket whose queue is full answers EAGAIN, and cannot be polled."""
    control.setblocking(False)
    while True:
        try:
            control.connect(path)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "timed out") from None
            time.sleep(_ASK_AGAIN_S)


def _probe_fault(error: OSError, path: str, timeout_s: float) -> str:
    start = "start it with: nvidia-cuda-mps-control -d"
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return f"no MPS daemon runs, there is no {path}; {start}"
    if isinstance(error, ConnectionRefusedError):
        return f"the MPS daemon of {path} is dead; {start}"
    if isinstance(error, TimeoutError):
        return f"the MPS daemon of {path} does not answer within {timeout_s:g} s; end it, then {start}"
    return f"the MPS daemon cannot be reached at {path}: {error.strerror or error}"


def _served_users(pipes: Path, daemon: Daemon) -> set[int]:
    """The user ids of the daemon's servers: each runs as the user whose clients it serves."""
    try:
        pid = int((pipes / CONTROL_PID).read_text(encoding="ascii"))
    except (OSError, ValueError):
        pid = daemon.pid
    found = set()
    try:
        for child in psutil.Process(pid).children():
            if child.name().startswith(_SERVER):
                found.add(child.uids().real)
    except (psutil.Error, ValueError):
        pass  # in another PID namespace, or it has just ended
    return found


def _take_share(store: Store, view: View, device: Device, share: int) -> None:
    """Write the share down beside our reservation on the device. RetryLater when it is not left."""
    rows = [row for row in view.rows if row.gpu_uuid == device.uuid]
    us = holder(os.getpid())
    own = {row.id for row in rows if (row.pid, row.pid_start, row.pid_ns) == us}
    taken = {row.id: _share_of(store, row.id) for row in rows if row.id not in own}
    left = 100 - sum(taken.values())
    if share > left:
        holders = ", ".join(f"{row_id} {part} %" for row_id, part in taken.items() if part)
        raise RetryLater(f"--gpu-share: {share} % asked, {max(0, left)} % left on {device.uuid} ({holders})")
    for row_id in own:
        store.write(f"mps-{row_id}.json", msgspec.json.encode(MpsShare(gpu_uuid=device.uuid, share=share)))


def _share_of(store: Store, row_id: str) -> int:
    """Percent that the reservation has; unreadable and impossible ones count as all of it, never as free."""
    try:
        data = store.read(f"mps-{row_id}.json")
        if data is None:
            return 0
        share = msgspec.json.decode(data, type=MpsShare).share
    except (Unreadable, msgspec.MsgspecError):
        return 100
    return share if 1 <= share <= 100 else 100
