"""The coordinator's process: state directory, signals, host keys, one line a message on stderr.

SIGINT, SIGTERM    leave at once, exit 130 or 143: jobs run on, the next start goes on with them
SIGUSR1            the same, exit 0: `gshare coordinator stop` asked for it
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gshare.agent.errors import EXIT_OK, EXIT_SIGINT, EXIT_SIGTERM, GshareError, RetryLater, UsageError
from gshare.agent.jobs.names import plain
from gshare.agent.service.registry import private_dir
from gshare.coordinator.api_client import CoordinatorClient, NoCoordinator
from gshare.coordinator.config import ClusterConfig, load_cluster
from gshare.coordinator.expecting import counted

if TYPE_CHECKING:
    from gshare.coordinator.host_keys import HostKeyUnknown
    from gshare.coordinator.store import Store

LOG = "coordinator.log"
#: Of `gshare coordinator stop`: who is asked to end and does has not failed.
STOP_SIGNAL = signal.SIGUSR1
#: Of a detached coordinator: interpreter, imports and the store take about a second; a loaded machine ten.
START_SECONDS = 60.0


@dataclass(frozen=True)
class Options:
    cluster: Path  # absolute
    state_dir: Path  # absolute
    accept_new: bool = False
    expect_workers: int = 0
    expect_seconds: float = 600.0
    ask: bool = False  # whether a person can be asked about an unknown host key


def open_state_dir(path: Path) -> Path:
    """The directory, made 0700. UsageError when it cannot be ours alone."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return private_dir(path)
    except OSError as error:
        raise UsageError(f"--state-dir {path}: {error.strerror}") from None
    except GshareError as error:
        raise UsageError(f"--state-dir {error}") from None


def run_coordinator(options: Options) -> int:
    """Runs one in this process to its end; the exit code. RetryLater: one runs on that directory already."""
    from gshare.coordinator.store import Store

    config = load_cluster(options.cluster)
    store = Store.open(open_state_dir(options.state_dir))
    try:
        # `asyncio.run` waits for threads that still place a result; only then may the lock be given back.
        return asyncio.run(_run(options, config, store))
    finally:
        store.close()


async def _run(options: Options, config: ClusterConfig, store: Store) -> int:
    from gshare.coordinator.connecting import Connector
    from gshare.coordinator.host_keys import HostKeys
    from gshare.coordinator.service import Coordinator

    keys = HostKeys(ask=ask_on_terminal if options.ask else None, accept_new=options.accept_new)
    coordinator = Coordinator(
        store,
        config,
        Connector(keys),
        tell,
        expect_workers=options.expect_workers,
        expect_seconds=options.expect_seconds,
    )
    stop, code = asyncio.Event(), EXIT_OK

    def leave(exit_code: int) -> None:
        nonlocal code
        code = exit_code
        stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, leave, EXIT_SIGINT)
    loop.add_signal_handler(signal.SIGTERM, leave, EXIT_SIGTERM)
    loop.add_signal_handler(STOP_SIGNAL, leave, EXIT_OK)
    tell("info", f"coordinator {os.getpid()} of {counted(len(config.nodes))}, state in {options.state_dir}")
    expected, named = options.expect_workers, len(config.nodes)
    if expected > named:  # others may dial in: no reason to refuse
        tell(
            "warning",
            f"--expect-workers {expected}, but {options.cluster} names {counted(named)}: waiting "
            f"{options.expect_seconds:.0f} s for {expected - named} more to dial in (`gshare agent "
            "--coordinator USER@HOST` there); add them to the file if they are reached from here, or expect "
            "fewer",
        )
    await coordinator.run(stop)
    tell("info", "the coordinator leaves; jobs run on, and the next start goes on with them")
    return code


def tell(level: str, text: str) -> None:
    """One line on stderr, whoever wrote the text. A log that cannot be written is no reason to stop."""
    mark = "" if level == "info" else f"{level}: "
    lines = [plain(line) for line in text.splitlines()] or [""]
    with contextlib.suppress(OSError, ValueError):
        print(f"{time.strftime('%H:%M:%S')} {mark}" + "\n  ".join(lines), file=sys.stderr, flush=True)


async def ask_on_terminal(unknown: HostKeyUnknown) -> bool:
    """Shows an unknown host's fingerprint; True for "yes", typed in full as ssh wants it."""
    return await asyncio.to_thread(_ask, unknown)


def _ask(unknown: HostKeyUnknown) -> bool:
    print(
        f"{unknown.hop}: the host {plain(unknown.host)} port {unknown.port} is not known.\n"
        f"Its {unknown.key_type} key is {unknown.fingerprint}.\n"
        "Compare it with `ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub` there.",
        file=sys.stderr,
    )
    with contextlib.suppress(EOFError, OSError):
        print("Trust it from now on (yes/no)? ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() == "yes"
    return False


def connect_or_start(options: Options, client: str) -> tuple[CoordinatorClient, bool]:
    """A client of the coordinator of that state directory, and whether it was started for it.

    UsageError: one runs there for another cluster file. GshareError: it did not start; its log says why.
    """
    try:
        return checked_client(options, client), False
    except NoCoordinator:
        pass
    load_cluster(options.cluster)  # what is wrong with it shows here, not in a log
    process, log = start_detached(options)
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(NoCoordinator):
            return checked_client(options, client), True
        code = process.poll()
        if code is not None:
            with contextlib.suppress(NoCoordinator):  # another was quicker to start one
                return checked_client(options, client), False
            last = _last_line(log)
            raise GshareError(f"the coordinator ended at once (exit code {code}): {last or f'see {log}'}")
        if time.monotonic() > deadline:
            raise GshareError(f"the coordinator did not answer within {START_SECONDS:.0f} s; see {log}")
        time.sleep(0.05)


def checked_client(options: Options, client: str) -> CoordinatorClient:
    """A client of the running coordinator, which has to be of that cluster file."""
    found = CoordinatorClient(options.state_dir, client)
    theirs = Path(found.welcome.cluster)
    if theirs != options.cluster:
        found.close()
        raise UsageError(
            f"the coordinator on {options.state_dir} is of {theirs}, not of {options.cluster}; "
            "name that file with --cluster, or another --state-dir"
        )
    return found


def start_detached(options: Options) -> tuple[subprocess.Popen[bytes], Path]:
    """A coordinator in a session of its own, and its log."""
    directory = open_state_dir(options.state_dir)
    log = directory / LOG
    command = [
        *(sys.executable, "-m", "gshare.cli.main", "coordinator"),
        *("--cluster", str(options.cluster), "--state-dir", str(directory)),
        *(("--accept-new",) if options.accept_new else ()),
    ]
    try:
        with open(log, "ab") as output:
            process = subprocess.Popen(
                command,
                # In a clone the room `kernels` must not hide the package of that name.
                cwd="/",
                env={**os.environ, "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
    except OSError as error:
        raise RetryLater(f"{log}: {error.strerror}") from None
    return process, log


def _last_line(log: Path) -> str:
    try:
        lines = log.read_bytes()[-4096:].decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((plain(line.strip()) for line in reversed(lines) if line.strip()), "")
