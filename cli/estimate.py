"""`gshare estimate`: how much memory adapters take on a base, and how fast they train, measured where wanted.

    gshare estimate --model MODEL --count 8 --r 16 --max-length 512 [--base-dtype nf4] [--json]
    gshare estimate --model MODEL --measure [--again] [--vram 40]

What `--measure` finds is kept, and used from then on by `gshare finetune` and whatever else reserves memory
for this base on this card. Here too: the estimate of an answer, and what `--dry-run --json` prints.
"""

from __future__ import annotations

import json as json_module
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter
from gshare.agent.data.prepare import find_model, run_estimate
from gshare.agent.errors import EXIT_OK, GshareError, UsageError
from gshare.agent.jobs.memory import MemoryEstimate, ModelShape, estimate_generation, largest_pass
from gshare.agent.jobs.memory_choice import (
    CPU_CARD,
    find_profile,
    is_checkpointing,
    predicted_speed,
    profile_dir,
)
from gshare.agent.jobs.memory_grid import Configuration, grid, grid_estimate
from gshare.agent.jobs.memory_profile import DamagedProfile, MemoryProfile, profile_key, write_profile
from gshare.agent.jobs.spec import BaseDtype, JobRequest, RunSpec
from gshare.agent.jobs.spec_file import run_spec_from_flags
from gshare.agent.jobs.spec_rules import check_ranks
from gshare.agent.service.base_identity import base_identity
from gshare.agent.service.registry import GpuRequest
from gshare.agent.vram.budget import with_allowance
from gshare.cli.finetune_flags import AdapterFlags, ReserveFlags, RunFlags, given
from gshare.cli.gpu_plan import GpuPlan, plan_gpu, request_gpu
from gshare.cli.prepare import shares, told_while
from gshare.cli.streams import progress, stderr_console
from rich.text import Text

if TYPE_CHECKING:
    from gshare.agent.train.trunk_forecast import Forecast

#: More adapters than anybody trains at once; the estimate is a sum over them.
MOST_ADAPTERS = 4096
#: A smaller pass is not worth measuring, tokens.
LEAST_PASS = 1024

_NO_RUN_FLAGS = RunFlags()
_NO_ADAPTER_FLAGS = AdapterFlags()
_NO_GPU_FLAGS = ReserveFlags()


def estimate(
    *,
    model: str,
    count: int = 1,
    measure: Annotated[bool, Parameter(negative=())] = False,
    again: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    device: str = "auto",
    run_flags: RunFlags = _NO_RUN_FLAGS,
    adapter_flags: AdapterFlags = _NO_ADAPTER_FLAGS,
    gpu_flags: ReserveFlags = _NO_GPU_FLAGS,
) -> int:
    """How much memory adapters take on a base, and how fast they train.

    Parameters
    ----------
    model
        The base, as for finetune.
    count
        How many adapters like this one are trained at once.
    measure
        Measure this base on this device, unless that was done before. Minutes; reserves what it may take.
    again
        Measure it even so.
    json
        One object on stdout.
    device
        auto, cpu, cuda or cuda:N.
    """
    if not 1 <= count <= MOST_ADAPTERS:
        raise UsageError(f"--count {count}: must be from 1 to {MOST_ADAPTERS}")
    if again and not measure:
        raise UsageError("--again is for --measure; give both or none")
    run = run_spec_from_flags(
        model=model,
        # Its rows are never read: any file will do.
        adapters=[f"a{number}={__file__}:no-output/a{number}" for number in range(count)],
        options=given(run_flags, adapter_flags),
    )
    plan = plan_gpu(gpu_flags, device)
    # They are all alike: what is wrong with one is said once.
    if plan is not None:
        check_ranks(run.adapters[:1])
    with told_while(stderr_console(), f"looking for {Path(run.model).name}") as tell:
        model_dir = find_model(msgspec.structs.replace(run, adapters=run.adapters[:1]), shares(tell))
    base = base_identity(model_dir)
    profile, fault = _known(run, base, plan)
    if measure and (again or profile is None):
        if base is None:
            raise GshareError(f"{model_dir}: its weights cannot be told apart from others; nothing is kept")
        if fault:
            stderr_console().print(Text(f"{fault}; measuring again"))
        profile = _measure(run, model_dir, base, plan, gpu_flags, device, quiet=json)
    requests = [JobRequest(spec=spec, train_store="", train_hash="") for spec in run.adapters]
    cards = plan.cards if plan is not None else ()
    it = run_estimate(run, model_dir, requests, on_gpu=plan is not None, cards=cards)
    speed = _speed(run, model_dir, it, profile)
    if json:
        print(json_module.dumps(_as_json(run, model_dir, it, profile, speed)))
        return EXIT_OK
    print(it.table())
    if plan is not None:
        print(f"to reserve: {with_allowance(it.total, it.fragmentation):,} MiB, context included")
    if profile is not None:
        print(_profile_lines(profile))
    if speed is not None:
        print(f"speed: {speed:,.0f} tokens/s when its passes are full")
    return EXIT_OK


