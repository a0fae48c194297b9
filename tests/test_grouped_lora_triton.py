"""The grouped LoRA kernels against float64, and their bits: alone, packed, cut, masked. Without CUDA they run
in Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from gshare.kernels import grouped_lora_backward_triton as backward
from gshare.kernels import grouped_lora_grads_triton as gradients
from gshare.kernels import grouped_lora_triton as forward
from gshare.kernels.lora_group import (
    lora_ds_group_reference,
    lora_dx_group_reference,
    lora_expand_group_reference,
    lora_grads_group_reference,
    lora_shrink_group_reference,
)
from gshare.kernels.lora_tables import GroupShape, LoraWorkspace, PassAdapter, column_width
from lora_pass import DEVICE, Job, Pass, make_pass, own_bytes, run

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
#: In these tests, since the interpreter takes a millisecond an operation.
CHUNK = 64
#: Two chunks of K and of the last linear; no width a multiple of a tile.
ODD = GroupShape(98, (33, 18, 70))
#: Widths as models have them, two chunks of K.
SMALL = GroupShape(128, (64, 32))

MIXED = (
    Job(1, (16, 3, 8), (70, 5)),
    Job(2, (0, 20, 17), (65,)),
    Job(3, (40, 0, 1), (10, 70, 1)),
)


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (forward, backward):
        monkeypatch.setattr(module, "CHUNK", CHUNK)


def near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = float((actual.double() - expected).norm() / expected.norm())
    assert error <= (1e-2 if dtype == torch.bfloat16 else 1e-5), error


def owned(p: Pass) -> torch.Tensor:
    """(T, columns) bool: where S has an owner."""
    where = torch.zeros(p.x.shape[0], p.columns, dtype=torch.bool, device=DEVICE)
    for adapter in p.adapters:
        width = sum(column_width(int(rank)) for rank in adapter.matrices[:, 2])
        where[adapter.sequences[0][0] : adapter.sequences[-1][1], :width] = True
    return where


@DTYPES
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
def test_every_op_agrees_with_float64(dtype: torch.dtype, dropout: bool) -> None:
    p = make_pass(ODD, MIXED, dtype, before=2, dropout=dropout)
    out = run(p)
    tokens = owned(p).any(1)
    where = owned(p)
    s = lora_shrink_group_reference(p.x, p.flat, ODD, p.adapters, p.columns, p.mask)
    ds = lora_ds_group_reference(p.dy, p.flat, ODD, p.adapters, p.columns)
    near(out["s"][where], s[where], dtype)
    near(out["ds"][where], ds[where], dtype)
    y = lora_expand_group_reference(p.y, out["s"], p.flat, ODD, p.adapters)
    near(out["y"][tokens], y[tokens], dtype)
    dx = lora_dx_group_reference(p.dx, out["ds"], p.flat, ODD, p.adapters, p.mask)
    near(out["dx"][tokens], dx[tokens], dtype)
    grads = lora_grads_group_reference(p.x, p.dy, out["s"], out["ds"], p.grads, ODD, p.adapters, p.mask)
    # Only the operands were rounded: the sums are fp32 in either dtype.
    near(out["grads"], grads, torch.float32)
    assert bool((out["s"][where & (s == 0)] == 0).all()), "columns past a rank must hold zeros"


#: Widths that neither, both or one tile of dA and dB divide: with masks along features and without.
@pytest.mark.parametrize("tiles", [(128, 64), (64, 128)], ids=["wide-dA", "wide-dB"])
@pytest.mark.parametrize("shape", [ODD, GroupShape(128, (128, 64))], ids=["odd", "even"])
def test_gradients_in_tiles_of_different_widths(
    shape: GroupShape, tiles: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = tuple(Job(job.seed, job.ranks[: shape.linears], job.lengths) for job in MIXED)
    p = make_pass(shape, jobs, torch.bfloat16, before=2)
    sides = iter(tiles)
    monkeypatch.setattr(gradients, "feature_block", lambda *_: next(sides))
    out = run(p)
    assert not list(sides), "both sides ask for their width"
    near(
        out["grads"],
        lora_grads_group_reference(p.x, p.dy, out["s"], out["ds"], p.grads, shape, p.adapters, None),
        torch.float32,
    )


def test_the_tiles_of_the_gradients_by_shape() -> None:
    """What was measured (`feature_block`), and in the shared memory that every card has."""
    block, size = gradients.feature_block, 2
    assert block(4096, 16, 16, size) == 64
    assert block(4864, 16, 16, size) == 128
    assert block(14336, 16, 1, size) == 64, "too few programs for a large card"
    assert block(14336, 64, 16, size) == block(14336, 16, 16, size, True) == block(14336, 16, 16, 4) == 64
    for a, b, columns in ((128, 128, 32), (64, 128, 64), (64, 64, 64)):
        buffers = (gradients.grad_stages(a, b, columns, size, False) + 1) // 2
        assert buffers >= 2
        assert buffers * (max(a, b) + columns) * 64 * size <= forward.SHARED_BYTES


@DTYPES
def test_chunks_of_their_real_length(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (forward, backward):
        monkeypatch.setattr(module, "CHUNK", 1024)
    shape = GroupShape(2050, (1048,))
    p = make_pass(shape, [Job(1, (12,), (5,))], dtype, spare=0, after=0)
    workspace = LoraWorkspace(DEVICE)
    sums = (
        forward.lora_shrink(p.x, p.flat, p.tables, 0, workspace),
        backward.lora_ds(p.dy, p.flat, p.tables, 0, workspace),
    )
    s, ds = (out[:, :12] for out in sums)
    near(s, lora_shrink_group_reference(p.x, p.flat, shape, p.adapters, p.columns)[:, :12], dtype)
    near(ds, lora_ds_group_reference(p.dy, p.flat, shape, p.adapters, p.columns)[:, :12], dtype)


@DTYPES
def test_rows_and_features_of_nobody_are_left_alone(dtype: torch.dtype) -> None:
    p = make_pass(SMALL, [Job(1, (0, 5), (66,))], dtype, before=3, after=5)
    p.y[:3], p.y[-5:], p.dx[:3], p.dx[-5:] = 7.0, 8.0, 9.0, 10.0
    out = run(p)
    rows = torch.ones(p.x.shape[0], dtype=torch.bool, device=DEVICE)
    rows[3:-5] = False
    assert torch.equal(out["y"][rows], p.y[rows])
    assert torch.equal(out["dx"][rows], p.dx[rows])
    assert torch.equal(out["y"][:, :64], p.y[:, :64]), "a linear of rank 0 changed"
    assert not torch.equal(out["y"][3:-5, 64:], p.y[3:-5, 64:])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the poisoned neighbour's own rows
@DTYPES
@pytest.mark.parametrize("ranks", [(8, 4), (16, 40)], ids=str)
def test_packed_bits_are_solo_bits(dtype: torch.dtype, ranks: tuple[int, int]) -> None:
    """Beside NaN and Inf, behind them, in another order, with another rank range and other capacities."""
    job = Job(5, ranks, (70, 3))
    solo = make_pass(SMALL, [job], dtype, after=0, spare=0)
    expected = own_bytes(solo, run(solo), 0)
    bad, good = Job(6, (70, 1), (33,), poisoned=True), Job(7, (3, 16), (64, 65))
    for jobs, index in (([bad, job, good], 1), ([good, bad, job], 2)):
        packed = make_pass(SMALL, jobs, dtype, spare=3)
        assert own_bytes(packed, run(packed), index) == expected


@DTYPES
def test_an_offset_changes_no_bits(dtype: torch.dtype) -> None:
    shape, job = GroupShape(48, (32,)), Job(8, (8,), (67,))
    expected = None
    for before in range(16):
        p = make_pass(shape, [job], dtype, before=before)
        got = own_bytes(p, run(p), 0)
        expected = expected or got
        assert got == expected, f"offset {before}"


@DTYPES
def test_split_sums_have_the_bits_of_whole_ones(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    p = make_pass(GroupShape(192, (136,)), [Job(1, (16,), (65,))], dtype)
    workspace = LoraWorkspace(DEVICE)
    split = own_bytes(p, run(p, workspace), 0)
    _, counters = workspace.reserve(1, 1)
    assert len(counters) > 1, "nothing was split"
    assert not counters.any(), "counters must be zero between launches"
    for module in (forward, backward):
        monkeypatch.setattr(module, "splits", lambda programs, block_c: False)
    assert own_bytes(p, run(p), 0) == split


def test_the_comparison_notices_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: chunks of another length, as a split chosen from the batch would have. In fp32:
    rounding S to bf16 hides it on these few values."""
    p = make_pass(GroupShape(192, (136,)), [Job(1, (16,), (65,))], torch.float32)
    before = own_bytes(p, run(p), 0)
    for module in (forward, backward):
        monkeypatch.setattr(module, "CHUNK", 32)
    after = own_bytes(p, run(p), 0)
    assert before["s"] != after["s"]
    assert before["ds"] != after["ds"]


