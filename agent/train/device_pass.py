"""A pass in device memory: padded to a rung of a ladder, so that few shapes serve every pass.

    T tokens, R label rows, A adapters, S sequences: capacities of a shape, at least what the pass holds

Padding changes no bits: no kernel lets rows meet, and tables say which rows are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from gshare.agent.jobs.spec import LINEARS
from gshare.agent.train.arena import Arena, MatrixKey
from gshare.kernels.attention_triton import NOTHING, attention_blocks, block_capacity
from gshare.kernels.layout import GROUPS
from gshare.kernels.lora_tables import BLOCK_T, GroupShape, PassAdapter, PassTables
from gshare.kernels.staging import Staging

if TYPE_CHECKING:
    from gshare.agent.base.config import ModelConfig
    from gshare.agent.train.engine import Part

#: The seat whose flag nobody reads.
NOBODY = 4096
_RANKS = (8, 16, 32, 64, 128, 256)


def rung(rows: int) -> int:
    """The padded number of rows: a multiple of 64 up to 512, of 128 up to 8,192, of 512 above.

    At the 3,200 tokens of sixteen short rows 2 % are lost on average, and 70 shapes reach 8,192.
    """
    step = 64 if rows <= 512 else 128 if rows <= 8192 else 512
    return max(step, -(-rows // step) * step)


def _power(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


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
    def of(cls, parts: Sequence[Part], *, training: bool, checkpointing: bool = False) -> PassShape:
        specs = [part.adapter.spec for part in parts]
        targets = {linear for spec in specs for linear in spec.targets}
        rank = max(spec.r for spec in specs)
        return cls(
            tokens=rung(sum(part.tokens for part in parts)),
            labels=rung(sum(row.label_tokens for part in parts for row in part.rows)),
            adapters=_power(len(parts)),
            sequences=_power(sum(len(part.rows) for part in parts)),
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
    """The device memory of one shape's tables. `fill` writes a pass into it, in stream order."""

    def __init__(self, shape: PassShape, config: ModelConfig, device: torch.device) -> None:
        self.shape = shape
        self.tables = PassTables(
            group_shapes(config),
            device,
            max_adapters=shape.adapters,
            max_sequences=shape.sequences,
            max_blocks=shape.tokens // BLOCK_T + shape.adapters,
            max_rank=shape.rank,
        )
        self._block_rows = block_capacity(shape.tokens, shape.sequences)
        self._staging = Staging(
            {
                "tokens": ((shape.tokens,), "int64"),
                "read": ((shape.labels,), "int64"),
                "write": ((shape.labels,), "int64"),
                "targets": ((shape.labels,), "int64"),
                "owner": ((shape.labels,), "int64"),
                "scale": ((shape.labels,), "float32"),
                "position": ((shape.tokens,), "int32"),
                "blocks": ((self._block_rows, 3), "int32"),
            },
            device,
        )
        self.device = self._staging.device

    def fill(
        self, parts: Sequence[Part], matrices: Sequence[np.ndarray], seats: Sequence[int], *, training: bool
    ) -> list[int]:
        """Lay out `parts`, with their `matrix_table`s and their seats in the round; returns each one's label
        rows."""
        shape, host = self.shape, self._staging.host()
        rows = [row for part in parts for row in part.rows]
        starts = [0, *accumulate(len(row.tokens) for row in rows)]
        host["tokens"][: starts[-1]] = np.concatenate([row.tokens for row in rows])
        host["tokens"][starts[-1] :] = 0
        host["position"][starts[-1] :] = 0
        blocks = attention_blocks(starts, shape.tokens)
        host["blocks"][:] = NOTHING
        host["blocks"][: len(blocks)] = blocks
        adapters, counts, label, sequence = [], [], 0, 0
        for part, table, seat in zip(parts, matrices, seats, strict=True):
            first_label, spans = label, []
            for row in part.rows:
                start, end = starts[sequence], starts[sequence + 1]
                host["position"][start:end] = np.arange(end - start)
                where = np.flatnonzero(row.trained[1:])
                upto = label + len(where)
                host["read"][label:upto] = start + where
                host["targets"][label:upto] = row.tokens[1:][where]
                label, sequence = upto, sequence + 1
                spans.append((start, end))
            host["scale"][first_label:label] = np.float32(1.0 / max(part.label_tokens, 1))
            host["owner"][first_label:label] = seat
            counts.append(label - first_label)
            adapters.append(
                PassAdapter(tuple(spans), part.scale if training else part.adapter.spec.scaling, table)
            )
        host["write"][:label] = host["read"][:label]
        # Padding label rows read row 0, have no target, and write to the row past the last.
        host["read"][label:] = 0
        host["write"][label:] = shape.tokens
        host["targets"][label:] = -1
        host["scale"][label:] = 0.0
        host["owner"][label:] = NOBODY
        self._staging.upload()
        self.tables.refresh(adapters)
        return counts
