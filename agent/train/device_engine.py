"""The engine on CUDA: the same pass over tables in device memory, replayed as a CUDA graph where that pays.

A pass is laid out on the host (`prepare`), uploaded and launched (`queue`); nothing waits for the device
until somebody asks for losses or verdicts, so a caller queues the next round while the device runs this one.
Results come back in memory of their own (`staging.Readback`): a later round does not write over them. The
first pass of a shape runs launch by launch (kernels are built, GEMMs are checked), the second is captured,
later ones are replayed. Captured or not, the launches and so the bits are the same.

A pass whose adapters all begin above layer 0 is two: the trunk, which leaves its states in memory that stays
where it is, and what is above. Each has shapes and graphs of its own.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from gshare.agent.base.decoder import Needed, Stage
from gshare.agent.base.weights import Base
from gshare.agent.jobs.memory import GRAPH_LIMIT, is_launch_bound
from gshare.agent.jobs.spec import LINEARS
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.arena import Slot
from gshare.agent.train.device_optimizer import DeviceOptimizer
from gshare.agent.train.device_pass import (
    PassBuffers,
    PassRows,
    PassShape,
    TrunkBuffers,
    TrunkShape,
    matrix_table,
)
from gshare.agent.train.engine import Engine, Verdict
from gshare.agent.train.graph_capture import GraphCapture
from gshare.agent.train.part import Part, Row
from gshare.agent.train.trunk import PassPlan, TrunkUse
from gshare.agent.train.trunk_cache import fill_states
from gshare.kernels.backend import Backend
from gshare.kernels.dropout_triton import keep_masks
from gshare.kernels.layout import Group
from gshare.kernels.limits import MAX_RANK
from gshare.kernels.lora_tables import LoraWorkspace, PassTables
from gshare.kernels.staging import Fetched, Readback
from gshare.kernels.triton_backend import DeviceLayout, DeviceLora

log = logging.getLogger(__name__)

#: Graphs kept; each holds its launches' parameters, they share their memory.
MAX_GRAPHS = 48
GRAPHS_VARIABLE = "GSHARE_CUDA_GRAPHS"  # "0": never


#: (shape, whether it trains).
Key = tuple[PassShape | TrunkShape, bool]


@dataclass
class _Entry:
    """A shape that was met: its tables, and its graph once captured."""

    buffers: PassBuffers | TrunkBuffers
    version: int = 0  # changes with what the next upload would carry
    runs: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    output: torch.Tensor | None = None
    too_large: bool = False  # there was no memory for its graph
    pointers: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Prepared:
    """A pass laid out on the host, for one `queue`; dropping it costs nothing.

    A shape has room for one: preparing another pass of the same shape, or queueing one, takes the room. So
    does a change of slots or specs. Such a pass is laid out again when it is queued: it is only slower.
    """

    parts: Sequence[Part]  # as they were given
    plan: PassPlan
    training: bool
    counts: list[int]  # of the plan's parts
    key: Key
    entry: _Entry
    version: int
    basis: tuple[object, ...]


@dataclass
class Pending:
    """A pass under way: `losses` waits for it."""

    plan: PassPlan
    counts: Sequence[int]
    nll: Fetched
    kept: int = 0  # tokens of the trunk whose states were there already

    @property
    def trunk(self) -> TrunkUse:
        return self.plan.use(self.kept)

    def losses(self) -> list[list[float]]:
        flat = self.nll.read()[0].tolist()
        ends = list(accumulate(self.counts))
        return self.plan.in_order(
            [flat[end - count : end] for end, count in zip(ends, self.counts, strict=True)]
        )


class DeviceEngine(Engine):
    """Runs passes over one base on a CUDA device through the Triton backend."""

    queues_ahead = True

    def __init__(self, base: Base, backend: Backend) -> None:
        super().__init__(base, backend)
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        # The trunk's states, (rows, H): the pass above gathers from it. Its last row takes what nobody reads.
        self._states = torch.empty(0, base.config.hidden_size, dtype=base.compute_dtype, device=base.device)
        self._matrices: dict[str, tuple[Slot, np.ndarray]] = {}
        self._positions = 2048
        self._workspace = LoraWorkspace(base.device)
        self._readback = Readback(base.device)
        self.optimizer = DeviceOptimizer(self.arena)
        self._captures = GraphCapture(base.device)
        self.graphs = os.environ.get(GRAPHS_VARIABLE, "1") != "0" and base.device.type == "cuda"
        self.replays = 0
        self._most_captured = sys.maxsize  # tokens
        self.most_rank = MAX_RANK
        self._parameters = base.config.parameter_count()
        self._coarse = is_launch_bound(self._parameters)

    # ------------------------------------------------------------------ rounds

    def begin_round(self, adapters: Sequence[Adapter]) -> None:
        self.optimizer.begin(adapters)

    def finish_round(
        self, adapters: Sequence[Adapter], steps: Sequence[int], rates: Sequence[float] | None
    ) -> Callable[[], list[Verdict]]:
        """Launches the updates; what is returned waits for what became of them. Without `rates` nothing is
        updated."""
        if rates is None:
            fetched = self._readback.fetch(self.optimizer.norms(adapters))
            return lambda: [Verdict(norm) for norm in fetched.read()[0].tolist()]
        verdicts = self.optimizer.step(adapters, steps, rates)
        return lambda: [
            Verdict(norm, committed=True, finite=not overflow)
            for norm, overflow in zip(verdicts.norms.tolist(), verdicts.overflow.tolist(), strict=True)
        ]

    # ------------------------------------------------------------------ passes

    def forward_backward(self, parts: Sequence[Part]) -> list[list[float]]:
        return self.queue(parts).losses()

    def prepare(self, parts: Sequence[Part], *, training: bool = True) -> Prepared:
        """Lay a pass out while the device is busy with another; `queue` starts it."""
        plan = PassPlan.of(parts, share=self.share_trunk)
        rows = PassRows.of(plan.parts)
        shape = PassShape.of(
            plan, rows, training=training, coarse=self._coarse, checkpointing=self.checkpointing
        )
        key = (shape, training)
        entry = self._entry(key, lambda: PassBuffers(shape, self.base.config, self.base.device))
        while self._positions < np.diff(rows.starts).max():
            self._positions *= 2
        matrices = [self._table(part) for part in plan.parts]
        assert isinstance(entry.buffers, PassBuffers)
        entry.buffers.lay_out(plan, rows, matrices, training=training)
        entry.version += 1
        basis = self._basis(parts)
        return Prepared(parts, plan, training, rows.counts, key, entry, entry.version, basis)

    @torch.no_grad()
    def queue(self, work: Prepared | Sequence[Part]) -> Pending:
        """Start a pass; its gradients are in the arena for whatever is launched next."""
        if not isinstance(work, Prepared):
            return self._start(work, None, training=True)
        return self._start(work.parts, work, training=work.training)

    @torch.no_grad()
    def queue_evaluation(self, parts: Sequence[Part]) -> Pending:
        return self._start(parts, None, training=False)

    def _start(self, parts: Sequence[Part], prepared: Prepared | None, *, training: bool) -> Pending:
        self._count(parts)
        if prepared is None or self._is_stale(prepared):
            prepared = self.prepare(parts, training=training)
        plan, entry, optimizer = prepared.plan, prepared.entry, self.optimizer
        names, buffers = [part.adapter.name for part in plan.parts], entry.buffers
        assert isinstance(buffers, PassBuffers)
        if not entry.runs:
            self.backend.plan_cross_entropy(
                buffers.shape.labels, self.base.lm_head.dense(), training=training
            )
        kept = 0
        if plan.trunk:
            self._reserve_states(sum(len(row.tokens) for row in plan.trunk))
            kept = fill_states(self.cache, plan, self._states, self._run_rows)
        entry.version += 1
        buffers.upload(
            prepared.counts,
            [optimizer.seat(name) for name in names],
            [training and optimizer.fresh(name) for name in names],
        )
        nll = self._run(entry, lambda: self._launch(buffers, training))
        if training:
            optimizer.passed(names)
        return Pending(plan, prepared.counts, self._readback.fetch(nll), kept)

    def _reserve_states(self, tokens: int) -> None:
        """Room in `_states` for so many tokens, and the row past them."""
        if len(self._states) <= tokens:
            hidden, dtype = self._states.shape[1], self._states.dtype
            # Zeros: padding of the pass above gathers row 0.
            self._states = torch.zeros(1 << tokens.bit_length(), hidden, dtype=dtype, device=self.base.device)

    def _run_rows(
        self, rows: Sequence[Row], layers: int, states: torch.Tensor, places: Sequence[int]
    ) -> None:
        assert states is self._states
        shape = TrunkShape.of(rows, layers, coarse=self._coarse)
        entry = self._entry((shape, False), lambda: TrunkBuffers(shape, self.base.device))
        buffers = entry.buffers
        assert isinstance(buffers, TrunkBuffers)
        buffers.upload(rows, places, len(states) - 1)
        self._run(entry, lambda: self._launch_trunk(buffers))

    def _run(self, entry: _Entry, launch: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `launch` gives, launched or replayed; in a graph's memory, so until another one runs."""
        pointers = self._pointers()
        if entry.pointers != pointers:
            entry.graph, entry.pointers, entry.runs = None, pointers, 0
        if entry.graph is not None:
            entry.graph.replay()
            self.replays += 1
        elif not (entry.runs >= 1 and self._may_capture(entry) and self._capture(entry, launch)):
            entry.output = launch()
        entry.runs += 1
        output, entry.output = entry.output, entry.output if entry.graph is not None else None
        assert output is not None
        return output

    def _is_stale(self, prepared: Prepared) -> bool:
        """Whether what was laid out is gone, or is no longer what it would be."""
        return (
            prepared.version != prepared.entry.version
            or self._entries.get(prepared.key) is not prepared.entry
            or prepared.basis != self._basis(prepared.parts)
        )

    def _basis(self, parts: Sequence[Part]) -> tuple[object, ...]:
        """What a layout depends on besides the rows."""
        switches = (self.checkpointing, self.share_trunk)
        return (self.arena.generation, *switches, *(part.adapter.spec for part in parts))

    def _entry(self, key: Key, make: Callable[[], PassBuffers | TrunkBuffers]) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(make())
            if len(self._entries) > MAX_GRAPHS:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return entry

    def _table(self, part: Part) -> np.ndarray:
        """The adapter's `matrix_table`, made once for each slot it is given."""
        name = part.adapter.name
        slot = self.arena.slot(name)
        known = self._matrices.get(name)
        if known is None or known[0] is not slot:
            if len(self._matrices) > 2 * len(self.arena.names()):
                self._matrices.clear()
            known = self._matrices[name] = (slot, matrix_table(self.arena, name, self.base.config))
        return known[1]

    def _pointers(self) -> tuple[int, ...]:
        """What a graph has baked in besides its own buffers."""
        arena = self.arena
        cos, sin = self.decoder.rope_tables(self._positions)
        return (
            arena.whole("compute").data_ptr(),
            arena.whole("grads").data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            self._states.data_ptr(),
        )

    def _may_capture(self, entry: _Entry) -> bool:
        small = entry.buffers.shape.tokens * self._parameters <= GRAPH_LIMIT
        small = small and entry.buffers.shape.tokens <= self._most_captured
        return self.graphs and small and not entry.too_large

    def _capture(self, entry: _Entry, launch: Callable[[], torch.Tensor]) -> bool:
        """Captured, and run once; False when there is no memory for it."""
        found = self._captures.capture(launch)
        if found is None:
            entry.too_large = True
            self.without_graph += 1
            log.info("no memory for a CUDA graph of %d tokens", entry.buffers.shape.tokens)
            return False
        entry.graph, entry.output = found
        entry.graph.replay()
        self.replays += 1
        return True

    def give_up_graphs(self) -> bool:
        """Those of passes of half as many tokens may come back: launches cost them the most."""
        held = [entry.buffers.shape.tokens for entry in self._entries.values() if entry.graph is not None]
        if not held:
            return False
        torch.cuda.synchronize(self.base.device)
        self._most_captured = max(held) // 2
        self.without_graph += len(held)
        self._entries.clear()
        self._captures = GraphCapture(self.base.device)
        return True

    # ------------------------------------------------------------------ one pass

    def _launch_trunk(self, buffers: TrunkBuffers) -> torch.Tensor:
        """`_states`. Reads device memory only, as `_launch` does."""
        layout = self._layout_of(buffers.device, "", buffers.shape.tokens)
        x = self.decoder.trunk(buffers.device["tokens"], layout, buffers.shape.layers)
        return self._states.index_copy_(0, buffers.device["write"], x)

    def _launch(self, buffers: PassBuffers, training: bool) -> torch.Tensor:
        """nll (R,). Reads device memory only: no size or pointer of it depends on the pass's content."""
        shape, device = buffers.shape, buffers.device
        stages, needed = self._stages(buffers)
        x = self._states if shape.lowest else self.decoder.embed(device["tokens"])
        x_rows, kept = self.decoder.forward(
            x, stages, needed=needed, keep=training, checkpoint=shape.checkpoint
        )
        del x
        h, rstd = self.decoder.final_norm(x_rows)
        head, targets = self.base.lm_head.dense(), device["targets"]
        if not training:
            return self.backend.cross_entropy(h, head, targets, None)[0]
        nll, dh = self.backend.cross_entropy(h, head, targets, device["scale"])
        assert dh is not None
        # Whole numbers: their minimum does not depend on the order in which rows arrive.
        finite = torch.isfinite(nll).int()
        self.optimizer.flags.scatter_reduce_(0, device["owner"], finite, reduce="amin")
        dx = self.backend.rms_norm_backward(dh, x_rows, self.base.final_norm, rstd)
        del x_rows, h, dh
        self.decoder.backward(dx, kept, stages, needed=needed)
        return nll

    def _stages(self, buffers: PassBuffers) -> tuple[list[Stage], Needed]:
        shape, device, tables = buffers.shape, buffers.device, buffers.tables
        keys = device.get("keys")
        stages = []
        for i, lower in enumerate(shape.lower):
            layout = self._layout_of(device, str(i), lower.rows)
            own = self._layout_of(device, str(i), lower.own, "own_attention")
            lora = self._lora(
                tables.over(device[f"blocks{i}"]),
                shape.groups,
                None if keys is None else keys[:, : lower.own].contiguous(),
            )
            stages.append(Stage(lower.first, layout, lower.own, own, lora, device.get(f"gather{i}")))
        layout = self._layout_of(device, "", shape.tokens)
        lora = self._lora(tables, shape.groups, keys)
        stages.append(Stage(shape.first, layout, shape.tokens, layout, lora, device.get("gather")))
        at_labels = self._lora(
            tables.over(device["label_blocks"], device["label_rows"]),
            shape.groups,
            None if keys is None else keys.index_select(1, device["read"]),
        )
        return stages, Needed(device["read"], device["write"], shape.tokens, at_labels)

    def _layout_of(
        self, device: Mapping[str, torch.Tensor], number: str, rows: int, attention: str = "attention"
    ) -> DeviceLayout:
        return DeviceLayout(
            (0, rows),
            self.base.device,
            position=device[f"position{number}"][:rows],
            blocks=device[f"{attention}{number}"],
            table_rows=self._positions,
        )

    def _lora(self, tables: PassTables, groups: frozenset[str], keys: torch.Tensor | None) -> DeviceLora:
        arena = self.arena
        return DeviceLora(
            tables,
            arena.whole("compute"),
            arena.whole("grads"),
            self._workspace,
            groups,
            None if keys is None else _Masks(keys),
        )


class _Masks:
    """Keep masks (J, T, K) of the linears of a group, made on the device from each token's key.

    The last group's are kept: its dX, dA and dB ask one after the other, and a mask is T·K bytes a linear.
    """

    def __init__(self, keys: torch.Tensor) -> None:
        self._keys = keys
        self._last: tuple[Group, torch.Tensor] | None = None

    def __call__(self, group: Group) -> torch.Tensor:
        if self._last is None or self._last[0] != group:
            self._last = None  # its memory may serve again
            shape = (len(group.linears), self._keys.shape[1], group.inputs)
            masks = torch.empty(shape, dtype=torch.uint8, device=self._keys.device)
            for mask, linear in zip(masks, group.linears, strict=True):
                keep_masks(
                    self._keys, group.inputs, layer=group.layer, module=LINEARS.index(linear), out=mask
                )
            self._last = (group, masks)
        return self._last[1]
