"""What nobody awaited: exceptions that reach the agent's loop, told to people, once a minute for each kind.

asyncio itself logs a traceback for each. An `accept` that is out of file descriptors fails a hundred times a
second and more: 0.4 MB/s of log were seen, on the disk that checkpoints are written to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Literal

#: Between two lines about the same kind of failure.
QUIET_SECONDS = 60.0

Say = Callable[[Literal["info", "warning", "error"], str], None]


class LoopErrors:
    """For `loop.set_exception_handler`. A kind is the exception's type and error number: a bounded set.

    A failing system call gets one line; anything else is a defect of the agent, and gets its traceback too.
    """

    def __init__(self, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._told: dict[tuple[type | None, int | None], float] = {}  # until when a kind is not told again
        self._unsaid: dict[tuple[type | None, int | None], int] = {}

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        number = error.errno if isinstance(error, OSError) else None
        kind = (type(error) if error is not None else None, number)
        now = self._clock()
        if now < self._told.get(kind, now):
            self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
            return
        self._told[kind] = now + QUIET_SECONDS
        more = self._unsaid.pop(kind, 0)
        text = f"{context.get('message', 'the loop')}: {_reason(error)}"[:300]
        self._say("error", text + (f" ({more} more since it was last told)" if more else ""))
        if not isinstance(error, OSError):
            loop.default_exception_handler(context)


def _reason(error: BaseException | None) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}"
    return f"{type(error).__name__}: {error}" if error is not None else "no exception"
