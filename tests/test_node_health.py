"""What a node tells of itself: devices and ledger, disk, problems with what to do; and the service's unit."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from gshare.agent.errors import GshareError
from gshare.agent.node import health as health_module
from gshare.agent.node import install as install_module
from gshare.agent.node import protocol
from gshare.agent.node import server as server_module
from gshare.agent.node.connection import Connection
from gshare.agent.node.health import Devices, Health, lingers
from gshare.agent.node.install import install, quote_unit, unit_text
from gshare.agent.node.state_dir import open_state_dir
from gshare.agent.vram.guard import reserve
from gshare.agent.vram.ledger import Ledger

DEVICES = """
[[device]]
uuid = "GPU-one"
name = "Simulated 24 GB"
total_mb = 24576
used_by_others_mb = 300

[[device]]
uuid = "GPU-lost"
total_mb = 24576
state = "lost"

[[device]]
uuid = "GPU-orin"
memory_type = "unified"
total_mb = 65536
"""


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "devices.toml").write_text(DEVICES)
    monkeypatch.setenv("GSHARE_DEVICES", str(tmp_path / "devices.toml"))
    monkeypatch.setenv("GSHARE_LEDGER_DIR", str(tmp_path / "ledger"))


def describe(tmp_path: Path, **options: Any) -> Any:
    health = Health(tmp_path)
    return health.describe(7, health.devices(), attempts_running=2, **options)


@pytest.mark.usefixtures("devices")
def test_devices_and_reservations_are_those_of_the_ledger(tmp_path: Path) -> None:
    one = [device for device in Ledger().list_devices() if device.uuid == "GPU-one"]
    with reserve(1024, devices=one, task="by a test", timeout_s=0):
        info = describe(tmp_path)
    one, lost, orin = info.gpus
    assert (one.uuid, one.total_mb, one.reserved_mb, one.outside_mb) == ("GPU-one", 24576, 1024, 300)
    assert one.free_mb == int(24576 * 0.85) - 300 - 1024
    assert (one.load_percent, one.temperature_c, one.power_w) == (None, None, None)
    # A card that does not answer is unknown, never 0.
    assert (lost.total_mb, lost.used_mb, lost.free_mb) == (None, None, None)
    assert lost.problem in info.problems
    assert orin.memory_type == "unified"
    (row,) = info.reservations
    assert (row.budget_mb, row.task, row.state, row.gpu_uuid) == (1024, "by a test", "held", "GPU-one")
    after = describe(tmp_path)
    assert (after.gpus[0].reserved_mb, after.reservations) == (0, [])
    assert (info.reply_to, info.attempts_running) == (7, 2)
    assert info.ram_mb > 0
    assert info.cpu_cores >= 1


def test_a_node_without_a_gpu_has_none_and_that_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSHARE_LEDGER_DIR", str(tmp_path / "ledger"))
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU here")
    info = describe(tmp_path)
    assert info.gpus == []
    assert not [problem for problem in info.problems if "driver" in problem]


@pytest.mark.usefixtures("devices")
def test_problems_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "free_bytes", lambda path: 100 << 20)
    monkeypatch.setattr(health_module, "lingers", lambda: False)
    info = describe(tmp_path, problems=["first of all"])
    assert info.problems[0] == "first of all"
    assert info.disk_free_mb == 100
    assert info.linger is False
    text = "\n".join(info.problems)
    assert "has room for 100 MiB; free some" in text
    assert "loginctl enable-linger" in text


@pytest.mark.usefixtures("devices")
def test_a_model_of_the_node_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    missing, there = str(tmp_path / "missing"), str(tmp_path)
    info = describe(
        tmp_path, models=[missing, there, "HuggingFaceTB/SmolLM2-135M", "~/nowhere\0", "/" + "x" * 5000]
    )
    told = [problem.split(",")[0] for problem in info.problems if "in `models`" in problem]
    assert told[0] == missing
    assert len(told) == 3
    assert describe(tmp_path, models=[there]).problems == describe(tmp_path).problems


def test_a_ledger_in_trouble_is_a_problem_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GSHARE_LEDGER_DIR", str(tmp_path / "file" / "below"))
    info = describe(tmp_path)
    assert info.gpus == []
    assert any(problem.startswith("the ledger cannot be read: ") for problem in info.problems)


def test_a_driver_that_hangs_is_told_and_holds_up_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not asked again while it hangs: one thread waits, however often the coordinator asks."""
    answer, calls = threading.Event(), []

    def hang(self: Health) -> Devices:
        calls.append(1)
        answer.wait(30)
        return Devices(driver="back")

    monkeypatch.setattr(Health, "devices", hang)
    monkeypatch.setattr(server_module, "DRIVER_SECONDS", 0.1)

    async def work() -> list[Any]:
        server = server_module.NodeServer(open_state_dir(tmp_path), drain=lambda: None)
        client, request = cast(Connection, None), protocol.DescribeNode(id=1)
        hung = [await server._describe(client, request) for _ in range(3)]
        held = await asyncio.to_thread(server.blobs.held, "0" * 64)
        assert held == (0, False)
        answer.set()
        monkeypatch.setattr(server_module, "DRIVER_SECONDS", 30.0)  # its thread may not get its turn at once
        return [*hung, await server._describe(client, request)]

    *hung, back = asyncio.run(work())
    for info in hung:
        assert any("does not answer" in problem for problem in info.problems)
    assert back.driver == "back"
    assert not any("does not answer" in problem for problem in back.problems)
    assert len(calls) == 1


