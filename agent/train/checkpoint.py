"""Checkpoints: what a job is between two steps, on disk (architecture, *Files of a run*).

    <output_dir>/
      adapter_config.json  adapter_model.safetensors     at the end: PEFT's layout
      best/              the same two, metadata.json (step, val_loss, tokens, fingerprint), manifest.json
      start/             the same, of a warm clone: the weights that it started from, and whose they were
      checkpoint-<step>/ the same two, optimizer.safetensors, state.json, manifest.json
      metrics.jsonl      one line a step or evaluation; cut back to the checkpoint on resume

A directory appears under its name only when complete (`files.py`); its manifest holds the size and SHA-256 of
every other file, so that what a broken disk left behind is skipped, not trained on. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.spec import AdapterSpec, WarmStart
from gshare.agent.train.files import (
    disk_errors,
    json_bytes,
    publish_dir,
    read_file,
    remove_dir,
    temporary_name,
    write_bytes_atomic,
    write_file,
)
from gshare.agent.train.flat_tensors import FlatTensors
from gshare.agent.train.tensor_file import file_pieces
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

log = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_MODEL = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
METADATA = "metadata.json"
MANIFEST = "manifest.json"
FORMAT = 1
_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
_KNOWN_FILES = frozenset({ADAPTER_CONFIG, ADAPTER_MODEL, OPTIMIZER, STATE, METADATA})
_WHOLE = frozenset({ADAPTER_CONFIG, ADAPTER_MODEL, OPTIMIZER, STATE})


@dataclass
class Snapshot:
    """Host copies taken between two steps: everything that a job is.

    `adapter`: float32 under PEFT's names, `base_model.model.….lora_A.weight` (r, in) and `lora_B` (out, r).
    `optimizer`: the moments, any names. `state`: JSON values (counters, best, data hashes, fingerprint).
    `wait`: until the copies hold what they are copies of; to be called before they are read.
    """

    job: str
    step: int
    adapter: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    state: dict[str, Any]
    wait: Callable[[], None] = lambda: None


def adapter_config(spec: AdapterSpec, model_name: str) -> dict[str, Any]:
    """PEFT's LoraConfig for `spec`, as PEFT 0.21 and vLLM read it. `lora_alpha` is an int where it is whole
    (vLLM types it so); `target_modules` names the linears even for "all-linear"."""
    alpha = spec.lora_alpha if spec.lora_alpha is not None else 2.0 * spec.r
    layers = spec.layers_to_transform
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model_name,
        "revision": None,
        "inference_mode": True,
        "r": spec.r,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": spec.lora_dropout,
        "target_modules": list(spec.targets),
        "layers_to_transform": list(layers) if layers is not None else None,
        "layers_pattern": spec.layers_pattern,
        "use_rslora": spec.use_rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


# ---------------------------------------------------------------------- writing


def write_checkpoint(
    snapshot: Snapshot, output_dir: Path, config: Mapping[str, Any], save_total_limit: int = 0
) -> Path:
    """Publish `checkpoint-<step>/`, then remove the oldest ones beyond `save_total_limit` (0: keep all)."""
    files = {
        ADAPTER_CONFIG: [json_bytes(config)],
        ADAPTER_MODEL: _pieces(snapshot.adapter),
        OPTIMIZER: _pieces(snapshot.optimizer),
        STATE: [json_bytes({"job": snapshot.job, "step": snapshot.step, "state": snapshot.state})],
    }
    path = _publish(output_dir / f"checkpoint-{snapshot.step}", files)
    if save_total_limit > 0:
        _enforce_limit(output_dir, path, save_total_limit)
    return path


def write_best(snapshot: Snapshot, output_dir: Path, config: Mapping[str, Any]) -> Path:
    """Publish `best/` in place of the one before. The state has `best_val_loss`, `tokens`, `fingerprint`."""
    metadata = {
        "step": snapshot.step,
        "val_loss": snapshot.state["best_val_loss"],
        "tokens": snapshot.state["tokens"],
        "fingerprint": snapshot.state["fingerprint"],
    }
    if "start" in snapshot.state:
        metadata["start"] = snapshot.state["start"]
    files = {
        ADAPTER_CONFIG: [json_bytes(config)],
        ADAPTER_MODEL: _pieces(snapshot.adapter),
        METADATA: [json_bytes(metadata)],
    }
    return _publish(output_dir / "best", files)


def write_final(snapshot: Snapshot, output_dir: Path, config: Mapping[str, Any]) -> Path:
    """Write the adapter into `output_dir` itself. The config first: it is the same for the whole job, so a
    kill between the two files leaves no pair that does not belong together."""
    with disk_errors("making", output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(output_dir / ADAPTER_CONFIG, [json_bytes(config)])
    write_bytes_atomic(output_dir / ADAPTER_MODEL, _pieces(snapshot.adapter))
    return output_dir


def write_start(
    parameters: Mapping[str, Tensor],
    directory: Path,
    config: Mapping[str, Any],
    *,
    parent: str,
    step: int,
    fingerprint: Mapping[str, str],
) -> WarmStart:
    """Publish `directory`: the weights that `parent` has after `step` steps, to start another job from."""
    data = list(_pieces(parameters))
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    start = WarmStart(directory=str(directory), sha256=digest.hexdigest(), parent=parent, step=step)
    files = {
        ADAPTER_CONFIG: [json_bytes(config)],
        ADAPTER_MODEL: data,
        METADATA: [json_bytes({**start.lineage, "fingerprint": dict(fingerprint)})],
    }
    _publish(directory, files)
    return start


def start_from_saved(output_dir: Path, directory: Path, *, parent: str) -> WarmStart:
    """As `write_start`, of a job that has ended: the weights of its newest whole checkpoint.

    UsageError: it has none.
    """
    path = latest_checkpoint(output_dir)
    if path is None:
        raise UsageError(f"{output_dir}: no whole checkpoint of {parent} is there; leave --warm out")
    snapshot = load_checkpoint(path)
    return write_start(
        snapshot.adapter,
        directory,
        json.loads(read_file(path / ADAPTER_CONFIG)),
        parent=parent,
        step=snapshot.step,
        fingerprint=snapshot.state["fingerprint"],
    )


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes]:
    if not isinstance(tensors, FlatTensors):
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return file_pieces(tensors)


def _publish(final: Path, files: Mapping[str, Iterable[bytes]]) -> Path:
    """Write `files`, given in pieces, and their manifest under a temporary name, then publish it as
    `final`."""
    entries: dict[str, dict[str, Any]] = {}
    temporary = temporary_name(final)
    try:
        with disk_errors("writing", final):
            temporary.mkdir(parents=True)
            for name, pieces in files.items():
                digest, size = hashlib.sha256(), 0

                def seen(pieces: Iterable[bytes] = pieces, digest: Any = digest) -> Iterator[bytes]:
                    nonlocal size
                    for piece in pieces:
                        digest.update(piece)
                        size += len(piece)
                        yield piece

                write_file(temporary / name, seen())
                entries[name] = {"size": size, "sha256": digest.hexdigest()}
            write_file(temporary / MANIFEST, [json_bytes({"format": FORMAT, "files": entries})])
        publish_dir(temporary, final)
    except BaseException:
        # Free the space at once: the next job's checkpoint may fit.
        if temporary.is_dir():
            remove_dir(temporary)
        raise
    return final


def _enforce_limit(output_dir: Path, newest: Path, limit: int) -> None:
    """Keep `newest` (just written, whole) and the `limit - 1` before it. A checkpoint of a later step is of a
    time line that was left: kept if whole (someone may want it; it counts), removed if broken."""
    step = _step_of(newest)
    assert step is not None
    kept = 1
    for other_step, path in _checkpoints(output_dir):
        if other_step == step:
            continue
        if kept < limit and (other_step < step or not problems(path)):
            kept += 1
        elif other_step < step or problems(path):
            remove_dir(path)


# ---------------------------------------------------------------------- reading


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The newest checkpoint that is whole; broken ones are skipped with a warning. None: start from step 0.

    Reads every byte of the checkpoint that it returns. Call `remove_leftovers(output_dir)` first if a writer
    may have been killed there (it may have to put a directory back).
    """
    for _, path in _checkpoints(output_dir):
        found = problems(path)
        if not found:
            return path
        log.warning("skipping a broken checkpoint: %s", found[0])
    return None


