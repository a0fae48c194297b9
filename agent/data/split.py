"""Which rows are trained on and which validate: by content and seed, whatever the rows' order.

Rows of equal content (tokens and mask) always fall on one side. Adding rows to a file moves few of
the others, because each content's place depends on its own keyed hash only.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from gshare.agent.data.tokens import TokenStore
from gshare.agent.errors import UsageError
from numpy.typing import NDArray


class CannotSplit(UsageError):
    """`where` names the file, `what` the matter; a caller may know more of the one, or of what to do."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(where, what)
        self.where, self.what = where, what

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; add rows, name val_data, or set val_fraction = 0"


class Split(NamedTuple):
    """Row ids of a store, ascending, disjoint, together all of them."""

    train: NDArray[np.int64]
    val: NDArray[np.int64]


def split_rows(store: TokenStore, *, val_fraction: float, seed: int) -> Split:
    """About `val_fraction` of the rows (at least one) for validation; 0 → none.

    Whole groups of equal rows are taken in the order of BLAKE2b(content, key = seed) as long as they
    fit. Raises `CannotSplit` when no group fits on its own side, so that a side would be empty.
    """
    if not 0.0 <= val_fraction < 1.0:
        raise UsageError(f"val_fraction must be at least 0 and below 1, found {val_fraction}")
    n = store.n_rows
    every = np.arange(n, dtype=np.int64)
    if val_fraction == 0.0:
        return Split(every, every[:0])
    groups: dict[bytes, list[int]] = {}
    for row in range(n):
        groups.setdefault(store.content[row].tobytes(), []).append(row)
    if len(groups) < 2:
        rows = f"{n} equal rows" if n > 1 else "one row"
        raise CannotSplit(store.meta.source, f"{rows} cannot be split into training and validation")
    key = (seed % 2**128).to_bytes(16, "little")
    order = sorted(groups, key=lambda content: hashlib.blake2b(content, key=key, digest_size=16).digest())
    wanted = min(max(1, round(n * val_fraction)), n - 1)
    taken: list[int] = []
    for content in order:
        if len(taken) + len(groups[content]) <= wanted:
            taken += groups[content]
    if not taken:  # every group is larger than what was wanted: the smallest, and something is left
        taken = groups[min(order, key=lambda content: len(groups[content]))]
    val = np.asarray(sorted(taken), dtype=np.int64)
    return Split(np.setdiff1d(every, val), val)
