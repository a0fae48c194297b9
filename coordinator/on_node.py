"""What deploy runs on a node: one program for one errand, with nothing but Python's standard library.

It travels on the stdin of `PYTHON -`, after `on_node_state.py`, its errand as the last line
(`errand("…JSON…")`), so no word of the user's is ever part of a command line. The answer is one line on
stdout after `MARK`: what a login shell prints before is passed over. Never imported on the node as part of
gshare, which is not there yet.

    look      what is there: Python, machine, disk, torch, installations, a running agent
    put       a file of an installation, checked by hash and placed whole
    install   a virtual environment with the wheel in it
    start     the agent: by systemd --user where there is one, else detached
    stop      the agent that holds the socket (idle ones only: the caller asked it)
    clear     installations that nothing uses

Under the state directory:

    <state>/install/lock               one errand that changes something at a time
    <state>/install/tries.json         when each version was tried, and what came of it
    <state>/install/<stamp>/           the wheel, venv/, and complete.json, which is written last
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from gshare.coordinator.on_node_state import (
    Failed,
    check_ours,
    listener,
    locked,
    make_private,
    note_try,
    read_json,
    write_whole,
)

MARK = "gshare-answer:"
STAMP_VARIABLE = "GSHARE_DEPLOYED"
#: An agent's stamp is its installation's, this, and a hash of its environment.
STAMP_BORDER = "~"
UNIT = "gshare-agent.service"
START_SECONDS = 30.0
STOP_SECONDS = 60.0  # an idle agent needs none of it
IMPORT_SECONDS = 180.0  # torch from a cold disk
WORDS = 2000  # characters of a program's last words


def errand(request: str) -> None:
    """Does what `request` (JSON with "op") asks and prints the answer."""
    wanted: dict[str, Any] = json.loads(request)
    os.umask(0o077)
    try:
        check_ours(place(wanted["state_dir"]))
        answer = ERRANDS[wanted.pop("op")](**wanted)
    except Failed as failed:
        answer = {"failed": [failed.kind, failed.text]}
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        where = error.filename or "its state directory"
        answer = {"failed": ["disk_full" if full else "install", f"{where}: {error.strerror or error}"]}
    print(f"\n{MARK}{json.dumps(answer)}", flush=True)


# --- look


def look(state_dir: str | None, stamp: str, want_torch: bool) -> dict[str, Any]:
    """What is there. `state_dir` None: the XDG one. torch is imported only when `stamp` is not installed."""
    state = place(state_dir)
    complete = finished(state / "install" / stamp)
    torch, torch_fault = "", ""
    if want_torch and complete is None:
        torch, torch_fault = import_torch([sys.executable])
    disk = os.statvfs(nearest(state))
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "machine": platform.machine(),
        "state_dir": str(state),
        "time": time.time(),
        "disk_free_mb": disk.f_bavail * disk.f_frsize >> 20,
        "disk_total_mb": disk.f_blocks * disk.f_frsize >> 20,
        "torch": torch,
        "torch_fault": torch_fault,
        "complete": complete,
        "tries": read_json(state / "install" / "tries.json"),
        "running": running(state),
        "systemd": has_systemd(state),
    }


def place(state_dir: str | None) -> Path:
    """The agent's state directory, absolute: what `gshare agent` itself takes when none is named."""
    if state_dir:
        return Path(os.path.abspath(os.path.expanduser(state_dir)))
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "gshare" / "agent"


def nearest(path: Path) -> Path:
    """The part of `path` that exists: its disk is the one that counts."""
    while not path.exists():
        path = path.parent
    return path


def finished(home: Path) -> dict[str, Any] | None:
    """complete.json, if the interpreter that it names still runs (the one below it may be gone)."""
    complete = read_json(home / "complete.json")
    return complete if os.path.exists(str(complete.get("python", ""))) and complete else None


def import_torch(python: list[str]) -> tuple[str, str]:
    """Version of that interpreter's torch, and why it cannot be imported ("" when it is simply missing)."""
    program = (
        "import importlib.util, sys\n"
        "sys.path = [p for p in sys.path if p]\n"
        "if importlib.util.find_spec('torch'):\n"
        "    import torch\n"
        "    print('torch', torch.__version__)\n"
    )
    try:
        done = run([*python, "-c", program], IMPORT_SECONDS)
    except Failed as failed:
        return "", failed.text
    for line in done.stdout.splitlines():
        if line.startswith("torch "):
            return line.split()[1], ""
    return "", last_words(done.stderr) if done.returncode else ""


def running(state: Path) -> dict[str, Any] | None:
    """The agent that answers at the socket: its pid, the stamp it was started with ("": by hand), and the
    interpreter that runs it ("": not known)."""
    pid = listener(state)
    if pid is None:
        return None
    stamp = ""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(f"{STAMP_VARIABLE}=".encode()):
                stamp = entry.partition(b"=")[2].decode(errors="replace")
    python = ""
    with contextlib.suppress(OSError):
        # As it was called: in a virtual environment the link there, not what it leads to.
        first = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode(errors="replace")
        python = first if first.startswith("/") else ""
    return {"pid": pid, "stamp": stamp, "python": python}


