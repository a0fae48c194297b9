"""A terminal that went away: the dashboard ends with it, if need be the hard way.

Textual's writing thread ends at the first error of a terminal that is gone, and whoever writes then waits for
ever, once its queue of 30 is full: the event loop stands still, and no signal is handled any more.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable

CODE = 128 + signal.SIGHUP
#: For the ordinary end, which asks once a second.
GRACE_SECONDS = 5.0


def is_gone() -> bool:
    return bool(_poll().poll(0))


def end_with_it(last: Callable[[], None], grace: float = GRACE_SECONDS) -> None:
    """From now on this process ends at the latest `grace` seconds after its terminal is gone; `last` comes
    before that, in a thread of its own, as the others may wait for each other."""

    def watch() -> None:
        _poll().poll()
        time.sleep(grace)
        with contextlib.suppress(Exception):
            last()
        os._exit(CODE)

    threading.Thread(target=watch, name="lost terminal", daemon=True).start()


def _poll() -> select.poll:
    poll = select.poll()
    poll.register(0, 0)  # asked for nothing, it tells of POLLHUP, POLLERR and POLLNVAL
    return poll
