"""The frozen base in memory: weights as they are stored, dense on demand.

N output features, K input features, V vocabulary, H hidden. A weight that is stored in another dtype than
the compute dtype is unpacked into one buffer that all weights of a base share: at any time one weight is
dense, so a 4-bit base costs 4 bits a weight plus its largest linear once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from gshare.agent.base.config import ModelConfig
from gshare.kernels import int8, nf4
from gshare.kernels.layout import GROUPS


class Scratch:
    """The one buffer that weights of a base are unpacked into, on `device` in `dtype`."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._flat = torch.empty(0, device=device, dtype=dtype)

    def reserve(self, elements: int) -> None:
        """Grow to hold a weight of `elements`; loading does it once, for the largest."""
        if elements > self._flat.numel():
            self._flat = torch.empty(elements, device=self._flat.device, dtype=self.dtype)

    def take(self, shape: tuple[int, int]) -> torch.Tensor:
        """A contiguous (N, K) view with whatever was there before."""
        self.reserve(shape[0] * shape[1])
        return self._flat[: shape[0] * shape[1]].view(shape)

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes


class Weight(Protocol):
    """A frozen (N, K) matrix."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        ...

    def dense(self) -> torch.Tensor:
        """(N, K) in the compute dtype. May be the shared buffer: valid until the next `dense` of the base."""
        ...

    def unpack_into(self, out: torch.Tensor) -> None:
        """Write the dense (N, K) into `out`, contiguous and in the compute dtype."""
        ...


class GroupWeight(Protocol):
    """What a product needs of a weight."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def dense(self) -> torch.Tensor: ...


class DenseWeight:
    """fp32 or bf16. Returned as it is when that is the compute dtype, else converted into the buffer."""

    def __init__(self, tensor: torch.Tensor, scratch: Scratch) -> None:
        self.tensor = tensor
        self._scratch = scratch
        if tensor.dtype != scratch.dtype:
            scratch.reserve(tensor.numel())

    @property
    def shape(self) -> tuple[int, int]:
        return (self.tensor.shape[0], self.tensor.shape[1])

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def dense(self) -> torch.Tensor:
        if self.tensor.dtype == self._scratch.dtype:
            return self.tensor
        return self._scratch.take(self.shape).copy_(self.tensor)

    def unpack_into(self, out: torch.Tensor) -> None:
        out.copy_(self.tensor)


class Int8Weight:
    """Weight-only int8, one scale per output channel (`gshare.kernels.int8`)."""

    def __init__(self, q: int8.Int8Tensor, scratch: Scratch) -> None:
        self.q = q
        self._scratch = scratch
        scratch.reserve(q.codes.numel())

    @property
    def shape(self) -> tuple[int, int]:
        return (self.q.codes.shape[0], self.q.codes.shape[1])

    @property
    def nbytes(self) -> int:
        return self.q.codes.nbytes + self.q.scales.nbytes

    def dense(self) -> torch.Tensor:
        out = self._scratch.take(self.shape)
        self.unpack_into(out)
        return out

    def unpack_into(self, out: torch.Tensor) -> None:
        if out.is_cuda:
            from gshare.kernels import int8_triton

            int8_triton.dequantise(self.q, out)
            return
        int8.dequantise(self.q, out.dtype, out)


class Nf4Weight:
    """4-bit NormalFloat, blocks of 64, double quantisation (`gshare.kernels.nf4`)."""

    def __init__(self, q: nf4.Nf4Tensor, scratch: Scratch) -> None:
        self.q = q
        self._scratch = scratch
        scratch.reserve(q.shape[0] * q.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.q if isinstance(part, torch.Tensor))

    def dense(self) -> torch.Tensor:
        out = self._scratch.take(self.shape)
        self.unpack_into(out)
        return out

    def unpack_into(self, out: torch.Tensor) -> None:
        if out.is_cuda:
            from gshare.kernels import nf4_triton

            nf4_triton.dequantise(self.q, out)
            return
        nf4.dequantise(self.q, out.dtype, out)


