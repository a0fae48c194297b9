"""`gshare coordinator`: places jobs on the nodes of a cluster and brings their adapters home.

gshare coordinator [--cluster FILE] --expect-workers 3 [--timeout 600]
gshare coordinator stop              ends the one that runs; jobs run on
gshare coordinator connect           stdin and stdout are its socket: what a node behind NAT calls
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from gshare.agent.errors import EXIT_OK, GshareError, RetryLater, UsageError
from gshare.cli.cluster_flags import options_of, state_dir_of

app = App(name="coordinator", help="Run the coordinator of a cluster in the foreground.")

#: It has nothing to finish: jobs run on without it.
STOP_SECONDS = 30.0


@app.default
def coordinator(
    *,
    cluster: Path | None = None,
    expect_workers: int = 0,
    timeout: str = "600",
    state_dir: Path | None = None,
    accept_new: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Run the coordinator until Ctrl-C; jobs run on without it, and its next start goes on with them.

    Parameters
    ----------
    cluster
        The file that names the nodes; by default ~/.config/gshare/cluster.toml.
    expect_workers
        Place nothing before so many nodes are ready; exit with 75 when they are not within --timeout.
    timeout
        How long to wait for them: 600 (seconds), 10m, 1h.
    state_dir
        Where jobs are remembered; by default $XDG_STATE_HOME/gshare/coordinator.
    accept_new
        Trust host keys that are seen for the first time. Changed ones are always refused.
    """
    from gshare.agent.vram.budget import parse_duration
    from gshare.coordinator.main import run_coordinator

    if expect_workers < 0:
        raise UsageError(f"--expect-workers: must be 0 or more, not {expect_workers}")
    options = options_of(
        cluster,
        state_dir,
        accept_new=accept_new,
        expect_workers=expect_workers,
        expect_seconds=parse_duration(timeout, what="--timeout"),
        ask=sys.stdin.isatty() and sys.stderr.isatty(),
    )
    return run_coordinator(options)


@app.command
def stop(*, state_dir: Path | None = None) -> int:
    """End the coordinator that runs. Jobs run on; `gshare submit` or `gshare coordinator` go on with them.

    Parameters
    ----------
    state_dir
        The coordinator's; by default $XDG_STATE_HOME/gshare/coordinator.
    """
    from gshare.agent.service.peer import peer_of
    from gshare.coordinator.api_client import NoCoordinator, connect_coordinator
    from gshare.coordinator.main import STOP_SIGNAL

    directory = state_dir_of(state_dir)
    try:
        with connect_coordinator(directory) as sock:
            # By the kernel's word: a coordinator of any version, or full of clients.
            pid = peer_of(sock).pid
    except NoCoordinator:
        raise RetryLater(f"no coordinator runs on {directory}") from None
    if pid <= 0:
        raise GshareError(f"the coordinator on {directory} runs in another container; stop it there")
    with contextlib.suppress(ProcessLookupError):  # it was leaving already
        os.kill(pid, STOP_SIGNAL)
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline:
        try:
            connect_coordinator(directory).close()
        except NoCoordinator:
            print(f"coordinator {pid} has ended; jobs run on", file=sys.stderr)
            return EXIT_OK
        time.sleep(0.05)
    raise GshareError(f"coordinator {pid} has not ended within {STOP_SECONDS:.0f} s")


@app.command
def connect(*, state_dir: Path | None = None) -> int:
    """Join stdin and stdout to the coordinator's socket; 75 when none runs.

    Parameters
    ----------
    state_dir
        The coordinator's; by default $XDG_STATE_HOME/gshare/coordinator.
    """
    from gshare.agent.node.bridge import connect_bridge
    from gshare.coordinator.api_client import SOCKET, connect_coordinator

    directory = state_dir_of(state_dir)
    connect_coordinator(directory).close()  # says what to do when there is none
    return connect_bridge(directory / SOCKET)
