"""Tensors that lie in flat ones: as a mapping, and as what a file is made of."""

from __future__ import annotations

import pytest
import torch
from gshare.agent.train.flat_tensors import FlatTensors, Place
from gshare.agent.train.tensor_file import file_pieces
from safetensors.torch import save


def flats() -> list[torch.Tensor]:
    return [torch.arange(40, dtype=torch.float32), torch.arange(30, dtype=torch.uint8)]


PLACES = {
    "b": Place(0, 3, (4, 5)),
    "a": Place(0, 23, (2, 3)),  # with gaps before and after it
    "none": Place(0, 39, (0, 7)),
    "codes": Place(1, 8, (11,)),
    "one": Place(0, 2, ()),
}


def test_each_is_a_view_of_its_flat_tensor() -> None:
    found = FlatTensors(flats(), PLACES)
    assert list(found) == list(PLACES)
    assert len(found) == 5
    assert found["b"].tolist() == torch.arange(3, 23, dtype=torch.float32).view(4, 5).tolist()
    assert found["a"].tolist() == [[23, 24, 25], [26, 27, 28]]
    assert found["codes"].tolist() == list(range(8, 19))
    assert found["one"].shape == ()
    assert float(found["one"]) == 2
    assert found["none"].shape == (0, 7)
    found["a"].fill_(7)
    assert float(found["a"].sum()) == 42, "a view, and not a copy"
    assert found.nbytes == 40 * 4 + 30, "gaps are kept in memory too"
    with pytest.raises(KeyError):
        found["c"]


def test_a_file_of_them_is_that_of_the_tensors_one_by_one() -> None:
    found = FlatTensors(flats(), PLACES)
    plain = {name: tensor.clone() for name, tensor in found.items()}
    expected = save(plain, metadata={"format": "pt"})
    assert b"".join(file_pieces(found)) == b"".join(file_pieces(plain)) == expected
    found["codes"][3] = 200
    assert b"".join(file_pieces(found)) != expected
