"""`gshare agent` as a person and an SSH session meet it: flags, the bridge, signals, what it imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from gshare.agent.node import protocol
from gshare.agent.node.install import stop_unit_of
from gshare.agent.node.protocol import FromNode, NodeClientHello, NodeHello, NodeRefused
from gshare.agent.service.wire import FrameReader, convert, encode
from gshare.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from node_agents import running_agent  # noqa: E402

HELLO = encode(NodeClientHello(protocol=1, gshare=version("gshare"), client="t", role="observer"))


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    monkeypatch.setenv("GSHARE_TEST_RUNNER", "fake_runner:FakeRunner")
    monkeypatch.setenv("GSHARE_TEST_PREPARE", "fake_prepare")
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))


def connect(state: Path, data: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "gshare.cli.main", "agent", "connect", "--state-dir", str(state)]
    return subprocess.run(command, cwd="/", input=data, capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("folder", ["node", "x" * 150])
def test_the_bridge_is_the_socket_however_long_its_path(tmp_path: Path, folder: str) -> None:
    with running_agent(tmp_path / folder) as agent:
        done = connect(agent.state, HELLO + encode(protocol.ListAttempts(id=1)))
        hello, attempts = (convert(frame, FromNode) for frame in FrameReader().feed(done.stdout))
        assert isinstance(hello, NodeHello)
        assert attempts == protocol.Attempts(reply_to=1, attempts=[])
        assert (done.returncode, done.stderr) == (0, b"")
        refused = connect(agent.state, b"\xc1")
        assert isinstance(convert(FrameReader().feed(refused.stdout)[0], FromNode), NodeRefused)


def test_the_bridge_without_an_agent_says_so(tmp_path: Path) -> None:
    done = connect(tmp_path / "nothing", HELLO)
    assert (done.returncode, done.stdout) == (75, b"")
    assert done.stderr.decode().startswith(f"gshare: {tmp_path}/nothing/socket: no agent answers there")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--authorized-keys", "keys"], "--authorized-keys is for --bind"),
        (["--node", "a"], "--node is for --coordinator"),
        (["--bind=host:port"], "--bind 'host:port': write HOST:PORT"),
        (["--bind", "--authorized-keys", "/nowhere"], "--authorized-keys /nowhere: No such file"),
        (["--coordinator", "-oProxyCommand=x"], "--coordinator"),
        (["--coordinator", "a@b", "--node", "../x"], "--node: '../x' holds a path separator"),
        (["--state-dir", "/dev/null"], "--state-dir /dev/null: is a file"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["agent", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("gshare: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 143), (signal.SIGTERM, 143)]
)
def test_an_idle_agent_leaves_at_once(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with running_agent(tmp_path / "node") as agent:
        assert agent.process is not None
        client = agent.connect()
        agent.process.send_signal(number)
        assert agent.process.wait(30) == code
        assert not agent.socket.exists()
        with pytest.raises(ConnectionResetError):
            client.receive(10)
        first, last = agent.log.read_text().splitlines()
        assert first == f"agent {agent.process.pid} runs; state in {agent.state}, socket {agent.socket}"
        assert last == "the agent has ended; what it ran goes on at its next start"


def stop(state: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gshare.cli.main", "agent", "stop", "--state-dir", str(state)]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)


def test_stop_ends_the_agent_of_that_directory_and_what_ran_goes_on(tmp_path: Path) -> None:
    """Negative control: the agent of another directory is none the worse."""
    with running_agent(tmp_path / "node") as agent, running_agent(tmp_path / "other") as other:
        assert agent.process is not None
        assert other.process is not None
        client = agent.connect()
        client.start("a", "steps=400,sleep=0.05,files=1")
        client.wait("a", lambda status: status.step >= 2)
        done = stop(agent.state)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        told = f"agent {agent.process.pid} has ended; what it ran goes on at its next start\n"
        assert done.stderr == told
        assert agent.process.wait(30) == 143
        assert not agent.socket.exists()
        other.connect().close()
        none = stop(agent.state)
        assert none.returncode == 75
        assert none.stderr == (
            f"gshare: no agent runs on {agent.state}; --state-dir names another one's directory\n"
        )
        agent.start()
        client = agent.connect()
        assert client.wait("a", lambda status: status.state == "running").step >= 2
        client.ask(protocol.StopAttempts, attempts=[("a", 1)])
        client.wait_end("a")


def test_an_agent_of_the_unit_is_stopped_by_its_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal alone would have the unit start it again. Negative control: another pid is not the unit's."""
    said = tmp_path / "said"
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(f'#!/bin/sh\necho "$2" >> "{said}"\n[ "$2" = show ] && echo 4711\nexit 0\n')
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(systemctl.parent), prepend=os.pathsep)
    assert not stop_unit_of(4712)
    assert said.read_text().split() == ["show"]
    assert stop_unit_of(4711)
    assert said.read_text().split() == ["show", "show", "stop"]


def test_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    """And costs nothing: the trainer checkpoints by itself, the next agent goes on."""
    with running_agent(tmp_path / "node") as agent:
        assert agent.process is not None
        client = agent.connect()
        client.start("a", "steps=40,sleep=0.2,files=1")
        client.wait("a", lambda status: status.step >= 2)
        for _ in range(2):
            agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(30) == 143
        agent.start()
        client = agent.connect()
        resumed = client.wait("a", lambda status: status.state == "running")
        assert resumed.step >= 2
        client.ask(protocol.StopAttempts, attempts=[("a", 1)])
        client.wait_end("a")


def test_the_agent_is_light() -> None:
    """Negative control: what it must not load is there to be loaded."""
    names = [f"gshare.agent.node.{path.stem}" for path in sorted((ROOT / "agent" / "node").glob("[a-z]*.py"))]
    assert "gshare.agent.node.daemon" in names
    heavy = ("torch", "transformers", "tokenizers", "numpy", "asyncssh", "rich", "pyarrow")
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        f"print(sorted(set({heavy!r}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
    noisy = subprocess.run(
        [sys.executable, "-c", code, *names, "asyncssh"],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert noisy.stdout == "['asyncssh']\n"
