"""SwiGLU inside the grouped LoRA ops: the bits of the separate launches, for every row of a padded pass."""

from __future__ import annotations

import os

import pytest
import torch
from row_company import same_bytes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where the kernels are decorated

from gshare.kernels.grouped_lora_backward_triton import lora_ds, lora_dx
from gshare.kernels.grouped_lora_triton import lora_expand, lora_shrink
from gshare.kernels.layout import Group, NoLora
from gshare.kernels.lora_swiglu_triton import covers_padding, lora_dx_swiglu_backward_, lora_expand_swiglu
from gshare.kernels.lora_tables import GroupShape, LoraWorkspace
from gshare.kernels.swiglu_triton import swiglu, swiglu_backward
from gshare.kernels.triton_backend import TritonBackend
from lora_pass import DEVICE, Job, Pass, make_pass

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
#: Ranks of gate and up (the first of them also down's): none, odd, one step, several steps of the sum.
MIXED = [Job(1, (0, 5), (70,)), Job(2, (16, 0), (3, 9)), Job(3, (40, 17), (20,)), Job(4, (8, 8), (1,))]
#: No tile divides it.
ODD = 100


def padded(
    jobs: list[Job], shape: GroupShape, dtype: torch.dtype, *, dropout: bool = False, total: int = 192
) -> Pass:
    """A pass of `total` rows, those of nobody finite, some zeros negative."""
    after = total - sum(sum(job.lengths) for job in jobs)
    p = make_pass(shape, jobs, dtype, after=after, dropout=dropout)
    generator = torch.Generator().manual_seed(9)
    for tensor in (p.x, p.y, p.dy, p.dx):
        tensor[total - after :] = torch.randn(after, tensor.shape[1], generator=generator).to(DEVICE, dtype)
        tensor[::3, ::5] = -0.0
    return p


def forward(p: Pass) -> dict[str, torch.Tensor]:
    s = lora_shrink(p.x, p.flat, p.tables, 0, LoraWorkspace(DEVICE), p.mask)
    gate_up = p.y.clone()
    m = lora_expand_swiglu(gate_up, s, p.flat, p.tables, 0)
    return {"gate_up": gate_up, "m": m}


def forward_apart(p: Pass) -> dict[str, torch.Tensor]:
    s = lora_shrink(p.x, p.flat, p.tables, 0, LoraWorkspace(DEVICE), p.mask)
    gate_up = p.y.clone()
    lora_expand(gate_up, s, p.flat, p.tables, 0)
    return {"gate_up": gate_up, "m": swiglu(gate_up)}


def gate_up_of(p: Pass) -> torch.Tensor:
    """(T, 2I): a function of the row alone, as x is."""
    return torch.cat([p.dx.flip(1), p.dx.roll(7, 1) * 2], dim=1).contiguous()


def backward(p: Pass) -> dict[str, torch.Tensor]:
    ds = lora_ds(p.dy, p.flat, p.tables, 0, LoraWorkspace(DEVICE))
    dm = p.dx.clone()
    d_gate_up = lora_dx_swiglu_backward_(dm, ds, p.flat, p.tables, 0, gate_up_of(p), p.mask)
    return {"d_gate_up": d_gate_up, "m": dm}


def backward_apart(p: Pass) -> dict[str, torch.Tensor]:
    ds = lora_ds(p.dy, p.flat, p.tables, 0, LoraWorkspace(DEVICE))
    dm = p.dx.clone()
    lora_dx(dm, ds, p.flat, p.tables, 0, p.mask)
    d_gate_up, m = swiglu_backward(dm, gate_up_of(p))
    return {"d_gate_up": d_gate_up, "m": m}


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in expected if not same_bytes(found[name], expected[name])]


def of_one(jobs: list[Job]) -> list[Job]:
    """The same jobs for a group of one linear."""
    return [Job(job.seed, job.ranks[:1], job.lengths, job.poisoned) for job in jobs]


@dtypes
@pytest.mark.parametrize("inner", [64, ODD])
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_forward_has_the_bits_of_expand_then_swiglu(inner: int, dtype: torch.dtype) -> None:
    p = padded(MIXED, GroupShape(48, (inner, inner)), dtype)
    found = forward(p)
    assert differing(found, forward_apart(p)) == []
    assert not same_bytes(found["gate_up"], p.y), "nothing was added"


@dtypes
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("inner", [64, ODD])
def test_backward_has_the_bits_of_dx_then_swiglu_backward(
    inner: int, dropout: bool, dtype: torch.dtype
) -> None:
    p = padded(of_one(MIXED), GroupShape(inner, (48,)), dtype, dropout=dropout)
    assert differing(backward(p), backward_apart(p)) == []
    plain = swiglu_backward(p.dx, gate_up_of(p))[0]
    assert not same_bytes(backward(p)["d_gate_up"], plain), "nothing was added"


