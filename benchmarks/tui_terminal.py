"""A program in a pseudo-terminal of 200 × 50, for tui_load.py: what it writes, and when."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import threading
import time

COLUMNS, ROWS = 200, 50


class Terminal:
    """A program in a pseudo-terminal; a thread notes what it writes, and when."""

    WORDS = ("paused", "starting")

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.sizes: list[tuple[float, int]] = []
        self.seen: list[tuple[float, str]] = []
        self._last = b""
        self._painted: float | None = None
        self._began = time.monotonic()
        self._fd = ours
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd="/", env=env, start_new_session=True
        )
        os.close(theirs)
        threading.Thread(target=self._read, daemon=True).start()

    def first_paint_ms(self) -> float:
        return float("inf") if self._painted is None else (self._painted - self._began) * 1000

    def tail(self) -> str:
        return self._last[-2000:].decode("utf-8", "replace")

    def close(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._fd)

    def _read(self) -> None:
        while True:
            try:
                select.select([self._fd], [], [])
                data = os.read(self._fd, 1 << 16)
            except OSError:
                return
            now = time.monotonic()
            self.sizes.append((now, len(data)))
            self._last = (self._last + data)[-4096:]
            if self._painted is None and b"gshare" in self._last:
                self._painted = now
            self.seen += [(now, word) for word in self.WORDS if word.encode() in data]
