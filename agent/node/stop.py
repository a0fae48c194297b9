"""`gshare agent stop`: ends the agent of a state directory and waits until it has given its lock back."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from gshare.agent.errors import GshareError, RetryLater
from gshare.agent.node.bridge import connect_agent
from gshare.agent.node.daemon import DRAIN_SECONDS, LEAVE_SECONDS
from gshare.agent.node.install import stop_unit_of
from gshare.agent.service.peer import peer_of
from gshare.agent.service.registry import is_held

#: It checkpoints what runs, then hangs up; ten seconds more for a loaded machine.
STOP_SECONDS = DRAIN_SECONDS + LEAVE_SECONDS + 10.0
_POLL = 0.05


def stop_agent(state_dir: Path) -> int:
    """Drains and ends the agent; its pid. RetryLater: none runs there; GshareError: it does not end."""
    try:
        sock = connect_agent(state_dir / "socket")
    except RetryLater:
        raise RetryLater(f"no agent runs on {state_dir}; --state-dir names another one's directory") from None
    with sock:
        # Of the process that listens, by the kernel's word: an agent of any version, or full of clients.
        pid = peer_of(sock).pid
    if pid <= 0:
        raise GshareError(f"the agent on {state_dir} runs in another container; stop it there")
    # Its unit would start it again at once.
    if not stop_unit_of(pid):
        with contextlib.suppress(ProcessLookupError):  # it was leaving already
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while is_held(state_dir / "lock") and _lives(pid):
        if time.monotonic() > deadline:
            raise GshareError(f"agent {pid} has not ended within {STOP_SECONDS:.0f} s")
        time.sleep(_POLL)
    return pid


def _lives(pid: int) -> bool:
    """Whether there is such a process. A lock that is held without it is a newer agent's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
