"""How long to wait before the next try to reach a node: doubling from 1 s to 60 s, with jitter.

Pure: the caller brings the random numbers and does the sleeping. The jitter is "full" above half of the
delay, so that a thousand nodes lost by one broken switch do not all come back in the same second.
"""

from __future__ import annotations

import random

FIRST_SECONDS = 1.0
MOST_SECONDS = 60.0
#: A connection that held this long was a good one: the next loss starts from the beginning.
STEADY_SECONDS = 60.0


class Backoff:
    """Delays of one node's reconnects.

    >>> backoff = Backoff(random.Random(1))
    >>> [backoff.next_delay() <= most for most in (1, 2, 4, 8, 16, 32, 60, 60)]
    [True, True, True, True, True, True, True, True]
    """

    def __init__(self, rng: random.Random, first: float = FIRST_SECONDS, most: float = MOST_SECONDS) -> None:
        """`first`, `most`: seconds."""
        if not 0 < first <= most:
            raise ValueError(f"a backoff needs 0 < first <= most, not {first} and {most}")
        self._rng = rng
        self._first = first
        self._most = most
        self.failures = 0  # in a row

    def next_delay(self) -> float:
        """Seconds to wait after one more failure: uniform in [d/2, d], d = min(most, first × 2^failures)."""
        # 2.0**1024 overflows; 64 doublings pass any `most`.
        whole = min(self._most, self._first * 2.0 ** min(self.failures, 64))
        self.failures += 1
        return whole / 2 + self._rng.random() * whole / 2

    def connected(self, lasted_seconds: float) -> None:
        """A connection ended after `lasted_seconds`; one that held `STEADY_SECONDS` starts the row anew."""
        if lasted_seconds >= STEADY_SECONDS:
            self.failures = 0
