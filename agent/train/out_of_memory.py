"""Which errors mean "no memory", and what they say to people."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from gshare.agent.errors import GshareError
from gshare.agent.train.gpu_guard import NoGuard


class OutOfMemory(RuntimeError):
    """Nothing can be made smaller any more; the text says what did not fit."""


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA's, the CPU allocator's, Python's own, and that of a round."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, OutOfMemory)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def whose_limit(error: Exception, guard: NoGuard) -> str:
    """One line for an out-of-memory error under a reservation; empty when it is nobody's limit."""
    whose = guard.explain() if is_out_of_memory(error) else ""
    if not whose:
        return ""
    return f"{error if isinstance(error, OutOfMemory) else 'out of memory'}; {whose}"


@contextmanager
def told(what: str, guard: NoGuard) -> Iterator[None]:
    """An out-of-memory error inside becomes a GshareError: `what`, and whose limit it was."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise GshareError(
            f"{what}: {whose_limit(error, guard) or f'{type(error).__name__}: {error}'}"
        ) from error
