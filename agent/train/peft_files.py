"""Reading an exported adapter (PEFT layout), and merging it into a full checkpoint."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gshare.agent.base.checkpoint_files import open_shard
from gshare.agent.base.config import ModelConfig
from gshare.agent.base.generate import LoadedLora
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.names import shorten
from gshare.agent.jobs.spec import LINEARS, BaseDtype
from gshare.agent.train.files import publish_dir, temporary_name
from gshare.kernels import int8, nf4
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

_TENSOR = re.compile(
    r"^base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight$"
)
Matrices = dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MOST_ALPHA = 1e30  # far below fp32's largest
MAX_RANK = 1 << 16  # PEFT has no bound; files of other tools may be beyond gshare's own 1024

#: Settings of PEFT's LoraConfig that change what an adapter computes, or the base that it was trained on, and
#: the values that mean "not used"; null and empty do too.
_UNUSED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA put another base below the adapter; these do not.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    **dict.fromkeys(("use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out"), (False,)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters"), ()),
    **dict.fromkeys(("layer_replication", "trainable_token_indices", "alora_invocation_tokens"), ()),
    **dict.fromkeys(("arrow_config", "kasa_config", "monteclora_config", "velora_config"), ()),
}


def read_adapter(directory: Path) -> tuple[dict[str, Any], Matrices]:
    """adapter_config.json and the (layer, linear) → (A, B) matrices in fp32. UsageError names the file."""
    config, rank = read_adapter_config(directory)
    weights_path = directory / "adapter_model.safetensors"
    try:
        tensors = load_file(weights_path)
    except (ValueError, SafetensorError, OSError) as error:
        raise UsageError(f"{weights_path}: cannot be read as an adapter's: {error}") from error
    halves: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.match(name)
        if match is None:
            raise UsageError(
                f"{weights_path}: unexpected tensor {name}; only LoRA of linear layers is supported"
            )
        if tensor.dtype not in _FLOATS:
            raise UsageError(f"{weights_path}: tensor {name} is {tensor.dtype}; only float matrices are read")
        if tensor.dim() != 2 or tensor.shape[0 if match[3] == "A" else 1] != rank:
            wanted = f"({rank}, in_features)" if match[3] == "A" else f"(out_features, {rank})"
            raise UsageError(
                f"{weights_path}: tensor {name} has shape {tuple(tensor.shape)}; "
                f"with r {rank} in adapter_config.json it must be {wanted}"
            )
        halves.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor.float()
    incomplete = [key for key, pair in halves.items() if len(pair) != 2]
    if incomplete or not halves:
        raise UsageError(
            f"{weights_path}: lora_A and lora_B do not pair up at {incomplete[:3] or 'any layer'}"
        )
    return config, {key: (pair["A"], pair["B"]) for key, pair in halves.items()}


def read_adapter_config(directory: Path) -> tuple[dict[str, Any], int]:
    """adapter_config.json and the rank in it, without the matrices, whose file must be there.

    UsageError names the file: what it says is known before a base is loaded, or memory is reserved for one.
    """
    config_path = directory / "adapter_config.json"
    for path in (config_path, directory / "adapter_model.safetensors"):
        if not path.is_file():
            raise UsageError(
                f"{path} is missing: {directory} is not an adapter (give the job's output_dir, or its best/)"
            )
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise UsageError(f"{config_path}: cannot be read as an adapter's: {error}") from error
    return config, _check_config(config, config_path)


def _check_config(config: object, path: Path) -> int:
    """The rank; UsageError for a config that asks for anything but plain LoRA of one rank and alpha."""
    if not isinstance(config, dict):
        raise UsageError(f"{path}: must hold a JSON object")
    for key, unused in _UNUSED.items():
        value = config.get(key)
        if value not in (None, [], {}) and not any(type(value) is type(v) and value == v for v in unused):
            raise UsageError(
                f"{path}: {key} is {shorten(value)}, which changes what the adapter computes and is not "
                "supported; only plain LoRA of linear layers is"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise UsageError(f"{path}: r must be a whole number from 1 to {MAX_RANK}, not {shorten(rank)}")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not abs(alpha) <= _MOST_ALPHA:
        raise UsageError(f"{path}: lora_alpha must be a finite number, not {shorten(alpha)}")
    if not isinstance(config.get("use_rslora", False), (bool, type(None))):
        raise UsageError(f"{path}: use_rslora must be true or false, not {shorten(config['use_rslora'])}")
    return rank


def adapter_scaling(config: dict[str, Any]) -> float:
    """lora_alpha / r, or lora_alpha / √r with use_rslora, as PEFT."""
    r = float(config["r"])
    return float(config["lora_alpha"]) / (r**0.5 if config.get("use_rslora") else r)


def load_lora(directory: Path, device: torch.device, dtype: torch.dtype) -> LoadedLora:
    """The adapter ready for generation."""
    config, matrices = read_adapter(directory)
    moved = {key: (a.to(device, dtype), b.to(device, dtype)) for key, (a, b) in matrices.items()}
    return LoadedLora(moved, adapter_scaling(config))


def merge(
    adapter_dir: Path,
    model_dir: Path,
    out: Path,
    *,
    dequantised: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    progress: Callable[[str], None] = lambda file: None,
) -> int:
    """Write a full checkpoint to `out` with W + scaling · B A merged in; returns how many linears changed.

    The sum is made in fp32 and rounded to the checkpoint's dtype. Every other tensor, tied embeddings
    included, is copied as it is. `dequantised(name, weight)` replaces a linear's weight before the merge
    (the NF4 or int8 values the adapter was trained against); None merges into the checkpoint's own values.
    """
    config, matrices = read_adapter(adapter_dir)
    scaling = adapter_scaling(config)
    names = {
        f"model.layers.{layer}.{'mlp' if linear in ('gate_proj', 'up_proj', 'down_proj') else 'self_attn'}."
        f"{linear}.weight": pair
        for (layer, linear), pair in matrices.items()
    }
    merged: set[str] = set()
    with _new_directory(out) as temporary:
        for source in sorted(model_dir.iterdir()):
            if source.suffix != ".safetensors":
                if source.is_file() and source.suffix in (".json", ".model", ".txt", ".jinja"):
                    shutil.copyfile(source, temporary / source.name)
                continue
            progress(source.name)
            tensors = {}
            with open_shard(source) as shard:
                for name in shard.keys():  # noqa: SIM118  (not a dict)
                    weight = shard.get_tensor(name)
                    if name in names:
                        a, b = names[name]
                        if tuple(weight.shape) != (b.shape[0], a.shape[1]):
                            raise UsageError(
                                f"{adapter_dir} does not fit {model_dir}: {name} is {tuple(weight.shape)}, "
                                f"the adapter's is {(b.shape[0], a.shape[1])}"
                            )
                        start = dequantised(name, weight) if dequantised is not None else weight
                        weight = (start.float() + scaling * (b @ a)).to(weight.dtype)
                        merged.add(name)
                    tensors[name] = weight.contiguous()
            _save(tensors, temporary / source.name)
        missing = sorted(names.keys() - merged)
        if missing:
            raise UsageError(f"{model_dir} has no tensor {missing[0]}; the adapter is for another model")
    return len(merged)


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """A safetensors file of mode 0644 less the umask; safetensors itself writes 0600 and renames."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    mode = os.fstat(fd).st_mode & 0o777  # the kernel has applied the umask
    os.close(fd)
    save_file(tensors, path, metadata={"format": "pt"})
    os.chmod(path, mode)