def _known(run: RunSpec, base: str | None, plan: GpuPlan | None) -> tuple[MemoryProfile | None, str]:
    """What was measured, on the first of the cards that has it; and what is wrong with a damaged file."""
    fault = ""
    for card in plan.cards if plan is not None else (CPU_CARD,):
        try:
            found = find_profile(
                base or "",
                base_dtype=run.base_dtype,
                card=card,
                checkpointing=is_checkpointing(run.adapters),
            )
        except DamagedProfile as error:
            fault = str(error)
            continue
        if found is not None:
            return found, ""
    return None, fault


def _measure(
    run: RunSpec,
    model_dir: Path,
    base: str,
    plan: GpuPlan | None,
    gpu_flags: ReserveFlags,
    device: str,
    *,
    quiet: bool,
) -> MemoryProfile:
    """Measured under a reservation, and kept; `quiet`: without saying how far it is."""
    from gshare.agent.service.environment import trainer_environment
    from gshare.cli.gpu_hold import hold_gpu, say

    os.environ.update(trainer_environment())
    from gshare.agent.base.config import read_config

    positions = read_config(model_dir).max_position_embeddings
    checkpointing = is_checkpointing(run.adapters)
    task = f"estimate {model_dir.name}"
    tokens, reserve = _reservable(run, model_dir, positions, plan, task)
    with hold_gpu(plan, reserve, task, flags=gpu_flags, device=device) as held:
        from gshare.agent.base.device import pick_device
        from gshare.agent.base.load import load_base
        from gshare.agent.train.checkpointing import card_name
        from gshare.agent.train.gpu_guard import make_guard
        from gshare.agent.train.measure_memory import Measurer, measure_memory
        from gshare.agent.train.memory_meter import make_meter
        from gshare.agent.train.out_of_memory import told
        from gshare.agent.xdg import cache_dir
        from gshare.kernels.backend import pick_backend

        where = pick_device(held.device)
        guard = make_guard(held.reservation, asked=held.device, where=where, may_grow=False, say=say)
        if where.type == "cpu" and not quiet:
            say(
                "info",
                f"on the CPU passes of up to {tokens:,} tokens take minutes each, of which there are "
                "some forty; --max-tokens-per-pass measures smaller ones",
            )
        with progress(quiet=quiet) as tell, told("the base", guard):
            tell("loading the base")
            backend = pick_backend(where, plans=cache_dir() / "gemm-plans.json")
            loaded = load_base(model_dir, base_dtype=run.base_dtype, device=where)
            limit = (guard.budget_mb() or 0) << 20
            meter = make_meter(where, resident_bytes=loaded.nbytes + loaded.scratch.nbytes, limit_bytes=limit)
            key = profile_key(
                base, base_dtype=run.base_dtype, card=card_name(where), checkpointing=checkpointing
            )
            profile = measure_memory(
                Measurer(loaded, backend, meter, checkpointing=checkpointing),
                key,
                max_tokens=tokens,
                max_length=positions,
                limit_bytes=limit,
                on_progress=lambda what, done, total: tell(
                    f"measuring {done + 1} of {total}: {what}" if total else f"measuring {what}"
                ),
            )
        guard.record("measure")
    path = write_profile(profile_dir(), profile)
    say("info", f"kept in {path}")
    return profile


def _reservable(
    run: RunSpec, model_dir: Path, positions: int, plan: GpuPlan | None, task: str
) -> tuple[int, Callable[[], MemoryEstimate]]:
    """The tokens of the largest pass that is measured, and its estimate: the run's, or what a device can hold
    at all. With --vram the reservation is that, and the measurement finds out what fits."""
    from gshare.agent.base.config import read_config

    shape = ModelShape.of(read_config(model_dir))
    tokens = run.max_tokens_per_pass
    while True:
        configurations: list[Configuration] = grid(tokens, max_length=positions)
        reserve = partial(
            grid_estimate,
            shape,
            configurations,
            base_dtype=run.base_dtype,
            device="cuda" if plan is not None else "cpu",
            checkpointing=is_checkpointing(run.adapters),
        )
        if plan is None:
            return tokens, reserve
        try:
            request_gpu(plan, reserve, task)
            return tokens, reserve
        except GshareError:
            if tokens // 2 < LEAST_PASS or plan.vram_mb is not None or plan.inherited is not None:
                raise
            tokens //= 2


