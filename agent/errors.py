"""What gshare raises at its users, and the exit code each kind means.

    GshareError        1    something failed while running
    ├── UsageError     2    a flag, file, key, row or name is wrong; nothing was written
    ├── RetryLater     75   nothing is wrong, but not now (EX_TEMPFAIL)
    └── Stopped        130/143   the user or the system asked us to stop

Every message is one line (or a few) that names the file, key, row or node and says what to do.
`assert` is for our own invariants only.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_RETRY = 75
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class GshareError(Exception):
    """Something failed at run time; `exit_code` is what the command exits with."""

    exit_code = EXIT_FAILURE


class UsageError(GshareError):
    """The input is wrong: flags, configuration, data, names. Raised before anything is written."""

    exit_code = EXIT_USAGE


class RetryLater(GshareError):
    """Nothing is wrong with the request, but it cannot be served now."""

    exit_code = EXIT_RETRY


class Stopped(GshareError):
    """Asked to stop by SIGINT or SIGTERM; work was checkpointed first."""

    def __init__(self, message: str, exit_code: int = EXIT_SIGINT) -> None:
        super().__init__(message)
        self.exit_code = exit_code
