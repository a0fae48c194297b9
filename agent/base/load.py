"""Load a checkpoint directory into a `Base`, quantising tensor by tensor as it goes.

At any time one tensor is in memory twice (as read and as stored), never the model. What is stored:

    base_dtype    linears              embeddings, head     norms, biases
    fp32          fp32                 fp32                 fp32
    bf16          bf16                 bf16                 rounded to bf16
    int8, nf4     quantised from the   bf16                 rounded to bf16
                  checkpoint's values

Norms and biases are then held in the compute dtype: fp32 on the CPU, on CUDA bf16 (fp32 with fp32).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

import torch
from gshare.agent.base.checkpoint_files import locate_tensors, open_shard
from gshare.agent.base.config import ModelConfig, linear_prefix, read_config
from gshare.agent.base.weights import (
    Base,
    BaseLayer,
    BaseLinear,
    DenseWeight,
    Int8Weight,
    Nf4Weight,
    Scratch,
    Weight,
    grouped,
)
from gshare.agent.errors import UsageError
from gshare.agent.jobs.spec import LINEARS, BaseDtype
from gshare.kernels import int8, nf4

#: what is being done, how much is done, out of how much
Progress = Callable[[str, int, int], None]

# Part of the fingerprint: raised when the bytes stored for one checkpoint change.
_STORAGE_VERSION = 1


def load_base(
    model_dir: Path, *, base_dtype: str, device: torch.device, progress: Progress | None = None
) -> Base:
    """Read `model_dir` (config.json, safetensors) onto `device`. `progress` counts parameters.

    Raises UsageError for an unknown dtype, an unsupported config, and missing, unknown, wrongly shaped,
    unreadable or non-finite tensors, naming the file.
    """
    if base_dtype not in get_args(BaseDtype):
        raise UsageError(f"base_dtype {base_dtype!r} is unknown; known: {', '.join(get_args(BaseDtype))}")
    config = read_config(model_dir)
    loader = _Loader(config, base_dtype, device)
    done, total = 0, config.parameter_count()
    for path, names in locate_tensors(model_dir, config).items():
        with open_shard(path) as shard:
            for name in names:
                tensor = shard.get_tensor(name)
                loader.add(name, tensor, path)
                done += tensor.numel()
                if progress is not None:
                    progress("loading the base", min(done, total), total)
    return loader.finish()


class _Loader:
    """Takes tensors by checkpoint name, in any order, and assembles the `Base`."""

    def __init__(self, config: ModelConfig, base_dtype: str, device: torch.device) -> None:
        self.config = config
        self.base_dtype = base_dtype
        self.device = device
        full = base_dtype == "fp32" or device.type == "cpu"
        self.compute_dtype = torch.float32 if full else torch.bfloat16
        self.plain_dtype = torch.float32 if base_dtype == "fp32" else torch.bfloat16
        self.scratch = Scratch(device, self.compute_dtype)
        self.linear_names = {
            f"{linear_prefix(layer, name)}.weight" for layer in range(config.num_layers) for name in LINEARS
        }
        self.weights: dict[str, Weight] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.digests: dict[str, bytes] = {}

    def add(self, name: str, tensor: torch.Tensor, path: Path) -> None:
        """Store one tensor of the checkpoint; `path` is for messages."""
        if not tensor.is_floating_point():
            raise UsageError(f"{path}: tensor {name} is {tensor.dtype}; only floating-point weights are read")
        if not bool(torch.isfinite(tensor).all()):
            raise UsageError(f"{path}: tensor {name} holds NaN or infinity")
        if name in self.linear_names:
            self.weights[name] = self._linear(name, tensor)
            return
        if name == "lm_head.weight" and self.config.tie_word_embeddings:
            if not torch.equal(self._stored(tensor), self.tensors["model.embed_tokens.weight"]):
                raise UsageError(
                    f"{path}: tensor {name} differs from the embeddings, but config.json ties them;"
                    " set tie_word_embeddings to false if the head is meant"
                )
            return
        stored = self._stored(tensor)
        self.digests[name] = _digest(name, (stored,))
        self.tensors[name] = stored

    def _stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of its own: what the file gives may be a view of the mapped file."""
        return tensor.to(device=self.device, dtype=self.plain_dtype, copy=True)

    def _linear(self, name: str, tensor: torch.Tensor) -> Weight:
        parts: Iterable[torch.Tensor | None]
        weight: Weight
        if self.base_dtype == "nf4":
            q4 = nf4.quantise(tensor.to(self.device))
            parts, weight = (q4.codes, q4.scales, q4.scale_absmax, q4.scale_mean), Nf4Weight(q4, self.scratch)
        elif self.base_dtype == "int8":
            q8 = int8.quantise(tensor.to(self.device))
            parts, weight = q8, Int8Weight(q8, self.scratch)
        else:
            stored = self._stored(tensor)
            parts, weight = (stored,), DenseWeight(stored, self.scratch)
        self.digests[name] = _digest(name, parts)
        return weight

    def finish(self) -> Base:
        """Assemble. All tensors were added: `locate_tensors` has seen to it."""
        embed = self.tensors["model.embed_tokens.weight"]
        head = embed if self.config.tie_word_embeddings else self.tensors["lm_head.weight"]
        return Base(
            config=self.config,
            embed=embed,
            layers=[self._layer(index) for index in range(self.config.num_layers)],
            final_norm=self._held("model.norm.weight"),
            lm_head=DenseWeight(head, self.scratch),
            compute_dtype=self.compute_dtype,
            base_dtype=self.base_dtype,
            device=self.device,
            fingerprint=self._fingerprint(),
            scratch=self.scratch,
        )

    def _held(self, name: str) -> torch.Tensor:
        return self.tensors[name].to(self.compute_dtype)

    def _layer(self, index: int) -> BaseLayer:
        prefix = f"model.layers.{index}"
        qk_norm = self.config.qk_norm
        linears = {}
        for name in LINEARS:
            module = linear_prefix(index, name)
            bias = self._held(f"{module}.bias") if self.config.has_bias(name) else None
            linears[name] = BaseLinear(self.weights.pop(f"{module}.weight"), bias)
        return BaseLayer(
            input_norm=self._held(f"{prefix}.input_layernorm.weight"),
            post_attention_norm=self._held(f"{prefix}.post_attention_layernorm.weight"),
            q_norm=self._held(f"{prefix}.self_attn.q_norm.weight") if qk_norm else None,
            k_norm=self._held(f"{prefix}.self_attn.k_norm.weight") if qk_norm else None,
            linears=linears,
            groups=grouped(linears, self.scratch),
        )

    def _fingerprint(self) -> str:
        """Over everything that the base's outputs depend on; token ids and file layout are not part of it."""
        shape = dataclasses.asdict(self.config)
        for key in ("bos_token_id", "eos_token_ids"):
            del shape[key]
        header = {"storage": _STORAGE_VERSION, "base_dtype": self.base_dtype, "config": shape}
        total = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        for name in self.config.tensor_shapes():
            total.update(self.digests[name])
        return total.hexdigest()


def _digest(name: str, parts: Iterable[torch.Tensor | None]) -> bytes:
    """sha256 over the name and each part's dtype, shape and bytes."""
    digest = hashlib.sha256(name.encode())
    for part in parts:
        if part is None:
            continue
        digest.update(f"|{part.dtype}|{tuple(part.shape)}|".encode())
        # As bytes: numpy has no bfloat16. A scalar gets a dimension, since views of scalars keep their dtype.
        digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
