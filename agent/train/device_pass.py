"""A pass in device memory: padded to a rung of a ladder, so that few shapes serve every pass.

    T tokens, R label rows, A adapters, S sequences: capacities of a shape, at least what the pass holds

Padding changes no bits: no kernel lets rows meet, and tables say which rows are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from gshare.agent.jobs.pass_load import rung
from gshare.agent.jobs.spec import LINEARS
from gshare.agent.train.arena import Arena, MatrixKey
from gshare.kernels.attention_triton import NOTHING, attention_blocks, block_capacity
from gshare.kernels.dropout import threshold
from gshare.kernels.dropout_triton import SequenceKey, token_keys
from gshare.kernels.layout import GROUPS
from gshare.kernels.lora_tables import BLOCK_T, GroupShape, PassAdapter, PassTables

if TYPE_CHECKING:
    from gshare.agent.base.config import ModelConfig
    from gshare.agent.train.engine import Part

#: The seat whose flag nobody reads.
NOBODY = 4096
_RANKS = (8, 16, 32, 64, 128, 256)


def _power(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


@dataclass(frozen=True)
class PassRows:
    """The rows of a pass, joined; nothing here depends on where its adapters lie."""

    tokens: np.ndarray  # (n,) int32
    starts: np.ndarray  # (S + 1,) int64: first token of each sequence, and n
    labels: np.ndarray  # (m,) int64: the tokens that are predicted, each from the one before it
    counts: list[int]  # of `labels`, for each part

    @classmethod
    def of(cls, parts: Sequence[Part]) -> PassRows:
        rows = [row for part in parts for row in part.rows]
        starts = np.array([0, *accumulate(len(row.tokens) for row in rows)])
        trained = np.concatenate([row.trained for row in rows])
        trained[starts[:-1]] = False  # nothing predicts a sequence's first token
        labels = np.flatnonzero(trained)
        ends = starts[list(accumulate((len(part.rows) for part in parts), initial=0))]
        counts = np.diff(np.searchsorted(labels, ends)).tolist()
        return cls(np.concatenate([row.tokens for row in rows]), starts, labels, counts)


@dataclass(frozen=True)
class PassShape:
    """What a pass must have in common with another to share its memory, its launches and its graph."""

    tokens: int
    labels: int
    adapters: int
    sequences: int
    rank: int
    groups: frozenset[str]
    lowest: int
    checkpoint: bool
    dropout: bool

    @classmethod
    def of(
        cls, parts: Sequence[Part], rows: PassRows, *, training: bool, checkpointing: bool = False
    ) -> PassShape:
        specs = [part.adapter.spec for part in parts]
        targets = {linear for spec in specs for linear in spec.targets}
        rank = max(spec.r for spec in specs)
        return cls(
            tokens=rung(len(rows.tokens)),
            labels=rung(len(rows.labels)),
            adapters=_power(len(parts)),
            sequences=_power(len(rows.starts) - 1),
            rank=next(known for known in _RANKS if known >= rank),
            groups=frozenset(name for name, members in GROUPS.items() if targets & set(members)),
            lowest=min(part.adapter.lowest_layer for part in parts),
            checkpoint=training and (checkpointing or any(spec.gradient_checkpointing for spec in specs)),
            dropout=training and any(spec.lora_dropout > 0 for spec in specs),
        )


def group_shapes(config: ModelConfig) -> list[GroupShape]:
    """Every group of every layer, in the order of the kernels' group numbers."""
    shapes = []
    for _ in range(config.num_layers):
        for members in GROUPS.values():
            sizes = [config.linear_shape(member) for member in members]
            shapes.append(GroupShape(sizes[0][1], tuple(out for out, _ in sizes)))
    return shapes


