"""What the memory and the time of a training pass depend on, as numbers that a model can be fitted over."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from gshare.agent.jobs.memory import (
    MemoryEstimate,
    ModelShape,
    adapter_bytes,
    compute_bytes,
    is_launch_bound,
)
from gshare.agent.jobs.spec import AdapterSpec, BaseDtype
from gshare.kernels.logit_chunks import chunk_rows, most_rows


def rung(rows: int, *, coarse: bool = False) -> int:
    """The padded number of rows: a multiple of 64 up to 512, of 128 up to 8,192, of 512 above.

    At the 3,200 tokens of sixteen short rows 2 % are lost on average, and 70 shapes reach 8,192. A shape that
    is met for the first or second time is launched kernel by kernel, so where launches are what a step takes
    (`is_launch_bound`) shapes are fewer: `coarse` is a multiple of 64 up to 256, of 128 up to 512, of 256 up
    to 2,048, of 512 above. A sweep of 60 configurations of SmolLM2 over real rows, trained in full, makes
    1,429 passes: 517 are launched or captured without it, 162 with it.
    """
    if coarse:
        step = 64 if rows <= 256 else 128 if rows <= 512 else 256 if rows <= 2048 else 512
    else:
        step = 64 if rows <= 512 else 128 if rows <= 8192 else 512
    return max(step, -(-rows // step) * step)


def label_rung(rows: int, *, coarse: bool = False) -> int:
    """The padded number of rows that predict a label: `rung`, but a power of two up to 2,048 and a multiple
    of 1,024 above where shapes are to be few. They meet tokens' rungs in every combination: of 1,250 passes
    of a sweep of 60 configurations of SmolLM2 115 are launched or captured with the rungs of tokens, 88 with
    these.
    """
    if not coarse:
        return rung(rows)
    return max(64, 1 << max(rows - 1, 0).bit_length()) if rows <= 2048 else -(-rows // 1024) * 1024


#: What a pass's rank is padded to on CUDA: its largest, to the next of these.
RANKS = (8, 16, 32, 64, 128, 256)


def padded_rank(rank: int) -> int:
    return next((known for known in RANKS if known >= rank), rank)


class PassLoad(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest pass of a run, and the adapters that are resident beside it. No field is below zero."""

    adapters: int
    tokens: int  # B·L of the pass; on CUDA padded to its rung
    longest_row: int  # tokens
    adapter_bytes: int  # weights, gradients and the copy in the compute dtype
    optimizer_bytes: int
    largest_adapter: int  # `adapter_bytes` of the largest one: updates are made one adapter at a time
    ranks: int  # r times adapted linears of a layer, of the adapter with the most; on CUDA a pass's: `_ranks`
    logit_bytes: int  # of the rows that the head takes at once
    mask_bytes: int  # dropout's keep masks of the widest group of linears; 0 without dropout


def pass_load(
    shape: ModelShape,
    adapters: Sequence[AdapterSpec],
    estimate: MemoryEstimate,
    *,
    base_dtype: BaseDtype,
    pass_tokens: int,
    longest_row: int,
    labels: int | None = None,
) -> PassLoad:
    """The load of a run whose analytic `estimate` was made from the same arguments.

    `labels`: tokens of the pass that are predicted; None: as many as the head takes most memory for, which
    need not be all (`logit_chunks.py`).
    """
    coarse = is_launch_bound(shape.parameters)
    tokens = rung(pass_tokens, coarse=coarse) if estimate.device == "cuda" else pass_tokens
    compute = compute_bytes(base_dtype, estimate.device)
    most = max((spec.r * len(spec.targets) for spec in adapters), default=0)
    dropping = any(spec.lora_dropout > 0 for spec in adapters)
    # One byte a value of each linear's input, one group at a time: q, k and v read the same H values.
    widest = max(3 * shape.hidden_size, shape.num_heads * shape.head_dim, shape.intermediate_size)
    return PassLoad(
        adapters=len(adapters),
        tokens=tokens,
        longest_row=longest_row,
        adapter_bytes=estimate["adapters"],
        optimizer_bytes=estimate["optimizer"],
        largest_adapter=max((adapter_bytes(shape, spec, compute) for spec in adapters), default=0),
        ranks=_ranks(adapters) if estimate.device == "cuda" else most,
        logit_bytes=_logit_bytes(shape, compute, tokens, labels, coarse=coarse)
        if estimate.device == "cuda"
        else estimate["logits"],
        mask_bytes=tokens * widest if dropping else 0,
    )


def _logit_bytes(shape: ModelShape, compute: int, tokens: int, labels: int | None, *, coarse: bool) -> int:
    if labels is None:
        rows = most_rows(tokens, shape.vocab_size, compute)
    else:
        rows = chunk_rows(min(label_rung(labels, coarse=coarse), tokens), shape.vocab_size, compute)
    return rows * shape.vocab_size * compute


def _ranks(adapters: Sequence[AdapterSpec]) -> int:
    """Every row of a pass has room for the highest rank, padded, at each linear that anybody adapts."""
    linears = {linear for spec in adapters for linear in spec.targets}
    return padded_rank(max((spec.r for spec in adapters), default=0)) * len(linears)