def _speed(run: RunSpec, model_dir: Path, it: MemoryEstimate, profile: MemoryProfile | None) -> float | None:
    """Predicted tokens a second; None without a profile that says something of such passes."""
    from gshare.agent.base.config import read_config

    if profile is None:
        return None
    tokens, longest = largest_pass(run)
    return predicted_speed(
        ModelShape.of(read_config(model_dir)),
        run.adapters,
        profile,
        base_dtype=run.base_dtype,
        device=it.device,
        pass_tokens=tokens,
        longest_row=longest,
    )


def _profile_lines(profile: MemoryProfile) -> str:
    model, seconds = profile.memory, profile.seconds
    terms = " + ".join(
        f"{k:.4g}" if term == "constant" else f"{k:.4g} · {term}"
        for k, term in zip(model.coefficients, model.terms, strict=True)
    )
    return "\n".join(
        [
            f"measured: {len(profile.points)} configurations on {profile.key.card}, {profile.refused} did "
            f"not fit; largest batch of one adapter {profile.largest_batch} rows of {profile.length} tokens",
            f"bytes = {terms}; on points left out R² {model.r2:.4f}, worst error {model.worst_error:.1%}; "
            f"margin {model.margin:.1%}",
            f"seconds a step: on points left out R² {seconds.r2:.4f}, worst error {seconds.worst_error:.1%}",
        ]
    )


def _as_json(
    run: RunSpec,
    model_dir: Path,
    it: MemoryEstimate,
    profile: MemoryProfile | None,
    speed: float | None,
) -> dict[str, Any]:
    """What `--json` prints; amounts in bytes, the budget in MiB (null on the CPU)."""
    return {
        "type": "estimate",
        "model": run.model,
        "model_dir": str(model_dir),
        "base_dtype": run.base_dtype,
        "count": len(run.adapters),
        "budget_mb": with_allowance(it.total, it.fragmentation) if it.device == "cuda" else None,
        "memory": _memory_json(it),
        "tokens_per_s": speed,
        "measured": None
        if profile is None
        else {
            "card": profile.key.card,
            "configurations": len(profile.points),
            "refused": profile.refused,
            "largest_batch": profile.largest_batch,
            "length": profile.length,
            "terms": dict(zip(profile.memory.terms, profile.memory.coefficients, strict=True)),
            "r2": profile.memory.r2,
            "worst_error": profile.memory.worst_error,
            "margin": profile.memory.margin,
        },
    }


def _memory_json(estimate: MemoryEstimate) -> dict[str, Any]:
    return {
        "device": estimate.device,
        "total_bytes": estimate.total,
        "source": estimate.source,
        "parts": [
            {"name": part.name, "bytes": part.nbytes, "note": part.note, "host": part.host}
            for part in estimate.parts
        ],
    }


def generation_estimate(
    model_dir: Path, adapter: Path | None, *, base_dtype: BaseDtype, prompt_tokens: int, new_tokens: int
) -> MemoryEstimate:
    """Of answering one prompt on a GPU; `adapter` is a directory in PEFT's layout."""
    from gshare.agent.base.config import read_config

    config = read_config(model_dir)
    weights = adapter / "adapter_model.safetensors" if adapter is not None else None
    return estimate_generation(
        ModelShape.of(config),
        base_dtype=base_dtype,
        device="cuda",
        prompt_tokens=prompt_tokens,
        positions=min(prompt_tokens + new_tokens, config.max_position_embeddings),
        adapter_bytes=weights.stat().st_size if weights is not None and weights.is_file() else 0,
    )


def dry_run_json(
    run: RunSpec,
    model_dir: Path,
    requests: Sequence[JobRequest],
    estimate: MemoryEstimate,
    gpu: GpuRequest | None,
    trunk: Forecast | None,
) -> dict[str, Any]:
    """What `finetune --dry-run --json` prints, one object; amounts in bytes, the budget in MiB.

    `gpu` null: the run is on the CPU and reserves nothing. `reservation`: the `gpu run` that it would use.
    `trunk` null: there is one adapter.
    """
    return {
        "type": "dry_run",
        "model": run.model,
        "model_dir": str(model_dir),
        "base_dtype": run.base_dtype,
        "schedule": run.schedule,
        "adapters": [
            {"name": request.spec.name, "data": request.spec.data, "output_dir": request.spec.output_dir}
            for request in requests
        ],
        "gpu": None
        if gpu is None
        else {"budget_mb": gpu.budget_mb, "gpus": list(gpu.gpus), "reservation": gpu.inherit or None},
        "memory": _memory_json(estimate),
        "trunk": trunk.as_json() if trunk is not None else None,
    }
