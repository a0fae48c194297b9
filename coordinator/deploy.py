"""An agent of our version on a node: found, installed, started, upgraded when idle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gshare.coordinator.remote import Remote


@dataclass(frozen=True)
class Deployed:
    """Where gshare is on the node, and what was done to get it there."""

    python: str  # on the node: the interpreter that has gshare
    state_dir: str  # on the node, absolute: the agent's
    stamp: str  # VERSION+HASH of what is installed and of what the agent should run
    torch: str  # its version there; "" when none was asked for
    done: tuple[str, ...] = ()  # what this call changed, for people; empty: nothing
    upgrade_pending: str = ""  # why an older agent still runs; empty: it does not


async def deploy(
    remote: Remote, *, force: bool = False, say: Callable[[str], None] = lambda text: None
) -> Deployed:
    """Brings `remote.node` to an agent of this version, running; does nothing where there is one.

    For transports "local" and "ssh". `force` tries again although this version failed within the last hour.
    `say` hears of long steps. NodeFault of kind no_python, no_torch, machine, disk_full, install, version,
    no_agent, timeout or lost.
    """
    raise NotImplementedError
