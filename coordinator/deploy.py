"""An agent of our version on a node: found, installed, started, upgraded when idle.

    look      which Python, torch, disk, installation, agent          nothing more when all is right
    put       our wheel, by hash
    install   a virtual environment in the node's state directory: on top of the named Python's packages
              when it has torch, else with the extra "train" from the node's package index
    stop      an older agent, when idle
    start     ours, by systemd --user where there is one, else detached

Each is one program run on the node (`on_node.py`), the same for this machine and for SSH.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import msgspec
from gshare.agent.node.protocol import (
    NODE_PROTOCOL_VERSION,
    DescribeNode,
    FromNode,
    NodeClientHello,
    NodeHello,
    NodeInfo,
    NodeRefused,
)
from gshare.agent.service.wire import FrameReader, WireError, convert, encode
from gshare.coordinator import on_node, on_node_state
from gshare.coordinator.channel import Channel, open_channel
from gshare.coordinator.deploy_plan import (
    MACHINES,
    Complete,
    Deployed,
    Hello,
    Look,
    about_running,
    disk_fault,
    needed_mb,
    python_is_enough,
    too_soon,
)
from gshare.coordinator.node_fault import FAULT_KINDS, FaultKind, NodeFault
from gshare.coordinator.remote import Remote
from gshare.coordinator.wheel import Wheel, own_wheel

#: Tried in this order on a node that names no `python`.
PYTHONS = ("python3", "python3.13", "python3.12", "python3.11", "python3.10")
ERRAND_SECONDS = 60.0
LOOK_SECONDS = ERRAND_SECONDS + on_node.IMPORT_SECONDS
INSTALL_SECONDS = 1800.0  # torch over a slow line
HELLO_SECONDS = 10.0
#: Which extra a made environment gets; "" is for nodes where something else brings torch.
EXTRA_VARIABLE = "GSHARE_DEPLOY_EXTRA"

Say = Callable[[str], None]


async def deploy(remote: Remote, *, force: bool = False, say: Say = lambda text: None) -> Deployed:
    """Brings `remote.node` to an agent of this version, running; does nothing where there is one.

    For transports "local" and "ssh". `force` tries again although this version failed within the last hour.
    `say` hears of long steps. NodeFault of kind no_python, no_torch, machine, disk_full, install, version,
    no_agent, protocol, timeout or lost.
    """
    return await _Deployment(remote, force, say).run()


async def find_agent(remote: Remote) -> Deployed:
    """The agent that runs on `remote.node`, whatever its version; installs, starts and ends nothing.

    NodeFault "no_agent" when none runs there; else as `deploy`.
    """
    return await _Deployment(remote, False, lambda text: None).find()


class _Deployment:
    """One call of `deploy` or `find_agent`."""

    def __init__(self, remote: Remote, force: bool, say: Say) -> None:
        self._remote = remote
        self._node = remote.node
        self._force = force
        self._say = say
        self._wheel: Wheel = own_wheel()
        self._extra = os.environ.get(EXTRA_VARIABLE, "train")
        # What is installed, and what an agent was started with: another interpreter in cluster.toml means
        # another environment, another variable a new start.
        self._stamp = f"{self._wheel.stamp}-{_short([self._node.python, self._extra])}"
        self._run_stamp = f"{self._stamp}{on_node.STAMP_BORDER}{_short(self._node.environment)}"
        self._done: list[str] = []
        self._python = ""

    async def run(self) -> Deployed:
        own = self._node.transport == "local" and self._node.python is None and _torch_is_here()
        look = await self._look(want_torch=not own)
        if look.machine not in MACHINES:
            raise self._fault(
                "machine", f"its machine is {look.machine}; gshare runs on {' and '.join(MACHINES)}"
            )
        if look.running is not None and (answer := await self._about_running(look)) is not None:
            return answer
        if own:
            # This very installation trains: nothing to install.
            complete = Complete(python=sys.executable)
            command = (sys.executable, "-m", "gshare.cli.main")
        else:
            complete = look.complete or await self._install(look)
            command = _command(complete)
        if look.running is not None:
            self._say("stopping the idle agent of another version")
            await self._errand("stop", state_dir=look.state_dir, pid=look.running.pid, systemd=look.systemd)
            self._done.append("stopped the idle older agent")
        await self._errand(
            "start",
            state_dir=look.state_dir,
            stamp=self._run_stamp,
            command=command,
            environment=self._node.environment,
            systemd=look.systemd,
        )
        self._done.append("started the agent")
        if look.running is not None:
            await self._errand("clear", state_dir=look.state_dir, keep=[self._stamp])
        return self._deployed(look, command, complete.torch)

    async def find(self) -> Deployed:
        look = await self._look(want_torch=False)
        if look.running is None:
            raise self._fault(
                "no_agent",
                f"no agent runs in {look.state_dir} there; `gshare agent` starts one, and a coordinator does",
            )
        return self._deployed(look, self._bridge(look), "")

    async def _about_running(self, look: Look) -> Deployed | None:
        """The answer when the agent that runs is used as it is; None when it is to be replaced."""
        assert look.running is not None
        hello = None
        if look.running.stamp != self._run_stamp:
            hello = await self._ask_agent(look)
        ours = version("gshare")
        step, why = about_running(look, self._run_stamp, ours, NODE_PROTOCOL_VERSION, hello, self._force)
        if step == "upgrade":
            return None
        if step in ("use", "pending"):
            complete = look.complete
            command = self._bridge(look)
            return self._deployed(look, command, complete.torch if complete else "", why)
        raise self._fault(cast(FaultKind, step), why)

    def _bridge(self, look: Look) -> tuple[str, ...]:
        """What runs gshare beside the agent that runs: our installation, else the one it came from."""
        if look.complete is not None:
            return _command(look.complete)
        if self._node.transport == "local":
            return (sys.executable, "-m", "gshare.cli.main")
        if look.running is not None and look.running.stamp:
            stamp = look.running.stamp.partition(on_node.STAMP_BORDER)[0]
            python = f"{look.state_dir}/install/{stamp}/venv/bin/python"
            return _command(Complete(python=python))
        python = look.running.python if look.running is not None else ""
        return (python or self._python, "-m", "gshare.cli.main")

    def _deployed(self, look: Look, command: tuple[str, ...], torch: str, pending: str = "") -> Deployed:
        return Deployed(
            command=command,
            state_dir=look.state_dir,
            stamp=self._stamp,
            torch=torch,
            done=tuple(self._done),
            upgrade_pending=pending,
        )

    async def _look(self, *, want_torch: bool) -> Look:
        """Through the named Python, or the first that is new enough."""
        told: list[str] = []
        own = [sys.executable] if self._node.transport == "local" else []
        for python in [self._node.python] if self._node.python else [*own, *PYTHONS]:
            finished = await self._run(
                python,
                "look",
                LOOK_SECONDS,
                state_dir=self._node.state_dir,
                stamp=self._stamp,
                want_torch=want_torch,
            )
            if isinstance(finished, str):
                told.append(f"{python}: {finished}")
                continue
            try:
                look = msgspec.convert(finished, Look)
            except msgspec.ValidationError as error:
                raise self._fault(
                    "protocol", f"{python} there gave an answer that is none: {error}"
                ) from None
            if not python_is_enough(look.python):
                told.append(f"{python} is Python {look.python}")
                continue
            self._python = python
            if look.torch_fault and self._node.python:
                raise self._fault("no_torch", f"{python}: its torch cannot be imported: {look.torch_fault}")
            return look
        raise self._fault(
            "no_python",
            f'no Python 3.10 or newer ({"; ".join(told)}); install one there, or name it: python = "/path"',
        )

    async def _install(self, look: Look) -> Complete:
        inherits = bool(look.torch)
        if fault := disk_fault(look, needed_mb(self._extra, inherits)):
            raise self._fault("disk_full", fault)
        if not self._force and (fault := too_soon(look, self._stamp)):
            raise self._fault("install", fault)
        what = f"on top of {self._python} (torch {look.torch})" if inherits else "with torch of its own"
        self._say(f"installing gshare {self._stamp} {what}")
        wheel = self._wheel
        await self._errand(
            "put",
            state_dir=look.state_dir,
            stamp=self._stamp,
            name=wheel.name,
            sha256=wheel.sha256,
            data=base64.b64encode(wheel.data).decode(),
        )
        answer = await self._errand(
            "install",
            seconds=INSTALL_SECONDS + ERRAND_SECONDS,
            state_dir=look.state_dir,
            stamp=self._stamp,
            wheel=wheel.name,
            extra=self._extra,
            inherit=inherits,
            torch=look.torch,
            environment=self._node.environment,
            timeout=INSTALL_SECONDS,
        )
        complete = msgspec.convert(answer["complete"], Complete)
        if not complete.torch and self._extra:
            raise self._fault(
                "no_torch", f"no torch in {complete.python}, although it was installed; see there"
            )
        self._done.append(f"installed gshare {self._stamp} {what}")
        return complete

    async def _ask_agent(self, look: Look) -> Hello | None:
        """The running agent's version and how many attempts it runs; None when it does not answer."""
        here = self._deployed(look, self._bridge(look), "")
        try:
            channel = await open_channel(self._remote, here, timeout=HELLO_SECONDS)
        except NodeFault as fault:
            if fault.kind == "lost":
                raise
            return None
        try:
            return await asyncio.wait_for(_ask(channel), HELLO_SECONDS)
        except (asyncio.TimeoutError, WireError):
            return None
        finally:
            await channel.close()

    async def _errand(self, op: str, *, seconds: float = ERRAND_SECONDS, **arguments: Any) -> dict[str, Any]:
        answer = await self._run(self._python, op, seconds, **arguments)
        if isinstance(answer, str):
            raise self._fault("protocol", f"{self._python} there: {answer}")
        return answer

    async def _run(self, python: str, op: str, seconds: float, **arguments: Any) -> dict[str, Any] | str:
        """The answer of one errand; a text when that Python did not give one. NodeFault: it said so."""
        request = json.dumps({"op": op, **arguments})
        program = f"{_program()}\nerrand({request!r})\n"
        # "-": the program comes on stdin. Its current folder (the home) is no place to import from.
        try:
            finished = await self._remote.run([python, "-"], program.encode(), timeout=seconds)
        except NodeFault as fault:
            if fault.kind == "no_python":
                return fault.text
            raise
        mark = f"\n{on_node.MARK}".encode()
        if mark not in finished.stdout:
            said = on_node.last_words((finished.stderr or finished.stdout).decode(errors="replace"))
            return said or f"ended with code {finished.code}"
        noise, _, line = finished.stdout.rpartition(mark)
        if noise:  # the bridge's frames would come after it, too
            said = on_node.last_words(noise.decode(errors="replace"))[:80]
            raise self._fault(
                "protocol",
                f"its login shell prints {said!r} before a program runs; make ~/.bashrc (or what "
                "prints it) silent where no terminal is",
            )
        answer = json.loads(line)
        if failed := answer.get("failed"):
            kind, text = failed
            raise self._fault(kind if kind in FAULT_KINDS else "install", text)
        return answer

    def _fault(self, kind: FaultKind, text: str) -> NodeFault:
        return NodeFault(self._node.name, kind, text)


