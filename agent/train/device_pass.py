"""A pass in device memory: padded to a rung of a ladder, so that few shapes serve every pass.

    T tokens, R label rows, A adapters, S sequences: capacities of a shape, at least what the pass holds

Padding changes no bits: no kernel lets rows meet, and tables say which rows are real. What a pass runs below
its adapters (`trunk.py`) is a pass of its own, `TrunkBuffers`: its output lies in memory that both know. The
rows of a lower stage's own jobs are padded to a rung, and so are its shared rows behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from gshare.agent.jobs.pass_load import label_rung, padded_rank, rung
from gshare.agent.jobs.spec import LINEARS
from gshare.agent.train.arena import Arena, MatrixKey
from gshare.agent.train.trunk import PassPlan, StagePlan, gathered, starts_of
from gshare.kernels.attention_triton import NO_SEQUENCE, NOTHING, attention_blocks, block_capacity
from gshare.kernels.dropout import threshold
from gshare.kernels.dropout_triton import SequenceKey, token_keys
from gshare.kernels.layout import GROUPS
from gshare.kernels.lora_tables import BLOCK_T, GroupShape, PassAdapter, PassTables, row_blocks
from gshare.kernels.staging import Staging

if TYPE_CHECKING:
    from gshare.agent.base.config import ModelConfig
    from gshare.agent.train.part import Part, Row

#: The seat whose flag nobody reads.
NOBODY = 4096


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
class StageShape:
    """A lower stage: its own jobs' rows, then the shared ones, each padded."""

    first: int
    own: int
    rows: int
    sequences: int

    @classmethod
    def of(cls, stage: StagePlan, *, coarse: bool) -> StageShape:
        own = rung(stage.own_tokens, coarse=coarse)
        shared = rung(stage.shared_tokens, coarse=coarse)
        return cls(stage.first, own, own + shared, _power(len(stage.rows)))


