"""Device tables that tell the grouped LoRA kernels which tokens and which matrices are whose.

    A  adapters of the pass      adapter i owns tokens [start_i, end_i); its sequences tile them, in order
    J  linears of a group        they read the same x (T, K); their outputs lie side by side in y (T, ΣN_j)
    matrices of (i, linear)      A (r, K) row-major at a_off and B (N_j, r) row-major at b_off of flat memory

Per pass:

    blocks     (max_blocks, 3) int32     adapter, first token, end of the adapter: 64 tokens counted from
                                         the adapter's first; what row-wise products run over
    granules   (max_granules, 2) int32   first token, end: 64 tokens counted from the *sequence's* first;
                                         what the sums over tokens of dA and dB run over, in this order
    spans      (max_adapters + 1) int32  granules of adapter i: spans[i] to spans[i + 1]
    scales     (max_adapters) fp32       s / p
    fresh      (max_adapters) int32      1: the adapter's gradients hold nothing yet, the sums start at zero
    matrices   (ΣJ, max_adapters, 3) int64   a_off, b_off, rank of every linear of every group

Unused blocks hold adapter −1, unused adapters have no granules and rank 0. All of it is one upload into
memory that stays where it is, so that a captured CUDA graph serves every pass of the same capacities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from gshare.kernels.limits import MAX_RANK
from gshare.kernels.staging import Staging

#: Tokens of a block and of a granule. The sums of dA and dB are cut by it: a part of the numerics.
BLOCK_T = 64
#: Every A and B starts at a multiple of this many elements (the arena's rule), so rows load 16 bytes at once.
ALIGN = 16
#: Each linear's columns of S start at a multiple of this: 16 bytes of bf16.
COLUMN_ALIGN = 8


def column_width(rank: int) -> int:
    """Columns of S that a linear of this rank takes: those past the rank hold zeros."""
    return -(-rank // COLUMN_ALIGN) * COLUMN_ALIGN


@dataclass(frozen=True)
class GroupShape:
    """The linears of one layer that read the same input: K in, N_j out, side by side in y."""

    in_features: int
    out_features: tuple[int, ...]

    def __post_init__(self) -> None:
        assert 1 <= len(self.out_features) <= 3, "a group has one to three linears"

    @property
    def linears(self) -> int:
        return len(self.out_features)

    @property
    def offsets(self) -> tuple[int, ...]:
        """n_off_j: the first column of linear j in y."""
        return (0, *accumulate(self.out_features[:-1]))


@dataclass(frozen=True)
class PassAdapter:
    """One adapter's share of a pass.

    sequences: (first, end) token ranges, in order, without gaps between them.
    scale: s / p.
    matrices: (ΣJ, 3) int64: a_off, b_off, rank of every linear of every group, group by group; rank 0
    where the adapter leaves a linear alone. It depends on the arena alone: build it once, not every pass. An
    array that was given is known again and not read a second time: never change one.
    """

    sequences: tuple[tuple[int, int], ...]
    scale: float
    matrices: np.ndarray


@dataclass(frozen=True)
class GroupTable:
    """One group as a kernel sees it. `columns`: width of S and dS, where adapter i's linear j starts at
    column Σ_{j' < j} column_width(r_ij'). `matrices` (J, max_adapters, 3) int64 is a slice of the upload."""

    shape: GroupShape
    columns: int
    matrices: torch.Tensor


def row_blocks(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """`blocks` of adapters that own these rows, (first, end) each; an adapter may have none."""
    return [(i, t, end) for i, (start, end) in enumerate(ranges) for t in range(start, end, BLOCK_T)]


class PassTables:
    """The tables of a pass, laid out on the host and uploaded into the same memory.

    Capacities (they set the kernels' grids): adapters, sequences, blocks (T // 64 + max_adapters is always
    enough) and the highest rank. A pass that exceeds one is refused with ValueError before anything changes.
    `extra` sections of `staging` are the caller's own and travel in the same copy.
    """

    def __init__(
        self,
        groups: Sequence[GroupShape],
        device: torch.device,
        *,
        max_adapters: int,
        max_sequences: int,
        max_blocks: int,
        max_rank: int,
        extra: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
    ) -> None:
        assert 1 <= max_rank <= MAX_RANK, f"max_rank {max_rank} is not in 1..{MAX_RANK}"
        self.device, self.max_rank = device, max_rank
        self.max_adapters, self.max_sequences, self.max_blocks = max_adapters, max_sequences, max_blocks
        linears = sum(group.linears for group in groups)
        sections = {
            "matrices": ((linears, max_adapters, 3), "int64"),
            "blocks": ((max_blocks, 3), "int32"),
            # A sequence adds at most one granule to what the adapter's blocks would have been.
            "granules": ((max_blocks + max_sequences, 2), "int32"),
            "spans": ((max_adapters + 1,), "int32"),
            "scales": ((max_adapters,), "float32"),
            "fresh": ((max_adapters,), "int32"),
        }
        self.staging = Staging({**sections, **(extra or {})}, device)
        # What each host buffer's `matrices` hold: an adapter's are written once for each place it takes.
        self._written: list[list[np.ndarray | None]] = [[None] * max_adapters for _ in range(2)]
        on_device = self.staging.device
        self.blocks, self.granules = on_device["blocks"], on_device["granules"]
        self.spans, self.scales, self.fresh = on_device["spans"], on_device["scales"], on_device["fresh"]
        self.rows: torch.Tensor | None = None
        self.groups: list[GroupTable] = []
        first = 0
        for group in groups:
            columns = -(-group.linears * column_width(max_rank) // 16) * 16
            matrices = on_device["matrices"][first : first + group.linears]
            self.groups.append(GroupTable(group, columns, matrices))
            first += group.linears
        self.refresh([])

    def over(self, blocks: torch.Tensor, rows: torch.Tensor | None = None) -> PassTables:
        """The same adapters over other rows of x and y, which `blocks` (n, 3) int32 lays out.

        rows (T,) int32: the row of each token that the granules count, −1 where it has none; its dy is taken
        for zero then. Left out: the rows are the tokens' own.
        """
        view = copy(self)
        view.blocks, view.max_blocks, view.rows = blocks, blocks.shape[0], rows
        return view

    def refresh(self, adapters: Sequence[PassAdapter], fresh: Sequence[bool] = ()) -> None:
        """`lay_out` and `upload`."""
        self.lay_out(adapters)
        self.upload(fresh)

    def lay_out(self, adapters: Sequence[PassAdapter]) -> None:
        """The tables of the next upload, on the host alone; what was laid out and not uploaded is replaced.
        Waits for nothing younger than the upload before last."""
        written = self._written[self.staging.turn]
        blocks, granules, spans = self._tiles(adapters)
        new = [i for i, adapter in enumerate(adapters) if adapter.matrices is not written[i]]
        for i in new:
            self._check_matrices(i, adapters[i].matrices)
        host = self.staging.host()
        host["blocks"][len(blocks) :] = -1
        host["blocks"][: len(blocks)] = blocks
        host["granules"][: len(granules)] = granules
        host["spans"][len(spans) :] = spans[-1]
        host["spans"][: len(spans)] = spans
        host["scales"][: len(adapters)] = [adapter.scale for adapter in adapters]
        for i in new:
            written[i] = adapters[i].matrices
            host["matrices"][:, i] = adapters[i].matrices
        for i in range(len(adapters), self.max_adapters):
            if written[i] is not None:
                written[i] = None
                host["matrices"][:, i] = 0

    def upload(self, fresh: Sequence[bool] = ()) -> None:
        """What was laid out, in stream order. `fresh[i]`: adapter i's gradients hold nothing yet, so that
        `lora_grads` starts its sums at zero and not at what it finds; left out: false."""
        flags = self.staging.host()["fresh"]
        flags[: len(fresh)] = fresh
        flags[len(fresh) :] = 0
        self.staging.upload()

    def _tiles(self, adapters: Sequence[PassAdapter]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Blocks, granules and spans; ValueError when they do not fit."""
        ranges: list[tuple[int, int]] = []
        granules: list[tuple[int, int]] = []
        spans, last_token, sequences = [0], 0, 0
        for i, adapter in enumerate(adapters):
            start, end = adapter.sequences[0][0], adapter.sequences[-1][1]
            assert start >= last_token, f"adapter {i} starts at token {start}, inside the one before"
            last_token = start
            for first, stop in adapter.sequences:
                assert first == last_token < stop, f"adapter {i}: its sequences do not tile its tokens"
                granules += [(t, stop) for t in range(first, stop, BLOCK_T)]
                last_token = stop
            ranges.append((start, end))
            spans.append(len(granules))
            sequences += len(adapter.sequences)
        blocks = row_blocks(ranges)
        for what, count, most in (
            ("adapters", len(adapters), self.max_adapters),
            ("sequences", sequences, self.max_sequences),
            ("blocks", len(blocks), self.max_blocks),
        ):
            if count > most:
                raise ValueError(f"a pass of {count} {what} does not fit tables for {most}")
        return (
            np.array(blocks, dtype=np.int32).reshape(-1, 3),
            np.array(granules, dtype=np.int32).reshape(-1, 2),
            spans,
        )

    def _check_matrices(self, i: int, matrices: np.ndarray) -> None:
        assert not (matrices[:, :2] % ALIGN).any(), f"adapter {i}: a matrix off the {ALIGN}-element grid"
        if matrices[:, 2].max(initial=0) > self.max_rank:
            raise ValueError(f"adapter {i}: rank {matrices[:, 2].max()} over the tables' {self.max_rank}")


class LoraWorkspace:
    """Where programs that each hold a part of one sum leave it: partial sums (fp32) and counters (int32).

    Counters are zero between launches. One workspace serves one stream. Buffers that were outgrown are
    kept: a captured CUDA graph may still use them.
    """

    def __init__(self, device: torch.device) -> None:
        self._partials = torch.empty(0, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[torch.Tensor] = []

    def reserve(self, partials: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
        """At least that many elements of each. Reserve the largest before the first graph is captured."""
        if self._partials.numel() < partials:
            self._outgrown.append(self._partials)
            self._partials = torch.empty(partials, device=self._partials.device)
        if self._counters.numel() < counters:
            self._outgrown.append(self._counters)
            self._counters = torch.zeros(counters, dtype=torch.int32, device=self._counters.device)
        return self._partials, self._counters
