"""Deploy with real processes: into an empty home of another user, made environments, other versions."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from gshare.agent.node.protocol import NODE_PROTOCOL_VERSION
from gshare.agent.service.peer import peer_of
from gshare.coordinator import deploy as deploy_module
from gshare.coordinator import on_node, on_node_state
from gshare.coordinator.channel import open_channel
from gshare.coordinator.config import NodeConfig
from gshare.coordinator.deploy import EXTRA_VARIABLE, deploy
from gshare.coordinator.deploy_plan import Deployed, Hello
from gshare.coordinator.host_keys import HostKeys
from gshare.coordinator.node_fault import NodeFault
from gshare.coordinator.remote import Remote, reach
from sshd import Sshd, free_port, make_key, other_user, require_sshd, start_sshd
from wheelhouse import make_wheelhouse

SUPPORT = Path(__file__).parent / "support"
HAS_TORCH = deploy_module._torch_is_here()
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs an interpreter with torch")


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Callable[..., NodeConfig]]:
    """Makes nodes on this machine; what runs in their state directories is ended afterwards."""
    states: list[Path] = []

    def make(**values: Any) -> NodeConfig:
        state = tmp_path / f"state{len(states)}"
        states.append(state)
        return NodeConfig(name="here", transport="local", state_dir=str(state), **values)

    yield make
    for state in states:
        end_agent(state)


def listener(state: Path) -> int | None:
    """Whoever listens there, as root sees it for another user too."""
    with on_node_state.connected(state) as sock:
        return None if sock is None else peer_of(sock).pid


def end_agent(state: Path) -> None:
    pid = listener(state)
    if pid is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            process.kill()
            process.wait(10)


def run(node: NodeConfig, keys: HostKeys | None = None, **how: Any) -> Deployed:
    async def main() -> Deployed:
        remote = await reach(node, keys or HostKeys(Path("/nonexistent"), also_read=()))
        try:
            return await deploy(remote, **how)
        finally:
            await remote.close()

    return asyncio.run(main())


def fault_of(node: NodeConfig, keys: HostKeys | None = None, **how: Any) -> NodeFault:
    with pytest.raises(NodeFault) as caught:
        run(node, keys, **how)
    return caught.value


def hello(node: NodeConfig, deployed: Deployed, keys: HostKeys | None = None) -> Hello | None:
    """What the agent says of itself, over the channel that the node's transport means."""

    async def main() -> Hello | None:
        remote: Remote = await reach(node, keys or HostKeys(Path("/nonexistent"), also_read=()))
        channel = await open_channel(remote, deployed)
        try:
            return await asyncio.wait_for(deploy_module._ask(channel), 30)
        finally:
            await channel.close()
            await remote.close()

    return asyncio.run(main())


# --- this machine


@needs_torch
def test_the_own_interpreter_is_used_and_a_second_deploy_does_nothing(
    local: Callable[..., NodeConfig],
) -> None:
    node = local(environment={"GSHARE_TEST_MARK": "$(touch pwned)\n%h \"x'"})
    first = run(node)
    assert first.done == ("started the agent",)
    assert hello(node, first) is not None
    pid = on_node.running(Path(first.state_dir))["pid"]  # pyright: ignore[reportOptionalSubscript]
    environment = psutil.Process(pid).environ()
    assert environment["GSHARE_TEST_MARK"] == node.environment["GSHARE_TEST_MARK"]
    second = run(node)
    assert second.done == ()
    assert on_node.running(Path(first.state_dir)) == {
        "pid": pid,
        "stamp": environment["GSHARE_DEPLOYED"],
        "python": sys.executable,
    }
    end_agent(Path(first.state_dir))
    assert run(node).done == ("started the agent",)  # the control: it does see when there is none


