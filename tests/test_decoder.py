"""agent/base/decoder.py against transformers (logits) and PEFT (LoRA gradients), fp32, every family.

Sequences of a pass are ragged and packed; transformers runs them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from gshare.agent.base.config import linear_prefix
from gshare.agent.base.decoder import Decoder, Stage
from gshare.agent.base.load import load_base
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.jobs.spec import LINEARS
from gshare.kernels.layout import Layout, LoraSlot, NoLora
from gshare.kernels.reference_backend import ReferenceBackend
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

CPU = torch.device("cpu")
LENGTHS = (5, 1, 90, 17)

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
MIXED = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("llama", {"num_kv_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 32, "num_kv_heads": 4}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-upper-window": (
        "qwen2",
        {"tie": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-mixed-windows": ("qwen3", MIXED),
    "qwen3-biases-yarn": ("qwen3", {"attention_bias": True, "rope_parameters": YARN, "tie": True}),
}


def rows(lengths: Sequence[int] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 283, (length,), generator=generator) for length in lengths]


def layout_of(sequences: Sequence[torch.Tensor]) -> Layout:
    return Layout(tuple(accumulate((len(row) for row in sequences), initial=0)))


def decoder_of(path: Path) -> Decoder:
    return Decoder(load_base(path, base_dtype="fp32", device=CPU), ReferenceBackend())


def reference(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def packed_logits(decoder: Decoder, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    layout = layout_of(sequences)
    stages = [Stage.whole(layout, NoLora())]
    x, kept = decoder.forward(decoder.embed(torch.cat(list(sequences))), stages)
    assert not kept
    return list(decoder.logits(x).split([len(row) for row in sequences]))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path: Path, case: str) -> None:
    family, options = CASES[case]
    path = make_tiny_checkpoint(tmp_path, family, **options)
    model = reference(path)
    sequences = rows()
    for row, logits in zip(sequences, packed_logits(decoder_of(path), sequences), strict=True):
        expected = model(row[None]).logits[0]
        assert expected.std() > 0.5  # not a comparison of zeros
        assert (logits - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("case", ["llama-biases", "mistral-window", "qwen2-tied-upper-window", "qwen3"])
@torch.no_grad()
def test_packed_equals_one_by_one_to_the_bit(tmp_path: Path, case: str) -> None:
    family, options = CASES[case]
    decoder = decoder_of(make_tiny_checkpoint(tmp_path, family, **options))
    sequences = rows()
    for row, logits in zip(sequences, packed_logits(decoder, sequences), strict=True):
        assert torch.equal(logits, packed_logits(decoder, [row])[0])


@torch.no_grad()
def test_every_setting_moves_the_logits(tmp_path: Path) -> None:
    """Negative control: a decoder that dropped one of these would differ by far more than 1e-4."""
    sequences = rows((60,))
    plain = packed_logits(decoder_of(make_tiny_checkpoint(tmp_path / "plain")), sequences)[0]
    for rope in (LINEAR, LLAMA3, YARN):
        path = make_tiny_checkpoint(tmp_path / rope["rope_type"], rope_parameters=rope)
        assert (plain - packed_logits(decoder_of(path), sequences)[0]).abs().max() > 0.01
    full = decoder_of(make_tiny_checkpoint(tmp_path / "full", "mistral", sliding_window=None))
    windowed = decoder_of(make_tiny_checkpoint(tmp_path / "window", "mistral", sliding_window=7))
    one, two = packed_logits(full, sequences)[0], packed_logits(windowed, sequences)[0]
    assert torch.equal(one[:7], two[:7])  # the window is not full before the eighth token
    assert (one[7:] - two[7:]).abs().max() > 0.01


class Adapter:
    """One LoRA adapter over consecutive sequences of the pass, and the same one in PEFT."""

    def __init__(self, path: Path, r: int, targets: Sequence[str], seed: int) -> None:
        self.targets = targets
        self.scaling = 2.0
        config = LoraConfig(r=r, lora_alpha=2 * r, target_modules=list(targets), task_type="CAUSAL_LM")
        self.model = get_peft_model(reference(path), config)
        generator = torch.Generator().manual_seed(seed)
        self.parameters = {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }
        with torch.no_grad():
            for parameter in self.parameters.values():  # B too: at zero, dA would be zero
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        self.grads = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    def names(self, layer: int, linear: str) -> tuple[str, str]:
        module = f"base_model.model.{linear_prefix(layer, linear)}"
        return f"{module}.lora_A.default.weight", f"{module}.lora_B.default.weight"

    def slot(self, layer: int, linear: str, sequences: tuple[tuple[int, int], ...]) -> LoraSlot:
        a, b = self.names(layer, linear)
        return LoraSlot(
            start=sequences[0][0],
            end=sequences[-1][1],
            sequences=sequences,
            a=self.parameters[a].detach(),
            b=self.parameters[b].detach(),
            grad_a=self.grads[a],
            grad_b=self.grads[b],
            scaling=self.scaling,
        )


class Plan:
    def __init__(self, parts: Sequence[tuple[Adapter, tuple[tuple[int, int], ...]]]) -> None:
        self.parts = parts

    def slots(self, layer: int, linear: str) -> list[LoraSlot]:
        return [
            adapter.slot(layer, linear, sequences)
            for adapter, sequences in self.parts
            if linear in adapter.targets
        ]


def packed_step(
    decoder: Decoder, sequences: Sequence[torch.Tensor], plan: Plan, *, checkpoint: bool
) -> float:
    """Next-token loss, summed over all tokens; gradients go into the adapters. Returns the loss."""
    layout = layout_of(sequences)
    base, tokens = decoder.base, torch.cat(list(sequences))
    stages = [Stage.whole(layout, plan)]
    x, kept = decoder.forward(decoder.embed(tokens), stages, keep=True, checkpoint=checkpoint)
    label_rows = torch.cat([torch.arange(start, end - 1) for start, end in layout.sequences])
    h, rstd = decoder.final_norm(x[label_rows])
    nll, dh = decoder.backend.cross_entropy(
        h, base.lm_head.dense(), tokens[label_rows + 1], torch.ones(len(label_rows))
    )
    assert dh is not None
    dx = torch.zeros_like(x)
    dx[label_rows] = decoder.backend.rms_norm_backward(dh, x[label_rows], base.final_norm, rstd)
    decoder.backward(dx, kept, stages)
    assert not kept
    return float(nll.sum())


@pytest.mark.parametrize(
    ("case", "checkpoint"),
    [
        ("llama-biases", False),
        ("llama-yarn", True),
        ("mistral-window", True),
        ("qwen2-tied-upper-window", False),
        ("qwen3-mixed-windows", False),
        ("qwen3-mixed-windows", True),
    ],
)
def test_gradients_equal_peft(tmp_path: Path, case: str, checkpoint: bool) -> None:
    """Two adapters of unlike rank and targets in one pass, each against its own PEFT model."""
    family, options = CASES[case]
    path = make_tiny_checkpoint(tmp_path, family, **options)
    sequences = rows((5, 40, 17, 2))
    spans = tuple(layout_of(sequences).sequences)
    one = Adapter(path, 4, LINEARS, seed=1)
    two = Adapter(path, 7, ("q_proj", "v_proj", "down_proj"), seed=2)
    plan = Plan([(one, spans[:2]), (two, spans[2:])])
    loss = packed_step(decoder_of(path), sequences, plan, checkpoint=checkpoint)
    expected_loss = 0.0
    for adapter, mine in ((one, sequences[:2]), (two, sequences[2:])):
        for row in mine:
            logits = adapter.model(row[None]).logits[0]
            row_loss = torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="sum")
            row_loss.backward()
            expected_loss += float(row_loss.detach())
        assert len(adapter.grads) == 2 * 2 * len(adapter.targets)
        for name, parameter in adapter.parameters.items():
            assert parameter.grad is not None
            largest = float(parameter.grad.abs().max())
            assert largest > 1e-3, name
            assert (adapter.grads[name] - parameter.grad).abs().max() <= 1e-4 * max(largest, 1.0), name
    assert loss == pytest.approx(expected_loss, rel=1e-5)


def test_gradients_have_solo_bits(tmp_path: Path) -> None:
    """The same adapter alone and beside another: equal to the last bit."""
    path = make_tiny_checkpoint(tmp_path, "qwen3")
    decoder, sequences = decoder_of(path), rows((5, 40, 17, 2))
    spans = tuple(layout_of(sequences).sequences)
    solo, fused = Adapter(path, 4, LINEARS, seed=1), Adapter(path, 4, LINEARS, seed=1)
    neighbour = Adapter(path, 7, ("q_proj", "down_proj"), seed=2)
    packed_step(decoder, sequences, Plan([(neighbour, spans[:2]), (fused, spans[2:])]), checkpoint=False)
    alone = sequences[2:]
    packed_step(decoder, alone, Plan([(solo, tuple(layout_of(alone).sequences))]), checkpoint=True)
    for name, grad in solo.grads.items():
        assert torch.equal(grad, fused.grads[name]), name
    # Control: other bits when the neighbour's rows are counted in.
    wrong = Adapter(path, 4, LINEARS, seed=1)
    packed_step(decoder, sequences, Plan([(wrong, spans)]), checkpoint=False)
    assert not any(torch.equal(grad, wrong.grads[name]) for name, grad in solo.grads.items())
