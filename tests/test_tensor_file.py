"""A safetensors file piece by piece: the library's bytes, in bounded pieces, each made when it is taken."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.train import checkpoint, tensor_file
from gshare.agent.train.checkpoint import Snapshot, adapter_config, write_checkpoint
from gshare.agent.train.tensor_file import PIECE_BYTES, file_pieces
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

Tensors = dict[str, Tensor]
PIECE = 4096
NUMPY = {torch.float32: np.float32, torch.uint8: np.uint8}


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits at all: of floats NaNs with a payload, denormals and negative zeros too."""
    drawn = np.random.default_rng(seed).bytes(int(np.prod(shape)) * dtype.itemsize)
    return torch.from_numpy(np.frombuffer(bytearray(drawn), NUMPY[dtype]).reshape(shape))


def library(tensors: Tensors) -> bytes:
    return save(tensors, metadata={"format": "pt"})


def bits(tensors: Tensors) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {name: (t.dtype, tuple(t.shape), t.numpy().tobytes()) for name, t in tensors.items()}


def three_pieces() -> Tensors:
    """A header and one tensor of a piece; then two pieces more."""
    return {name: tensor((PIECE - 512,), torch.uint8, seed) for seed, name in enumerate("abc")}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", PIECE)


# ---------------------------------------------------------------------- the library's bytes

#: JSON escapes the first ones; the others take one to four bytes of UTF-8, and U+FFFF sorts before U+10000
#: in UTF-8 and after it in UTF-16.
ODD = '"\\/\b\f\n\r\t\x00\x01\x1f\x7f\x80é\u2028\ud7ff\ue000\uffff\U00010000\U0010ffff'
characters = st.sampled_from(ODD) | st.characters(exclude_categories=["Cs"])
names = st.text(characters, max_size=40).filter(lambda name: name != "__metadata__")  # the header's own key
dims = st.lists(st.integers(1, 5), max_size=5) | st.lists(st.integers(0, 5), max_size=6)  # 0: none of it
made = st.builds(tensor, dims.map(tuple), st.sampled_from(list(NUMPY)), st.integers(0, 2**32))
#: 1 cuts within an element, and 13 at no multiple of one.
piece_sizes = st.sampled_from([1, 13, 64, 1000, PIECE_BYTES])


@given(st.dictionaries(names, made, max_size=8), piece_sizes)
@example({}, 64)
@example({name: tensor((2,), torch.uint8) for name in ODD}, PIECE_BYTES)
@example({"0-d": tensor((), torch.float32), "none": tensor((0,), torch.uint8)}, 13)
@example({"": tensor((1,) * 30, torch.float32), "z" * 3000: tensor((3, 0, 2), torch.float32)}, 64)
def test_the_pieces_are_the_library_s_file_and_no_larger_than_they_may_be(
    tensors: Tensors, piece: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tensor_file, "PIECE_BYTES", piece)
        pieces = list(file_pieces(tensors))
    data = b"".join(pieces)
    assert data == library(tensors)
    assert bits(load(data)) == bits(tensors)
    header = 8 + int.from_bytes(data[:8], "little")
    assert len(pieces[0]) <= max(header, piece)
    assert all(0 < len(one) <= piece for one in pieces[1:])
    assert all(type(one) is bytes for one in pieces)
    # Two that would have been one do not come: a piece is a turn of Python's lock.
    assert all(len(a) + len(b) > piece for a, b in pairwise(pieces))


@pytest.mark.parametrize("dtype", list(NUMPY), ids=str)
@pytest.mark.parametrize("offset", [-4, -1, 0, 1, 4])
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_a_tensor_of_about_one_piece_or_of_several(
    small_pieces: None, dtype: torch.dtype, offset: int, pieces: int
) -> None:
    """The large one between two small ones: what is cut is its own, and theirs is joined."""
    elements = (pieces * PIECE + offset * dtype.itemsize) // dtype.itemsize
    tensors = {
        "a": tensor((3,), dtype, 1),
        "b": tensor((elements,), dtype, 2),
        "c": tensor((5,), dtype, 3),
    }
    found = list(file_pieces(tensors))
    assert b"".join(found) == library(tensors)
    assert pieces + 1 <= len(found) <= pieces + 2
    assert max(map(len, found)) <= PIECE