def test_an_agent_that_does_not_start_says_why(
    local: Callable[..., NodeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy_module, "_torch_is_here", lambda: True)
    node = local()
    state = Path(str(node.state_dir))
    state.mkdir()
    (state / "blobs").write_text("in the way")
    fault = fault_of(node)
    assert fault.kind == "no_agent"
    assert "state-dir" in fault.text or "blobs" in fault.text


@pytest.fixture
def straw() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts an agent of another version in a state directory."""
    running: list[subprocess.Popen[str]] = []

    def start(
        node: NodeConfig,
        version: str,
        *,
        protocol: int = NODE_PROTOCOL_VERSION,
        attempts: int = 0,
        stamp: str,
    ) -> subprocess.Popen[str]:
        words = [str(node.state_dir), version, str(protocol), str(attempts)]
        process = subprocess.Popen(
            [sys.executable, str(SUPPORT / "straw_agent.py"), *words],
            env={**os.environ, on_node.STAMP_VARIABLE: stamp},
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        return process

    yield start
    for process in running:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


@needs_torch
def test_an_older_agent_is_replaced_when_idle(
    local: Callable[..., NodeConfig], straw: Callable[..., subprocess.Popen[str]]
) -> None:
    node = local()
    old = straw(node, "0.0.1", stamp="0.0.1-abc-def~123456")
    deployed = run(node)
    assert deployed.done == ("stopped the idle older agent", "started the agent")
    assert old.wait(60) == 0
    found = hello(node, deployed)
    assert found is not None
    assert found.gshare != "0.0.1"


@needs_torch
def test_an_older_agent_with_adapters_is_left_alone_and_the_upgrade_is_pending(
    local: Callable[..., NodeConfig], straw: Callable[..., subprocess.Popen[str]]
) -> None:
    node = local()
    old = straw(node, "0.0.1", attempts=2, stamp="0.0.1-abc-def~123456")
    deployed = run(node)
    assert (deployed.done, "2 adapters" in deployed.upgrade_pending) == ((), True)
    assert old.poll() is None
    assert hello(node, deployed) == Hello(gshare="0.0.1", protocol=NODE_PROTOCOL_VERSION, attempts=2)


@needs_torch
def test_a_newer_agent_is_used_if_it_speaks_our_protocol_and_else_refused(
    local: Callable[..., NodeConfig], straw: Callable[..., subprocess.Popen[str]]
) -> None:
    node = local()
    newer = straw(node, "99.0.0", stamp="99.0.0-abc-def~123456")
    deployed = run(node)
    assert (deployed.done, deployed.upgrade_pending, newer.poll()) == ((), "", None)
    other = local()
    newest = straw(other, "99.0.0", protocol=NODE_PROTOCOL_VERSION + 1, stamp="99.0.0-abc-def~123456")
    fault = fault_of(other)
    assert (fault.kind, "upgrade gshare here" in fault.text, newest.poll()) == ("version", True, None)


@needs_torch
def test_an_agent_that_hangs_is_named_and_not_killed(
    local: Callable[..., NodeConfig],
    straw: Callable[..., subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deploy_module, "HELLO_SECONDS", 1.0)
    node = local()
    hung = straw(node, "0.0.1", stamp="0.0.1-abc-def~123456")
    hung.send_signal(signal.SIGSTOP)
    fault = fault_of(node)
    assert (fault.kind, str(hung.pid) in fault.text, hung.poll()) == ("no_agent", True, None)


@needs_torch
def test_two_builds_do_not_replace_each_other_in_a_loop(
    local: Callable[..., NodeConfig], straw: Callable[..., subprocess.Popen[str]]
) -> None:
    """The agent of the other build comes back after ours replaced it: it stays, for an hour."""
    node = local()
    straw(node, "0.0.1", stamp="0.0.1-abc-def~123456")
    assert "started the agent" in run(node).done
    end_agent(Path(str(node.state_dir)))
    again = straw(node, "0.0.1", stamp="0.0.1-abc-def~123456")
    deployed = run(node)
    assert (deployed.done, bool(deployed.upgrade_pending), again.poll()) == ((), True, None)
    assert "started the agent" in run(node, force=True).done


# --- environments that are made


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """An interpreter that has pip and nothing else."""
    pip = pytest.importorskip("pip")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=120
    )
    (packages,) = (tmp_path / "bare" / "lib").glob("python*/site-packages")
    (packages / "pip").symlink_to(Path(pip.__file__).parent)
    return str(tmp_path / "bare" / "bin" / "python")


@pytest.fixture
def no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH may lead to a checkout's gshare and pip's settings to an index: neither is the node's."""
    for variable in [name for name in os.environ if name == "PYTHONPATH" or name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.mark.slow
def test_without_torch_an_environment_is_made_from_an_index(
    local: Callable[..., NodeConfig],
    bare_python: str,
    no_paths: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The base dependencies only, from wheels packed of what is installed here."""
    monkeypatch.setenv(EXTRA_VARIABLE, "")
    house = make_wheelhouse(tmp_path / "wheels")
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(house), "PIP_NO_COMPILE": "1"}
    node = local(python=bare_python, environment=environment)
    deployed = run(node)
    assert [step.split()[0] for step in deployed.done] == ["installed", "started"]
    assert deployed.command[0].startswith(deployed.state_dir)
    assert hello(node, deployed) is not None
    # Our files, from where they were put, and nothing of the interpreter that made the environment.
    program = (
        "import gshare.agent, sys; print(gshare.agent.__file__); print([p for p in sys.path if 'bare' in p])"
    )
    said = subprocess.run(
        [deployed.command[0], "-I", "-c", program], check=True, capture_output=True, text=True
    )
    assert said.stdout.startswith(f"{deployed.state_dir}/install/{deployed.stamp}/venv/")
    assert said.stdout.endswith("\n[]\n")
    assert run(node).done == ()


def test_an_install_that_fails_is_not_tried_again_within_the_hour(
    local: Callable[..., NodeConfig], bare_python: str, no_paths: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXTRA_VARIABLE, "")
    node = local(python=bare_python, environment={"PIP_NO_INDEX": "1"})
    first = fault_of(node)
    assert (first.kind, "pip failed" in first.text) == ("install", True)
    tries = Path(str(node.state_dir)) / "install" / "tries.json"
    before = tries.read_text()
    second = fault_of(node)
    assert (second.kind, "once an hour" in second.text, "pip failed" in second.text) == (
        "install",
        True,
        True,
    )
    assert tries.read_text() == before  # nothing was tried
    (installation,) = [path for path in tries.parent.iterdir() if path.is_dir()]
    shutil.rmtree(installation)
    installation.write_text("")  # in the way, so that a try fails at once
    assert "once an hour" in fault_of(node).text
    assert str(installation) in fault_of(node, force=True).text


def test_a_python_that_is_missing_or_is_none_is_named(local: Callable[..., NodeConfig]) -> None:
    for python in ("/no/such/python", "/bin/true"):
        fault = fault_of(local(python=python))
        assert (fault.kind, python in fault.text) == ("no_python", True)


# --- disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if not done or done.returncode:
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_too_small_is_found_before_anything_is_written(
    small_disk: Path, bare_python: str
) -> None:
    node = NodeConfig(name="here", transport="local", python=bare_python, state_dir=str(small_disk / "state"))
    fault = fault_of(node)
    assert (fault.kind, fault.transient, "make room" in fault.text) == ("disk_full", True, True)
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_up_on_the_way_leaves_nothing_half_visible(small_disk: Path) -> None:
    state = small_disk / "state"
    request = json.dumps(
        {
            "op": "put",
            "state_dir": str(state),
            "stamp": "v",
            "name": "big.whl",
            **dict(zip(("data", "sha256"), _big(6_000_000), strict=True)),
        }
    )
    program = deploy_module._program() + f"\nerrand({request!r})\n"
    done = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.split(on_node.MARK)[1])
    assert answer["failed"][0] == "disk_full"
    assert list((state / "install" / "v").iterdir()) == []


def _big(size: int) -> tuple[str, str]:
    import base64
    import hashlib

    data = bytes(size)
    return base64.b64encode(data).decode(), hashlib.sha256(data).hexdigest()


def test_a_file_that_arrives_damaged_is_not_placed(tmp_path: Path) -> None:
    with pytest.raises(on_node.Failed, match="damaged"):
        on_node.put(str(tmp_path / "state"), "v", "a.whl", "0" * 64, _big(10)[0])
    assert not (tmp_path / "state").exists()


# --- another machine


def python_for(user: str, folder: Path) -> str | None:
    """An interpreter with this one's packages that `user` may run; None where there is none.

    The tests' own may lie in a home that nobody else may enter; the system's, if it is of the same version,
    sees the same packages.
    """

    entry = pwd.getpwnam(user)

    def works(python: str) -> bool:
        environment = {"PATH": os.environ["PATH"], "HOME": "/"}
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                [python, "-c", "import torch"],
                capture_output=True,
                check=False,
                timeout=120,
                env=environment,
                cwd="/",
                user=entry.pw_uid,
                group=entry.pw_gid,
                extra_groups=[],
            )
            return done.returncode == 0
        return False

    if works(sys.executable):
        return sys.executable
    system = Path("/usr/bin/python3")
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        subprocess.run(
            [str(system), "-m", "venv", "--without-pip", str(folder)], check=True, capture_output=True
        )
        (packages,) = (folder / "lib" / f"python{ours}").glob("site-packages")
        (packages / "tests.pth").write_text(f"{Path(psutil.__file__).parent.parent}\n")
        subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
        if works(str(folder / "bin" / "python")):
            return str(folder / "bin" / "python")
    return None


@needs_torch
def test_into_the_empty_home_of_another_user(tmp_path: Path, no_paths: None) -> None:
    with other_user() as (user, home):
        python = python_for(user, home.parent / f"{home.name}-python")
        if python is None:
            pytest.skip(f"no interpreter with torch that {user} may run")
        try:
            with start_sshd(tmp_path / "sshd", user=user, home=home, forwarding=False, sftp=False) as sshd:
                check_deploy_over_ssh(sshd, home, tmp_path, python)
        finally:
            shutil.rmtree(home.parent / f"{home.name}-python", ignore_errors=True)


def cut_while_it_installs(node: NodeConfig, keys: HostKeys, sshd: Sshd, install: Path) -> None:
    """Kills the connection and all that it started, in the middle of a deploy."""

    async def main() -> None:
        remote = await reach(node, keys)
        deploying = asyncio.ensure_future(deploy(remote))
        while not deploying.done() and not list(install.glob("*/venv/pyvenv.cfg")):
            await asyncio.sleep(0.01)
        sshd.signal_sessions(signal.SIGKILL)
        with pytest.raises(NodeFault) as caught:
            await deploying
        assert (caught.value.kind, caught.value.transient) == ("lost", True)
        await remote.close()

    asyncio.run(main())
    assert not list(install.glob("*/complete.json"))


def check_deploy_over_ssh(sshd: Sshd, home: Path, tmp_path: Path, python: str) -> None:
    (tmp_path / "known_hosts").write_text(sshd.known_hosts_line)
    keys = HostKeys(tmp_path / "known_hosts", also_read=())
    inside = sorted(path.name for path in Path(python).parents[1].rglob("*.pth"))
    state = f"{home}/a $(touch pwned) 'b"
    node = sshd.node(python=python, state_dir=state)
    cut_while_it_installs(node, keys, sshd, Path(state) / "install")
    first = run(node, keys)
    assert [step.split()[0] for step in first.done] == ["installed", "started"]
    assert first.torch
    found = hello(node, first, keys)
    assert found is not None
    assert found.attempts == 0
    # Idempotent: the same agent, and nothing in the node's files has changed.
    install = Path(state) / "install"
    pid = listener(Path(state))
    before = {str(path): path.stat().st_mtime_ns for path in install.rglob("*")}
    assert run(node, keys).done == ()
    assert {str(path): path.stat().st_mtime_ns for path in install.rglob("*")} == before
    process = psutil.Process(pid)
    assert process.is_running()
    # It runs as that user, outlives the connection, and the environment named was not touched.
    assert process.username() == node.user
    assert process.terminal() is None
    assert sorted(path.name for path in Path(python).parents[1].rglob("*.pth")) == inside
    assert not list(home.rglob("pwned"))
    assert not Path("pwned").exists()
    assert (Path(state).stat().st_mode & 0o777) == 0o700
    process.terminate()
    deadline = time.monotonic() + 60
    while listener(Path(state)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert hello(node, first, keys) is None  # the bridge finds no agent, and ends
    assert run(node, keys).done == ("started the agent",)


def test_an_agent_that_listens_itself_is_reached_by_its_subsystem(tmp_path: Path) -> None:
    """transport "agent": nothing is deployed; its own host key is checked like any other."""
    require_sshd()  # for ssh-keygen
    key, port = make_key(tmp_path / "key"), free_port()
    state = tmp_path / "state"
    words = ["agent", "--state-dir", str(state), "--bind", f"127.0.0.1:{port}"]
    agent = subprocess.Popen(
        [sys.executable, "-m", "gshare.cli.main", *words, "--authorized-keys", f"{key}.pub"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert agent.stderr is not None
        while "host key SHA256:" not in (line := agent.stderr.readline()):
            assert line, "the agent ended"
        node = NodeConfig(
            name="lab",
            host="127.0.0.1",
            port=port,
            transport="agent",
            identity=str(key),
            user=getpass.getuser(),
        )

        async def ask(keys: HostKeys) -> Hello | None:
            remote = await reach(node, keys)
            channel = await open_channel(remote)
            try:
                return await asyncio.wait_for(deploy_module._ask(channel), 30)
            finally:
                await channel.close()
                await remote.close()

        with pytest.raises(NodeFault) as caught:
            asyncio.run(ask(HostKeys(tmp_path / "known_hosts", also_read=())))
        assert caught.value.kind == "host_key_unknown"
        assert line.strip().endswith(caught.value.text.split("key is ")[1].split(";")[0])
        found = asyncio.run(ask(HostKeys(tmp_path / "known_hosts", also_read=(), accept_new=True)))
        assert found is not None
        assert found.protocol == NODE_PROTOCOL_VERSION
    finally:
        agent.kill()
        agent.wait(10)
        assert agent.stderr is not None
        agent.stderr.close()


def test_a_login_shell_that_prints_is_named(tmp_path: Path, bare_python: str) -> None:
    command = 'ForceCommand echo Welcome to desk; exec sh -c "$SSH_ORIGINAL_COMMAND"'
    with start_sshd(tmp_path / "sshd", more=(command,)) as sshd:
        (tmp_path / "known_hosts").write_text(sshd.known_hosts_line)
        keys = HostKeys(tmp_path / "known_hosts", also_read=())
        fault = fault_of(sshd.node(python=bare_python, state_dir=str(tmp_path / "state")), keys)
    assert (fault.kind, "Welcome to desk" in fault.text) == ("protocol", True)
    assert not (tmp_path / "state").exists()


# --- what else may be wrong with a node


def test_a_torch_that_cannot_be_imported_is_named(local: Callable[..., NodeConfig], bare_python: str) -> None:
    (packages,) = Path(bare_python).parents[1].glob("lib/python*/site-packages")
    (packages / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')\n")
    fault = fault_of(local(python=bare_python))
    assert (fault.kind, "libcudart.so.13" in fault.text) == ("no_torch", True)


def test_another_machine_is_refused(
    local: Callable[..., NodeConfig], bare_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deploy_module, "MACHINES", ("vax",))
    fault = fault_of(local(python=bare_python))
    assert (fault.kind, "vax" in fault.text) == ("machine", True)


def test_files_in_the_home_are_not_taken_for_python_modules(
    local: Callable[..., NodeConfig], bare_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -` looks in the current folder first, which over SSH is the home."""
    for name in ("json", "base64", "socket", "gshare"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')\n")
    program = deploy_module._program() + f"\nerrand({json.dumps(json.dumps(LOOK))})\n"
    done = subprocess.run(
        [bare_python, "-"], input=program, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert json.loads(done.stdout.split(on_node.MARK)[1])["python"]


LOOK = {"op": "look", "state_dir": None, "stamp": "v", "want_torch": False}


# --- systemd


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's systemd that says yes; what it was asked is a line each in the file returned."""
    asked = tmp_path / "asked"
    asked.write_text("")
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >>{asked}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return asked


def test_with_systemd_the_unit_gets_its_environment_by_a_drop_in(tmp_path: Path, systemctl: Path) -> None:
    state = tmp_path / "state"
    assert on_node.has_systemd(state)
    # `gshare agent --install`, whose unit starts an agent.
    install = (
        "import subprocess, sys\n"
        f"assert sys.argv[1:] == ['agent', '--install', '--state-dir', {str(state)!r}], sys.argv\n"
        f"agent = [{str(SUPPORT / 'straw_agent.py')!r}, {str(state)!r}, '1', '1', '0']\n"
        "subprocess.Popen([sys.executable, *agent],"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
    )
    environment = {"A": 'x "y" \\ %h\nz'}
    try:
        found = on_node.start(str(state), "v~1", [sys.executable, "-c", install], environment, True)
        assert found["running"]["pid"]
    finally:
        end_agent(state)
    drop_in = (tmp_path / "config/systemd/user/gshare-agent.service.d/deployed.conf").read_text()
    assert drop_in.splitlines() == [
        "[Service]",
        f"WorkingDirectory={state}",
        'Environment="A=x \\"y\\" \\\\ %%h\\nz"',
        'Environment="GSHARE_DEPLOYED=v~1"',
        'Environment="PYTHONSAFEPATH=1"',
    ]


def test_the_one_unit_of_a_user_is_not_taken_from_another_state_directory(
    tmp_path: Path, systemctl: Path
) -> None:
    unit = tmp_path / "config/systemd/user/gshare-agent.service"
    unit.parent.mkdir(parents=True)
    unit.write_text(f'ExecStart="python" "agent" "--state-dir" "{tmp_path / "first"}"\n')
    assert on_node.has_systemd(tmp_path / "first")
    assert not on_node.has_systemd(tmp_path / "second")