def load_checkpoint(path: Path) -> Snapshot:
    """The snapshot that `write_checkpoint` wrote, bit for bit; GshareError naming the broken or missing file.

    What is parsed are the bytes that were verified, read once.
    """
    files, found = _read_whole(path)
    if found or not files.keys() >= _WHOLE:
        what = found[0] if found else f"{path}: not a checkpoint to resume from (best/ holds no optimizer)"
        raise GshareError(f"{what}; remove {path} to resume from the checkpoint before it")
    record = json.loads(files[STATE])
    tensors: list[dict[str, Tensor]] = []
    for name in (ADAPTER_MODEL, OPTIMIZER):
        try:
            tensors.append(load_safetensors(files.pop(name)))
        except SafetensorError as error:
            raise GshareError(f"{path / name}: {error}") from error
    return Snapshot(record["job"], record["step"], tensors[0], tensors[1], record["state"])


def load_start(start: WarmStart, base: str) -> dict[str, Tensor]:
    """The weights that `write_start` wrote. UsageError: they are damaged, not those that `start` says, or of
    another base than the one with the fingerprint `base`."""
    path = Path(start.directory)
    files, found = _read_whole(path)
    if not found and not files.keys() >= {ADAPTER_MODEL, METADATA}:
        found = [f"{path}: not the weights of a warm clone"]
    if not found and hashlib.sha256(files[ADAPTER_MODEL]).hexdigest() != start.sha256:
        found = [f"{path / ADAPTER_MODEL}: other weights than those of {start.parent} at step {start.step}"]
    if found:
        raise UsageError(f"{found[0]}; clone {start.parent} again")
    trained_on = json.loads(files[METADATA])["fingerprint"]["base"]
    if trained_on != base:
        raise UsageError(f"{path}: trained on another base (weights {trained_on[:12]}, here {base[:12]})")
    return load_safetensors(files[ADAPTER_MODEL])


