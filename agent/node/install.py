"""`gshare agent --install`: the agent as a systemd user service, which comes back after crash and reboot."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gshare.agent.errors import GshareError
from gshare.agent.node.durable import write_all
from gshare.agent.node.health import lingers, user_name

UNIT = "gshare-agent.service"
_SYSTEMCTL_SECONDS = 30.0
#: Of the environment at installation: without these the service would not find what the user's shell finds.
_KEPT = ("PATH", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "XDG_STATE_HOME", "GSHARE_LEDGER_DIR")


def unit_text(arguments: Sequence[str], environment: dict[str, str]) -> str:
    """The unit. KillMode=process: a trainer is told by its closed connection, and checkpoints."""
    command = " ".join(quote_unit(word) for word in (sys.executable, "-m", "gshare.cli.main", *arguments))
    kept = "\n".join(
        f"Environment={quote_unit(f'{name}={environment[name]}')}" for name in _KEPT if name in environment
    )
    return (
        "[Unit]\n"
        "Description=gshare agent\n"
        "\n"
        "[Service]\n"
        f"ExecStart={command}\n"
        "WorkingDirectory=%h\n"
        "Restart=always\n"
        "RestartSec=2\n"
        "KillMode=process\n"
        "TimeoutStopSec=90\n"
        # 75: another agent has the directory; 143: stopped in order.
        "RestartPreventExitStatus=2 75\n"
        "SuccessExitStatus=143\n"
        f"{kept}\n"
        "\n"
        "[Install]\n"
        "WantedBy=default.target\n"
    )


def quote_unit(word: str) -> str:
    """`word` as one word of a unit file: systemd.syntax(7) and, for `%` and `$`, systemd.service(5)."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def install(arguments: Sequence[str]) -> list[str]:
    """Writes, enables and starts the unit; lines that say what was done and what is left to do.

    GshareError: no systemd that this user can use; says how to start the agent without it.
    """
    for word in arguments:
        if not word.isprintable():
            raise GshareError(f"--install: {word!a} cannot stand in a unit file")
    detached = shlex.join(["setsid", "nohup", sys.executable, "-m", "gshare.cli.main", *arguments])
    without = f"start the agent yourself: {detached} </dev/null >/dev/null 2>&1 &"
    config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    path = Path(config) / "systemd" / "user" / UNIT
    try:
        _systemctl("is-system-running", ok=None)
    except GshareError as error:
        raise GshareError(f"--install: {error}; {without}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, unit_text(arguments, dict(os.environ)).encode())
    finally:
        os.close(fd)
    _systemctl("daemon-reload")
    _systemctl("enable", UNIT)
    _systemctl("restart", UNIT)
    lines = [f"wrote {path} and started it; its log: journalctl --user -u {UNIT}"]
    if lingers() is False:
        lines.append(
            f"it ends when you log out: run `loginctl enable-linger {user_name()}` (or ask an administrator)"
        )
    return lines


def stop_unit_of(pid: int) -> bool:
    """Stops our unit when `pid` is its process: True. False: no systemd, or it did not start that agent."""
    command = ["systemctl", "--user", "show", "--property=MainPID", "--value", UNIT]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SYSTEMCTL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    if done.stdout.strip() != str(pid):
        return False
    _systemctl("stop", "--no-block", UNIT)  # the caller waits for its end
    return True


def _systemctl(*arguments: str, ok: int | None = 0) -> None:
    """`systemctl --user`; `ok` None: any answer of a manager that runs will do."""
    command = ["systemctl", "--user", *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SYSTEMCTL_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise GshareError("there is no systemd here") from None
    except subprocess.TimeoutExpired:
        raise GshareError(f"{shlex.join(command)} does not answer") from None
    if ok is None:
        if done.stdout.strip() in ("offline", "unknown", ""):
            raise GshareError("this user has no systemd manager here")
    elif done.returncode != ok:
        raise GshareError(f"{shlex.join(command)} failed: {done.stderr.strip()[-300:]}")