@dataclass(frozen=True)
class PassShape:
    """What a pass must have in common with another to share its memory, its launches and its graph."""

    tokens: int
    labels: int
    adapters: int
    sequences: int
    rank: int
    groups: frozenset[str]
    lower: tuple[StageShape, ...]
    first: int  # the last stage's
    checkpoint: bool
    dropout: bool

    @property
    def lowest(self) -> int:
        """The first layer of the pass: what is below it is the trunk's."""
        return self.lower[0].first if self.lower else self.first

    @classmethod
    def of(
        cls,
        plan: PassPlan,
        rows: PassRows,
        *,
        training: bool,
        coarse: bool = False,
        checkpointing: bool = False,
    ) -> PassShape:
        parts, specs = plan.parts, [part.adapter.spec for part in plan.parts]
        targets = {linear for spec in specs for linear in spec.targets}
        rank = max(spec.r for spec in specs)
        tokens = rung(len(rows.tokens), coarse=coarse)
        return cls(
            tokens=tokens,
            labels=min(label_rung(len(rows.labels), coarse=coarse), tokens),  # the estimate's bound
            adapters=_power(len(parts)),
            sequences=_power(len(rows.starts) - 1),
            rank=padded_rank(rank),
            groups=frozenset(name for name, members in GROUPS.items() if targets & set(members)),
            lower=tuple(StageShape.of(stage, coarse=coarse) for stage in plan.stages[:-1]),
            first=plan.stages[-1].first,
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
    """The device memory of one shape's tables: a pass is laid out on the host, then uploaded.

    The last stage's sections bear no number; those of lower stage i end in i. `gather` is there for every
    stage but one that begins with the pass's tokens.
    """

    def __init__(self, shape: PassShape, config: ModelConfig, device: torch.device) -> None:
        self.shape = shape
        blocks = shape.tokens // BLOCK_T + shape.adapters
        extra: dict[str, tuple[tuple[int, ...], str]] = {
            **({"keys": ((5, shape.tokens), "int64")} if shape.dropout else {}),
            "read": ((shape.labels,), "int64"),
            "write": ((shape.labels,), "int64"),
            "targets": ((shape.labels,), "int64"),
            "owner": ((shape.labels,), "int64"),
            "scale": ((shape.labels,), "float32"),
            "position": ((shape.tokens,), "int32"),
            "attention": ((block_capacity(shape.tokens, shape.sequences), 3), "int32"),
            "label_blocks": ((shape.labels // BLOCK_T + shape.adapters, 3), "int32"),
            "label_rows": ((shape.tokens,), "int32"),
        }
        if shape.lower or shape.first:
            extra["gather"] = ((shape.tokens,), "int64")
        for i, stage in enumerate(shape.lower):
            if i or stage.first:
                extra[f"gather{i}"] = ((stage.rows,), "int64")
            extra[f"position{i}"] = ((stage.rows,), "int32")
            extra[f"attention{i}"] = ((block_capacity(stage.rows, stage.sequences) + 1, 3), "int32")
            extra[f"own_attention{i}"] = ((block_capacity(stage.own, stage.sequences), 3), "int32")
            extra[f"blocks{i}"] = ((stage.own // BLOCK_T + shape.adapters, 3), "int32")
        if not shape.lowest:
            extra["tokens"] = ((shape.lower[0].rows if shape.lower else shape.tokens,), "int64")
        self.tables = PassTables(
            group_shapes(config),
            device,
            max_adapters=shape.adapters,
            max_sequences=shape.sequences,
            max_blocks=blocks,
            max_rank=shape.rank,
            extra=extra,
        )
        self.device = self.tables.staging.device

    def lay_out(
        self, plan: PassPlan, rows: PassRows, matrices: Sequence[np.ndarray], *, training: bool
    ) -> None:
        """The next upload, on the host alone: `plan`, its `rows` and its parts' `matrix_table`s. A pass that
        was laid out and not uploaded is replaced."""
        shape, host, parts = self.shape, self.tables.staging.host(), plan.parts
        starts, m = rows.starts.tolist(), len(rows.labels)
        self._lay_out_stages(plan, host)
        # Padding label rows read row 0, have no target, and write to the row past the last.
        host["read"][:m] = host["write"][:m] = rows.labels - 1
        host["read"][m:], host["write"][m:] = 0, shape.tokens
        host["targets"][:m] = rows.tokens[rows.labels]
        host["targets"][m:] = -1
        host["scale"][:m] = np.repeat([1.0 / max(part.label_tokens, 1) for part in parts], rows.counts)
        host["scale"][m:] = 0.0
        host["label_rows"][:] = -1
        host["label_rows"][rows.labels - 1] = np.arange(m)
        ends = list(accumulate(rows.counts, initial=0))
        _fill(host["label_blocks"], row_blocks(list(pairwise(ends))), -1)
        if shape.dropout:
            host["keys"][:] = token_keys(_sequence_keys(parts), max_tokens=shape.tokens)
        spans = iter(pairwise(starts))
        adapters = [
            PassAdapter(
                tuple(islice(spans, len(part.rows))),
                part.scale if training else part.adapter.spec.scaling,
                table,
            )
            for part, table in zip(parts, matrices, strict=True)
        ]
        self.tables.lay_out(adapters)
        ranges = [(adapter.sequences[0][0], adapter.sequences[-1][1]) for adapter in adapters]
        for i, stage in enumerate(plan.stages[:-1]):
            _fill(host[f"blocks{i}"], row_blocks(ranges[: stage.parts]), -1)

    def _lay_out_stages(self, plan: PassPlan, host: Mapping[str, np.ndarray]) -> None:
        """Every stage's tokens or where its rows come from, positions and attention blocks."""
        before = starts_of(plan.trunk)
        for i, stage in enumerate(plan.stages):
            last = i == len(self.shape.lower)
            number = "" if last else str(i)
            own = self.shape.tokens if last else self.shape.lower[i].own
            places = starts_of(stage.rows[: stage.own])[:-1] + starts_of(stage.rows[stage.own :], own)[:-1]
            if stage.source:
                gather = gathered(stage.source, before, stage.rows)
                _put(host[f"gather{number}"], places, stage.rows, gather)
            else:
                _put(host["tokens"], places, stage.rows, np.concatenate([row.tokens for row in stage.rows]))
            positions = np.concatenate([np.arange(len(row.tokens)) for row in stage.rows])
            _put(host[f"position{number}"], places, stage.rows, positions)
            mine = attention_blocks(starts_of(stage.rows[: stage.own]), own)
            if not last:
                _fill(host[f"own_attention{number}"], mine, NOTHING)
                total = self.shape.lower[i].rows
                shared = attention_blocks(starts_of(stage.rows[stage.own :]), total - own)
                mine = mine + [_moved(entry, own) for entry in shared]
            _fill(host[f"attention{number}"], mine, NOTHING)
            before = places

    def upload(self, counts: Sequence[int], seats: Sequence[int], fresh: Sequence[bool]) -> None:
        """What was laid out, in stream order, with what the round knows of each part: its seat, and whether
        its gradients hold nothing yet."""
        owner, m = self.tables.staging.host()["owner"], sum(counts)
        owner[:m] = np.repeat(seats, counts)
        owner[m:] = NOBODY
        self.tables.upload(fresh)


@dataclass(frozen=True)
class TrunkShape:
    """What the trunks of two passes must have in common to share memory and graph."""

    tokens: int
    sequences: int
    layers: int

    @classmethod
    def of(cls, rows: Sequence[Row], layers: int, *, coarse: bool = False) -> TrunkShape:
        tokens = sum(len(row.tokens) for row in rows)
        return cls(rung(tokens, coarse=coarse), _power(len(rows)), layers)


class TrunkBuffers:
    """The tables of a trunk: rows that run through the bare base, and where each token's state goes."""

    def __init__(self, shape: TrunkShape, device: torch.device) -> None:
        self.shape = shape
        self.staging = Staging(
            {
                "tokens": ((shape.tokens,), "int64"),
                "write": ((shape.tokens,), "int64"),
                "position": ((shape.tokens,), "int32"),
                "attention": ((block_capacity(shape.tokens, shape.sequences), 3), "int32"),
            },
            device,
        )
        self.device = self.staging.device

    def upload(self, rows: Sequence[Row], places: Sequence[int], nowhere: int) -> None:
        """`places[s]`: where the states of row s begin; padding writes to row `nowhere`."""
        host, starts = self.staging.host(), starts_of(rows)
        lengths = [np.arange(len(row.tokens)) for row in rows]
        at = np.concatenate([place + length for place, length in zip(places, lengths, strict=True)])
        for name, values, filler in (
            ("tokens", np.concatenate([row.tokens for row in rows]), 0),
            ("position", np.concatenate(lengths), 0),
            ("write", at, nowhere),
        ):
            _fill(host[name], values, filler)
        _fill(host["attention"], attention_blocks(starts, self.shape.tokens), NOTHING)
        self.staging.upload()


def _fill(section: np.ndarray, values: Sequence[tuple[int, ...]] | np.ndarray, filler: int) -> None:
    section[: len(values)] = np.asarray(values).reshape(len(values), *section.shape[1:])
    section[len(values) :] = filler


def _put(section: np.ndarray, places: Sequence[int], rows: Sequence[Row], values: np.ndarray) -> None:
    """`values` of the rows' tokens, each row's from its place on; zeros elsewhere."""
    section[:] = 0
    at = 0
    for place, row in zip(places, rows, strict=True):
        length = len(row.tokens)
        section[place : place + length] = values[at : at + length]
        at += length


def _moved(entry: tuple[int, int, int], by: int) -> tuple[int, int, int]:
    """An entry of `attention_blocks` for rows that begin `by` rows later."""
    start, end, first = entry
    return (start if start == NO_SEQUENCE else start + by, end + by, first + by)


def _sequence_keys(parts: Sequence[Part]) -> list[SequenceKey]:
    """What the dropout masks of each sequence are keyed by; an adapter without dropout keeps everything."""
    keys = []
    for part in parts:
        spec = part.adapter.spec
        assert spec.seed is not None
        cut = threshold(spec.lora_dropout)
        keys += [SequenceKey(spec.seed, part.step, row.sample, len(row.tokens), cut) for row in part.rows]
    return keys
