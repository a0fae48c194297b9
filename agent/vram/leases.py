"""Ending several holds at once, for who sees a list of them: the dashboard, over whatever way."""

from __future__ import annotations

from collections.abc import Iterable

from gshare.agent.errors import GshareError
from gshare.agent.vram.ledger import Ledger


def end_leases(ids: Iterable[str], ledger: Ledger | None = None) -> dict[str, str]:
    """Ends the holds (`gshare gpu hold`) of this user; id → why one was not ended.

    A reservation that a living process holds, or another user's, stays. Takes the ledger's lock once each.
    """
    ledger = ledger or Ledger()
    failed: dict[str, str] = {}
    for id in ids:
        try:
            ledger.end_lease(id, only_own=True)
        except (GshareError, OSError) as error:
            failed[id] = str(error)
    return failed
