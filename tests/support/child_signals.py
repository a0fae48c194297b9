"""Children of the tests get signals as a terminal would give them, however the tests were started.

`nohup` ignores SIGHUP, and a shell without job control ignores SIGINT and SIGQUIT for what `&` starts.
What is ignored is inherited, even through exec: a `gshare` that should stop on Ctrl-C then runs on, and a
shell cannot trap it at all. A handler is not inherited: exec gives the child the default (execve(2)).
"""

from __future__ import annotations

import signal
from types import FrameType

INTERRUPTING = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)


def undo_ignoring() -> None:
    """Replace an ignored signal by a handler that does nothing: the same for us, the default for children."""
    for number in INTERRUPTING:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _nothing)


def _nothing(number: int, frame: FrameType | None) -> None:
    return None
