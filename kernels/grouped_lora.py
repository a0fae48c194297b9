"""Grouped LoRA: every adapter of a pass adds its low-rank path to one linear.

Per adapter with rank r, scaling s, keep probability p and keep mask m (1 without dropout):

    forward    S  = (s/p) · (x ∘ m) Aᵀ             (L, r)
               y += S Bᵀ                           y (T, N), in place
    backward   dS = (s/p) · dy B                   (L, r)
               dx += m ∘ (dS A)                    dx (T, K), in place; skipped when dx is None
               dB += dyᵀ S,   dA += dSᵀ (x ∘ m)    fp32, in place

Order (NUMERICS.md, *dA and dB*): the sum over tokens restarts at each sequence, and the sequences'
partial sums are added in order into one fp32 accumulator, which lives through the micro-batches of the
step. So it does not matter how the step's sequences were cut into passes. Where a slot holds only some rows
of a sequence (`LoraSlot.places`), the sum runs over all its positions with zeros at the others: it has the
bits that it has when those rows are there and their dy is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from gshare.kernels.layout import LoraSlot

#: (T, n) @ (n, m) of which a row depends on that row and the second matrix alone (`gemm.RowInvariantGemm`).
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _dropped_input(x: torch.Tensor, slot: LoraSlot, index: int) -> torch.Tensor:
    """x ∘ m of the slot's `index`-th sequence, (L, K)."""
    first, last = slot.sequences[index]
    rows = x[first:last]
    return rows if slot.keep is None else rows * _kept(slot, index, rows.shape[1])


def _kept(slot: LoraSlot, index: int, features: int) -> torch.Tensor:
    """The keep mask of the rows that are here of the slot's `index`-th sequence."""
    assert slot.keep is not None
    mask = slot.keep(index, features)
    return mask if slot.places is None else mask[slot.places[index][0]]


def _in_place(rows: torch.Tensor, slot: LoraSlot, index: int) -> torch.Tensor:
    """The slot's `index`-th sequence in fp32, zeros in rows that are not here."""
    if slot.places is None:
        return rows.float()
    places, length = slot.places[index]
    whole = torch.zeros(length, rows.shape[1], device=rows.device)
    whole[places] = rows.float()
    return whole


def _aligned(t: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Rows first:last in fp32 at the start of an allocation, so that the bits are those of the sequence
    alone even where r · 4 bytes is not a multiple of the vector width."""
    if first == 0 and last == t.shape[0]:
        return t.float()
    return t[first:last].float().clone()


def _product(rows: torch.Tensor, w: torch.Tensor, slot: LoraSlot, product: Product) -> torch.Tensor:
    """rows (tokens of the slot, n) @ w (n, m), each sequence with the bits it has alone.

    On a CPU by `product`, whose rows do not depend on each other. cuBLAS has no such one for thin matrices:
    there each sequence is a product of its own.
    """
    if not rows.is_cuda:
        return product(rows, w)
    return torch.cat([rows[a - slot.start : b - slot.start] @ w for a, b in slot.sequences])


def _whole_input(x: torch.Tensor, slot: LoraSlot) -> torch.Tensor:
    if slot.keep is None:
        return x[slot.start : slot.end]
    return torch.cat([_dropped_input(x, slot, i) for i in range(len(slot.sequences))])


def lora_forward_reference(
    x: torch.Tensor, y: torch.Tensor, slots: Sequence[LoraSlot], product: Product
) -> list[torch.Tensor]:
    """Adds every slot's path to y (T, N) in place; returns each slot's scaled S (tokens, r)."""
    saved = []
    for slot in slots:
        s = _product(_whole_input(x, slot), slot.a.t(), slot, product)
        s = s * (slot.scaling / slot.keep_probability)
        y[slot.start : slot.end] += _product(s, slot.b.t(), slot, product)
        saved.append(s)
    return saved


def lora_dx_reference(
    dy: torch.Tensor, dx: torch.Tensor | None, slots: Sequence[LoraSlot], product: Product
) -> list[torch.Tensor]:
    """Adds to dx (T, K) unless None; returns each slot's dS (tokens, r)."""
    saved = []
    for slot in slots:
        ds = _product(dy[slot.start : slot.end], slot.b, slot, product)
        ds *= slot.scaling / slot.keep_probability
        saved.append(ds)
        if dx is None:
            continue
        d_input = _product(ds, slot.a, slot, product)
        if slot.keep is not None:
            for index, (first, last) in enumerate(slot.sequences):
                d_input[first - slot.start : last - slot.start] *= _kept(slot, index, d_input.shape[1])
        dx[slot.start : slot.end] += d_input
    return saved


def lora_grads_reference(
    x: torch.Tensor,
    dy: torch.Tensor,
    slots: Sequence[LoraSlot],
    s_of: Sequence[torch.Tensor],
    ds_of: Sequence[torch.Tensor],
) -> None:
    """Adds to every slot's grad_a (r, K) and grad_b (N, r), from its S and dS."""
    for slot, s, ds in zip(slots, s_of, ds_of, strict=True):
        grad_a, grad_b = slot.grad_a, slot.grad_b
        assert grad_a is not None
        assert grad_b is not None
        for index, (first, last) in enumerate(slot.sequences):
            a, b = first - slot.start, last - slot.start
            dropped = _in_place(_dropped_input(x, slot, index), slot, index)
            grad_b += _in_place(dy[first:last], slot, index).t() @ _in_place(_aligned(s, a, b), slot, index)
            grad_a += _in_place(_aligned(ds, a, b), slot, index).t() @ dropped
