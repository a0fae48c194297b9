"""AdamW with 8-bit blockwise moments: the plain-PyTorch reference.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861; layout and arithmetic of
bitsandbytes 0.50's `AdamW8bit`: both moments as uint8 codes into a fixed table of 256 values ("dynamic
map", signed for the first moment, unsigned for the second), one float32 absmax a block of 256 elements,
float32 moments for tensors below 4096 elements. A tensor is one LoRA matrix: blocks never reach across
tensors, so an adapter's state does not know where in an arena it lies.

bitsandbytes' own backends differ from one another. Against them this reference

- has the state layout, the tables (bit for bit), the block size and the 4096 limit of all of them;
- quantises like its CUDA kernel: the nearest table value, ties to the even code, and a negative first
  moment that would become code 127 (0.0) becomes 126, so that it keeps its sign. The Triton backend lacks the
  sign rule; the CPU backend looks codes up in a table of 1/32768 steps and is off where table values lie
  closer than that (0.0 in a second moment becomes 1.6e-5 of the block's absmax);
- updates parameters like its CPU and Triton backends and like `torch.optim.AdamW`: decay first, then the
  update. The CUDA kernel decays afterwards, which is lr * weight_decay (about 1e-6) relative of one update;
- divides and takes powers exactly where the CUDA kernel uses `__fdividef` and `__powf` (2 ulp).

As in `adamw.py`, every operation is one that IEEE 754 rounds correctly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from gshare.kernels.adamw import adamw_step_, bias_corrections
from torch import Tensor

#: Elements that share one absmax.
BLOCK = 256
#: Tensors with fewer elements keep float32 moments.
MIN_8BIT_SIZE = 4096
#: Blocks handled at once: bounds the float32 temporaries to a few MiB; no effect on the bits.
_BLOCKS_AT_ONCE = 1024
_FIELDS = ("state1", "state2", "absmax1", "absmax2")


@lru_cache(maxsize=2)
def _dynamic_map_values(signed: bool) -> tuple[float, ...]:
    """The 256 table values, ascending, every one a float32.

    For exponent i = 0..6, 2^i (unsigned: 2^(i+1)) intervals divide [0.1, 1] evenly; their midpoints times
    10^(i-6), with both signs if signed, and 0 and 1. The end points are fma(step, k, 0.1) from below and
    fma(-step, k, 1) from above, as float64 arithmetic rounded once: what `torch.linspace` gives where it
    is vectorised with FMA, but on every machine.
    """
    f32 = np.float32
    values = [f32(0.0), f32(1.0)]
    for i in range(7):
        count = 2**i if signed else 2 ** (i + 1)
        step = f32((f32(1.0) - f32(0.1)) / f32(count))
        half = (count + 1) // 2
        bounds = [f32(float(f32(0.1)) + float(step) * k) for k in range(half)]
        bounds += [f32(1.0 - float(step) * (count - k)) for k in range(half, count + 1)]
        for low, high in pairwise(bounds):
            value = f32(f32(10.0 ** (i - 6)) * f32(f32(low + high) / f32(2.0)))
            values += [value, -value] if signed else [value]
    assert len(values) == 256, len(values)
    return tuple(sorted(float(v) for v in values))


def dynamic_map(signed: bool, device: torch.device | str = "cpu") -> Tensor:
    """bitsandbytes' dynamic map: (256,), float32, ascending."""
    return torch.tensor(_dynamic_map_values(signed), dtype=torch.float32, device=device)


