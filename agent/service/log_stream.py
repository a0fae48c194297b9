"""stdout and stderr of the processes without a terminal: their log, which must never be what ends them."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import BinaryIO

from gshare.agent.service.registry import log_path


class _Forgiving(io.RawIOBase):
    """Writes to a descriptor; what the disk does not take is dropped."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: object, /) -> int:
        assert isinstance(data, bytes | bytearray | memoryview)
        with contextlib.suppress(OSError):  # a full disk: it is only the log
            os.write(self._fd, data)
        return len(data)


def forgive_output() -> None:
    """Replaces stdout and stderr: nothing is buffered, and no write raises, now or at the exit."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = io.TextIOWrapper(
            _Forgiving(fd),  # pyright: ignore[reportArgumentType]
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        setattr(sys, name, stream)


def open_log(identity: str) -> tuple[Path, BinaryIO, str]:
    """The log of the process `identity`, open, and "": or /dev/null and why there can be none."""
    try:
        path = log_path(identity)
        return path, open(path, "ab"), ""
    except OSError as error:
        why = f"no log is kept: {error.filename or 'the state directory'}: {error.strerror}"
        return Path(os.devnull), open(os.devnull, "ab"), why
