"""What a job leaves in files: lines of metrics.jsonl, and the names in its output directory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from gshare.agent.errors import GshareError
from gshare.tui.curve import MAX_STEP
from gshare.tui.source import FileRow

#: Of one listing; a run has a few dozen.
MAX_FILES = 500
#: Of run.json or metadata.json, which have some KB.
MAX_JSON_BYTES = 1 << 20
#: A step of a curve. JSON has whole numbers of any length: one of 400 digits is no float, nor MessagePack.
Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics.jsonl, as `agent/train/runner.py` writes it; of type "step", "eval" or another.

    JSON has no NaN: the runner writes it as a string, or null.
    """

    type: str
    step: Step
    total_steps: _Count = 0
    epoch: float | None = None
    loss: float | str | None = None
    val_loss: float | str | None = None
    grad_norm: float | str | None = None
    learning_rate: float | None = None
    tokens: _Count | None = None
    seconds: float | None = None
    adapters_in_pass: _Count | None = None
    best: bool = False


_LINE = msgspec.json.Decoder(MetricsLine)


def read_line(line: str | bytes) -> MetricsLine | None:
    """None for a torn or foreign line."""
    try:
        return _LINE.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        return None


def line_text(line: MetricsLine) -> str:
    """A line of metrics.jsonl for people, as a trainer's log tells it."""
    total = f" of {line.total_steps}" if line.total_steps else ""
    parts = [f"step {line.step}{total}"]
    if line.type == "eval":
        best = "  (best)" if line.best else ""
        return f"{parts[0]}  val loss {as_number(line.val_loss):.4f}{best}"
    if line.type != "step":
        return f"{parts[0]}  {line.type}"
    parts.append(f"loss {as_number(line.loss):.4f}")
    if line.grad_norm is not None:
        parts.append(f"grad norm {as_number(line.grad_norm):.4g}")
    if line.learning_rate is not None:
        parts.append(f"lr {line.learning_rate:.3g}")
    if line.seconds is not None:
        parts.append(f"{line.seconds:.3g} s")
    if line.adapters_in_pass is not None and line.adapters_in_pass > 1:
        parts.append(f"{line.adapters_in_pass} in the pass")
    return "  ".join(parts)


def as_number(value: float | str | None) -> float:
    """A loss of a line; NaN for what JSON cannot say as a number and is not "inf"."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return float("nan")
    return float("nan") if value is None else value


def curves(lines: Iterable[str | bytes]) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """(step, loss) of the steps and of the evaluations in lines of metrics.jsonl, by step."""
    train: dict[int, float] = {}
    val: dict[int, float] = {}
    for text in lines:
        line = read_line(text)
        if line is None:
            continue
        if line.type == "step":
            train[line.step] = as_number(line.loss)
        elif line.type == "eval":
            val[line.step] = as_number(line.val_loss)
    return sorted(train.items()), sorted(val.items())


def list_directory(directory: Path) -> list[FileRow]:
    """The files below `directory`, two levels deep, by name; no hidden ones. GshareError: none there."""
    found: list[FileRow] = []

    def look(folder: Path, prefix: str, depth: int) -> None:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith(".") or len(found) >= MAX_FILES:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if depth:
                        look(Path(entry.path), f"{prefix}{entry.name}/", depth - 1)
                    continue
                status = entry.stat(follow_symlinks=False)
                name = f"{prefix}{entry.name}"
                found.append(FileRow(name=name, size=status.st_size, changed=status.st_mtime))

    try:
        look(directory, "", 1)
    except OSError as error:
        raise GshareError(f"{directory}: {error.strerror}") from None
    return found


def open_regular(path: Path) -> BinaryIO:
    """Open for reading. OSError for a pipe or a device, which would be waited for or never end."""
    # Not blocking: the open itself waits for a pipe's writer.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return file


def tail_text(path: Path, max_bytes: int) -> str:
    """The end of a text file. GshareError: it cannot be read."""
    try:
        with open_regular(path) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - max_bytes))
            return file.read(max_bytes).decode("utf-8", "replace")
    except OSError as error:
        raise GshareError(f"{path}: {error.strerror}") from None


def json_file(path: Path, kind: Any) -> Any:
    """A JSON file as `kind`; None when it is not there, torn, or something else."""
    try:
        with open_regular(path) as file:
            return msgspec.json.decode(file.read(MAX_JSON_BYTES), type=kind)
    except (OSError, msgspec.MsgspecError, RecursionError):
        return None
