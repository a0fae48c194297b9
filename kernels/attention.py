"""Causal attention over packed sequences, with grouped query heads and an optional sliding window.

    q (T, Hq, D), k and v (T, Hkv, D); query head h uses key head h // (Hq / Hkv)
    o = softmax(q kᵀ · scale + mask) v, within each sequence only
    window w: position i sees positions i − w + 1 … i (as in Mistral)

The reference runs sequence by sequence, so its bits are a function of the sequence alone. The backward
recomputes the probabilities.
"""

from __future__ import annotations

import torch
from gshare.kernels.layout import Layout


def causal_mask(
    queries: int, keys: int, window: int | None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Additive fp32 mask (queries, keys); the queries are the last ones of the keys."""
    row = torch.arange(keys - queries, keys, device=device)[:, None]
    column = torch.arange(keys, device=device)[None, :]
    hidden = column > row
    if window is not None:
        hidden |= column <= row - window
    return torch.zeros(queries, keys, device=device).masked_fill_(hidden, float("-inf"))


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(L, H, D) → contiguous fp32 (kv_heads, H / kv_heads · L, D)."""
    length, heads, dim = x.shape
    return (
        x.float()
        .reshape(length, kv_heads, heads // kv_heads, dim)
        .permute(1, 2, 0, 3)
        .reshape(kv_heads, -1, dim)
    )


def _ungrouped(x: torch.Tensor, length: int, heads: int) -> torch.Tensor:
    """Inverse of `_grouped`: (kv_heads, G · L, D) → (L, H, D)."""
    kv_heads, _, dim = x.shape
    return x.view(kv_heads, heads // kv_heads, length, dim).permute(2, 0, 1, 3).reshape(length, heads, dim)


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, queries: int, scale: float
) -> torch.Tensor:
    """softmax(q kᵀ scale + mask): (Hkv, G · queries, keys)."""
    scores = torch.bmm(q, k.transpose(1, 2)) * scale
    scores = scores.view(k.shape[0], -1, queries, k.shape[1]) + mask
    return torch.softmax(scores, dim=-1).view(k.shape[0], -1, k.shape[1])


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None
) -> torch.Tensor:
    """One sequence whose last positions are the queries.

    q (Lq, Hq, D), k and v (Lk, Hkv, D) → (Lq, Hq, D).
    """
    queries, heads, _ = q.shape
    kv_heads = k.shape[1]
    mask = causal_mask(queries, k.shape[0], window, q.device)
    p = _probabilities(_grouped(q, kv_heads), _grouped(k, kv_heads), mask, queries, scale)
    return _ungrouped(torch.bmm(p, _grouped(v, kv_heads)), queries, heads).to(q.dtype)


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, *, scale: float, window: int | None
) -> torch.Tensor:
    """o (T, Hq, D)."""
    out = q.new_empty(q.shape)
    for a, b in layout.sequences:
        out[a:b] = attend(q[a:b], k[a:b], v[a:b], scale=scale, window=window)
    return out


def attention_backward_reference(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    layout: Layout,
    *,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq (T, Hq, D), dk and dv (T, Hkv, D)."""
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    heads, kv_heads = q.shape[1], k.shape[1]
    for a, b in layout.sequences:
        length = b - a
        qs, ks, vs = (_grouped(x[a:b], kv_heads) for x in (q, k, v))
        dos, os = _grouped(do[a:b], kv_heads), _grouped(o[a:b], kv_heads)
        p = _probabilities(qs, ks, causal_mask(length, length, window, q.device), length, scale)
        dp = torch.bmm(dos, vs.transpose(1, 2))
        # softmax backward: dS = P ∘ (dP − rowsum(dO ∘ O)) (FlashAttention, arXiv:2205.14135, B.2)
        ds = p * (dp - (dos * os).sum(-1, keepdim=True)) * scale
        dq[a:b] = _ungrouped(torch.bmm(ds, ks), length, heads).to(q.dtype)
        dk[a:b] = _ungrouped(torch.bmm(ds.transpose(1, 2), qs), length, kv_heads).to(k.dtype)
        dv[a:b] = _ungrouped(torch.bmm(p.transpose(1, 2), dos), length, kv_heads).to(v.dtype)
    return dq, dk, dv
