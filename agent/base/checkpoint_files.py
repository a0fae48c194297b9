"""The safetensors files of a checkpoint directory: which tensor is where, all names and shapes checked.

Everything is checked from the files' headers before any tensor is read, so a wrong directory costs nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gshare.agent.base.config import ModelConfig
from gshare.agent.errors import UsageError
from safetensors import SafetensorError, safe_open

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")


def open_shard(path: Path, framework: str = "pt") -> Any:
    """`safe_open` on the CPU, or UsageError naming the file. "numpy" reads headers without loading torch."""
    try:
        return safe_open(path, framework=framework, device="cpu")
    except FileNotFoundError:
        raise UsageError(f"{path} is named by {_INDEX} but missing; fetch the checkpoint again") from None
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is truncated or not a safetensors file ({error}); fetch it again") from None


def locate_tensors(model_dir: Path, config: ModelConfig) -> dict[Path, list[str]]:
    """The tensors to read from each file, in the order of the model; files in the order of first use.

    With tied embeddings a stored `lm_head.weight` is listed too, for the loader to compare.

    Raises UsageError for a directory without safetensors (pickle checkpoints are refused), an unreadable
    file, and a tensor that is missing, unknown or of another shape, naming tensor and file.
    """
    wanted = config.tensor_shapes()
    if config.tie_word_embeddings:
        wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    found: dict[str, tuple[Path, tuple[int, ...]]] = {}
    for path in _shards(model_dir):
        with open_shard(path, "numpy") as shard:
            for name in list(shard.keys()):
                if name in found:
                    raise UsageError(f"tensor {name} is in both {found[name][0]} and {path}")
                found[name] = (path, tuple(shard.get_slice(name).get_shape()))
    for name, (path, shape) in found.items():
        # Old checkpoints store the RoPE frequencies, which follow from the config.
        if name not in wanted and not name.endswith("rotary_emb.inv_freq"):
            raise UsageError(
                f"{path}: tensor {name} is not part of a {config.family} model as config.json describes it"
            )
        if name in wanted and shape != wanted[name]:
            raise UsageError(
                f"{path}: tensor {name} has shape {list(shape)}, config.json asks for {list(wanted[name])}"
            )
    located: dict[Path, list[str]] = {}
    for name in wanted:
        if name in found:
            located.setdefault(found[name][0], []).append(name)
        elif not (name == "lm_head.weight" and config.tie_word_embeddings):
            raise UsageError(f"{model_dir}: tensor {name} is in none of its safetensors files")
    return located


def _shards(model_dir: Path) -> list[Path]:
    index = model_dir / _INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{index} cannot be read as an index of shards: {error!r}") from None
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise UsageError(f"{index}: {name!r} is not a file name in the same directory")
        return [model_dir / name for name in names]
    if (model_dir / _SINGLE).is_file():
        return [model_dir / _SINGLE]
    pickles = sorted(path.name for pattern in _PICKLES for path in model_dir.glob(pattern))
    if pickles:
        raise UsageError(
            f"{model_dir} has its weights in pickle files ({pickles[0]}), which can run code when read:"
            " refused; convert them to safetensors (transformers: from_pretrained, then save_pretrained)"
        )
    raise UsageError(f"{model_dir} has neither {_SINGLE} nor {_INDEX}")
