"""stdout and stderr that take nothing: closed by the caller, a full disk, a pipe that nobody reads.

stdout is data: when it takes nothing, that is an error. stderr is talk: when it takes nothing, nothing else
may fail for it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


class ClosedStream(io.TextIOWrapper):
    """Stands where the caller had closed a stream: what is written goes nowhere, as it would have."""

    def __init__(self, number: int) -> None:
        super().__init__(os.fdopen(number, "wb", closefd=False), encoding="utf-8")


class Stdout(io.TextIOWrapper):
    """The stdout that Python made, which remembers why it could not be written.

    The error alone does not say where it comes from, and an unbuffered stream has nothing left to try again.
    """

    fault: OSError | None = None

    def __init__(self, made: io.TextIOWrapper) -> None:
        super().__init__(
            made.buffer,
            encoding=made.encoding,
            errors=made.errors,
            line_buffering=made.line_buffering,
            write_through=made.write_through,
        )

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self.fault = error
            raise

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.fault = error
            raise


def stderr_console() -> Console:
    """rich on stderr. Lines are wrapped for a terminal alone: in a file 80 columns are nobody's width."""
    from rich.console import Console

    return Console(stderr=True, soft_wrap=not sys.stderr.isatty())


@contextlib.contextmanager
def progress(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Takes what is done now, for work of minutes: one line that changes on a terminal, else a line each.

    `quiet`: nothing is shown.
    """
    if quiet:
        yield lambda text: None
    elif sys.stderr.isatty():
        from rich.text import Text

        with stderr_console().status(Text("")) as status:
            yield lambda text: status.update(Text(text))
    else:
        yield say


def say(text: str) -> None:
    """One line on stderr, or nowhere."""
    with contextlib.suppress(OSError, ValueError):
        print(f"gshare: {text}", file=sys.stderr, flush=True)


def stdout_fault() -> OSError | None:
    """Why stdout did not take what was written to it; None when it did."""
    return sys.stdout.fault if isinstance(sys.stdout, Stdout) else None


def drop_unwritten() -> None:
    """Point stdout and stderr at nothing where they do not take what is left in them.

    The interpreter tries again when it ends: it would complain, and exit with 120 instead of our code.
    """
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, number)
            os.close(nothing)
