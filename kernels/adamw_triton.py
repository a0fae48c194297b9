"""AdamW of every adapter of a step in one launch over the flat arena: the bits of `adamw_step_`.

A quarter of each block of 4,096 elements is a program: clip, moments, weights, and the copy in compute
dtype. Scalars are computed on the host in float64 (`hyper_row`) and rounded to fp32 where they meet a tensor,
as PyTorch does; square root and division are IEEE-exact and nothing is contracted, so the bits are those of
the reference on any device. The clip coefficient is computed here from the norm on the device: no step waits
for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gshare.kernels.adamw import bias_corrections
from gshare.kernels.launch import launch
from gshare.kernels.slot_table import BLOCK, LENGTH, MOMENTS, WEIGHTS
from gshare.kernels.triton_rounding import round_to

#: Columns of the hyper table (A, 9) float64; see `hyper_row`.
HYPER_COLUMNS = 9
#: Elements a program; elementwise, so it changes no bits. 8 a thread keep 5 programs and more on an SM
#: (H200, 84 M elements: 600 µs; 4,096 with 8 warps: 711).
PART = 1024
_HYPER = tl.constexpr(HYPER_COLUMNS)
_WEIGHTS, _MOMENTS, _LENGTH = tl.constexpr(WEIGHTS), tl.constexpr(MOMENTS), tl.constexpr(LENGTH)


def hyper_row(
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    max_grad_norm: float,
) -> tuple[float, ...]:
    """One adapter's row of the hyper table, for its `step` (from 1); `max_grad_norm` 0 means no clipping.

    beta1, 1 − beta1, beta2, 1 − beta2, sqrt(1 − beta2^step), eps, 1 − lr·weight_decay,
    lr / (1 − beta1^step), max_grad_norm: each computed in float64, as `adamw_step_` does.
    """
    correction1, correction2 = bias_corrections(beta1, beta2, step)
    decay, step_size = 1.0 - lr * weight_decay, lr / correction1
    return beta1, 1.0 - beta1, beta2, 1.0 - beta2, correction2, eps, decay, step_size, max_grad_norm


@triton.jit
def may_step(norms_ptr, finite_ptr, adapter):
    """Whether the adapter's loss and gradient norm are finite."""
    norm = tl.load(norms_ptr + adapter)
    # False for NaN as well; the largest float64.
    return (tl.load(finite_ptr + adapter) != 0) & (norm <= 1.7976931348623157e308)


@triton.jit
def clip_coefficient(norms_ptr, hyper_ptr, adapter):
    """`grad_norm.clip_coefficient` in float64, then rounded to fp32."""
    largest = tl.load(hyper_ptr + adapter * _HYPER + 8)
    coefficient = largest / (tl.load(norms_ptr + adapter) + 1e-6)
    coefficient = tl.where((largest == 0.0) | (coefficient > 1.0), 1.0, coefficient)
    return coefficient.to(tl.float32)


@triton.jit
def adamw_elements(p, g, m, v, hyper_ptr, adapter):
    """New (p, m, v) of fp32 elements; `g` is clipped already. The order of `adamw_step_`."""
    row = hyper_ptr + adapter * _HYPER
    m = m * tl.load(row).to(tl.float32) + g * tl.load(row + 1).to(tl.float32)
    v = v * tl.load(row + 2).to(tl.float32) + (g * tl.load(row + 3).to(tl.float32)) * g
    root = tl.div_rn(tl.sqrt_rn(v), tl.load(row + 4).to(tl.float32))
    update = tl.div_rn(m, root + tl.load(row + 5).to(tl.float32))
    p = p * tl.load(row + 6).to(tl.float32) - update * tl.load(row + 7).to(tl.float32)
    return p, m, v


@triton.jit
def store_weights(
    params_ptr,
    grads_ptr,
    compute_ptr,
    overflow_ptr,
    adapter,
    at,
    p,
    mask,
    HAS_COMPUTE: tl.constexpr,
    HAS_OVERFLOW: tl.constexpr,
    ZERO: tl.constexpr,
):
    """The new weights, their rounded copy, zeroed gradients, and the mark of a weight that overflowed."""
    tl.store(params_ptr + at, p, mask=mask)
    if HAS_COMPUTE:
        tl.store(compute_ptr + at, round_to(p, compute_ptr.dtype.element_ty), mask=mask)
    if ZERO:
        tl.store(grads_ptr + at, tl.zeros_like(p), mask=mask)
    if HAS_OVERFLOW:
        # Programs may store at once, but only ever 1.
        bad = mask & ~(tl.abs(p) <= 3.4028234663852886e38)
        tl.store(overflow_ptr + adapter, 1, mask=tl.max(bad.to(tl.int32)) > 0)


