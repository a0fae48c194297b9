"""One run per output directory: what `run.json` says, and a flock while a job runs.

Checked three times: by the client before anything is tokenised or written, again when the model and the data
are known, and by the trainer under the lock.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.jobs.spec import AdapterSpec, WarmStart, lineage_line
from gshare.agent.node.durable import UNREADABLE, read_regular
from gshare.agent.service.registry import is_held, take_lock, write_json

RUN_FILE = "run.json"
LOCK_FILE = ".lock"
#: The weights that a warm clone starts from.
START_DIR = "start"
#: A clone's job spec, for `gshare finetune --adapters-config`.
CLONE_FILE = "clone.toml"
#: How `gshare finetune` goes on with a run.
GO_ON = "continue it with --resume"

#: What may change between a run and its resumption; everything else shapes the bits already trained. The
#: paths may change because data is compared by the hash of its tokens.
CHANGEABLE = frozenset(
    {
        *("data", "val_data", "output_dir", "data_format", "on_bad_turns"),
        *("num_train_epochs", "max_steps", "eval_steps", "save_steps", "save_total_limit", "weight"),
        "gradient_checkpointing",  # recomputes the same values
    }
)


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`: what a directory's results were made from."""

    model: str
    base_dtype: str
    spec: AdapterSpec
    base: str | None = None  # `base_identity` of the model; None: not found yet, or nothing to tell it from
    train_hash: str | None = None  # None: not tokenised yet (the client's first check)
    val_hash: str | None = None
    start: WarmStart | None = None  # of a warm clone: whose weights it started from