def test_the_order_of_a_mapping_does_not_reach_the_file() -> None:
    tensors = {
        "b": tensor((3,), torch.uint8),
        "a": tensor((2, 2), torch.uint8, 1),
        "d": tensor((4,), torch.float32, 2),
        "c": tensor((), torch.float32, 3),
    }
    files = [b"".join(file_pieces(dict(some))) for some in (tensors.items(), reversed(tensors.items()))]
    assert files[0] == files[1] == library(tensors)


def test_a_view_and_a_tensor_with_a_gradient_are_written_as_they_are() -> None:
    """What a checkpoint is given are slices of one copy of an arena's region."""
    region = tensor((100,), torch.float32)
    tensors = {"a": region[10:30].view(4, 5), "b": region[30:].requires_grad_()}
    copies = {name: one.detach().clone() for name, one in tensors.items()}
    assert b"".join(file_pieces(tensors)) == library(copies)


@pytest.mark.parametrize("broken", ["order", "escapes", "alignment"])
def test_another_order_escape_or_alignment_is_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison with the library."""
    tensors = {"é": tensor((1,), torch.uint8), "b": tensor((1,), torch.float32, 1)}
    assert b"".join(file_pieces(tensors)) == library(tensors)
    if broken == "order":
        monkeypatch.setattr(tensor_file, "_ORDER", [torch.uint8, torch.float32])
    elif broken == "escapes":
        ascii_only = SimpleNamespace(dumps=lambda value, **_: json.dumps(value, separators=(",", ":")))
        monkeypatch.setattr(tensor_file, "json", ascii_only)
    else:
        monkeypatch.setattr(tensor_file, "_ALIGN", 64)
    data = b"".join(file_pieces(tensors))
    assert data != library(tensors)
    assert bits(load(data)) == bits(tensors), "a file all the same, which a load alone would let pass"


# ---------------------------------------------------------------------- other dtypes

OTHERS = [
    *(torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16),
]


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_another_dtype_is_refused_before_a_byte_is_given(small_pieces: None, dtype: torch.dtype) -> None:
    """Though it comes last, after more than a piece of others."""
    tensors = {"a": tensor((2 * PIECE,), torch.uint8), "z": torch.zeros(3, dtype=dtype)}
    with pytest.raises(KeyError, match=str(dtype).replace(".", r"\.")):
        next(file_pieces(tensors))
    del tensors["z"]
    assert next(file_pieces(tensors))


# ---------------------------------------------------------------------- no copy of the whole

Taken = Callable[[Iterator[bytes]], Iterable[bytes]]
AS_THEY_COME = pytest.param(iter, True, id="as they come")
#: The negative control: a writer that makes the file and then writes it.
ALL_AT_ONCE = pytest.param(list, False, id="all at once")


@pytest.mark.parametrize(("taken", "lazy"), [AS_THEY_COME, ALL_AT_ONCE])
def test_a_piece_is_made_when_it_is_taken(small_pieces: None, taken: Taken, lazy: bool) -> None:
    """Told by a tensor that is changed when the piece before it is there already."""
    tensors = three_pieces()
    before = library(tensors)
    pieces = iter(taken(file_pieces(tensors)))
    found = [next(pieces)]
    tensors["b"].fill_(7)
    found.append(next(pieces))
    tensors["c"].fill_(9)
    found += pieces
    assert len(found) == 3
    assert found[0] == before[: len(found[0])]
    after = library(tensors)
    assert before != after
    assert b"".join(found) == (after if lazy else before)


@pytest.mark.parametrize(("taken", "lazy"), [AS_THEY_COME, ALL_AT_ONCE])
def test_who_writes_a_checkpoint_never_holds_a_whole_file(
    small_pieces: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: Taken, lazy: bool
) -> None:
    """A file of 4 MiB in pieces of 4 KiB; Python's memory is counted, of which tensors take none."""
    size = 4 << 20
    weights = {name: tensor((size // 8,), torch.float32, seed) for seed, name in enumerate("ab")}
    snapshot = Snapshot("a", 1, weights, {}, {})
    config = adapter_config(AdapterSpec(name="a", data="a.jsonl", output_dir="out", r=4), "toy")
    monkeypatch.setattr(checkpoint, "file_pieces", lambda tensors: taken(file_pieces(tensors)))
    write_checkpoint(snapshot, tmp_path / "first", config)  # what is made once for all is made
    tracemalloc.start()
    try:
        path = write_checkpoint(snapshot, tmp_path / "second", config)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (path / "adapter_model.safetensors").stat().st_size > size
    assert (peak < size // 8) if lazy else (peak > size)
