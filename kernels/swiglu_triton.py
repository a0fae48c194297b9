"""SwiGLU on CUDA over the fused gate-and-up product; formulas in `swiglu.py`.

gate_up (T, 2I) holds the gate in columns 0 … I−1 and up in I … 2I−1. Every element is on its own; the
backward recomputes m with the forward's own function, so that a step need not keep m (T, I).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from gshare.kernels.launch import ceil_div, launch
from gshare.kernels.triton_rounding import round_to

# A tile of 4 × 512 with 4 warps: 16 elements a thread, two 16-byte bf16 loads in flight for each operand.
_ROWS, _COLUMNS, _WARPS = 4, 512, 4


@triton.jit
def swiglu_product(gate, up):
    """silu(gate) · up in fp32, not rounded."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def swiglu_gradients(dm, gate, up):
    """d_gate and d_up in fp32, not rounded."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    d_gate = dm * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    d_up = dm * (gate * sigmoid)
    return d_gate, d_up


@triton.jit(do_not_specialize=["T"])
def swiglu_kernel(gate_up_ptr, m_ptr, T, I: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: E741
    """m = round(silu(gate) · up): one tile (ROWS, COLUMNS) of m a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < T)[:, None] & (column < I)[None, :]
    row64 = row.to(tl.int64)[:, None]
    at = row64 * (2 * I) + column[None, :]
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + I, mask=mask, other=0.0).to(tl.float32)
    m = round_to(swiglu_product(gate, up), m_ptr.dtype.element_ty)
    tl.store(m_ptr + row64 * I + column[None, :], m, mask=mask)


@triton.jit(do_not_specialize=["T"])
def swiglu_backward_kernel(
    dm_ptr,
    gate_up_ptr,
    d_gate_up_ptr,
    m_ptr,
    T,
    I: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """d_gate, d_up and m again, each rounded once: one tile (ROWS, COLUMNS) of m a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < T)[:, None] & (column < I)[None, :]
    row64 = row.to(tl.int64)[:, None]
    at, at_m = row64 * (2 * I) + column[None, :], row64 * I + column[None, :]
    dtype = m_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + I, mask=mask, other=0.0).to(tl.float32)
    dm = tl.load(dm_ptr + at_m, mask=mask, other=0.0).to(tl.float32)
    d_gate, d_up = swiglu_gradients(dm, gate, up)
    tl.store(m_ptr + at_m, round_to(swiglu_product(gate, up), dtype), mask=mask)
    tl.store(d_gate_up_ptr + at, round_to(d_gate, dtype), mask=mask)
    tl.store(d_gate_up_ptr + at + I, round_to(d_up, dtype), mask=mask)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up (T, 2I) bf16 or fp32, contiguous → m (T, I) in its dtype."""
    tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.shape[1] == 2 * inner, gate_up.shape
    assert gate_up.is_contiguous(), "contiguous rows needed"
    m = gate_up.new_empty(tokens, inner)
    launch(
        swiglu_kernel,
        (ceil_div(tokens, _ROWS), ceil_div(inner, _COLUMNS)),
        gate_up,
        m,
        tokens,
        I=inner,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return m


def swiglu_backward(dm: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dm (T, I), gate_up (T, 2I) of one dtype, contiguous → d_gate_up (T, 2I) and m (T, I).

    m has the bits that `swiglu` gave.
    """
    tokens, inner = dm.shape
    assert gate_up.shape == (tokens, 2 * inner), (dm.shape, gate_up.shape)
    assert gate_up.dtype == dm.dtype, "one compute dtype"
    assert all(t.is_contiguous() for t in (dm, gate_up)), "contiguous rows needed"
    d_gate_up, m = torch.empty_like(gate_up), torch.empty_like(dm)
    launch(
        swiglu_backward_kernel,
        (ceil_div(tokens, _ROWS), ceil_div(inner, _COLUMNS)),
        dm,
        gate_up,
        d_gate_up,
        m,
        tokens,
        I=inner,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )
    return d_gate_up, m
