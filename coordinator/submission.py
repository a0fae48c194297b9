"""From a run's spec to a submission: every file hashed, the model's size and memory told where it can be.

No torch and no transformers: what is wrong with the data's rows shows on the node that tokenises them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gshare.agent.base.config import read_config
from gshare.agent.errors import UsageError
from gshare.agent.jobs.memory import ModelShape, estimate_run, largest_pass
from gshare.agent.jobs.names import name_fault
from gshare.agent.jobs.spec import AdapterSpec, RunSpec
from gshare.agent.vram.budget import FRAGMENTATION, with_allowance
from gshare.coordinator.api_protocol import JobSubmission, LocalFile, ModelSource
from gshare.coordinator.blobs import hash_file
from gshare.coordinator.gguf_header import gguf_shape
from gshare.coordinator.placement import CPU_MAX_PARAMETERS

#: What of a model's directory a node needs; weights in other formats and the like are not sent.
_MODEL_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".model", ".txt"})

#: what is being done
Say = Callable[[str], None]


def build_submission(run: RunSpec, say: Say = lambda text: None) -> dict[str, Any]:
    """The fields of `SubmitToCluster`, besides its id.

    UsageError: a model that does not exist here and cannot be a hub id or a path of the nodes, a model's
    directory without config.json, a file that cannot be read.
    """
    model, shape = _model(run.model, say)
    jobs = []
    for spec in run.adapters:
        base_mb, adapter_mb = _memory(run, spec, shape)
        jobs.append(
            JobSubmission(
                spec=spec,
                data=_file(Path(spec.data), say),
                val_data=_file(Path(spec.val_data), say) if spec.val_data else None,
                base_mb=base_mb,
                adapter_mb=adapter_mb,
            )
        )
    return {
        "submission": secrets.token_hex(16),
        "model": model,
        "base_dtype": run.base_dtype,
        "schedule": run.schedule,
        "max_tokens_per_pass": run.max_tokens_per_pass,
        "max_adapters_per_pass": run.max_adapters_per_pass,
        "jobs": tuple(jobs),
    }


def _model(name: str, say: Say) -> tuple[ModelSource, ModelShape | None]:
    path = Path(name)
    if not path.is_absolute():  # `spec_file` makes every path absolute: this is a hub id
        shape = _cached_shape(name)
        return ModelSource(name=name, parameters=shape.parameters if shape else 0), shape
    if not path.exists():  # may be a path that nodes have, or a name of their `models`
        return ModelSource(name=name), None
    if path.is_file():
        shape = gguf_shape(path)
        files: Sequence[Path] = [path]
    else:
        shape = ModelShape.of(read_config(path))
        files = sorted(p for p in path.iterdir() if p.suffix in _MODEL_SUFFIXES and p.is_file())
    sent = tuple(_file(file, say) for file in files)
    return ModelSource(name=name, files=sent, parameters=shape.parameters), shape


def _cached_shape(name: str) -> ModelShape | None:
    """Of a hub id that happens to be in Hugging Face's cache here; None otherwise: the nodes find out."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    root = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    for config in sorted(root.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")):
        try:
            return ModelShape.of(read_config(config.parent))
        except UsageError:
            continue  # a family that we do not know: the node says so
    return None


def _memory(run: RunSpec, spec: AdapterSpec, shape: ModelShape | None) -> tuple[int, int]:
    """(base_mb, adapter_mb), MiB: what the base takes with one adapter's pass, and what each adapter adds.

    Models that a CPU-only node may get are counted with the CPU's fp32, which is the larger.
    """
    if shape is None:
        return 0, 0
    tokens, longest = largest_pass(run)
    device = "cpu" if shape.parameters <= CPU_MAX_PARAMETERS else "cuda"
    estimate = estimate_run(
        shape,
        [spec],
        base_dtype=run.base_dtype,
        device=device,
        pass_tokens=tokens,
        longest_row=longest,
        attention_matrix=device == "cpu",
    )
    own = estimate["adapters"] + estimate["optimizer"]
    adapter_mb = max(1, round(own / 2**20 * (1 + FRAGMENTATION)))
    return max(1, with_allowance(estimate.total) - adapter_mb), adapter_mb


def _file(path: Path, say: Say) -> LocalFile:
    say(f"hashing {path.name}")
    # It gets this name on the node, where the format of data goes by the suffix.
    names = (path.name, f"file{path.suffix}")
    name = next((name for name in names if name_fault(name) is None), "file")
    try:
        return LocalFile(name=name, path=str(path), sha256=hash_file(path), size=path.stat().st_size)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