class StackedWeight:
    """Several quantised weights of one input, one above the other: each keeps its own quantisation."""

    def __init__(self, parts: Sequence[Weight], scratch: Scratch) -> None:
        self.parts = tuple(parts)
        self._scratch = scratch
        scratch.reserve(self.shape[0] * self.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        return (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def dense(self) -> torch.Tensor:
        out = self._scratch.take(self.shape)
        row = 0
        for part in self.parts:
            part.unpack_into(out[row : row + part.shape[0]])
            row += part.shape[0]
        return out


@dataclass
class BaseLinear:
    weight: Weight
    bias: torch.Tensor | None  # (N,) in the compute dtype


@dataclass
class GroupLinear:
    """The linears of a group as one: weight (ΣN, K), bias (ΣN,)."""

    weight: GroupWeight
    bias: torch.Tensor | None


def grouped(linears: dict[str, BaseLinear], scratch: Scratch) -> dict[str, GroupLinear]:
    """Concatenate each group's weights; plain ones become views of the whole, so nothing is held twice."""
    groups = {}
    for name, members in GROUPS.items():
        parts = [linears[member] for member in members]
        weight: GroupWeight = parts[0].weight
        if len(parts) > 1 and all(isinstance(part.weight, DenseWeight) for part in parts):
            whole = torch.cat([part.weight.tensor for part in parts if isinstance(part.weight, DenseWeight)])
            weight = DenseWeight(whole, scratch)
            row = 0
            for part in parts:
                rows = part.weight.shape[0]
                part.weight = DenseWeight(whole[row : row + rows], scratch)
                row += rows
        elif len(parts) > 1:
            weight = StackedWeight([part.weight for part in parts], scratch)
        biases = [part.bias for part in parts]
        known = next((bias for bias in biases if bias is not None), None)
        bias = None
        if known is not None:
            bias = torch.cat(
                [known.new_zeros(part.weight.shape[0]) if part.bias is None else part.bias for part in parts]
            )
        groups[name] = GroupLinear(weight, bias)
    return groups


@dataclass
class BaseLayer:
    """One decoder layer. Norms are in the compute dtype."""

    input_norm: torch.Tensor  # (H,)
    post_attention_norm: torch.Tensor  # (H,)
    q_norm: torch.Tensor | None  # (head_dim,)
    k_norm: torch.Tensor | None  # (head_dim,)
    linears: dict[str, BaseLinear]  # by the names of `LINEARS`
    groups: dict[str, GroupLinear]  # by the names of `GROUPS`: the same weights, concatenated


@dataclass
class Base:
    """A loaded model. `embed` is as stored (fp32, or bf16 for every other `base_dtype`): upcast on use.

    `lm_head` shares `embed`'s storage when tied. `fingerprint` is the sha256 over the configuration and the
    bytes of every weight as stored, so it is the same on every device.
    """

    config: ModelConfig
    embed: torch.Tensor  # (V, H)
    layers: list[BaseLayer]
    final_norm: torch.Tensor  # (H,) in the compute dtype
    lm_head: Weight  # (V, H)
    compute_dtype: torch.dtype
    base_dtype: str
    device: torch.device
    fingerprint: str
    scratch: Scratch = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as held, a tied head once, without the shared buffer (`scratch.nbytes`)."""
        total = self.embed.nbytes + self.final_norm.nbytes
        if not self.config.tie_word_embeddings:
            total += self.lm_head.nbytes
        for layer in self.layers:
            norms = (layer.input_norm, layer.post_attention_norm, layer.q_norm, layer.k_norm)
            biases = (linear.bias for linear in layer.linears.values())
            total += sum(tensor.nbytes for tensor in (*norms, *biases) if tensor is not None)
            total += sum(linear.weight.nbytes for linear in layer.linears.values())
        return total
