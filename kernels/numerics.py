"""The version of the numerics contract. Without torch, so that a cache can be keyed by it."""

from __future__ import annotations

#: Version of NUMERICS.md that this code keeps.
NUMERICS = 2
