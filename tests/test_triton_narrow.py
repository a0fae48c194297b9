"""`triton_common.narrow` rounds as torch does, in Triton's interpreter too, which by itself does not."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402  (after the variable is set)
from gshare.kernels.triton_common import INTERPRET, narrow  # noqa: E402


@triton.jit
def narrow_kernel(x, out, ROUND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, narrow(tl.load(x + at), out.dtype.element_ty, ROUND))


def narrowed(x: torch.Tensor, dtype: torch.dtype, *, by_hand: bool = INTERPRET) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    narrow_kernel[(x.numel() // 65536,)](x, out, ROUND=by_hand, BLOCK=65536)
    return out


def patterns() -> torch.Tensor:
    """(8 × 65536,) fp32: every upper half with lower halves around the midpoint; subnormals, NaNs."""
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1234, 0xABCD])
    bits = (torch.arange(65536) << 16)[:, None] | lower
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return bits.to(torch.int32).view(torch.float32).view(-1).to(DEVICE)


def test_every_bf16_is_the_nearest() -> None:
    x = patterns()
    got, wanted = narrowed(x, torch.bfloat16), x.to(torch.bfloat16)
    number = ~x.isnan()
    assert torch.equal(got[number].view(torch.int16), wanted[number].view(torch.int16))
    assert bool(got[~number].isnan().all())


def test_fp32_stays() -> None:
    x = patterns()
    assert torch.equal(narrowed(x, torch.float32).view(torch.int32), x.view(torch.int32))


@pytest.mark.skipif(not INTERPRET, reason="the GPU rounds by itself")
def test_the_interpreter_alone_rounds_otherwise() -> None:
    """Negative control, and the reason for `narrow`: when this fails, Triton has mended it."""
    x = torch.linspace(1, 2, 65536, device=DEVICE)
    assert not torch.equal(narrowed(x, torch.bfloat16, by_hand=False), x.to(torch.bfloat16))