def copy_adapter(adapter_dir: Path, out: Path) -> None:
    """The adapter's two files in the new directory `out`, whole or not at all."""
    with _new_directory(out) as temporary:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copyfile(adapter_dir / name, temporary / name)


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `out` at the end; after an error neither of them is left.

    UsageError when `out` is there already; GshareError naming `out` when it cannot be written.
    """
    temporary = temporary_name(out)
    try:
        if os.path.lexists(out):
            raise UsageError(f"{out} exists already; choose a new directory")
        temporary.mkdir(parents=True)
        yield temporary
        publish_dir(temporary, out)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise GshareError(f"{out}: cannot be written: {reason}; nothing was left there") from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def trained_dtype(adapter_dir: Path) -> BaseDtype | None:
    """The base_dtype that the run beside (or above) an adapter recorded; None without a run.json."""
    for directory in (adapter_dir, adapter_dir.parent):
        try:
            record = json.loads((directory / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        dtype = record.get("base_dtype") if isinstance(record, dict) else None
        if dtype in ("nf4", "int8", "bf16", "fp32"):
            return dtype
    return None


def check_fits(lora: LoadedLora, config: ModelConfig, adapter_dir: Path) -> None:
    """UsageError when a matrix has not the shape of the model's linear, or names a layer it has not."""
    for (layer, linear), (a, b) in lora.matrices.items():
        known = layer < config.num_layers and linear in LINEARS
        if not known or (b.shape[0], a.shape[1]) != config.linear_shape(linear):
            raise UsageError(
                f"{adapter_dir} is for another model: layer {layer} {linear} is {(b.shape[0], a.shape[1])}"
                + (
                    f", the model's is {config.linear_shape(linear)}"
                    if known
                    else "; the model has no such linear"
                )
            )


def dequantiser(base_dtype: str) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Round-trips a linear's weight through nf4 or int8, as loading the base with that dtype does."""

    def convert(name: str, weight: torch.Tensor) -> torch.Tensor:
        del name
        if base_dtype == "nf4":
            return nf4.dequantise(nf4.quantise(weight), torch.float32)
        return int8.dequantise(int8.quantise(weight), torch.float32)

    return convert
