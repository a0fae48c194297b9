"""The clients' parts of a trainer's reservation: grown before a client's jobs come, given back after them.

What is in the row besides its clients' parts is for what they share: the base, the context, workspaces. An
adapter that leaves gives its place in the arena to the next one and not to the allocator, so that much of a
client's part stays in the row and is not asked for again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gshare.agent.errors import GshareError
from gshare.agent.vram.guard import Reservation


@dataclass
class Parts:
    """By the clients' names in the row. Without a reservation (the CPU) there is nothing to keep."""

    reservation: Reservation | None = None
    spare_mb: int = 0  # of adapters that have left
    _resident_mb: dict[str, int] = field(default_factory=dict)

    def own(self, name: str, resident_mb: int) -> None:
        """The part of the client that started the trainer: it came with the reservation."""
        self._resident_mb[name] = resident_mb

    def join(self, name: str, budget_mb: int, resident_mb: int) -> None:
        """Reserve one more client's part. RetryLater, and no change, when it does not fit now."""
        if self.reservation is None:
            return
        if not self.reservation.is_open:
            raise GshareError("its GPU was given back, it computes on the CPU")
        if budget_mb <= 0:
            raise GshareError("it reserves GPU memory, and this client does not say how much it needs")
        inside = min(self.spare_mb, resident_mb, budget_mb)
        self.reservation.set_client(name, budget_mb, inside_mb=inside)
        self.spare_mb -= inside
        self._resident_mb[name] = min(resident_mb, budget_mb)

    def leave(self, name: str) -> None:
        """Give a client's part back, but for what the arena keeps. A client without one may leave too."""
        resident = self._resident_mb.pop(name, None)
        if self.reservation is None or resident is None or not self.reservation.is_open:
            return
        part = next((one.budget_mb for one in self.reservation.row.clients if one.name == name), 0)
        inside = min(resident, part)
        self.reservation.set_client(name, None, inside_mb=inside)
        self.spare_mb += inside
