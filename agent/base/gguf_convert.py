"""A GGUF file as a Hugging Face directory: weights unpacked, config and tokenizer included.

transformers unpacks the weights (`GgufConfig(dequantize=True)`, the same in 5.17 and 5.24). It passes over
RoPE scaling, `<arch>.rope.scaling.*` and the `rope_freqs` tensor of Llama 3.1 and later: put right here, or
refused, because it would change the numbers in silence. The tokenizer is read by gguf_tokenizer.py.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gshare.agent.base.checkpoint_files import locate_tensors
from gshare.agent.base.config import RopeConfig, read_config
from gshare.agent.base.gguf_tokenizer import field, read_tokenizer
from gshare.agent.base.rope import inverse_frequencies
from gshare.agent.errors import UsageError

# Mistral files say `llama`. Their sliding window is not in the file; llama.cpp runs them without, as we do.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")

Step = Callable[[str], None]


def convert_gguf(gguf: Path, out_dir: Path, *, dtype: str, step: Step = lambda what: None) -> None:
    """Write `out_dir` (made, must be empty) from `gguf`, weights in `dtype` ("float32" or "bfloat16").

    `step` is told what comes next. Raises UsageError naming the file when it is not a GGUF file, truncated,
    of an unknown architecture, or has a tokenizer or RoPE scaling that cannot be carried over.
    """
    step("reading the header")
    reader = _open(gguf)
    architecture = str(field(reader, "general.architecture"))
    if architecture not in _ARCHITECTURES:
        raise UsageError(
            f"{gguf}: architecture {architecture!r} is not supported; known: {', '.join(_ARCHITECTURES)}"
        )
    rope = _rope_parameters(reader, architecture, gguf)
    tokenizer = read_tokenizer(reader, gguf)
    step("unpacking the weights")
    model = _model(gguf, dtype)
    step("writing safetensors")
    out_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stderr(io.StringIO()):  # as above: its bar cannot be switched off
        model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    if rope is not None:
        config_path = out_dir / "config.json"
        values = json.loads(config_path.read_text(encoding="utf-8"))
        values["rope_parameters"] = {**(values.get("rope_parameters") or {}), **rope}
        config_path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    locate_tensors(out_dir, read_config(out_dir))


def _open(gguf: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(gguf)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise UsageError(f"{gguf} is truncated or not a GGUF file ({error}); fetch it again") from None


def _model(gguf: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # progress is told through `step`
    try:
        # That switch does not reach the bar of the GGUF reader, which would print a line at every redraw
        # of a live display. Warnings go to the logger, not here.
        with contextlib.redirect_stderr(io.StringIO()):
            return AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=getattr(torch, dtype),
                local_files_only=True,
            )
    except (ValueError, KeyError, RuntimeError) as error:
        raise UsageError(f"{gguf} cannot be unpacked: {str(error).splitlines()[0]}") from error
    finally:
        if bars:
            logging.enable_progress_bar()


def _rope_parameters(reader: Any, architecture: str, gguf: Path) -> dict[str, Any] | None:
    """What has to be added to `rope_parameters`, or None for unscaled RoPE."""
    prefix = f"{architecture}.rope.scaling."
    kind = field(reader, prefix + "type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(field(reader, prefix + "factor"))}
    if kind == "yarn":
        for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
            if field(reader, prefix + key) is not None:
                raise UsageError(f"{gguf}: {prefix}{key} is not supported; use the Hugging Face directory")
        settings: dict[str, Any] = {"rope_type": "yarn", "factor": float(field(reader, prefix + "factor"))}
        for name, key in (
            ("original_max_position_embeddings", "original_context_length"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            if (value := field(reader, prefix + key)) is not None:
                settings[name] = value
        return settings
    if kind != "none":
        raise UsageError(f"{gguf}: RoPE scaling {kind!r} is not supported; known: none, linear, yarn")
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            return _llama3_parameters([float(v) for v in tensor.data.reshape(-1)], reader, architecture, gguf)
    return None


def _llama3_parameters(
    divisors: list[float], reader: Any, architecture: str, gguf: Path
) -> dict[str, Any] | None:
    """`rope_freqs` holds what each frequency is divided by: find the llama3 settings that give it.

    Every Llama 3.1 to 3.3 has the bands 1 and 4 and an original context of 8192; only `factor` differs.
    """
    import torch

    if all(value == 1.0 for value in divisors):
        return None
    settings: dict[str, Any] = {
        "factor": max(divisors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = float(field(reader, f"{architecture}.rope.freq_base", 10000.0))
    shape = {"theta": theta, "head_dim": 2 * len(divisors), "max_position_embeddings": 8192}
    plain, _ = inverse_frequencies(RopeConfig(kind="default", **shape))
    scaled, _ = inverse_frequencies(RopeConfig(kind="llama3", **shape, **settings))
    if not torch.allclose(plain / scaled, torch.tensor(divisors), rtol=1e-4):
        raise UsageError(f"{gguf}: its rope_freqs are not those of Llama 3; use the Hugging Face directory")
    return {"rope_type": "llama3", **settings}