def matrix_table(arena: Arena, name: str, config: ModelConfig) -> np.ndarray:
    """(layers · 7, 3) int64: offsets of A and B in the arena's flat memory and the rank, 0 where absent."""
    offsets = arena.slot(name).offsets
    table = np.zeros((config.num_layers * len(LINEARS), 3), dtype=np.int64)
    row = 0
    for layer in range(config.num_layers):
        for members in GROUPS.values():
            for linear in members:
                a = offsets.get(MatrixKey(layer, linear, "A"))
                if a is not None:
                    rank = arena.shape(name, MatrixKey(layer, linear, "A"))[0]
                    table[row] = (a, offsets[MatrixKey(layer, linear, "B")], rank)
                row += 1
    return table


class PassBuffers:
    """The device memory of one shape's tables: a pass is laid out on the host, then uploaded."""

    def __init__(self, shape: PassShape, config: ModelConfig, device: torch.device) -> None:
        self.shape = shape
        self.tables = PassTables(
            group_shapes(config),
            device,
            max_adapters=shape.adapters,
            max_sequences=shape.sequences,
            max_blocks=shape.tokens // BLOCK_T + shape.adapters,
            max_rank=shape.rank,
            extra={
                **({"keys": ((5, shape.tokens), "int64")} if shape.dropout else {}),
                "tokens": ((shape.tokens,), "int64"),
                "read": ((shape.labels,), "int64"),
                "write": ((shape.labels,), "int64"),
                "targets": ((shape.labels,), "int64"),
                "owner": ((shape.labels,), "int64"),
                "scale": ((shape.labels,), "float32"),
                "position": ((shape.tokens,), "int32"),
                "attention": ((block_capacity(shape.tokens, shape.sequences), 3), "int32"),
            },
        )
        self.device = self.tables.staging.device

    def lay_out(
        self, parts: Sequence[Part], rows: PassRows, matrices: Sequence[np.ndarray], *, training: bool
    ) -> None:
        """The next upload, on the host alone: `parts`, their `rows` and their `matrix_table`s. A pass that
        was laid out and not uploaded is replaced."""
        shape, host = self.shape, self.tables.staging.host()
        starts, n, m = rows.starts.tolist(), len(rows.tokens), len(rows.labels)
        host["tokens"][:n] = rows.tokens
        host["tokens"][n:] = 0
        host["position"][:n] = np.arange(n) - np.repeat(rows.starts[:-1], np.diff(rows.starts))
        host["position"][n:] = 0
        blocks = attention_blocks(starts, shape.tokens)
        host["attention"][: len(blocks)] = blocks
        host["attention"][len(blocks) :] = NOTHING
        # Padding label rows read row 0, have no target, and write to the row past the last.
        host["read"][:m] = host["write"][:m] = rows.labels - 1
        host["read"][m:], host["write"][m:] = 0, shape.tokens
        host["targets"][:m] = rows.tokens[rows.labels]
        host["targets"][m:] = -1
        host["scale"][:m] = np.repeat([1.0 / max(part.label_tokens, 1) for part in parts], rows.counts)
        host["scale"][m:] = 0.0
        if shape.dropout:
            host["keys"][:] = token_keys(_sequence_keys(parts), max_tokens=shape.tokens)
        spans = iter(pairwise(starts))
        self.tables.lay_out(
            [
                PassAdapter(
                    tuple(islice(spans, len(part.rows))),
                    part.scale if training else part.adapter.spec.scaling,
                    table,
                )
                for part, table in zip(parts, matrices, strict=True)
            ]
        )

    def upload(self, counts: Sequence[int], seats: Sequence[int], fresh: Sequence[bool]) -> None:
        """What was laid out, in stream order, with what the round knows of each part: its seat, and whether
        its gradients hold nothing yet."""
        owner, m = self.tables.staging.host()["owner"], sum(counts)
        owner[:m] = np.repeat(seats, counts)
        owner[m:] = NOBODY
        self.tables.upload(fresh)


def _sequence_keys(parts: Sequence[Part]) -> list[SequenceKey]:
    """What the dropout masks of each sequence are keyed by; an adapter without dropout keeps everything."""
    keys = []
    for part in parts:
        spec = part.adapter.spec
        assert spec.seed is not None
        cut = threshold(spec.lora_dropout)
        keys += [SequenceKey(spec.seed, part.step, row.sample, len(row.tokens), cut) for row in part.rows]
    return keys
