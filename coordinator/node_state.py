"""How a node is, as a machine without a clock: new, deploying, ready, busy, degraded, unreachable, lost."""

from __future__ import annotations

from typing import Literal

NodeStateName = Literal["new", "deploying", "ready", "busy", "degraded", "unreachable", "lost"]

HEARTBEAT_S = 15.0
#: A node that missed so many heartbeats is unreachable.
MISSED_BEATS = 3
#: Seconds unreachable after which it is lost and its jobs go elsewhere.
LOST_AFTER_S = 600.0
