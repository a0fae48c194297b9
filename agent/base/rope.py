"""Rotary position embedding tables for every supported kind (arXiv:2104.09864).

fp32 throughout and in the order of operations of transformers' `modeling_rope_utils`, so that the tables
have its bits; `linear` is position interpolation (arXiv:2306.15595), `yarn` arXiv:2309.00071, `llama3` the
frequency-banded scaling of Llama 3.1.
"""

from __future__ import annotations

import math

import torch
from gshare.agent.base.config import RopeConfig
from gshare.kernels import vector_math

vector_math.set_up()


def inverse_frequencies(rope: RopeConfig) -> tuple[torch.Tensor, float]:
    """fp32 (head_dim / 2,) radians per position, and the factor that cos and sin are multiplied by."""
    exponent = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
    wavelength = rope.theta**exponent  # in positions per radian
    if rope.kind == "default":
        return 1.0 / wavelength, 1.0
    if rope.kind == "linear":
        return 1.0 / wavelength / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(1.0 / wavelength, rope), 1.0
    return _yarn(wavelength, rope), _yarn_attention_factor(rope)


def rope_tables(
    rope: RopeConfig, n_positions: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (P, head_dim) of positions 0 … n_positions - 1, each half holding all frequencies.

    Built on the CPU and copied, so that every device has the same bits.
    """
    frequencies, scaling = inverse_frequencies(rope)
    angles = torch.arange(n_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    angles_PD = torch.cat((angles, angles), dim=-1)
    cos_PD, sin_PD = angles_PD.cos() * scaling, angles_PD.sin() * scaling
    return cos_PD.to(device=device, dtype=dtype), sin_PD.to(device=device, dtype=dtype)


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """High frequencies stay, low ones are divided by `factor`, those between are blended."""
    low_wavelength = rope.original_max_position_embeddings / rope.low_freq_factor
    high_wavelength = rope.original_max_position_embeddings / rope.high_freq_factor
    wavelength = 2 * math.pi / frequencies
    scaled = torch.where(wavelength > low_wavelength, frequencies / rope.factor, frequencies)
    blend = (rope.original_max_position_embeddings / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * scaled / rope.factor + blend * scaled
    between = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(between, blended, scaled)


def _yarn(wavelength: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """A ramp over the features from extrapolation (fast ones) to interpolation (slow ones)."""
    dim = rope.head_dim

    def feature_of(rotations: float) -> float:
        """The feature that turns `rotations` times over the original context."""
        return (dim * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = feature_of(rope.beta_fast), feature_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolated = 1 - ramp
    return 1.0 / (rope.factor * wavelength) * (1 - extrapolated) + 1.0 / wavelength * extrapolated


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 0.1 ln(factor) + 1 unless the config says otherwise."""

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