@DTYPES
def test_a_mask_of_ones_has_the_bits_of_none(dtype: torch.dtype) -> None:
    p = make_pass(SMALL, [Job(1, (16, 3), (65,)), Job(2, (4, 8), (20,))], dtype)
    masked = make_pass(SMALL, [Job(1, (16, 3), (65,)), Job(2, (4, 8), (20,))], dtype, dropout=True)
    assert masked.mask is not None
    dropped = run(masked)
    masked.mask.fill_(1)
    plain, kept = run(p), run(masked)
    for index in range(2):
        assert own_bytes(masked, kept, index) == own_bytes(p, plain, index)
        assert own_bytes(masked, dropped, index) != own_bytes(p, plain, index)


@DTYPES
def test_micro_batches_change_no_bits_of_the_gradients(dtype: torch.dtype) -> None:
    shape, lengths = GroupShape(96, (80, 16)), (70, 3, 64, 129)
    p = make_pass(shape, [Job(1, (8, 20), lengths), Job(2, (5, 0), (9,))], dtype)
    out = run(p)
    whole = own_bytes(p, out, 0)["grads"]
    first, second = p.adapters

    def in_calls(*cuts: int) -> bytes:
        grads, at = p.grads.clone(), 0
        for count in cuts:
            part = PassAdapter(first.sequences[at : at + count], first.scale, first.matrices)
            p.tables.refresh([part, second] if at == 0 else [part])
            gradients.lora_grads(p.x, p.dy, out["s"], out["ds"], grads, p.tables, 0)
            at += count
        assert at == len(lengths)
        return own_bytes(p, {**out, "grads": grads}, 0)["grads"]

    assert in_calls(4) == whole
    assert in_calls(2, 2) == whole
    assert in_calls(1, 1, 1, 1) == whole
    # Negative controls: the sequences in another order; granules that run through the sequences' ends (not
    # in fp32 on a GPU: there a granule is a chain of single additions, and its borders do not show).
    joined = ((first.sequences[0][0], first.sequences[-1][1]),)
    others = [[(sequence,) for sequence in reversed(first.sequences)]]
    if dtype is torch.bfloat16 or p.x.device.type == "cpu":
        others.append([joined])
    for calls in others:
        grads = p.grads.clone()
        for sequences in calls:
            p.tables.refresh([PassAdapter(sequences, first.scale, first.matrices)])
            gradients.lora_grads(p.x, p.dy, out["s"], out["ds"], grads, p.tables, 0)
        assert own_bytes(p, {**out, "grads": grads}, 0)["grads"] != whole