def has_systemd(state: Path) -> bool:
    """Whether this user's own systemd answers, and its one unit is for this state directory.

    It does not in containers and for logins without a session. Two nodes of one user on one host: the second
    agent is started detached.
    """
    if not shutil.which("systemctl") or not os.environ.get("XDG_RUNTIME_DIR"):
        return False
    with contextlib.suppress(FileNotFoundError):
        if unit_quoted(str(state)) not in (unit_folder() / UNIT).read_text(errors="replace"):
            return False
    try:
        return run(["systemctl", "--user", "show-environment"], 10).returncode == 0
    except Failed:
        return False


def unit_folder() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "systemd" / "user"


# --- put, install


def put(state_dir: str, stamp: str, name: str, sha256: str, data: str) -> dict[str, Any]:
    """`data` (base64) as <state>/install/<stamp>/<name>."""
    content = base64.b64decode(data)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise Failed("lost", f"{name} arrived damaged; try again")
    target = Path(state_dir) / "install" / stamp / name
    make_private(Path(state_dir))
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, content)
    return {}


def install(
    state_dir: str,
    stamp: str,
    wheel: str,
    extra: str,
    inherit: bool,
    torch: str,
    environment: dict[str, str],
    timeout: float,
) -> dict[str, Any]:
    """A virtual environment with the wheel and what it needs.

    `inherit`: it sees this interpreter's packages (torch `torch` among them, which is left as it is), and
    only what is missing is added, in its own folder: the user's environment is never changed.
    """
    state = Path(state_dir)
    with locked(state):
        home = state / "install" / stamp
        complete = finished(home)
        if complete is not None:
            return {"complete": complete}  # somebody else has just done it
        note_try(state, stamp, "it was interrupted", begun=True)
        try:
            complete = build(home, home / wheel, extra, inherit, torch, environment, timeout)
        except Failed as failed:
            note_try(state, stamp, failed.text)
            raise
        write_whole(home / "complete.json", json.dumps(complete).encode())
        note_try(state, stamp, "")
        return {"complete": complete}


def build(
    home: Path,
    wheel: Path,
    extra: str,
    inherit: bool,
    torch: str,
    environment: dict[str, str],
    timeout: float,
) -> dict[str, Any]:
    """The steps of `install`; leaves `home` without complete.json when one fails."""
    venv = home / "venv"
    shutil.rmtree(venv, ignore_errors=True)
    python = str(venv / "bin" / "python")
    os.environ.update(environment)
    made = run([sys.executable, "-m", "venv", "--without-pip", str(venv)], 120)
    if made.returncode:
        hint = "install its venv module (Debian: python3-venv) or name another `python`"
        raise Failed("no_python", f"{sys.executable} makes no virtual environment: {words_of(made)}; {hint}")
    packages = Path(
        run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], 60).stdout.strip()
    )
    if inherit:
        (packages / "gshare-inherited.pth").write_text("".join(f"{path}\n" for path in package_paths()))
    # A pure wheel is a ZIP of site-packages (PEP 427). Unpacked first, it is there when pip asks what is
    # missing: pip never looks for a package of this name in an index.
    shutil.unpack_archive(str(wheel), str(packages), "zip")
    needed = f"gshare[{extra}]" if extra else "gshare"
    command = [*find_pip(python), "install", "--no-input", "--disable-pip-version-check"]
    if torch:
        constraints = home / "constraints.txt"
        constraints.write_text(f"torch=={torch}\n")
        command += ["-c", str(constraints)]
    done = run([*command, f"{needed} @ {wheel.as_uri()}"], timeout)
    if done.returncode:
        full = "No space left" in done.stderr + done.stdout
        raise Failed("disk_full" if full else "install", f"pip failed there: {words_of(done)}")
    check = run([python, "-I", "-c", "import gshare.cli.main, gshare.coordinator.config"], 120)
    if check.returncode:
        raise Failed("install", f"what was installed does not start: {words_of(check)}")
    found, fault = import_torch([python, "-I"])
    if fault:
        raise Failed("no_torch", f"torch cannot be imported there: {fault}")
    return {"python": python, "torch": found, "from": sys.executable, "inherit": inherit, "time": time.time()}


def find_pip(python: str) -> list[str]:
    """A pip that installs into that environment: an inherited one, its maker's, else Python's own copy."""
    if run([python, "-m", "pip", "--version"], 60).returncode == 0:
        return [python, "-m", "pip"]
    if run([sys.executable, "-m", "pip", "--python", python, "--version"], 60).returncode == 0:  # 22.3 on
        return [sys.executable, "-m", "pip", "--python", python]
    if run([python, "-m", "ensurepip", "--default-pip"], 120).returncode == 0:
        return [python, "-m", "pip"]
    hint = "install its venv module (Debian: python3-venv), or pip"
    raise Failed("no_python", f"{sys.executable} has neither pip nor ensurepip; {hint}")


