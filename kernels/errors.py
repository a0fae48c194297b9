"""What the kernels raise."""

from __future__ import annotations


class NotRowInvariant(RuntimeError):
    """No available product gives rows whose bits are independent of the rest of the batch."""