@dataclass
class Adam8bitState:
    """The moments of one tensor; the tensors may be views into an arena.

    `state1`, `state2`: the parameter's shape; uint8 codes, or float32 moments when there are fewer than
    4096 elements. `absmax1`, `absmax2`: (ceil(n / 256),) float32, or None with float32 moments.
    """

    state1: Tensor
    state2: Tensor
    absmax1: Tensor | None
    absmax2: Tensor | None

    @classmethod
    def new(cls, shape: tuple[int, ...] | torch.Size, device: torch.device | str = "cpu") -> Adam8bitState:
        """The state before the first step: all zeros (codes too, as their absmax is 0)."""
        elements = int(np.prod(shape, dtype=np.int64))
        if elements < MIN_8BIT_SIZE:
            moments = torch.zeros(shape, dtype=torch.float32, device=device)
            return cls(moments, moments.clone(), None, None)
        codes = torch.zeros(shape, dtype=torch.uint8, device=device)
        absmax = torch.zeros(-(-elements // BLOCK), dtype=torch.float32, device=device)
        return cls(codes, codes.clone(), absmax, absmax.clone())

    def named_tensors(self) -> dict[str, Tensor]:
        """The parts for a checkpoint: `state1` … `absmax2`, None left out; views, not copies."""
        parts = {field: getattr(self, field) for field in _FIELDS}
        return {field: tensor for field, tensor in parts.items() if tensor is not None}

    @classmethod
    def from_named_tensors(
        cls, parts: Mapping[str, Tensor], device: torch.device | str = "cpu"
    ) -> Adam8bitState:
        """The inverse of `named_tensors`, copied to `device`. KeyError when a part is missing."""
        fields = _FIELDS if parts["state1"].dtype == torch.uint8 else _FIELDS[:2]
        tensors = [parts[field].to(device, copy=True) for field in fields]
        return cls(tensors[0], tensors[1], *(tensors[2:] or (None, None)))


def quantise_blocks(x_NB: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes (N, B) uint8 and absmax (N,) float32 of float32 blocks x (N, B); zeros may fill up a block."""
    table = dynamic_map(signed, x_NB.device)
    midpoints = (table[:-1] + table[1:]) * 0.5
    absmax_N = x_NB.abs().amax(dim=1)
    divisor_N = torch.where(absmax_N == 0, 1.0, absmax_N)  # a block of zeros: code of 0.0, not 0 / 0
    scaled_NB = x_NB / divisor_N[:, None]
    below = torch.bucketize(scaled_NB, midpoints)  # a tie goes to the lower code here …
    above = torch.bucketize(scaled_NB, midpoints, right=True)  # … and to the upper one here
    codes = torch.where(below % 2 == 0, below, above)
    if signed:
        codes = torch.where((x_NB < 0) & (codes == 127), 126, codes)
    return codes.to(torch.uint8), absmax_N


def dequantise_blocks(codes_NB: Tensor, absmax_N: Tensor, signed: bool) -> Tensor:
    """table[code] * absmax of the block: (N, B), float32."""
    return dynamic_map(signed, codes_NB.device)[codes_NB.int()] * absmax_N[:, None]


def adamw_8bit_step_(
    param: Tensor,
    grad: Tensor,
    state: Adam8bitState,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """One step in place on `param` (float32, contiguous) and `state`; `grad` (float32) is not written.

    m and v are the dequantised moments; then the arithmetic is that of `adamw_step_`, the parameter moves by
    the unquantised new moments, and those are quantised. `step` counts from 1. Not for non-finite gradients:
    one would spoil the absmax of its block (the caller checks before it commits a step).
    """
    hyper = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "step": step}
    if state.absmax1 is None or state.absmax2 is None:
        adamw_step_(param, grad, state.state1, state.state2, **hyper)
        return
    assert param.shape == grad.shape == state.state1.shape == state.state2.shape, "shapes must agree"
    assert all(t.is_contiguous() for t in (param, grad, state.state1, state.state2)), "blocks need contiguity"
    bias_corrections(beta1, beta2, step)  # refuses step 0 before anything is written
    p, g, s1, s2 = (t.view(-1) for t in (param, grad, state.state1, state.state2))
    elements = p.numel()
    for first in range(0, -(-elements // BLOCK), _BLOCKS_AT_ONCE):
        flat = slice(first * BLOCK, min((first + _BLOCKS_AT_ONCE) * BLOCK, elements))
        blocks = slice(first, first + _BLOCKS_AT_ONCE)
        m = dequantise_blocks(_as_blocks(s1[flat]), state.absmax1[blocks], signed=True)
        v = dequantise_blocks(_as_blocks(s2[flat]), state.absmax2[blocks], signed=False)
        count = flat.stop - flat.start
        m_flat, v_flat = m.view(-1)[:count], v.view(-1)[:count]
        adamw_step_(p[flat], g[flat], m_flat, v_flat, **hyper)
        m.view(-1)[count:] = 0.0  # the filling of the last block has no part in its absmax
        v.view(-1)[count:] = 0.0
        for moments, codes, absmax, signed in (
            (m, s1, state.absmax1, True),
            (v, s2, state.absmax2, False),
        ):
            new_codes, new_absmax = quantise_blocks(moments, signed)
            codes[flat] = new_codes.view(-1)[:count]
            absmax[blocks] = new_absmax


def _as_blocks(codes: Tensor) -> Tensor:
    """(n,) as (ceil(n / 256), 256), the end filled with code 0."""
    missing = -codes.numel() % BLOCK
    return torch.nn.functional.pad(codes, (0, missing)).view(-1, BLOCK)
