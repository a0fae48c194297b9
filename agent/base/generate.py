"""Greedy or sampled generation with a key/value cache, through the same decoder that trains.

One sequence at a time: this is for looking at an adapter's answers, not for serving.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gshare.agent.base.decoder import Decoder
from gshare.kernels.attention import attend
from gshare.kernels.layout import LoraPlan, LoraSlot, NoLora
from gshare.kernels.reference_backend import split_heads


class LoadedLora:
    """An adapter read from files: (layer, linear) → A (r, K), B (N, r), fp32 or compute dtype."""

    def __init__(
        self, matrices: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]], scaling: float
    ) -> None:
        self.matrices = matrices
        self._scaling = scaling
        self.tokens = 0  # rows of the current call

    def slots(self, layer: int, linear: str) -> list[LoraSlot]:
        pair = self.matrices.get((layer, linear))
        if pair is None:
            return []
        span = ((0, self.tokens),)
        return [LoraSlot(0, self.tokens, span, pair[0], pair[1], None, None, self._scaling)]


@torch.no_grad()
def generate_tokens(
    decoder: Decoder,
    prompt: list[int],
    *,
    lora: LoadedLora | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    stop: frozenset[int] = frozenset(),
) -> Iterator[int]:
    """Yields token ids, the first of `stop` included; `temperature` 0 is greedy (ties: the lowest id)."""
    config, device = decoder.config, decoder.base.device
    keys: list[torch.Tensor | None] = [None] * config.num_layers
    values: list[torch.Tensor | None] = [None] * config.num_layers

    def cached(layer: int, qkv: torch.Tensor) -> tuple[torch.Tensor, None]:
        q, k, v = split_heads(qkv, decoder.heads)
        old_k, old_v = keys[layer], values[layer]
        keys[layer] = k = k if old_k is None else torch.cat([old_k, k])
        values[layer] = v = v if old_v is None else torch.cat([old_v, v])
        o = attend(q, k, v, scale=decoder.scale, window=config.sliding_window[layer])
        return o.reshape(len(qkv), -1), None

    plan: LoraPlan = lora if lora is not None else NoLora()
    generator = torch.Generator().manual_seed(seed)
    new, position = list(prompt), 0
    for _ in range(max_new_tokens):
        if position + len(new) > config.max_position_embeddings:
            return
        tokens = torch.tensor(new, dtype=torch.int64, device=device)
        places = torch.arange(position, position + len(new), device=device)
        if lora is not None:
            lora.tokens = len(new)
        x, delta = decoder.embed(tokens), None
        for layer in range(config.num_layers):
            rotation = decoder.rotation(layer, places, position + len(new))
            x, delta, _ = decoder.layer_forward(layer, x, delta, rotation, cached, plan)
        assert delta is not None
        position += len(new)
        scores = decoder.logits((x + delta)[-1:])[0].float().cpu()
        if temperature > 0:
            token = int(torch.multinomial(torch.softmax(scores / temperature, -1), 1, generator=generator))
        else:
            token = int(scores.argmax())
        yield token
        if token in stop:
            return
        new = [token]
