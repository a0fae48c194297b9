"""From a run's spec to a submission: every file hashed, the model's size and memory told where it can be.

No torch and no transformers: what is wrong with the data's rows shows on the node that tokenises them.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gshare.agent.base.config import read_config
from gshare.agent.errors import UsageError
from gshare.agent.jobs.faults import Faults
from gshare.agent.jobs.memory import ModelShape, estimate_run, largest_pass
from gshare.agent.jobs.model_limits import add_model_faults
from gshare.agent.jobs.names import name_fault, shorten
from gshare.agent.jobs.spec import AdapterSpec, RunSpec
from gshare.agent.vram.budget import FRAGMENTATION, with_allowance
from gshare.coordinator.api_protocol import JobSubmission, LocalFile, ModelSource
from gshare.coordinator.blobs import hash_file
from gshare.coordinator.config import ClusterConfig
from gshare.coordinator.gguf_header import gguf_shape
from gshare.coordinator.placement import CPU_MAX_PARAMETERS

#: What of a model's directory a node needs; weights in other formats and the like are not sent.
_MODEL_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".model", ".txt"})

#: Without an owner it is most likely a directory that is not there; the hub's few such names have aliases.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")

#: what is being done
Say = Callable[[str], None]


def build_submission(
    run: RunSpec, say: Say = lambda text: None, known: dict[Path, LocalFile] | None = None
) -> dict[str, Any]:
    """The fields of `SubmitToCluster`, besides its id. `known`: the files hashed so far; it gets the others.

    UsageError: a model's directory without config.json, a file that cannot be read, an adapter beyond the
    model when that can be told here.
    """
    known = {} if known is None else known
    shape, max_positions = _shape(run.model)
    if shape is not None:
        faults = Faults()
        add_model_faults(run.adapters, shape.num_layers, max_positions, faults)
        faults.raise_if_any()
    model = _model(run.model, shape, say, known)
    jobs = []
    for spec in run.adapters:
        base_mb, adapter_mb = _memory(run, spec, shape)
        jobs.append(
            JobSubmission(
                spec=spec,
                data=_file(Path(spec.data), say, known),
                val_data=_file(Path(spec.val_data), say, known) if spec.val_data else None,
                base_mb=base_mb,
                adapter_mb=adapter_mb,
            )
        )
    if (run.trunk_cache, run.trunk_cache_host) != ("auto", 0.0):
        say('trunk_cache and trunk_cache_host are not sent to the nodes: each does as for "auto"')
    return {
        "submission": secrets.token_hex(16),
        "model": model,
        "base_dtype": run.base_dtype,
        "schedule": run.schedule,
        "max_tokens_per_pass": run.max_tokens_per_pass,
        "max_adapters_per_pass": run.max_adapters_per_pass,
        "jobs": tuple(jobs),
    }


def check_model(name: str, cluster: ClusterConfig) -> None:
    """UsageError when a run's model is neither here nor on a node, and can be none of the hub's."""
    path = Path(name)
    if any(name in node.models for node in cluster.nodes):
        return
    if path.is_absolute():
        missing = not path.exists()
    else:
        missing = not _HUB_ID.fullmatch(name) and _cached_shape(name)[0] is None
    if missing:
        raise UsageError(
            f"model {shorten(name)}: no such directory or .gguf file here, no hub id (owner/name), and no "
            f"node in {cluster.source} has it in `models`; correct it, or name it there"
        )


def _shape(name: str) -> tuple[ModelShape | None, int | None]:
    """What can be told here of the model: its shape, and the most positions of a row (None: not known)."""
    path = Path(name)
    if not path.is_absolute():  # `spec_file` makes every path absolute: this is a hub id
        return _cached_shape(name)
    if not path.exists():  # may be a path that nodes have, or a name of their `models`
        return None, None
    return (gguf_shape(path), None) if path.is_file() else _read_shape(path)


def _read_shape(directory: Path) -> tuple[ModelShape, int]:
    config = read_config(directory)
    return ModelShape.of(config), config.max_position_embeddings


def _model(name: str, shape: ModelShape | None, say: Say, known: dict[Path, LocalFile]) -> ModelSource:
    path = Path(name)
    files: Sequence[Path] = ()
    if path.is_absolute() and path.is_file():
        files = [path]
    elif path.is_absolute() and path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in _MODEL_SUFFIXES and p.is_file())
    sent = tuple(_file(file, say, known) for file in files)
    return ModelSource(name=name, files=sent, parameters=shape.parameters if shape else 0)


def _cached_shape(name: str) -> tuple[ModelShape | None, int | None]:
    """Of a hub id that happens to be in Hugging Face's cache here; None otherwise: the nodes find out."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    root = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    for config in sorted(root.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")):
        try:
            return _read_shape(config.parent)
        except UsageError:
            continue  # a family that we do not know: the node says so
    return None, None


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


def _file(path: Path, say: Say, known: dict[Path, LocalFile]) -> LocalFile:
    if path in known:
        return known[path]
    say(f"hashing {path.name}")
    # It gets this name on the node, where the format of data goes by the suffix.
    names = (path.name, f"file{path.suffix}")
    name = next((name for name in names if name_fault(name) is None), "file")
    try:
        size = path.stat().st_size
        known[path] = LocalFile(name=name, path=str(path), sha256=hash_file(path), size=size)
        return known[path]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
