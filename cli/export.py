"""`gshare export`: an adapter as files for others, alone or merged into its base; on the CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from gshare.agent.errors import UsageError
from gshare.cli.gpu_hold import without_gpu


def export(
    adapter: Path,
    *,
    to: Path | None = None,
    merge: Path | None = None,
    model: str | None = None,
    base: Literal["checkpoint", "dequantised"] = "checkpoint",
) -> None:
    """Copy ADAPTER's files (PEFT layout), or write a full checkpoint with it merged in.

    Parameters
    ----------
    adapter
        A job's output_dir, its best/ or a checkpoint.
    to
        New directory for a copy of the adapter alone.
    merge
        New directory for the merged checkpoint.
    model
        The base to merge into; by default the one the adapter names.
    base
        What to merge into: `checkpoint` is the base's own weights (the usual choice); `dequantised` is the
        nf4 or int8 values that the adapter was trained against, rounded to the checkpoint's dtype.
    """
    if (to is None) == (merge is None):
        raise UsageError("say either --to DIR (the adapter alone) or --merge DIR (base and adapter in one)")
    # Copying and merging are on the CPU. Without a visible GPU they stay there, and need no reservation.
    with without_gpu():
        _export(adapter, to=to, merge=merge, model=model, base=base)


def _export(adapter: Path, *, to: Path | None, merge: Path | None, model: str | None, base: str) -> None:
    from gshare.agent.service.environment import trainer_environment

    os.environ.update(trainer_environment())
    from gshare.agent.train.peft_files import copy_adapter, dequantiser, read_adapter, trained_dtype
    from gshare.agent.train.peft_files import merge as merge_into

    config, _ = read_adapter(adapter)
    if to is not None:
        copy_adapter(adapter, to)
        print(to)
        return
    assert merge is not None
    from gshare.agent.base.resolve import resolve_model
    from gshare.agent.xdg import cache_dir

    name = model or str(config.get("base_model_name_or_path") or "")
    if not name:
        raise UsageError(f"{adapter}/adapter_config.json names no base; give --model")
    trained = trained_dtype(adapter)
    resolved = resolve_model(name, cache_dir=cache_dir(), base_dtype=trained or "bf16")
    convert = None
    if base == "dequantised":
        if trained not in ("nf4", "int8"):
            raise UsageError(
                f"--base dequantised: {adapter} was trained on {trained or 'an unknown base dtype'}, "
                "not nf4 or int8"
            )
        convert = dequantiser(trained)
    changed = merge_into(
        adapter,
        resolved.path,
        merge,
        dequantised=convert,
        progress=lambda file: print(f"merging {file}", file=sys.stderr),
    )
    into = (
        f"the checkpoint's own weights at {resolved.path}"
        if convert is None
        else f"{trained} weights, dequantised"
    )
    print(f"merged {changed} linears into {into}", file=sys.stderr)
    if convert is None and trained in ("nf4", "int8"):
        print(
            f"note: the adapter was trained against {trained} weights; "
            "--base dequantised merges into exactly those",
            file=sys.stderr,
        )
    print(merge)
