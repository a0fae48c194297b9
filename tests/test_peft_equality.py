"""Three adapters trained together against three PEFT runs of the same jobs: same init, rows and order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.data.tokens import TokenStore
from gshare.agent.jobs.learning_rate import learning_rate_at
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.train.job_data import JobData
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from toy import make_runner, request, tiny_base
from transformers import AutoModelForCausalLM

STEPS = 20

JOBS: dict[str, dict[str, Any]] = {
    "small": {"r": 4, "learning_rate": 3e-3, "per_device_train_batch_size": 1},
    "clipped": {
        "r": 8,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.3,
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.2,
    },
    "attention": {
        "r": 16,
        "lora_alpha": 16.0,
        "learning_rate": 5e-3,
        "per_device_train_batch_size": 4,
        "target_modules": ("q_proj", "v_proj"),
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
    },
}


def peft_losses(
    checkpoint: Path, job: JobRequest, initial: dict[str, torch.Tensor]
) -> tuple[list[float], Any]:
    """The job by transformers + PEFT + torch.optim.AdamW, one row at a time."""
    spec = job.spec
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    config = LoraConfig(
        r=spec.r,
        lora_alpha=int(spec.lora_alpha or 0),
        target_modules=list(spec.targets),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, config)
    state = {name.replace(".weight", ".default.weight"): value for name, value in initial.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert not [name for name in missing if "lora_" in name]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=spec.learning_rate, weight_decay=spec.weight_decay)
    data = JobData.open(job)
    losses = []
    for step in range(STEPS):
        batches = data.micro_batches(step)
        labels = sum(row.label_tokens for batch in batches for row in batch)
        total = 0.0
        for row in (row for batch in batches for row in batch):
            tokens = torch.tensor(row.tokens, dtype=torch.int64)[None]
            target = torch.where(torch.tensor(row.trained), tokens[0], -100)
            logits = model(tokens).logits[0]
            loss = torch.nn.functional.cross_entropy(logits[:-1], target[1:], reduction="sum") / labels
            loss.backward()
            total += float(loss.detach())
        if spec.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, spec.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(
                step,
                total_steps=STEPS,
                base=spec.learning_rate,
                kind=spec.lr_scheduler_type,
                warmup_ratio=spec.warmup_ratio,
            )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_three_co_trained_adapters_equal_three_peft_runs(tmp_path: Path, family: str) -> None:
    options = {"sliding_window": 7} if family == "mistral" else {}
    checkpoint = make_tiny_checkpoint(tmp_path / "base", family, tie=family == "qwen2", **options)
    base = tiny_base(checkpoint)
    losses: dict[str, list[float]] = {name: [] for name in JOBS}

    def listen(event: Any) -> None:
        if type(event).__name__ == "Stepped":
            losses[event.job].append(event.loss)

    runner = make_runner(checkpoint, base, listen)
    initial = {}
    requests = {
        name: request(tmp_path, name, data_seed=i, max_steps=STEPS, eval_steps=0, **spec)
        for i, (name, spec) in enumerate(JOBS.items())
    }
    for name, job in requests.items():
        runner.admit(job)
        initial[name] = runner.jobs()[-1].adapter.parameters()
    while runner.run_round():
        pass
    runner.close()
    assert runner.engine.most_adapters == 3
    for name, job in requests.items():
        expected, model = peft_losses(checkpoint, job, initial[name])
        assert len(expected) == len(losses[name]) == STEPS
        for ours, theirs in zip(losses[name], expected, strict=True):
            assert abs(ours - theirs) <= 1e-4 * abs(theirs), (name, ours, theirs)
        assert losses[name][-1] != losses[name][0]
        assert_loads_in_peft(checkpoint, Path(job.spec.output_dir), job, model)


def assert_loads_in_peft(checkpoint: Path, output_dir: Path, job: JobRequest, trained: Any) -> None:
    """The exported adapter in a fresh PEFT model gives the logits of the PEFT run that it should equal."""
    fresh = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    loaded = PeftModel.from_pretrained(fresh, output_dir)
    exported = load_file(output_dir / "adapter_model.safetensors")
    assert len(exported) == 2 * len(job.spec.targets) * trained.config.num_hidden_layers
    tokens = torch.tensor(TokenStore.open(job.train_store).row(0)[0], dtype=torch.int64)[None]
    with torch.no_grad():
        ours, theirs = loaded(tokens).logits, trained(tokens).logits
        with loaded.disable_adapter():
            bare = loaded(tokens).logits
    assert (ours - theirs).abs().max() < 1e-3
    assert (ours - bare).abs().max() > 10 * (ours - theirs).abs().max(), "the adapter does nothing"
