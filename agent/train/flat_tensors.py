"""Many tensors in a few flat ones, by name, each made when it is asked for.

A save of an r = 64 adapter of SmolLM2 has 1,260 of them. To slice and view each gives Python's lock away and
asks for it again, 6 s of a sweep in which threads write checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """Where a tensor lies: the number of its flat tensor, its first element there, its shape."""

    flat: int
    start: int
    shape: tuple[int, ...]


class Raw(NamedTuple):
    """One tensor as a file has it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: memoryview


class FlatTensors(Mapping[str, Tensor]):
    """`flats`: one-dimensional, on the host, contiguous."""

    def __init__(self, flats: Sequence[Tensor], places: Mapping[str, Place]) -> None:
        self._flats, self._places = list(flats), places

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        end = place.start + math.prod(place.shape)
        return self._flats[place.flat][place.start : end].view(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """What they keep in memory, gaps between them included."""
        return sum(flat.nbytes for flat in self._flats)

    def raw(self) -> Iterator[Raw]:
        """Every tensor, with its bytes where they are."""
        whole = [flat.detach().view(torch.uint8).numpy().data for flat in self._flats]
        for name, (number, start, shape) in self._places.items():
            flat = self._flats[number]
            first, size = start * flat.element_size(), math.prod(shape) * flat.element_size()
            yield Raw(name, flat.dtype, shape, whole[number][first : first + size])
