"""One adapter in the engine: its spec, its matrices in the arena, its optimizer state.

Everything here is per adapter; nothing of it is shared, so no adapter's arithmetic can see another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch
from gshare.agent.jobs.spec import LINEARS, AdapterSpec
from gshare.agent.train.arena import MOMENTS, MOMENTS_8BIT, Arena, MatrixKey
from gshare.agent.train.flat_tensors import FlatTensors, Place
from gshare.agent.train.host_copy import HostCopy, copied
from gshare.kernels.adamw import adamw_scratch, adamw_step_
from gshare.kernels.adamw_8bit import adamw_8bit_step_
from gshare.kernels.grad_norm import clip_coefficient, grad_norm

_EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")


def has_8bit_moments(spec: AdapterSpec) -> bool:
    return spec.optim in _EIGHT_BIT


def initial_a(seed: int, key: MatrixKey, shape: tuple[int, int]) -> torch.Tensor:
    """A's start: U(−1/√K, 1/√K) with K = in_features, as PEFT's kaiming_uniform(a=√5); B starts at zero.

    Keyed by (seed, layer, linear): a job's start does not depend on which other linears it targets, nor
    on the device or library version (Philox counter stream, 53-bit doubles rounded to fp32).
    """
    stream = np.random.Philox(key=[seed % 2**64, (key.layer << 8) | LINEARS.index(key.linear)])
    raw = stream.random_raw(shape[0] * shape[1])
    unit = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    bound = 1.0 / shape[1] ** 0.5
    return torch.from_numpy(((2.0 * unit - 1.0) * bound).astype(np.float32)).view(shape)


class InitialWeights:
    """`initial_a`, drawn once for jobs of one seed: sixty adapters of SmolLM2 draw 330 million numbers
    otherwise, seconds in which the device waits.

    A job of a lower rank starts with the first rows of one of a higher rank: the stream fills A row by row.
    """

    #: Of host memory. An r = 64 adapter of SmolLM2 takes 37 MiB; of larger models the first layers are kept.
    MOST_BYTES = 64 << 20

    def __init__(self) -> None:
        self._seed: int | None = None
        self._kept: dict[MatrixKey, torch.Tensor] = {}
        self._bytes = 0

    def __call__(self, seed: int, key: MatrixKey, shape: tuple[int, int]) -> torch.Tensor:
        if seed != self._seed:
            self._seed, self._kept, self._bytes = seed, {}, 0
        kept = self._kept.get(key)
        if kept is not None and kept.shape[0] >= shape[0] and kept.shape[1] == shape[1]:
            return kept[: shape[0]]
        drawn = initial_a(seed, key, shape)
        more = drawn.nbytes - (kept.nbytes if kept is not None else 0)
        if self._bytes + more <= self.MOST_BYTES:
            self._kept[key] = drawn
            self._bytes += more
        return drawn


class Adapter:
    """A slot of the arena with its optimizer; `key` is its name in the arena."""

    def __init__(
        self,
        name: str,
        spec: AdapterSpec,
        arena: Arena,
        shapes: dict[MatrixKey, tuple[int, int]],
        *,
        initial: Callable[[int, MatrixKey, tuple[int, int]], torch.Tensor] | None = initial_a,
    ) -> None:
        """`initial` draws A; None: zeros, to be loaded."""
        assert spec.seed is not None, "the runner fills the seed in"
        self.name = name
        self.spec = spec
        self.arena = arena
        self.lowest_layer = spec.lowest_layer
        self.eight_bit = has_8bit_moments(spec)
        arena.allocate(name, shapes, eight_bit=self.eight_bit)
        try:
            for key, shape in shapes.items():
                if initial is not None and key.side == "A":
                    arena.view("params", name, key).copy_(initial(spec.seed, key, shape))
            arena.publish(name)
        except BaseException:
            arena.free(name)
            raise

    def gradient_norm(self) -> float:
        """L2 norm over all matrices in contract order; NaN or inf when any gradient is not finite."""
        return float(
            grad_norm([self.arena.view("grads", self.name, k) for k, _ in self.arena.matrices(self.name)])
        )

    def update(self, *, step: int, learning_rate: float, norm: float) -> None:
        """Clip and step every matrix; `step` is 1-based (Adam's bias correction).

        All or nothing: after an out-of-memory error weights, gradients and optimizer state have the bits that
        they had before, and the same call may be made again. fp32 moments: everything is allocated before
        anything changes. 8-bit: blocks are quantised on the way, so what changes is copied first (up to 10
        bytes an element, at a time when the activations of the pass are gone) and put back.

        AdamW is elementwise, so one call over the whole slot gives each matrix the bits of its own call
        (420 matrices a rank-8 SmolLM2 adapter: 12 operations instead of 5,040). 8-bit state is per matrix.
        """
        spec, arena = self.spec, self.arena
        hyper = {
            "lr": learning_rate,
            "beta1": spec.adam_beta1,
            "beta2": spec.adam_beta2,
            "eps": spec.adam_epsilon,
            "weight_decay": spec.weight_decay,
        }
        clip = clip_coefficient(norm, spec.max_grad_norm)
        if self.eight_bit:
            with self._put_back_on_error():
                self._clip(clip)
                for key, state in arena.states_8bit(self.name).items():
                    param, grad = (arena.view(purpose, self.name, key) for purpose in ("params", "grads"))
                    adamw_8bit_step_(param, grad, state, step=step, **hyper)
        else:
            param, grad, first, second = (
                arena.flat(purpose, self.name) for purpose in ("params", "grads", "exp_avg", "exp_avg_sq")
            )
            scratch = adamw_scratch(param)
            self._clip(clip)
            adamw_step_(param, grad, first, second, step=step, scratch=scratch, **hyper)
        arena.publish(self.name)

    def _clip(self, coefficient: float) -> None:
        if coefficient != 1.0:
            self.arena.flat("grads", self.name).mul_(coefficient)

    @contextmanager
    def _put_back_on_error(self) -> Iterator[None]:
        """Weights, gradients and 8-bit state as they were when the block raises."""
        purposes = ("params", "grads", "codes1", "codes2", "floats1", "floats2")
        changing = [self.arena.flat(purpose, self.name) for purpose in purposes]
        before = [tensor.clone() for tensor in changing]
        try:
            yield
        except BaseException:
            for tensor, old in zip(changing, before, strict=True):
                tensor.copy_(old)
            raise

    def is_finite(self) -> bool:
        """Whether every weight is a number; an update may overflow though loss and gradient did not."""
        return bool(torch.isfinite(self.arena.flat("params", self.name)).all())

    # ------------------------------------------------------------------ state in and out

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Host copies of the fp32 masters under PEFT's names."""
        copy = self.on_host(optimizer=False)
        copy.wait()
        return copy.parameters

    def optimizer_tensors(self) -> Mapping[str, torch.Tensor]:
        """Host copies of the moments: `<peft name>.exp_avg`, … or the 8-bit state's own parts."""
        copy = self.on_host(optimizer=True)
        copy.wait()
        return copy.optimizer

    def on_host(self, *, optimizer: bool) -> HostCopy:
        """`parameters`, and `optimizer_tensors` if asked for, on their way: what is queued on the device from
        here on does not reach them."""
        moments = MOMENTS_8BIT if self.eight_bit else MOMENTS
        purposes = ("params", *(moments if optimizer else ()))
        copies, wait = copied([self.arena.flat(purpose, self.name) for purpose in purposes])
        flats: dict[str, torch.Tensor] = dict(zip(purposes, copies, strict=True))
        weights = self._weights_in(flats["params"])
        return HostCopy(weights, self._optimizer_in(flats) if optimizer else {}, wait)

    def _weights_in(self, flat: torch.Tensor) -> FlatTensors:
        """The matrices by PEFT's names, in a copy of the adapter's flat memory."""
        return FlatTensors([flat], self._weight_places)

    def _optimizer_in(self, flats: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The moments by name, in copies of the adapter's flat memory, by purpose."""
        if self.eight_bit:
            return {
                f"{key.peft_name()}.{part}": tensor
                for key, state in self.arena.states_8bit(self.name, flats).items()
                for part, tensor in state.named_tensors().items()
            }
        return FlatTensors([flats[part] for part in MOMENTS], self._moment_places)

    @cached_property
    def _weight_places(self) -> dict[str, Place]:
        places = self.arena.places("params", self.name)
        return {key.peft_name(): Place(0, start, shape) for key, (start, shape) in places.items()}

    @cached_property
    def _moment_places(self) -> dict[str, Place]:
        places = [self.arena.places(part, self.name) for part in MOMENTS]
        return {
            f"{key.peft_name()}.{part}": Place(number, *places[number][key])
            for key, _ in self.arena.matrices(self.name)
            for number, part in enumerate(MOMENTS)
        }

    def load(self, parameters: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `parameters` and `optimizer_tensors`. KeyError names a missing tensor, RuntimeError
        one of another shape or dtype."""
        self.start_from(parameters)
        with self._filling(MOMENTS_8BIT if self.eight_bit else MOMENTS) as flats:
            for name, view in self._optimizer_in(flats).items():
                _fill(view, optimizer[name], name)

    def start_from(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """These weights instead of the initial ones; the optimizer stays as it is. Errors as of `load`."""
        with self._filling(["params"]) as flats:
            for name, view in self._weights_in(flats["params"]).items():
                _fill(view, parameters[name], name)
        self.arena.publish(self.name)

    @contextmanager
    def _filling(self, purposes: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        """The adapter's flat memory of these purposes, to be filled on the host: it reaches a device in one
        copy each, when the block ends."""
        flats = {purpose: self.arena.flat(purpose, self.name) for purpose in purposes}
        if self.arena.device.type == "cpu":
            yield flats
            return
        host = {purpose: torch.zeros_like(flat, device="cpu") for purpose, flat in flats.items()}
        yield host
        for purpose, flat in flats.items():
            flat.copy_(host[purpose])

    def close(self) -> None:
        self.arena.free(self.name)


def _fill(view: torch.Tensor, values: torch.Tensor, name: str) -> None:
    """`copy_` without what it would put up with: broadcasting, and rounding to another dtype."""
    if (values.shape, values.dtype) != (view.shape, view.dtype):
        raise RuntimeError(
            f"{name} is {values.dtype} {tuple(values.shape)}, not {view.dtype} {tuple(view.shape)}"
        )
    view.copy_(values)