def _command(complete: Complete) -> tuple[str, ...]:
    # -I: neither the current folder nor PYTHONPATH can put another gshare before the installed one.
    return (complete.python, "-I", "-m", "gshare.cli.main")


def _short(settings: object) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:6]


def _torch_is_here() -> bool:
    return importlib.util.find_spec("torch") is not None


def _program() -> str:
    """The program of the errands, its two files one after the other, with its import path cleaned before
    anything else is imported."""
    halves = [Path(str(half.__file__)).read_text(encoding="utf-8") for half in (on_node_state, on_node)]
    future = "from __future__ import annotations\n"
    source = "".join(half.replace(future, "", 1) for half in halves)
    # What the second one imports of the first stands above it.
    source = re.sub(r"^from gshare\.coordinator\.on_node_state import \([^)]*\)\n", "", source, flags=re.M)
    return f"{future}\nimport sys\n\nsys.path = [p for p in sys.path if p]\n{source}"


async def _ask(channel: Channel) -> Hello | None:
    """Hello and one question, as an observer."""
    frames = FrameReader()
    hello = NodeClientHello(protocol=NODE_PROTOCOL_VERSION, gshare=version("gshare"), client="deploy")
    channel.write(encode(hello))
    theirs: NodeHello | None = None
    while data := await channel.read():
        for frame in frames.feed(data):
            message = convert(frame, FromNode)
            if isinstance(message, NodeHello):
                theirs = message
                channel.write(encode(DescribeNode(id=1)))
            elif isinstance(message, NodeInfo) and theirs is not None:
                return Hello(
                    gshare=theirs.gshare, protocol=theirs.protocol, attempts=message.attempts_running
                )
            elif isinstance(message, NodeRefused):
                break
    return None if theirs is None else Hello(gshare=theirs.gshare, protocol=theirs.protocol, attempts=None)