@DTYPES
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
def test_fresh_gradients_have_the_bits_of_zeroed_ones(dtype: torch.dtype, dropout: bool) -> None:
    """What lay there is not read: NaN. A second call adds to what the first wrote; a neighbour's flag and
    matrices of a linear that it leaves alone play no part."""
    shape, lengths = GroupShape(98, (70, 18)), (70, 3, 9, 64)
    p = make_pass(shape, [Job(1, (9, 20), lengths), Job(2, (5, 0), (9,))], dtype, dropout=dropout)
    out = run(p)
    first, second = p.adapters

    def in_calls(start: torch.Tensor, fresh: bool, *cuts: int) -> list[bytes]:
        grads, at = start.clone(), 0
        for count in cuts:
            part = PassAdapter(first.sequences[at : at + count], first.scale, first.matrices)
            p.tables.refresh([part, second] if at == 0 else [part], [fresh and at == 0])
            gradients.lora_grads(p.x, p.dy, out["s"], out["ds"], grads, p.tables, 0, p.mask)
            at += count
        return [own_bytes(p, {**out, "grads": grads}, i)["grads"] for i in range(2)]

    zeroed, dirty = p.grads.clone(), p.grads.clone()
    for (a_off, b_off, rank), n in zip(first.matrices, shape.out_features, strict=True):
        for offset, size in ((int(a_off), int(rank) * shape.in_features), (int(b_off), int(rank) * n)):
            zeroed[offset : offset + size] = 0.0
            dirty[offset : offset + size] = torch.nan
    expected = in_calls(zeroed, False, 4)
    assert in_calls(dirty, True, 4) == expected
    assert in_calls(dirty, True, 2, 2) == expected
    assert in_calls(dirty, False, 4)[0] != expected[0]  # negative control


