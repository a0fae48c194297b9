"""SwiGLU: m = silu(g) ∘ u (Shazeer, arXiv:2002.05202).

silu is written x / (1 + exp(−x)) with separate operations: torch's fused silu uses another exponential
in its scalar tail than in its vector body, so an element's bits depend on its place (seen on CPU).
"""

from __future__ import annotations

import torch
from gshare.kernels import vector_math

vector_math.set_up()


def swiglu_reference(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """g, u (T, I) → (T, I)."""
    wide = g.float()
    return (wide / (1.0 + torch.exp(-wide)) * u.float()).to(g.dtype)


def swiglu_backward_reference(
    dm: torch.Tensor, g: torch.Tensor, u: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dg, du (T, I): silu'(x) = σ(x) · (1 + x · (1 − σ(x)))."""
    wide, d = g.float(), dm.float()
    sigmoid = 1.0 / (1.0 + torch.exp(-wide))
    du = d * (wide * sigmoid)
    dg = d * u.float() * (sigmoid * (1.0 + wide * (1.0 - sigmoid)))
    return dg.to(g.dtype), du.to(g.dtype)
