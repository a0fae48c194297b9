"""`gshare gpu repair`: takes damaged rows out of the count, keeping a copy of each.

Only what provably has no living holder is taken out. Everything else stays counted, and says what to do.
"""

from __future__ import annotations

import msgspec
from gshare.agent.vram.clock import now, start_ticks
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.rows import BadRow, Damaged, decode_row
from gshare.agent.vram.store import Store, Unreadable, locked


class Repaired(msgspec.Struct, frozen=True, kw_only=True):
    """One damaged row and what became of it; `kept` is the copy's path, empty when the row still counts."""

    name: str
    reason: str
    outcome: str
    kept: str = ""


def repair(ledger: Ledger) -> list[Repaired]:
    """Look at every damaged row; also makes the ledger clean, as every operation does."""
    with ledger.tracer.span("LedgerCleanup"), locked(ledger.directory, ledger.tracer) as store:
        view = ledger.view(store, now(), {})
        with ledger.tracer.phase("ledger_wr"):
            return [_repair_one(store, damaged) for damaged in view.damaged]


def _repair_one(store: Store, damaged: Damaged) -> Repaired:
    living = _living_holder(store, damaged)
    if living:
        return Repaired(name=damaged.name, reason=damaged.reason, outcome=f"still counted: {living}")
    copy = store.set_aside(damaged.name)
    if copy is None:
        outcome = "still counted: it is another user's; they or root must run gshare gpu repair"
        return Repaired(name=damaged.name, reason=damaged.reason, outcome=outcome)
    store.remove(_life_of(damaged.name))
    return Repaired(name=damaged.name, reason=damaged.reason, outcome="taken out", kept=str(copy))


def _living_holder(store: Store, damaged: Damaged) -> str:
    """Why the row's holder may be alive; empty when it is not."""
    life = "missing" if damaged.name.startswith("lease-") else store.life(_life_of(damaged.name))
    if life == "held":
        return "its process is alive and writes the row again on its next change; or end that process"
    if life == "unreadable":
        return "its proof of life cannot be read; ask the owner of the file or root"
    if life == "missing":
        # The file was removed, and with it the flock that others could see: only the PID is left to ask.
        try:
            data = store.read(damaged.name)
            row = decode_row(data) if data is not None else None
        except (Unreadable, BadRow):
            return ""
        if row is not None and row.pid and start_ticks(row.pid) == row.pid_start:
            return f"process {row.pid} is alive and writes it again on its next change; or end that process"
    return ""


def _life_of(name: str) -> str:
    return name.removesuffix(".json") + ".life"