def test_refreshed_tables_serve_the_next_pass() -> None:
    """As a captured graph does: the same memory, first for three adapters, then for one elsewhere."""
    dtype = torch.float32
    p = make_pass(SMALL, [Job(1, (16, 3), (65,)), Job(2, (4, 8), (20,)), Job(3, (1, 1), (7,))], dtype)
    expected = own_bytes(p, run(p), 1)
    pointers = [t.data_ptr() for t in (p.tables.blocks, p.tables.groups[0].matrices, p.tables.scales)]
    p.tables.refresh([p.adapters[1]])
    assert own_bytes(p, run(p), 1) == expected
    others = run(p)["y"]
    assert torch.equal(others[:65], p.y[:65]), "an adapter that left still has its path added"
    assert [t.data_ptr() for t in (p.tables.blocks, p.tables.groups[0].matrices, p.tables.scales)] == pointers


def test_what_does_not_fit_the_tables_is_refused_and_changes_nothing() -> None:
    p = make_pass(SMALL, [Job(1, (16, 3), (65,))], torch.float32, spare=0, after=0)
    before = p.tables.blocks.clone()
    own = p.adapters[0]
    two_ranges = PassAdapter(((65, 66),), 1.0, own.matrices)
    higher = PassAdapter(own.sequences, 1.0, own.matrices + np.array([0, 0, 1]))
    longer = PassAdapter(((0, 300),), 1.0, own.matrices)
    cut = PassAdapter(((0, 30), (30, 65)), 1.0, own.matrices)
    for adapters, message in (
        ([own, two_ranges], "2 adapters does not fit tables for 1"),
        ([cut], "2 sequences does not fit tables for 1"),
        ([longer], "5 blocks does not fit tables for 2"),
        ([higher], "rank 17 over the tables' 16"),
    ):
        with pytest.raises(ValueError, match=message):
            p.tables.refresh(adapters)
    for sequences in (((0, 30), (31, 65)), ((0, 0), (0, 65))):
        with pytest.raises(AssertionError, match="do not tile"):
            p.tables.refresh([PassAdapter(sequences, 1.0, own.matrices)])
    with pytest.raises(AssertionError, match="inside the one before"):
        p.tables.refresh([own, own])
    with pytest.raises(AssertionError, match="off the 16-element grid"):
        p.tables.refresh([PassAdapter(own.sequences, 1.0, own.matrices + np.array([8, 0, 0]))])
    assert torch.equal(p.tables.blocks, before)


def test_an_outgrown_workspace_stays_where_a_graph_saw_it() -> None:
    workspace = LoraWorkspace(DEVICE)
    partials, counters = workspace.reserve(10, 10)
    counters.fill_(5)
    more, zeros = workspace.reserve(1000, 1000)
    assert more.numel() >= 1000
    assert not zeros.any()
    assert workspace.reserve(10, 10)[0].data_ptr() == more.data_ptr()
    assert partials.data_ptr() != more.data_ptr()
    assert counters.tolist() == [5] * 10