@triton.jit
def adamw_kernel(
    params_ptr,
    grads_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    compute_ptr,
    slots_ptr,
    blocks_ptr,
    hyper_ptr,
    norms_ptr,
    finite_ptr,
    overflow_ptr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    HAS_COMPUTE: tl.constexpr,
    HAS_OVERFLOW: tl.constexpr,
    ZERO: tl.constexpr,
):
    """One step of PART elements: part program_id(0) % (BLOCK / PART) of the block that row
    program_id(0) // (BLOCK / PART) of the block table names; nothing for a row of −1."""
    PARTS: tl.constexpr = BLOCK // PART
    row = tl.program_id(0) // PARTS
    found = tl.load(blocks_ptr + row * 2)
    # Masks, not branches: the loads of the elements wait for the tables alone, not for norms and flags.
    adapter = tl.maximum(found, 0)
    slot_ptr = slots_ptr + adapter * 4
    length = tl.multiple_of(tl.load(slot_ptr + _LENGTH), 16)
    first = tl.load(blocks_ptr + row * 2 + 1).to(tl.int64) * BLOCK + tl.program_id(0) % PARTS * PART
    offset = first + tl.arange(0, PART)
    mask = (offset < length) & (found >= 0)
    at = tl.multiple_of(tl.load(slot_ptr + _WEIGHTS), 16) + offset
    at_moments = tl.multiple_of(tl.load(slot_ptr + _MOMENTS), 16) + offset
    p = tl.load(params_ptr + at, mask=mask, other=0.0)
    g = tl.load(grads_ptr + at, mask=mask, other=0.0)
    m = tl.load(exp_avg_ptr + at_moments, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq_ptr + at_moments, mask=mask, other=0.0)
    mask = mask & may_step(norms_ptr, finite_ptr, adapter)
    g = g * clip_coefficient(norms_ptr, hyper_ptr, adapter)
    p, m, v = adamw_elements(p, g, m, v, hyper_ptr, adapter)
    tl.store(exp_avg_ptr + at_moments, m, mask=mask)
    tl.store(exp_avg_sq_ptr + at_moments, v, mask=mask)
    store_weights(
        params_ptr,
        grads_ptr,
        compute_ptr,
        overflow_ptr,
        adapter,
        at,
        p,
        mask,
        HAS_COMPUTE,
        HAS_OVERFLOW,
        ZERO,
    )


def adamw_(
    params: torch.Tensor,
    grads: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    compute: torch.Tensor | None,
    slots: torch.Tensor,
    blocks: torch.Tensor,
    hyper: torch.Tensor,
    norms: torch.Tensor,
    finite: torch.Tensor,
    *,
    overflow: torch.Tensor | None = None,
    zero_grads: bool = False,
) -> None:
    """One clipped AdamW step of every adapter of the tables, in place.

    Flat params, grads, exp_avg, exp_avg_sq fp32; `compute`, with the weights' offsets, gets the new weights
    rounded to its dtype. `slots` (A, 4) and `blocks` (NB, 2) of `slot_table`; hyper (A, 9) float64, a row
    `hyper_row`; norms (A,) float64 before clipping (`grad_norms`); finite (A,) int32, 0 when the adapter's
    loss was not finite. An adapter with a 0 there or a norm that is not finite is left as it was, gradients
    included. `overflow` (A,) int32: set to 1, never to 0, where a new weight is not finite. `zero_grads`
    leaves zeros in the gradients of the adapters that stepped; else gradients are not written.
    """
    assert all(t.dtype == torch.float32 for t in (params, grads, exp_avg, exp_avg_sq)), "AdamW runs on fp32"
    check_step_tables(slots.shape[0], blocks, hyper, norms, finite, overflow)
    launch(
        adamw_kernel,
        (blocks.shape[0] * (BLOCK // PART),),
        params,
        grads,
        exp_avg,
        exp_avg_sq,
        params if compute is None else compute,
        slots,
        blocks,
        hyper,
        norms,
        finite,
        finite if overflow is None else overflow,
        BLOCK=BLOCK,
        PART=PART,
        HAS_COMPUTE=compute is not None,
        HAS_OVERFLOW=overflow is not None,
        ZERO=zero_grads,
        num_warps=4,
    )


def check_step_tables(
    adapters: int,
    blocks: torch.Tensor,
    hyper: torch.Tensor,
    norms: torch.Tensor,
    finite: torch.Tensor,
    overflow: torch.Tensor | None,
) -> None:
    """Shapes and dtypes of what both optimizers read per adapter."""
    assert blocks.dtype == torch.int32, blocks.dtype
    assert (hyper.shape, hyper.dtype) == ((adapters, HYPER_COLUMNS), torch.float64), (
        hyper.shape,
        hyper.dtype,
    )
    assert (norms.shape, norms.dtype) == ((adapters,), torch.float64), (norms.shape, norms.dtype)
    for flag in (finite, overflow):
        assert flag is None or (flag.shape, flag.dtype) == ((adapters,), torch.int32), flag
