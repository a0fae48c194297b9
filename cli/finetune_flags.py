"""The flags of `gshare finetune` that set the run: every key of the job spec, and the aliases people know.

None means "not given": what a flag does not say, the file or the default does. Values are checked by
`agent/jobs/spec_file.py`, together with the file's. That no key is forgotten is a test.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from cyclopts import Group, Parameter

RUN = Group("Run", sort_key=1)
ADAPTER = Group("Every adapter", sort_key=2)
GPU = Group("GPU memory", sort_key=3)


@Parameter(name="*", group=RUN)
@dataclass(frozen=True)
class RunFlags:
    base_dtype: Annotated[str | None, Parameter(help="nf4, int8, bf16 (default) or fp32.")] = None
    method: Annotated[str | None, Parameter(help="qlora (= --base-dtype nf4) or lora (bf16).")] = None
    task: Annotated[str | None, Parameter(help="instruct, the only task for now.")] = None
    schedule: Annotated[
        str | None, Parameter(help="synchronized (default), round_robin, priority_val_loss or fair.")
    ] = None
    seed: Annotated[int | None, Parameter(help="Of the run and of every adapter without its own.")] = None
    max_tokens_per_pass: Annotated[int | None, Parameter(help="Larger rounds are split.")] = None
    max_adapters_per_pass: Annotated[int | None, Parameter(help="0 (default): no limit.")] = None
    trunk_cache: Annotated[
        str | None,
        Parameter(help="auto (default), off, or GiB of GPU memory for states below the adapters."),
    ] = None
    trunk_cache_host: Annotated[float | None, Parameter(help="GiB of main memory for the same (0).")] = None


@Parameter(name="*", group=ADAPTER)
@dataclass(frozen=True)
class AdapterFlags:
    val_data: Annotated[str | None, Parameter(help="Validation file, instead of a split.")] = None
    data_format: Annotated[
        str | None,
        Parameter(help="auto (default), text, messages, prompt_completion, alpaca or sharegpt."),
    ] = None
    on_bad_turns: Annotated[
        str | None, Parameter(help="error (default), merge or drop: chats whose turns do not alternate.")
    ] = None
    train_on_prompt: Annotated[bool | None, Parameter(help="Train every token.")] = None
    r: Annotated[int | None, Parameter(name=["--r", "--rank"], help="Rank of the adapter (16).")] = None
    lora_alpha: Annotated[float | None, Parameter(help="Default: 2 × r.")] = None
    lora_dropout: float | None = None
    use_rslora: Annotated[bool | None, Parameter(help="Scale by alpha / sqrt(r).")] = None
    target_modules: Annotated[
        str | None, Parameter(help="all-linear (default), or names with commas: q_proj,v_proj.")
    ] = None
    layers_to_transform: Annotated[str | None, Parameter(help="Layers with commas; default: all.")] = None
    layers_pattern: Annotated[str | None, Parameter(help="PEFT's; layers is the only one there is.")] = None
    learning_rate: Annotated[
        float | None, Parameter(name=["--learning-rate", "--lr"], help="Peak (2e-4).")
    ] = None
    lr_scheduler_type: Annotated[str | None, Parameter(help="constant (default), linear or cosine.")] = None
    warmup_ratio: float | None = None
    per_device_train_batch_size: Annotated[int | None, Parameter(help="Rows of a micro-batch (1).")] = None
    gradient_accumulation_steps: Annotated[int | None, Parameter(help="Micro-batches of a step (1).")] = None
    num_train_epochs: Annotated[
        float | None, Parameter(name=["--num-train-epochs", "--epochs"], help="3 by default.")
    ] = None
    max_steps: Annotated[int | None, Parameter(help="Instead of epochs, when above 0.")] = None
    max_length: Annotated[
        int | None, Parameter(name=["--max-length", "--max-seq-len"], help="Tokens of a row (1024).")
    ] = None
    optim: Annotated[
        str | None, Parameter(help="adamw (default), adamw_8bit or paged_adamw_8bit (an alias).")
    ] = None
    adam_beta1: float | None = None
    adam_beta2: float | None = None
    adam_epsilon: float | None = None
    weight_decay: float | None = None
    max_grad_norm: Annotated[float | None, Parameter(help="0: no clipping.")] = None
    gradient_checkpointing: Annotated[
        bool | None, Parameter(help="Recompute layers instead of keeping them.")
    ] = None
    eval_steps: Annotated[int | None, Parameter(help="0: only at the end.")] = None
    save_steps: Annotated[int | None, Parameter(help="0: only at the end.")] = None
    save_total_limit: Annotated[int | None, Parameter(help="Checkpoints kept (2).")] = None
    val_fraction: Annotated[float | None, Parameter(help="0: no validation.")] = None
    weight: Annotated[float | None, Parameter(help="Share of compute under --schedule fair.")] = None


@Parameter(name="*", group=GPU)
@dataclass(frozen=True)
class ReserveFlags:
    """What is reserved before a GPU is touched. Without a GPU nothing is reserved."""

    vram: Annotated[
        str | None, Parameter(help="Memory to reserve: 8 (GiB), 8GiB, 8000MiB. Default: an estimate.")
    ] = None
    wait_gpu: Annotated[
        bool, Parameter(negative="--no-wait-gpu", help="Wait in the queue; else exit with 75 at once.")
    ] = True
    timeout: Annotated[
        str | None, Parameter(help="How long to wait: 90 (seconds), 30m, 1h (default); then exit with 75.")
    ] = None
    gpus: Annotated[
        str | None,
        Parameter(
            name=["--gpus", "--gpu"],
            help="By UUID, the beginning of one, or index; of several, with commas, any one is taken.",
        ),
    ] = None


@Parameter(name="*", group=GPU)
@dataclass(frozen=True)
class GpuFlags(ReserveFlags):
    """A trainer may share the GPU's cores too."""

    experimental_mps: Annotated[
        bool, Parameter(negative=(), help="Share the GPU's cores with others by NVIDIA MPS.")
    ] = False
    gpu_share: Annotated[int | None, Parameter(help="Percent of its cores, under --experimental-mps.")] = None


def given(*flags: RunFlags | AdapterFlags) -> dict[str, object]:
    """The flags that were given, by key."""
    pairs = ((field.name, getattr(group, field.name)) for group in flags for field in fields(group))
    return {name: value for name, value in pairs if value is not None}
