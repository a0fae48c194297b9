"""What the CUDA kernels were built for. No torch, so that a run can be refused before anything is loaded."""

from __future__ import annotations

#: Highest rank of an adapter.
MAX_RANK = 256
