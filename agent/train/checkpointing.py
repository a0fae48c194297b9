"""Whether activations are kept or recomputed: by the memory estimate before, by what fits afterwards.

Recomputing gives the same bits, so it may change from pass to pass; it costs about a third more work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from gshare.agent.base.config import read_config
from gshare.agent.base.weights import Base
from gshare.agent.jobs.memory import ModelShape, compute_bytes, graph_bytes, largest_pass
from gshare.agent.jobs.memory_choice import CPU_CARD, choose_estimate
from gshare.agent.jobs.spec import AdapterSpec, RunSpec

#: From so many tokens on a pass is cut in two before anything is recomputed: products of half as many rows
#: are nearly as fast (H200, 8B: 20.6 against 21.1 thousand tokens/s at 1,600 and 3,200), a second forward
#: is not free.
CUT_FIRST = 2048
_ANY = AdapterSpec(name="any", data="", output_dir="")


def does_not_fit(
    base: Base,
    specs: Sequence[AdapterSpec],
    *,
    max_tokens: int,
    max_adapters: int,
    budget_mb: int | None,
    identity: Callable[[], str | None] = lambda: None,
) -> bool:
    """Whether the run's estimate, activations kept, is more than the reservation; False without one.

    `identity`: the base's `base_identity`, under which it may have been measured.
    """
    spare = spare_bytes(
        base,
        specs,
        max_tokens=max_tokens,
        max_adapters=max_adapters,
        budget_mb=budget_mb,
        identity=identity,
        with_graphs=False,
    )
    return spare is not None and spare < 0


def spare_bytes(
    base: Base,
    specs: Sequence[AdapterSpec],
    *,
    max_tokens: int,
    max_adapters: int,
    budget_mb: int | None,
    identity: Callable[[], str | None] = lambda: None,
    with_graphs: bool = True,
) -> int | None:
    """What the reservation has over the run's estimate, activations kept; None without one."""
    if budget_mb is None or not specs:
        return None
    run = RunSpec(
        model="", max_tokens_per_pass=max_tokens, max_adapters_per_pass=max_adapters, adapters=tuple(specs)
    )
    tokens, longest = largest_pass(run)
    estimate = choose_estimate(
        ModelShape.of(base.config),
        specs,
        base_dtype=base.base_dtype,  # pyright: ignore[reportArgumentType]
        device="cuda" if base.device.type == "cuda" else "cpu",
        pass_tokens=tokens,
        longest_row=longest,
        base=identity,
        cards=(card_name(base.device),),
    )
    return budget_mb * 2**20 - (estimate.total if with_graphs else estimate.needed)


def graphs_mb(model_dir: Path, base_dtype: str, pass_tokens: int) -> int:
    """What captured passes of a base may take, with adapters on all layers; MiB."""
    shape = ModelShape.of(read_config(model_dir))
    compute = compute_bytes(base_dtype, "cuda")  # pyright: ignore[reportArgumentType]
    return -(-graph_bytes(shape, [_ANY], compute, pass_tokens) >> 20)


def card_name(device: torch.device) -> str:
    """What a device is called in the key of its measurements; the driver has the same name for it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else CPU_CARD
