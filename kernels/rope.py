"""Rotary position embedding, half-rotation layout (Su et al., arXiv:2104.09864, as in Llama).

rotate(x) = [−x₂, x₁] for x = [x₁, x₂];   y = x · cos + rotate(x) · sin
backward: the transpose, i.e. rotation by the negative angle.
"""

from __future__ import annotations

import torch


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (T, heads, D); cos, sin (T, D) fp32 → (T, heads, D)."""
    half = x.shape[-1] // 2
    c, s = cos[:, None, :], sin[:, None, :]
    wide = x.float()
    rotated = torch.cat([-wide[..., half:], wide[..., :half]], dim=-1)
    return (wide * c + rotated * s).to(x.dtype)


def rope_backward_reference(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """dx (T, heads, D)."""
    half = dy.shape[-1] // 2
    wide = dy.float()
    weighted = wide * sin[:, None, :]
    rotated = torch.cat([weighted[..., half:], -weighted[..., :half]], dim=-1)
    return (wide * cos[:, None, :] + rotated).to(dy.dtype)
