"""A pass of random LoRA adapters for the grouped kernels' tests: what each of them reads and writes.

Everything an adapter owns (its rows of x, y, dy, dx and masks, its matrices, its gradients) comes from its
own seed, so that it is the same in any pass, in any place, beside anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from gshare.kernels.grouped_lora_backward_triton import lora_ds, lora_dx
from gshare.kernels.grouped_lora_grads_triton import lora_grads
from gshare.kernels.grouped_lora_triton import lora_expand, lora_shrink
from gshare.kernels.lora_tables import GroupShape, LoraWorkspace, PassAdapter, PassTables, column_width

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEEP = 0.7


@dataclass(frozen=True)
class Job:
    """One adapter: ranks of the group's linears and lengths of its sequences. `poisoned`: all its values
    are NaN or Inf."""

    seed: int
    ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    poisoned: bool = False


@dataclass
class Pass:
    """The tensors of one pass. `adapters` say where each job lies; `outputs` what the kernels wrote."""

    shape: GroupShape
    adapters: list[PassAdapter]
    tables: PassTables
    flat: torch.Tensor
    grads: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor
    dy: torch.Tensor
    dx: torch.Tensor
    mask: torch.Tensor | None

    @property
    def columns(self) -> int:
        return self.tables.groups[0].columns


def _values(job: Job, shape: GroupShape) -> dict[str, list[torch.Tensor]]:
    """Per linear A, B, their gradients; per job x, y, dy, dx and the mask's rows. All fp32, on the CPU."""
    generator = torch.Generator().manual_seed(job.seed)
    tokens, k = sum(job.lengths), shape.in_features

    def draw(*size: int) -> torch.Tensor:
        drawn = torch.randn(*size, generator=generator)
        if job.poisoned:
            drawn = torch.where(drawn > 0, torch.nan, torch.inf)
        return drawn

    values = {
        "rows": [
            draw(tokens, k),
            *(draw(tokens, sum(shape.out_features)) for _ in range(2)),
            draw(tokens, k),
        ],
        "mask": [torch.rand(len(job.ranks), tokens, k, generator=generator)],
        "a": [draw(r, k) for r in job.ranks],
        "b": [draw(n, r) for r, n in zip(job.ranks, shape.out_features, strict=True)],
    }
    values["grad_a"] = [draw(*a.shape) for a in values["a"]]
    values["grad_b"] = [draw(*b.shape) for b in values["b"]]
    return values


def make_pass(
    shape: GroupShape,
    jobs: Sequence[Job],
    dtype: torch.dtype,
    *,
    before: int = 0,
    after: int = 3,
    dropout: bool = False,
    spare: int = 1,
    max_rank: int | None = None,
) -> Pass:
    """The pass of `jobs`, after `before` and followed by `after` rows of nobody (NaN); the tables have room
    for `spare` more adapters than there are."""
    starts = list(accumulate((sum(job.lengths) for job in jobs), initial=before))
    total = starts[-1] + after
    rows = [torch.full((total, n), torch.nan) for n in (shape.in_features, *2 * [sum(shape.out_features)])]
    rows.append(torch.full((total, shape.in_features), torch.nan))
    mask = torch.full((shape.linears, total, shape.in_features), 2.0)
    adapters, flat, grads = [], [torch.full((16,), torch.nan)], [torch.zeros(16)]
    at = 16
    for job, (start, end) in zip(jobs, pairwise(starts), strict=True):
        values = _values(job, shape)
        for into, own in zip(rows, values["rows"], strict=True):
            into[start:end] = own
        mask[:, start:end] = values["mask"][0]
        places = np.zeros((shape.linears, 3), dtype=np.int64)
        for j, rank in enumerate(job.ranks):
            places[j, 2] = rank
            for side, name in enumerate(("a", "b")):
                places[j, side] = at
                matrix, gradient = values[name][j].flatten(), values[f"grad_{name}"][j].flatten()
                gap = -len(matrix) % 16
                flat += [matrix, torch.full((gap,), torch.nan)]
                grads += [gradient, torch.zeros(gap)]
                at += len(matrix) + gap
        ends = list(accumulate(job.lengths, initial=start))
        adapters.append(PassAdapter(tuple(pairwise(ends)), 0.5 + job.seed % 3, places))
    tables = PassTables(
        [shape],
        DEVICE,
        max_adapters=len(jobs) + spare,
        max_sequences=sum(len(job.lengths) for job in jobs) + spare,
        max_blocks=total // 64 + len(jobs) + spare,
        max_rank=max_rank or max(1, *(rank for job in jobs for rank in job.ranks)),
    )
    tables.refresh(adapters)
    x, y, dy, dx = (t.to(DEVICE, dtype) for t in rows)
    kept = (mask < KEEP).to(torch.uint8).to(DEVICE) if dropout else None
    whole_flat, whole_grads = torch.cat(flat).to(DEVICE, dtype), torch.cat(grads).to(DEVICE)
    return Pass(shape, adapters, tables, whole_flat, whole_grads, x, y, dy, dx, kept)


def run(p: Pass, workspace: LoraWorkspace | None = None) -> dict[str, torch.Tensor]:
    """Every kernel once, on copies of what they change."""
    workspace = workspace or LoraWorkspace(DEVICE)
    y, dx, grads = p.y.clone(), p.dx.clone(), p.grads.clone()
    s = lora_shrink(p.x, p.flat, p.tables, 0, workspace, p.mask)
    lora_expand(y, s, p.flat, p.tables, 0)
    ds = lora_ds(p.dy, p.flat, p.tables, 0, workspace)
    lora_dx(dx, ds, p.flat, p.tables, 0, p.mask)
    lora_grads(p.x, p.dy, s, ds, grads, p.tables, 0, p.mask)
    return {"s": s, "y": y, "ds": ds, "dx": dx, "grads": grads}


def own_bytes(p: Pass, outputs: dict[str, torch.Tensor], index: int) -> dict[str, bytes]:
    """What the pass's `index`-th adapter got, byte for byte."""
    adapter = p.adapters[index]
    rows = slice(adapter.sequences[0][0], adapter.sequences[-1][1])
    width = sum(column_width(int(rank)) for rank in adapter.matrices[:, 2])
    last = adapter.matrices[-1]
    end = int(last[1]) + int(last[2]) * p.shape.out_features[-1]
    parts = {
        "s": outputs["s"][rows, :width],
        "y": outputs["y"][rows],
        "ds": outputs["ds"][rows, :width],
        "dx": outputs["dx"][rows],
        "grads": outputs["grads"][int(adapter.matrices[0, 0]) : end],
    }
    return {name: part.contiguous().cpu().view(torch.uint8).numpy().tobytes() for name, part in parts.items()}