def check_output_dir(run: RunRecord, *, resume: bool, go_on: str = GO_ON) -> None:
    """`UsageError` when the directory holds another run (or this one, without `resume`). Writes nothing.

    `go_on`: how the caller's command continues a run, for the message.
    """
    directory = Path(run.spec.output_dir)
    where = f"adapter {run.spec.name}: output_dir {directory}"
    if not directory.exists():
        _check_creatable(directory, where)
        return
    if not directory.is_dir():
        raise UsageError(f"{where} is a file; name a directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"{where} is not writable")
    results = results_in(directory)
    before = read_record(directory, where)
    if before is None:
        if results:
            raise UsageError(
                f"{where} holds {results[0]}, which is not from a run of gshare (no {RUN_FILE}); "
                "choose an empty directory"
            )
        return
    changes = _changes(before, _with_start(run, before) if resume else run)
    if not resume:
        if changes:
            raise UsageError(
                f"{where} holds another run ({'; '.join(changes)}); "
                "choose another directory or remove this one"
            )
        if results:
            raise UsageError(
                f"{where} already holds this run ({results[0]}); {go_on}, or choose another directory"
            )
        return
    frozen = [change for change in changes if change.split(":", 1)[0] not in CHANGEABLE]
    if frozen:
        raise UsageError(
            f"{where} holds a run that --resume cannot continue as asked: {'; '.join(frozen)}; "
            "restore these values or choose another directory"
        )


def check_free_output_dir(run: RunRecord, *, resume: bool, go_on: str = GO_ON) -> None:
    """As `check_output_dir`, but `RetryLater` when a job runs there: what it leaves is not judged then."""
    try:
        check_output_dir(run, resume=resume, go_on=go_on)
    finally:
        # After the look: whoever held the lock during it may have just written what it found.
        directory = Path(run.spec.output_dir)
        with contextlib.suppress(NotADirectoryError, PermissionError):
            if is_held(directory / LOCK_FILE):
                raise RetryLater(
                    f"adapter {run.spec.name}: another trainer is writing to {directory}; "
                    "wait for it, or stop its job with `gshare jobs stop`"
                ) from None


class OutputClaim:
    """The lock on one job's directory, from before its admission to its end, and its `run.json`."""

    def __init__(self, run: RunRecord, *, resume: bool) -> None:
        """`UsageError`: another run; `RetryLater`: another trainer is there; `GshareError`: cannot write."""
        self.run = run  # as it is written: with the start that a resumed clone had
        self.directory = Path(run.spec.output_dir)
        check_free_output_dir(run, resume=resume)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._fd = take_lock(self.directory / LOCK_FILE)
        except OSError as error:
            raise GshareError(
                f"adapter {run.spec.name}: output_dir {self.directory}: {error.strerror}"
            ) from None
        if self._fd is None:
            raise RetryLater(
                f"adapter {run.spec.name}: another trainer is writing to {self.directory}; "
                "wait for it, or stop its job with `gshare jobs stop`"
            )
        try:
            # Again under the lock: another trainer may have finished here since the first look.
            check_output_dir(run, resume=resume)
            self._fresh = not (self.directory / RUN_FILE).exists()
            before = read_record(self.directory)
            if resume and before is not None:
                self.run = _with_start(run, before)
            write_json(self.directory / RUN_FILE, self.run)
        except OSError as error:
            self.release()
            raise GshareError(f"{self.directory / RUN_FILE}: {error.strerror}") from None
        except GshareError:
            self.release()
            raise

    def undo(self) -> None:
        """The job was refused: its `run.json` goes (unless it stood there before), the directory if empty."""
        if self._fresh:
            (self.directory / RUN_FILE).unlink(missing_ok=True)
            if {entry.name for entry in self.directory.iterdir()} <= {LOCK_FILE}:
                (self.directory / LOCK_FILE).unlink(missing_ok=True)
                self.directory.rmdir()
        self.release()

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def results_in(directory: Path) -> list[str]:
    """Names of what training leaves behind, in the order in which a message should name them."""
    names = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    known = ("adapter_model.safetensors", "adapter_model.bin", "adapter_config.json", "best")
    found = [name for name in known if name in names]
    found += [name for name in names if name.startswith("checkpoint-")]
    metrics = directory / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size > 0:
        found.append(metrics.name)
    return found


def _with_start(run: RunRecord, before: RunRecord) -> RunRecord:
    """A resume need not say what the run started from: its directory does, and has these weights."""
    if run.start is not None or before.start is None:
        return run
    directory = str(Path(run.spec.output_dir) / START_DIR)
    return msgspec.structs.replace(run, start=msgspec.structs.replace(before.start, directory=directory))


def read_record(directory: Path, where: str = "") -> RunRecord | None:
    """What a directory's results were made from; None: nothing of gshare's is there. UsageError, beginning
    with `where`: it cannot be read."""
    path = directory / RUN_FILE
    where = where or str(directory)
    try:
        return msgspec.json.decode(read_regular(path), type=RunRecord)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise UsageError(
            f"{where}: {RUN_FILE} is not one that gshare wrote ({error}); choose another directory"
        ) from None


def _changes(before: RunRecord, now: RunRecord) -> list[str]:
    """`key: old → new` for every difference that can be told."""
    changes: list[str] = []
    if model := _model_change(before, now):
        changes.append(model)
    if before.base_dtype != now.base_dtype:
        changes.append(f"base_dtype: {before.base_dtype} → {now.base_dtype}")
    old: dict[str, Any] = msgspec.to_builtins(before.spec)
    new: dict[str, Any] = msgspec.to_builtins(now.spec)
    changes += [f"{key}: {old[key]} → {new[key]}" for key in new if old[key] != new[key]]
    if _lineage(before) != _lineage(now):
        changes.append(f"start: {_lineage(before)} → {_lineage(now)}")
    for key, was, now_is in (
        ("training data", before.train_hash, now.train_hash),
        ("validation data", before.val_hash, now.val_hash),
    ):
        if was is not None and now_is is not None and was != now_is:
            changes.append(f"{key}: tokens {was[:12]} → {now_is[:12]}")
    return changes


def _lineage(run: RunRecord) -> str:
    return "fresh weights" if run.start is None else lineage_line(run.start.lineage)


def _model_change(before: RunRecord, now: RunRecord) -> str:
    """By content where both tell it: a moved model is the same one, another under its name is not."""
    text = f"model: {before.model} → {now.model}"
    if before.base is not None and now.base is not None:
        return "" if before.base == now.base else f"{text} (other weights or another configuration)"
    if before.base is not None and now.train_hash is None:
        return ""  # the first look, before the model is found: the next one tells
    return "" if Path(before.model).name == Path(now.model).name else text


def _check_creatable(directory: Path, where: str) -> None:
    parent = directory.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError(f"{where} cannot be made: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{where} cannot be made: {parent} is not writable")