def package_paths() -> list[str]:
    """Where this interpreter's packages are: its path without the standard library and the current folder."""
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    own |= {os.path.join(path, "lib-dynload") for path in own}
    return [path for path in sys.path if os.path.isdir(path) and path not in own and "\n" not in path]


# --- start, stop, clear


def start(
    state_dir: str, stamp: str, command: list[str], environment: dict[str, str], systemd: bool
) -> dict[str, Any]:
    """The agent, answering at its socket. `command` runs gshare."""
    state = Path(state_dir)
    make_private(state)
    with locked(state):
        if found := running(state):
            return {"running": found}
        note_try(state, f"start {stamp}", "")
        environment = {**environment, STAMP_VARIABLE: stamp}
        log = state / "agent.log"
        process = None
        if systemd:
            start_unit(state, command, environment)
        else:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [*command, "agent", "--state-dir", str(state)],
                    env={**os.environ, **environment},
                    cwd=str(state),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # outlives the connection
                )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if found := running(state):
                return {"running": found}
            if process is not None and process.poll() is not None:
                said = last_words(log.read_bytes()[-WORDS:].decode(errors="replace"))
                raise Failed("no_agent", f"the agent ended with code {process.returncode}: {said} ({log})")
            time.sleep(0.05)
        raise Failed("no_agent", f"the agent does not answer after {START_SECONDS:g} s; see {log} there")


def start_unit(state: Path, command: list[str], environment: dict[str, str]) -> None:
    """`gshare agent --install` writes and (re)starts the unit; its environment is a drop-in of ours."""
    # Not the home, which the unit says: `-m` looks there first, and it may hold a clone of gshare.
    environment = {**environment, "PYTHONSAFEPATH": "1"}
    lines = "".join(f"Environment={unit_quoted(f'{name}={text}')}\n" for name, text in environment.items())
    drop_in = unit_folder() / f"{UNIT}.d" / "deployed.conf"
    drop_in.parent.mkdir(parents=True, exist_ok=True)
    folder = str(state).replace("%", "%%")
    write_whole(drop_in, f"[Service]\nWorkingDirectory={folder}\n{lines}".encode())
    done = run([*command, "agent", "--install", "--state-dir", str(state)], START_SECONDS)
    if done.returncode:
        raise Failed("no_agent", f"gshare agent --install failed there: {words_of(done)}")


def unit_quoted(text: str) -> str:
    """One word of a unit file (systemd.syntax(7)): quoted, with C escapes; % is doubled (specifiers)."""
    for plain, escaped in (
        ("\\", "\\\\"),
        ('"', '\\"'),
        ("\n", "\\n"),
        ("\t", "\\t"),
        ("\r", "\\r"),
        ("%", "%%"),
    ):
        text = text.replace(plain, escaped)
    return f'"{text}"'


def stop(state_dir: str, pid: int, systemd: bool) -> dict[str, Any]:
    """Ends the agent with that pid, if it still is the one at the socket; it drains first."""
    state = Path(state_dir)
    with locked(state):
        found = running(state)
        if found is None or found["pid"] != pid:
            return {}
        # A unit would be restarted at once with its old command: stopped by its manager instead.
        by_unit = systemd and run(["systemctl", "--user", "stop", UNIT], STOP_SECONDS).returncode == 0
        if not by_unit or running(state):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while running(state):
            if time.monotonic() > deadline:
                raise Failed("version", f"the agent there (pid {pid}) does not end; stop it by hand")
            time.sleep(0.05)
        return {}


def clear(state_dir: str, keep: list[str]) -> dict[str, Any]:
    """Removes the installations that are not in `keep`, and not what the running agent was started from."""
    state = Path(state_dir)
    with locked(state):
        found = running(state)
        kept = {*keep, found["stamp"].partition(STAMP_BORDER)[0] if found else ""}
        gone = [entry for entry in (state / "install").iterdir() if entry.is_dir() and entry.name not in kept]
        for entry in gone:
            shutil.rmtree(entry, ignore_errors=True)
        return {"gone": [entry.name for entry in gone]}


# --- small things


def run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            cwd="/",  # `-m` looks in the current folder first, and the home may hold a clone
        )
    except subprocess.TimeoutExpired:
        raise Failed("install", f"{' '.join(command[:4])} did not end within {timeout:g} s") from None


def words_of(done: subprocess.CompletedProcess[str]) -> str:
    return last_words(done.stderr.strip() or done.stdout)


def last_words(text: str) -> str:
    """The last three lines that say something, as one."""
    return " / ".join([line.strip() for line in text.splitlines() if line.strip()][-3:])[-WORDS:]


ERRANDS = {"look": look, "put": put, "install": install, "start": start, "stop": stop, "clear": clear}