@dtypes
def test_dropout_masks_are_applied(dtype: torch.dtype) -> None:
    p = padded(of_one(MIXED), GroupShape(64, (48,)), dtype, dropout=True)
    masked = backward(p)
    p.mask = None
    assert differing(backward(p), masked) == ["d_gate_up"]


@dtypes
@pytest.mark.parametrize(
    ("lengths", "total"),
    [((1,), 64), ((1,), 256), ((64,), 128), ((65,), 128), ((63, 64), 192), ((128,), 128)],
)
def test_padding_of_any_length_gets_the_plain_swiglu(
    lengths: tuple[int, ...], total: int, dtype: torch.dtype
) -> None:
    jobs = [Job(1, (4, 8), lengths)]
    p = padded(jobs, GroupShape(16, (32, 32)), dtype, total=total)
    assert differing(forward(p), forward_apart(p)) == []
    p = padded(of_one(jobs), GroupShape(32, (16,)), dtype, total=total)
    assert differing(backward(p), backward_apart(p)) == []


@dtypes
def test_an_empty_pass_is_the_plain_swiglu(dtype: torch.dtype) -> None:
    p = padded([Job(1, (4, 8), (5,))], GroupShape(16, (32, 32)), dtype, total=64)
    p.tables.refresh([])
    assert differing(forward(p), {"gate_up": p.y, "m": swiglu(p.y)}) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the poisoned neighbour's own rows
@dtypes
def test_packed_bits_are_solo_bits(dtype: torch.dtype) -> None:
    job, good = Job(5, (16, 3), (70, 3)), Job(7, (3, 16), (40,))
    bad = Job(6, (20, 1), (33,), poisoned=True)
    for op, shape, jobs in (
        (forward, GroupShape(48, (64, 64)), [job, bad, good]),
        (backward, GroupShape(64, (48,)), of_one([job, bad, good])),
    ):
        own, others = jobs[0], jobs[1:]
        alone = op(make_pass(shape, [own], dtype, after=128 - 73))
        for before, packed in ((0, [own, *others]), (33, [others[0], own, others[1]]), (73, [*others, own])):
            together = op(make_pass(shape, packed, dtype, after=192 - 146))
            ours = {name: value[before : before + 73] for name, value in together.items()}
            assert differing(ours, {name: value[:73] for name, value in alone.items()}) == [], before


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_negative_control_another_rounding_is_noticed() -> None:
    """SwiGLU of sums that were not rounded first: close, and not the same bits."""
    p = padded([Job(1, (8, 8), (64,))], GroupShape(48, (64, 64)), torch.bfloat16, total=64)
    wide, found = p.y.double(), forward(p)
    s = lora_shrink(p.x, p.flat, p.tables, 0, LoraWorkspace(DEVICE))
    for j, (_, b_at, rank) in enumerate(p.adapters[0].matrices):
        b = p.flat[b_at : b_at + 64 * rank].view(64, rank).double()
        wide[:, 64 * j : 64 * j + 64] += s[:, 8 * j : 8 * j + rank].double() @ b.t()
    gate, up = wide.chunk(2, dim=1)
    unrounded = (torch.nn.functional.silu(gate) * up).bfloat16()
    assert torch.allclose(unrounded, found["m"], rtol=0.1, atol=0.1)
    assert differing({"m": unrounded}, {"m": found["m"]}) == ["m"]


def test_tables_too_small_for_the_padding_are_refused() -> None:
    p = padded([Job(1, (4, 8), (5,))], GroupShape(16, (32, 32)), torch.float32, total=64)
    assert covers_padding(p.tables, 64)
    assert not covers_padding(p.tables, 65)
    longer = torch.zeros(65, 64, device=DEVICE)
    with pytest.raises(AssertionError):
        lora_expand_swiglu(longer, torch.zeros(65, p.columns, device=DEVICE), p.flat, p.tables, 0)


def test_the_bare_base_takes_the_plain_kernels() -> None:
    backend = TritonBackend()
    gate_up, dm = torch.randn(9, 64, device=DEVICE), torch.randn(9, 32, device=DEVICE)
    s, m = backend.lora_forward_swiglu(dm, gate_up, NoLora(), Group(0, "gate_up", (32, 32), 16))
    assert s is None
    assert same_bytes(m, swiglu(gate_up))
    ds, *rest = backend.lora_dx_swiglu_backward(
        dm, dm.clone(), gate_up, NoLora(), Group(0, "down", (16,), 32)
    )
    assert ds is None
    assert all(same_bytes(a, b) for a, b in zip(rest, swiglu_backward(dm, gate_up), strict=True))
    assert backend.calls == {"swiglu": 1}
