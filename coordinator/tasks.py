"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

#: Between two cancellations of a task that did not end by the first.
_AGAIN_SECONDS = 0.1


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels them, and again until each has ended; what they raised is not told.

    Once is not enough before Python 3.12: `asyncio.wait_for` swallows a cancellation that arrives together
    with its result (github.com/python/cpython/issues/81839), and the task would go on for ever.
    """
    left = {task for task in tasks if task is not asyncio.current_task()}
    cancelled = False
    while left:
        for task in left:
            task.cancel()
        try:
            await asyncio.wait(left, timeout=_AGAIN_SECONDS)
        except asyncio.CancelledError:
            cancelled = True  # not before these have ended
        for task in [task for task in left if task.done()]:
            left.discard(task)
            if not task.cancelled():
                task.exception()  # looked at, so that asyncio does not complain of one that nobody saw
    if cancelled:
        raise asyncio.CancelledError
