"""The wish to stop, from a signal or from another thread."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from gshare.agent.errors import EXIT_SIGINT, EXIT_SIGTERM, Stopped


@dataclass
class StopRequest:
    """Set by the first signal; the second raises `Stopped` where the main thread is."""

    exit_code: int | None = None
    reason: str = "stopped by the user"  # what the jobs that run are told

    def __call__(self, number: int, frame: FrameType | None) -> None:
        code = EXIT_SIGTERM if number == signal.SIGTERM else EXIT_SIGINT
        if self.exit_code is not None:
            raise Stopped("left at once; the trainer checkpoints and stops the jobs by itself", code)
        self.exit_code = code

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handles SIGINT, SIGTERM and SIGHUP, save those that the shell has set to ignore (nohup, `&`)."""
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.getsignal(number) for number in signals}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, self)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
