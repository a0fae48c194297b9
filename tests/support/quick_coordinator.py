"""`gshare coordinator` with less patience: a node is lost after seconds, and a test need not wait an hour.

    python quick_coordinator.py LOST_AFTER --cluster FILE --state-dir DIR [--accept-new]

While there is a file HOLDING in DIR, every file stands still after ten MiB: what a test does in the middle of
one is in the middle, however quick the line is.

Everything else is the real command in a process of its own. LOST_AFTER: seconds unreachable after which a
node is lost. A busy machine may take two seconds to answer, so nothing here is shorter than four.
"""

from __future__ import annotations

import asyncio
import functools
import random
import sys
from pathlib import Path
from typing import Any

from gshare.coordinator import connecting, file_transfer, remote, service, session, transfers
from gshare.coordinator.cluster import Cluster
from gshare.coordinator.reconnect import Backoff

HEARTBEAT_SECONDS = 1.0
BEAT_SECONDS = 4.0
CONNECT_SECONDS = 4.0
HOLDING = "holding"
CHUNKS = 40  # of 256 KiB


def new_session(*arguments: Any, **fields: Any) -> session.NodeSession:
    """A node's session that tries again within half a second."""
    backoff = Backoff(random.Random(1), first=0.2, most=0.5)
    return session.NodeSession(*arguments, backoff=backoff, **fields)


def hurry(lost_after: float) -> None:
    """Before the command is run, in its process."""
    limits = transfers.Limits(lost_after_s=lost_after, fault_delay_s=0.5, publish_delay_s=1.0)
    service.Cluster = functools.partial(Cluster, limits=limits)  # pyright: ignore[reportAttributeAccessIssue]
    service.NodeSession = new_session  # pyright: ignore[reportAttributeAccessIssue]
    defaults = service.Coordinator.__init__.__kwdefaults__
    assert defaults is not None
    defaults["heartbeat_seconds"] = HEARTBEAT_SECONDS
    session.BEAT_SECONDS = BEAT_SECONDS
    connecting.reach = functools.partial(remote.reach, timeout=CONNECT_SECONDS)


def hold(holding: Path) -> None:
    """Before the command is run, in its process."""
    real, taken = file_transfer._chunk_reply, 0

    async def chunk_reply(*arguments: Any) -> Any:
        nonlocal taken
        while holding.exists() and taken >= CHUNKS:
            await asyncio.sleep(0.02)
        taken = taken + 1 if holding.exists() else 0
        return await real(*arguments)

    file_transfer._chunk_reply = chunk_reply


if __name__ == "__main__":
    hurry(float(sys.argv[1]))
    hold(Path(sys.argv[sys.argv.index("--state-dir") + 1]) / HOLDING)
    from gshare.cli.main import main

    sys.exit(main(["coordinator", *sys.argv[2:]]))