def problems(path: Path) -> list[str]:
    """What is wrong with a directory that has a manifest: one line each, empty when it is whole."""
    return _read_whole(path)[1]


def _read_whole(path: Path) -> tuple[dict[str, bytes], list[str]]:
    """Every file named in the manifest, and what is wrong with them."""
    files: dict[str, bytes] = {}
    try:
        manifest = json.loads(read_file(path / MANIFEST))
        if manifest["format"] != FORMAT:
            return {}, [f"{path / MANIFEST}: format {manifest['format']}, this version reads {FORMAT}"]
        expected = {str(n): (int(e["size"]), str(e["sha256"])) for n, e in manifest["files"].items()}
    except OSError as error:
        return {}, [f"{path / MANIFEST}: {error.strerror}"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}, [f"{path / MANIFEST}: not a manifest"]
    unknown = sorted(expected.keys() - _KNOWN_FILES)  # a manifest must not name files elsewhere
    if unknown or not expected:
        return {}, [f"{path / MANIFEST}: names {unknown[0] if unknown else 'no file'}"]
    found: list[str] = []
    for name, (size, digest) in sorted(expected.items()):
        try:
            data = read_file(path / name)
        except OSError as error:
            found.append(f"{path / name}: {error.strerror}")
            continue
        if len(data) != size:
            found.append(f"{path / name}: {len(data)} bytes, {size} were written")
        elif hashlib.sha256(data).hexdigest() != digest:
            found.append(f"{path / name}: its bytes are not those that were written (SHA-256 differs)")
        files[name] = data
    return files, found


def _step_of(path: Path) -> int | None:
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match[1]) if match else None


def _checkpoints(output_dir: Path) -> list[tuple[int, Path]]:
    """(step, directory) of what is named like a checkpoint, newest first; links are none."""
    found: list[tuple[int, Path]] = []
    if output_dir.is_dir():
        for entry in os.scandir(output_dir):
            step = _step_of(Path(entry.name))
            if step is not None and entry.is_dir(follow_symlinks=False):
                found.append((step, Path(entry.path)))
    return sorted(found, reverse=True)


# ---------------------------------------------------------------------- metrics


def truncate_metrics(path: Path, step: int) -> None:
    """Cut metrics.jsonl back to the lines with `step` <= step, atomically; a torn last line goes too.

    No file: nothing to do. UsageError names a line in the middle that is no JSON object with a `step`.
    Whoever holds the file open for appending must open it again.
    """
    try:
        data = read_file(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise GshareError(f"{path}: {error.strerror}") from error
    lines = data.split(b"\n")
    torn = lines.pop()  # empty when the last line is complete
    kept: list[bytes] = []
    for number, line in enumerate(lines, 1):
        try:
            at = json.loads(line)["step"]
            keep = at <= step
        except (ValueError, KeyError, TypeError):
            raise UsageError(
                f"{path}:{number}: not a JSON object with a number `step`; remove the line, then resume"
            ) from None
        if keep:
            kept.append(line)
    if torn or len(kept) < len(lines):
        write_bytes_atomic(path, [b"".join(line + b"\n" for line in kept)])