def test_linger_is_unknown_without_systemd(tmp_path: Path) -> None:
    if not Path("/run/systemd/system").is_dir():
        assert lingers(tmp_path) is None


# ---------------------------------------------------------------------- the service


@pytest.mark.parametrize("word", ["plain", "two words", 'a"b', "a\\b", "100%", "$HOME", "a'b"])
def test_a_word_of_a_unit_file_stays_one_word(word: str) -> None:
    """By the rules of systemd.syntax(7): double quotes as in C, then `%%` and `$$` for `%` and `$`."""
    (read,) = shlex.split(quote_unit(word))
    assert read.replace("%%", "%").replace("$$", "$") == word


def test_the_unit(tmp_path: Path) -> None:
    text = unit_text(["agent", "--state-dir", "/s d"], {"PATH": "/bin", "SECRET": "x"})
    assert 'agent" "--state-dir" "/s d"\n' in text
    assert "Restart=always\n" in text
    assert "KillMode=process\n" in text
    assert 'Environment="PATH=/bin"\n' in text
    assert "SECRET" not in text


def fake_systemctl(monkeypatch: pytest.MonkeyPatch, answers: dict[str, tuple[int, str]]) -> list[list[str]]:
    """`systemctl` as the test wants it; the calls that were made."""
    calls: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        code, out = answers.get(command[2], (0, ""))
        return subprocess.CompletedProcess(command, code, out, "it says why")

    monkeypatch.setattr(install_module.subprocess, "run", run)
    return calls


def test_install_writes_enables_and_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(install_module, "lingers", lambda: False)
    calls = fake_systemctl(monkeypatch, {"is-system-running": (1, "degraded\n")})
    lines = install(["agent", "--state-dir", "/s"])
    unit = tmp_path / "systemd" / "user" / "gshare-agent.service"
    assert '"--state-dir" "/s"' in unit.read_text()
    assert [call[2] for call in calls] == ["is-system-running", "daemon-reload", "enable", "restart"]
    assert "enable-linger" in lines[1]


@pytest.mark.parametrize("answer", ["offline\n", ""])
def test_without_a_user_manager_it_says_how_to_start_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    fake_systemctl(monkeypatch, {"is-system-running": (1, answer)})
    with pytest.raises(GshareError, match=r"setsid nohup .* -m gshare\.cli\.main agent"):
        install(["agent"])
    assert not list(tmp_path.iterdir())


def test_a_failing_systemctl_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    fake_systemctl(monkeypatch, {"is-system-running": (0, "running\n"), "enable": (1, "")})
    with pytest.raises(GshareError, match=r"enable gshare-agent\.service failed: it says why"):
        install(["agent"])
    with pytest.raises(GshareError, match="cannot stand in a unit file"):
        install(["agent", "--state-dir", "a\nb"])


def test_two_who_ask_how_the_node_is_at_once_both_hear_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one waits for the look of the first; the driver is asked once."""
    answer, calls = threading.Event(), []

    def look(self: Health) -> Devices:
        calls.append(1)
        answer.wait(30)
        return Devices(driver=f"look {len(calls)}")

    monkeypatch.setattr(Health, "devices", look)

    async def work() -> list[Any]:
        server = server_module.NodeServer(open_state_dir(tmp_path), drain=lambda: None)
        client, request = cast(Connection, None), protocol.DescribeNode(id=1)
        asked = [asyncio.create_task(server._describe(client, request)) for _ in range(3)]
        await asyncio.sleep(0.05)
        answer.set()
        return [*await asyncio.gather(*asked), await server._describe(client, request)]

    infos = asyncio.run(work())
    assert [info.driver for info in infos] == ["look 1", "look 1", "look 1", "look 2"]
