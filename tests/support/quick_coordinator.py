"""`gshare coordinator` with less patience: a node is lost after seconds, so that a test need not wait an hour.

    python quick_coordinator.py --cluster FILE --state-dir DIR [--accept-new]

Everything else is the real command in a process of its own. Patience is in seconds; a busy machine may take
two of them to answer, so nothing here is shorter than four.
"""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

from gshare.coordinator import connecting, remote, service, session, transfers
from gshare.coordinator.cluster import Cluster
from gshare.coordinator.reconnect import Backoff

LIMITS = transfers.Limits(lost_after_s=4.0, fault_delay_s=0.5, publish_delay_s=1.0, settle_s=20.0)
HEARTBEAT_SECONDS = 1.0
BEAT_SECONDS = 4.0
CONNECT_SECONDS = 4.0


def new_session(*arguments: Any, **fields: Any) -> session.NodeSession:
    """A node's session that tries again within half a second."""
    backoff = Backoff(random.Random(1), first=0.2, most=0.5)
    return session.NodeSession(*arguments, backoff=backoff, **fields)


def hurry() -> None:
    """Before the command is run, in its process."""
    service.Cluster = functools.partial(Cluster, limits=LIMITS)  # pyright: ignore[reportAttributeAccessIssue]
    service.NodeSession = new_session  # pyright: ignore[reportAttributeAccessIssue]
    defaults = service.Coordinator.__init__.__kwdefaults__
    assert defaults is not None
    defaults["heartbeat_seconds"] = HEARTBEAT_SECONDS
    session.BEAT_SECONDS = BEAT_SECONDS
    connecting.reach = functools.partial(remote.reach, timeout=CONNECT_SECONDS)


if __name__ == "__main__":
    hurry()
    from gshare.cli.main import main

    sys.exit(main(["coordinator", *sys.argv[1:]]))
