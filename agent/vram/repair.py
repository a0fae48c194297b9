"""`gshare gpu repair`: takes damaged rows out of the count, keeping a copy of each.

Only what provably has no living holder is taken out. Everything else stays counted, and says what to do.
What does not count but lies where the ledger writes (a directory named like a file of its, counts of passes
that cannot be read) is taken out too.
"""

from __future__ import annotations

import msgspec
from gshare.agent.vram.clock import now, start_ticks
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.paths import TEMPORARY
from gshare.agent.vram.rows import BadRow, Damaged, decode_row
from gshare.agent.vram.store import Store, Unreadable, locked
from gshare.agent.vram.view import decode_passes


class Repaired(msgspec.Struct, frozen=True, kw_only=True):
    """One damaged file and what became of it; `kept` is the copy's path, empty when it is still there.

    The texts may hold what a terminal would obey: names of files are anybody's.
    """

    name: str
    reason: str
    outcome: str
    kept: str = ""


def repair(ledger: Ledger) -> list[Repaired]:
    """Look at every damaged row; also makes the ledger clean, as every operation does."""
    with ledger.tracer.span("LedgerCleanup"), locked(ledger.directory, ledger.tracer) as store:
        view = ledger.view(store, now(), {})
        with ledger.tracer.phase("ledger_wr"):
            found = [_repair_one(store, damaged) for damaged in view.damaged]
            known = {damaged.name for damaged in view.damaged}
            for name in store.names():
                reason = _fault(store, name) if name not in known else ""
                if reason:
                    found.append(_take_out(store, name, reason, still="still there"))
            return found


def _repair_one(store: Store, damaged: Damaged) -> Repaired:
    living = _living_holder(store, damaged)
    if living:
        return Repaired(name=damaged.name, reason=damaged.reason, outcome=f"still counted: {living}")
    repaired = _take_out(store, damaged.name, damaged.reason, still="still counted")
    if repaired.kept:
        store.remove(_life_of(damaged.name))
    return repaired


def _take_out(store: Store, name: str, reason: str, *, still: str) -> Repaired:
    try:
        copy = store.set_aside(name)
    except OSError as error:
        return Repaired(name=name, reason=reason, outcome=f"{still}: {error.strerror}")
    if copy is None:
        outcome = f"{still}: it is another user's; they or root must run gshare gpu repair"
        return Repaired(name=name, reason=reason, outcome=outcome)
    return Repaired(name=name, reason=reason, outcome="taken out", kept=str(copy))


def _fault(store: Store, name: str) -> str:
    """What is wrong with a file that is no row; empty when nothing is, or when it is not ours to judge."""
    if name.startswith(("passes-", "wait-", "mps-", TEMPORARY)) and store.is_odd(name):
        return "is no regular file"
    if name.startswith("passes-"):
        try:
            decode_passes(store.read(name))
        except (Unreadable, BadRow) as error:
            return str(error)
    return ""


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
            writes = "" if damaged.name.startswith("lease-") else " and writes it again on its next change"
            return f"process {row.pid} is alive{writes}; or end that process"
    return ""


def _life_of(name: str) -> str:
    return name.removesuffix(".json") + ".life"
