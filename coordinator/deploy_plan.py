"""What deploy does about what it found on a node. Pure: no clock, no connection.

The rules: install what is missing, at most one try a version and hour; never touch a running agent that has
attempts; an older agent is replaced when idle; a newer one is used as it is when it speaks our protocol.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import msgspec
from gshare.coordinator.node_fault import FaultKind

RETRY_SECONDS = 3600.0
#: A line that broke is no fault of the version; what is cut off each time, by the OOM killer say, is.
MOST_INTERRUPTED = 3
MACHINES = ("x86_64", "aarch64")
LEAST_PYTHON = (3, 10)
#: MiB on the node's disk. Measured: an environment that inherits everything takes 3, the base dependencies
#: 160, torch with CUDA and the rest of the extra "train" about 6,500 while pip unpacks.
NEED_INHERITED_MB = 400
NEED_BASE_MB = 500
NEED_TRAIN_MB = 8000


@dataclass(frozen=True)
class Deployed:
    """Where gshare is on the node, and what a call of `deploy` did to get it there."""

    command: tuple[str, ...]  # on the node: what runs gshare; arguments follow
    state_dir: str  # on the node, absolute: the agent's
    stamp: str  # VERSION-HASH of what is installed there
    torch: str  # its version there; "" when there is none, or it is this installation's own
    done: tuple[str, ...] = ()  # what was changed, for people; empty: nothing
    upgrade_pending: str = ""  # why an older agent still runs; empty: it does not


class Complete(msgspec.Struct, frozen=True, kw_only=True):
    """complete.json of an installation."""

    python: str
    torch: str = ""


class Try(msgspec.Struct, frozen=True, kw_only=True):
    time: float  # the node's clock
    fault: str = ""
    interrupted: int = 0  # tries in a row that neither failed nor ended: a cut, a reboot, the OOM killer


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that answers at the socket. `stamp`: as deploy started it; "" when somebody else did."""

    pid: int
    stamp: str = ""
    python: str = ""  # its interpreter; "": not known


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What `on_node.py` found."""

    python: str
    executable: str
    machine: str
    state_dir: str
    time: float
    disk_free_mb: int
    disk_total_mb: int
    torch: str = ""
    torch_fault: str = ""
    complete: Complete | None = None
    tries: dict[str, Try] = {}
    running: Running | None = None
    systemd: bool = False


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What a running agent says of itself. `attempts`: None when it does not say."""

    gshare: str
    protocol: int
    attempts: int | None


Step = Literal["use", "upgrade", "pending"]


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: enough to tell older from newer.

    >>> release("0.10.2.dev1") > release("0.9"), release("unknown")
    (True, ())
    """
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def python_is_enough(version: str) -> bool:
    return release(version)[:2] >= LEAST_PYTHON


def disk_fault(look: Look, need_mb: int) -> str | None:
    """Why there is too little room; a reserve of 5 % of the disk or 1 GiB, the smaller, is left alone."""
    reserve = min(1024, look.disk_total_mb // 20)
    if look.disk_free_mb >= need_mb + reserve:
        return None
    return (
        f"{look.state_dir}: {look.disk_free_mb} MiB are free, installing needs {need_mb} and leaves "
        f"{reserve}; make room, or name a state_dir on another disk"
    )


def needed_mb(extra: str, inherits: bool) -> int:
    if inherits:
        return NEED_INHERITED_MB
    return NEED_TRAIN_MB if extra else NEED_BASE_MB


def too_soon(look: Look, stamp: str) -> str | None:
    """Why this version is not tried again yet."""
    tried = look.tries.get(stamp)
    if tried is None or not tried.fault:
        return None
    ago = look.time - tried.time
    if not 0 <= ago < RETRY_SECONDS:  # a clock that was set back does not block for ever
        return None
    if 0 < tried.interrupted < MOST_INTERRUPTED:
        return None
    return (
        f"installing {stamp} failed {ago / 60:.0f} min ago: {tried.fault}. It is tried once an hour; "
        "`gshare cluster check` tries at once"
    )


def about_running(
    look: Look, stamp: str, version: str, protocol: int, hello: Hello | None, force: bool = False
) -> tuple[Step, str] | tuple[FaultKind, str]:
    """What to do about the agent that runs, and why: a step, or a fault's kind and text.

    `stamp`, `version`, `protocol` are ours; `hello` None: it runs, but does not answer. `force`: although
    it was done within the last hour.
    """
    assert look.running is not None
    if look.running.stamp == stamp:
        return "use", ""
    if hello is None:
        return "no_agent", f"an agent runs there (pid {look.running.pid}) and does not answer; end it by hand"
    theirs = f"the agent there is gshare {hello.gshare} (protocol {hello.protocol})"
    ours = f"this coordinator {version} (protocol {protocol})"
    if release(hello.gshare) > release(version):
        if hello.protocol == protocol:
            return "use", ""
        return "version", f"{theirs}, {ours}: upgrade gshare here"
    if not look.running.stamp and hello.gshare == version:
        return "use", ""  # started by hand, by this version: not ours to replace
    upgraded = look.tries.get(f"start {stamp}")
    if not force and upgraded is not None and 0 <= look.time - upgraded.time < RETRY_SECONDS:
        # Two coordinators of different builds or settings would replace each other's agent for ever.
        return "pending", f"{theirs} of another build or environment; it is exchanged once an hour at most"
    if hello.attempts is None:
        return "version", f"{theirs}, {ours}, and does not say whether it is idle: stop it there when it is"
    if hello.attempts:
        if hello.protocol != protocol:
            return "version", f"{theirs}, {ours}: it is replaced when its {hello.attempts} adapters are done"
        return "pending", f"{theirs}; it is upgraded when its {hello.attempts} adapters are done"
    return "upgrade", f"{theirs} and idle"
