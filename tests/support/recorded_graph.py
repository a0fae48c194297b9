"""What a CUDA graph does, on a CPU: the operations of one launch, made again in the same memory.

A graph keeps addresses, not values. So everything that was recorded runs again with the very tensors that it
had, and its results go where they went; a size, a pointer or a number that a later pass should change, and
that the host baked in, shows in the bits. What no graph may contain is refused while it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

#: Ops that wait for the device, or make a tensor of the host's values.
REFUSED = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "lift_fresh", "unique")
#: They have no values.
_EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")


class RecordedGraph(TorchDispatchMode):
    """Record with `recording`, then `replay` any number of times."""

    def __init__(self) -> None:
        super().__init__()
        self._again: list[Callable[[], object]] = []
        self._made: list[torch.Tensor] = []
        self._in_kernel = False

    def replay(self) -> None:
        """After the memory that it made itself was written over: other graphs use it in between."""
        for made in self._made:
            made.fill_(torch.nan if made.is_floating_point() else 1)
        for again in self._again:
            again()

    @contextmanager
    def recording(self) -> Iterator[None]:
        real = interpreter.GridExecutor.__call__

        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            def again() -> None:
                real(executor, *args, **kwargs)

            self._again.append(again)
            self._in_kernel = True
            try:
                again()
            finally:
                self._in_kernel = False

        with pytest.MonkeyPatch.context() as patch, self:
            patch.setattr(interpreter.GridExecutor, "__call__", launch)
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._in_kernel:
            return out
        name = func.overloadpacket.__name__
        assert name not in REFUSED, f"{name} cannot be captured"
        if func.is_view:
            return out
        made = [] if func._schema.is_mutable else [one for one in tree_leaves(out) if torch.is_tensor(one)]
        self._made += made
        if name in _EMPTY:
            return out

        def again() -> None:
            found = [one for one in tree_leaves(func(*args, **kwargs)) if torch.is_tensor(one)]
            for place, value in zip(made, found, strict=False):
                place.copy_(value)

        self._again.append(again)
        return out
