"""AdamW on float32 tensors: the plain-PyTorch reference.

AdamW: Loshchilov & Hutter, arXiv:1711.05101, algorithm 2, in the form of `torch.optim.AdamW`.

An element's new bits depend on its own inputs and the step's scalars alone: not on where it lies in a
tensor, how the tensor is sliced, or how many threads run. So only elementwise operations are used that
IEEE 754 rounds correctly (mul, add, sub, div, sqrt), each rounded to float32 on its own. (MKL's sqrt on
AVX-512 is 1 ulp off for 0.6 % of values, the same for a value wherever it lies.) Not `addcmul`,
`addcdiv`, `lerp` or `add(alpha=)`: their vector body and their scalar tail may contract to an FMA
differently, and then the last few elements of a tensor get other bits than the first.
"""

from __future__ import annotations

import math

import torch
from gshare.kernels import vector_math
from torch import Tensor

vector_math.set_up()

#: Elements handled at once. Bounds the temporaries (two of 1 MiB) and keeps the five operands in L2/L3;
#: the bits are the same for any value.
CHUNK = 1 << 18


def bias_corrections(beta1: float, beta2: float, step: int) -> tuple[float, float]:
    """(1 - beta1^step, sqrt(1 - beta2^step)) in float64; `step` counts from 1."""
    assert step >= 1, f"optimizer steps count from 1, got {step}"
    return 1.0 - beta1**step, math.sqrt(1.0 - beta2**step)


def adamw_scratch(param: Tensor) -> Tensor:
    """(2, min(CHUNK, elements)), float32: all that a step of `param` has to allocate."""
    return torch.empty(2, min(CHUNK, param.numel()), dtype=torch.float32, device=param.device)


def adamw_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    scratch: Tensor | None = None,
) -> None:
    """One AdamW step in place. All tensors float32, of one shape, contiguous; `grad` is not written.

    Nothing is allocated once the first operand has changed, so running out of memory changes none of them;
    with `scratch` (of `adamw_scratch`) nothing is allocated at all.

    With c1 = 1 - beta1^step and c2 = sqrt(1 - beta2^step), scalars computed in float64 and rounded to
    float32 once where they meet a tensor, every tensor operation rounded to float32 in this order:

        m = (m * beta1) + (g * (1 - beta1))
        v = (v * beta2) + ((g * (1 - beta2)) * g)
        d = (sqrt(v) / c2) + eps
        p = (p * (1 - lr * weight_decay)) - ((m / d) * (lr / c1))

    A non-finite gradient gives non-finite values in its own element and nowhere else.
    """
    operands = (param, grad, exp_avg, exp_avg_sq)
    assert all(t.dtype == torch.float32 for t in operands), "AdamW runs on float32"
    assert all(t.shape == param.shape and t.is_contiguous() for t in operands), "shapes must agree"
    correction1, correction2 = bias_corrections(beta1, beta2, step)
    step_size, decay = lr / correction1, 1.0 - lr * weight_decay

    first, second = scratch if scratch is not None else adamw_scratch(param)
    flats = [t.view(-1) for t in operands]
    for start in range(0, param.numel(), CHUNK):
        p, g, m, v = (t[start : start + CHUNK] for t in flats)
        term, update = first[: p.numel()], second[: p.numel()]
        torch.mul(g, 1.0 - beta1, out=term)
        m.mul_(beta1).add_(term)
        torch.mul(g, 1.0 - beta2, out=term)
        v.mul_(beta2).add_(term.mul_(g))
        # By a tensor: on CUDA a division by a number is a multiplication by its rounded inverse.
        denominator = torch.sqrt(v, out=term).div_(update.fill_(correction2)).add_(eps)
        torch.div(m, denominator, out=update).mul_(step_size)
        p.mul_(decay).sub_(update)
