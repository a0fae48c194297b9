"""The job spec: one TOML file, PEFT's and TRL's names (architecture, *The job spec*).

Plain typed structs; reading, defaults and validation are in `spec_file.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from gshare.agent.jobs.early_exit import EarlyExit

BaseDtype = Literal["nf4", "int8", "bf16", "fp32"]
ScheduleName = Literal["synchronized", "round_robin", "priority_val_loss", "fair"]
LrSchedulerType = Literal["constant", "linear", "cosine"]
OptimName = Literal["adamw", "adamw_8bit", "paged_adamw_8bit"]
DataFormat = Literal["auto", "text", "messages", "prompt_completion", "alpaca", "sharegpt"]
TurnPolicy = Literal["error", "merge", "drop"]

#: The linears of every supported decoder layer, in the order they run.
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One adapter = one job. Everything that its bits depend on besides base, data and numerics."""

    name: str
    data: str
    output_dir: str
    val_data: str | None = None
    data_format: DataFormat = "auto"
    on_bad_turns: TurnPolicy = "error"  # turns that do not alternate
    train_on_prompt: bool = False  # loss on every token instead of assistant/completion only
    r: int = 16
    lora_alpha: float | None = None  # None: 2 × r
    lora_dropout: float = 0.0
    use_rslora: bool = False  # scaling lora_alpha / sqrt(r) instead of lora_alpha / r
    target_modules: str | tuple[str, ...] = "all-linear"
    layers_to_transform: tuple[int, ...] | None = None  # None: all layers
    layers_pattern: str | None = None  # PEFT's name of the list of layers: "layers" in every model here
    learning_rate: float = 2e-4
    lr_scheduler_type: LrSchedulerType = "constant"
    warmup_ratio: float = 0.0
    per_device_train_batch_size: int = 1
    gradient_accumulation_steps: int = 1
    num_train_epochs: float = 3.0
    max_steps: int = -1
    max_length: int = 1024
    optim: OptimName = "adamw"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0  # 0: no clipping
    gradient_checkpointing: bool = False
    eval_steps: int = 50  # 0: only at the end
    save_steps: int = 100  # 0: only at the end
    save_total_limit: int = 2
    val_fraction: float = 0.1  # 0: no validation
    weight: float = 1.0
    seed: int | None = None  # None: the run's seed

    @property
    def scaling(self) -> float:
        """PEFT's LoRA scaling: alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv:2312.03732)."""
        alpha = self.lora_alpha if self.lora_alpha is not None else 2.0 * self.r
        return alpha / (self.r**0.5) if self.use_rslora else alpha / self.r

    @property
    def targets(self) -> tuple[str, ...]:
        """The linears that get an adapter, in the order of `LINEARS`."""
        if isinstance(self.target_modules, str):
            assert self.target_modules == "all-linear"
            return LINEARS
        return tuple(name for name in LINEARS if name in self.target_modules)

    @property
    def lowest_layer(self) -> int:
        """Below it the adapter changes nothing."""
        return min(self.layers_to_transform or (0,))


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run: one base, one schedule, N adapters."""

    model: str
    base_dtype: BaseDtype = "bf16"
    schedule: ScheduleName = "synchronized"
    seed: int = 0
    max_tokens_per_pass: int = 16384
    max_adapters_per_pass: int = 0  # 0: no limit; round_robin with 1 runs adapters one by one
    #: GiB of the device's memory for states below the adapters, kept for later epochs; "off"; or "auto": of a
    #: reservation what nothing else needs, if that pays. It changes no bits.
    trunk_cache: float | str = "auto"
    trunk_cache_host: float = 0.0  # GiB of main memory for what has no room there
    adapters: tuple[AdapterSpec, ...] = ()
    source: str = ""  # the file it came from, for messages


class WarmStart(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that a job starts from instead of fresh ones: what another job's were after `step` steps.

    A job stays a pure function: these weights, by their hash, are one more of its inputs.
    """

    directory: str  # adapter_config.json, adapter_model.safetensors, metadata.json, manifest.json
    sha256: str  # of adapter_model.safetensors
    parent: str  # name of the job that they were
    step: int  # optimizer steps that it had done

    @property
    def lineage(self) -> dict[str, str | int]:
        """What a result says of its origin: the same wherever the files lie."""
        return {"parent": self.parent, "step": self.step, "sha256": self.sha256}


def lineage_line(lineage: Mapping[str, object]) -> str:
    """A `WarmStart.lineage` for people."""
    return f"{lineage['parent']} at step {lineage['step']} (weights {str(lineage['sha256'])[:12]})"


def cache_bytes(trunk_cache: float | str) -> int | None:
    """Bytes that `trunk_cache` asks for; None: "auto"."""
    if trunk_cache == "auto":
        return None
    return 0 if trunk_cache == "off" else int(float(trunk_cache) * 2**30)


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a client sends to a trainer: a spec whose data is already tokenised."""

    spec: AdapterSpec  # `seed` and `lora_alpha` filled in, paths absolute
    train_store: str  # directory of a TokenStore
    train_hash: str
    val_store: str | None = None  # only when the spec names val_data
    val_hash: str | None = None
    resume: bool = False
    client: str = "local"
    start: WarmStart | None = None  # None: A at random by the seed, B zero
    early_exit: EarlyExit | None = None  # None: no pattern stops it
    pause_at: int = 0  # after so many steps it pauses, evaluated and saved; 0: nowhere
