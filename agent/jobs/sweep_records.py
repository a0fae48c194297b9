"""What a sweep leaves in its directory, for its own resumption, the report and the dashboard.

    <dir>/sweep.json        SweepRecord: what was asked for; written once, before the first job starts
    <dir>/decisions.jsonl   Decision, one a line, fsynced: what was done with which configuration, and why
    <dir>/<name>/           each configuration's own output_dir, as that of an ordinary run

`decisions.jsonl` only grows; a last line that a kill has cut off is dropped by readers and by the next
writer. Numbers that are not finite are null, as strict JSON has no others.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec
from gshare.agent.errors import GshareError
from gshare.agent.node.durable import UNREADABLE, read_regular, read_struct, write_all, write_struct

SWEEP_FILE = "sweep.json"
DECISIONS_FILE = "decisions.jsonl"
#: Held for as long as a sweep runs: two would decide against each other.
SWEEP_LOCK = "sweep.lock"
VERSION = 1

DecisionEvent = Literal[
    "started", "paused", "resumed", "stopped", "selected", "completed", "failed", "diverged", "cloned"
]
#: Why a configuration was stopped: the three patterns of early exit, or a person. Empty: it was not stopped.
Pattern = Literal["", "divergence", "overfitting", "underperformance", "user"]


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration of a sweep. `samples` counts rows trained on, epochs included."""

    name: str
    hyper_parameters: dict[str, Any]  # those in which the configurations differ
    total_steps: int
    samples_total: int
    output_dir: str


class SamplerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides about the draws, as in the file's table."""

    seed: int
    n_trials: int
    batch: int
    ranges: dict[str, Any]


class SweepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`sweep.json`. `early_exit`: the settings as in the file's table, defaults filled in.

    `sampler` and `fixed` are for the comparison at --resume; no `fixed`: written before they were.
    """

    version: int = VERSION
    name: str
    model: str
    base_dtype: str
    early_exit: dict[str, Any]
    created: float  # seconds since the epoch
    configurations: list[Configuration]
    sampled: list[dict[str, Any]] = []  # of those that a sampler drew: its values, in the same order
    cluster: str = ""  # id of the coordinator's store that has its jobs; empty: they are on this machine
    submission: str = ""  # under which they are there
    sampler: SamplerRecord | None = None  # None: nothing is drawn
    fixed: dict[str, Any] | None = None  # of what shapes losses: the value that all have, or that they differ


def directory_of(directory: Path, configuration: Configuration) -> Path:
    """A configuration's directory; beside sweep.json when the whole sweep was moved."""
    told = directory / configuration.output_dir
    beside = directory / Path(configuration.output_dir).name
    return beside if not os.path.isdir(told) and os.path.isdir(beside) else told


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `decisions.jsonl`. `evidence`: the numbers that the decision follows from, by name."""

    time: float  # seconds since the epoch
    job: str
    event: DecisionEvent
    step: int = 0
    samples: int = 0
    pattern: Pattern = ""
    reason: str = ""
    evidence: dict[str, Any] = {}


class DecisionLog:
    """Appends to `decisions.jsonl`; every line is on the disk when `append` returns. One writer at a time."""

    def __init__(self, directory: Path) -> None:
        """GshareError when the file cannot be opened. A line that was cut off before is removed."""
        self._path = directory / DECISIONS_FILE
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(self._path, flags, 0o666)
            os.ftruncate(self._fd, read_regular(self._path).rfind(b"\n") + 1)
        except OSError as error:
            raise GshareError(f"{self._path}: {error.strerror}") from None

    def append(self, decision: Decision) -> None:
        """GshareError when the disk does not take it; half a line is taken back."""
        before = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, msgspec.json.encode(decision) + b"\n")
            os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before)
            raise GshareError(f"{self._path}: {error.strerror}") from None

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> DecisionLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def append_decision(directory: Path, decision: Decision) -> None:
    """One line more, beside the sweep that runs there and writes the others. GshareError: it was not taken.

    A whole line in one write at the end: no other writer's is cut. Of a sweep that does not run the last line
    may be half of one; `DecisionLog` mends that.
    """
    path = directory / DECISIONS_FILE
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            write_all(fd, msgspec.json.encode(decision) + b"\n")
        finally:
            os.close(fd)
    except OSError as error:
        raise GshareError(f"{path}: {error.strerror}") from None


def write_sweep(directory: Path, record: SweepRecord) -> None:
    """`sweep.json`, whole or not at all. GshareError when it cannot be written."""
    try:
        write_struct(directory / SWEEP_FILE, record)
    except OSError as error:
        raise GshareError(f"{directory / SWEEP_FILE}: {error.strerror}") from None


def read_sweep(directory: Path) -> SweepRecord | None:
    """None where there is no sweep. GshareError for one that is damaged or of a later version."""
    record = read_struct(directory / SWEEP_FILE, SweepRecord)
    if record is not None and record.version > VERSION:
        raise GshareError(
            f"{directory / SWEEP_FILE}: version {record.version} is newer than the {VERSION} known here; "
            "use the gshare that wrote it"
        )
    return record


def read_decisions(directory: Path) -> list[Decision]:
    """All decisions, oldest first; none where there is no file. A last line without its end is dropped.

    GshareError naming the line when another one is damaged: what is missing there would be decided again.
    """
    path = directory / DECISIONS_FILE
    try:
        lines = read_regular(path).split(b"\n")[:-1]  # what follows the last newline was cut off, or is empty
    except FileNotFoundError:
        return []
    except OSError as error:
        raise GshareError(f"{path}: {error.strerror}") from None
    decisions = []
    for number, line in enumerate(lines, start=1):
        try:
            decision = msgspec.json.decode(line, type=Decision)
            for key in ("val_loss", "best_val_loss"):  # what a resumed sweep ranks by
                msgspec.convert(decision.evidence.get(key), float | None)
            decisions.append(decision)
        except UNREADABLE as error:
            raise GshareError(
                f"{path}:{number}: not a decision of a sweep ({error}); remove the line, or the directory"
            ) from None
    return decisions
