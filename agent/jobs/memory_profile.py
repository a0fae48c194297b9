"""What was measured of a base on a card, kept in one JSON file a combination and checked when it is read.

    key = profile_key(base, base_dtype=…, card=…, checkpointing=…)
    write_profile(directory, profile);  read_profile(directory, key)

The file holds measurements and no coefficients: the models are fitted again when it is read, so that they
cannot say what was not measured. It is a cache: a damaged one is told of and measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from gshare.agent.jobs.memory_model import (
    FOLDS,
    MEMORY_TERMS,
    TIME_TERMS,
    Fit,
    fit_memory,
    fit_seconds,
    fit_terms,
)
from gshare.agent.jobs.pass_load import PassLoad
from gshare.agent.service.environment import trainer_environment
from gshare.kernels.numerics import NUMERICS

#: Changes with the meaning of a field: an older file is another key's, and is never read.
FORMAT = 3
#: A profile of 26 points is 8 KiB.
MAX_BYTES = 1 << 20
MAX_POINTS = 512
#: Profiles kept; the one that was written longest ago goes first.
MAX_PROFILES = 64
#: Beyond so many times the largest measured pass nothing is said.
REACH = 2
#: No device has more, in bytes; and no field of a load is larger (it is an int that JSON may exceed).
_MOST = 1 << 50
#: What the allocator does with memory is set by these.
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "GSHARE_CUDA_GRAPHS")


class ProfileKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the measured numbers depend on besides the load."""

    base: str  # `base_identity`
    base_dtype: str
    card: str  # the GPU's name, or "cpu"
    checkpointing: bool  # activations are recomputed
    numerics: int = NUMERICS
    torch: str = ""
    triton: str = ""
    allocator: str = ""
    format: int = FORMAT

    @property
    def file_name(self) -> str:
        return f"{hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]}.json"


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured configuration: N adapters with `batch` rows of `length` tokens each."""

    load: PassLoad
    batch: int
    length: int
    peak_bytes: int  # that the device must have for it, base included, context not
    step_seconds: float


class MemoryProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """`largest_batch` rows of `length` tokens was the most of one adapter that fitted, within
    `limit_bytes` (0: no limit but the pass's). The terms are those that were found to be worth it."""

    key: ProfileKey
    points: tuple[Point, ...]
    memory_terms: tuple[str, ...]
    time_terms: tuple[str, ...]
    length: int
    largest_batch: int
    limit_bytes: int
    refused: int = 0  # configurations that ran out of memory

    @cached_property
    def memory(self) -> Fit:
        """Bytes of a load."""
        peaks = [float(point.peak_bytes) for point in self.points]
        return _fit(self._loads, peaks, self.memory_terms, arena=True)

    @cached_property
    def seconds(self) -> Fit:
        """Seconds of a load's optimizer step."""
        seconds = [point.step_seconds for point in self.points]
        return _fit(self._loads, seconds, self.time_terms, arena=False)

    def tokens_per_second(self, load: PassLoad) -> float:
        """Predicted throughput of passes like this one."""
        return load.tokens / self.seconds.predict(load)

    def reaches(self, load: PassLoad) -> bool:
        """Whether the measurements say something of this load: its pass is not far beyond the largest of
        them. Of adapters there may be any number: their bytes are known."""
        return load.tokens <= REACH * max(point.load.tokens for point in self.points)

    @property
    def _loads(self) -> list[PassLoad]:
        return [point.load for point in self.points]


class DamagedProfile(ValueError):
    """The text says what is wrong with the file."""


def profile_key(base: str, *, base_dtype: str, card: str, checkpointing: bool) -> ProfileKey:
    """The key here and now, as of a trainer started here. The versions are read without loading torch."""
    environment = {**os.environ, **trainer_environment()}
    return ProfileKey(
        base=base,
        base_dtype=base_dtype,
        card=card,
        checkpointing=checkpointing,
        torch=_version("torch"),
        triton=_version("triton"),
        allocator=" ".join(f"{name}={environment[name]}" for name in _ALLOCATOR if environment.get(name)),
    )


def make_profile(
    key: ProfileKey,
    points: Sequence[Point],
    *,
    length: int,
    largest_batch: int,
    limit_bytes: int,
    refused: int = 0,
) -> MemoryProfile:
    """The profile with the terms that its points are best told by. ValueError: there is no model of them."""
    loads = [point.load for point in points]
    memory = fit_memory(loads, [float(point.peak_bytes) for point in points])
    seconds = fit_seconds(loads, [point.step_seconds for point in points])
    if len(points) < FOLDS:
        raise ValueError(f"{len(points)} configurations were measured, a model needs {FOLDS}")
    if memory is None or seconds is None:
        raise ValueError("no model fits what was measured")
    return MemoryProfile(
        key=key,
        points=tuple(points),
        memory_terms=memory.terms,
        time_terms=seconds.terms,
        length=length,
        largest_batch=largest_batch,
        limit_bytes=limit_bytes,
        refused=refused,
    )


def write_profile(directory: Path, profile: MemoryProfile) -> Path:
    """Whole or not at all; the oldest beyond `MAX_PROFILES` go. OSError when the disk does not take it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / profile.key.file_name
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _keep_newest(directory)
    return path


def read_profile(directory: Path, key: ProfileKey) -> MemoryProfile | None:
    """None: not measured yet. DamagedProfile: the file is there and is not what was written."""
    path = directory / key.file_name
    try:
        return _profile(path, _content(path), key)
    except FileNotFoundError:
        return None


def read_profile_file(path: Path) -> MemoryProfile | None:
    """One that is named, whatever it was measured of; None: a file of another kind. DamagedProfile,
    FileNotFoundError."""
    data = _content(path)
    try:
        if msgspec.json.decode(data, type=_Kind).points == msgspec.Raw(b""):
            return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return _profile(path, data, None)


class _Kind(msgspec.Struct, frozen=True):
    """What tells a profile from other JSON objects."""

    points: msgspec.Raw = msgspec.Raw(b"")


def _content(path: Path) -> bytes:
    """FileNotFoundError, or DamagedProfile for whatever else keeps it from being read."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedProfile(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise DamagedProfile(f"{path}: is larger than {MAX_BYTES >> 20} MiB")
    return data


def _profile(path: Path, data: bytes, key: ProfileKey | None) -> MemoryProfile:
    """`key` None: of whatever base and card."""
    try:
        profile = msgspec.json.decode(data, type=MemoryProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedProfile(f"{path}: {error}") from None
    fault = _fault(profile, key or profile.key)
    if fault:
        raise DamagedProfile(f"{path}: {fault}")
    return profile


def _fault(profile: MemoryProfile, key: ProfileKey) -> str:
    """What is wrong with a profile that was read; empty when nothing is."""
    if profile.key.format != FORMAT:
        return f"is of format {profile.key.format}, this version reads {FORMAT}; measure it again"
    if profile.key != key:
        return "is of another base, card or version than its name says"
    if not FOLDS <= len(profile.points) <= MAX_POINTS:
        return f"has {len(profile.points)} points; {FOLDS} to {MAX_POINTS} are possible"
    for number, point in enumerate(profile.points):
        values = {**msgspec.structs.asdict(point.load), "batch": point.batch, "length": point.length}
        wrong = [name for name, value in values.items() if not 0 <= value <= _MOST]
        if not 0 < point.peak_bytes <= _MOST:
            wrong.append("peak_bytes")
        if not 1e-9 < point.step_seconds < 1e6:
            wrong.append("step_seconds")
        if wrong:
            return f"points[{number}].{wrong[0]} is out of range"
    for what, terms, known in (
        ("memory_terms", profile.memory_terms, MEMORY_TERMS),
        ("time_terms", profile.time_terms, TIME_TERMS),
    ):
        if terms[:1] != ("constant",) or len(set(terms)) != len(terms) or set(terms[1:]) - set(known):
            return f"{what} is not a model's"
    try:
        _ = profile.memory, profile.seconds
    except ValueError as error:
        return str(error)
    return ""


def _fit(loads: Sequence[PassLoad], targets: Sequence[float], terms: Sequence[str], *, arena: bool) -> Fit:
    fit = fit_terms(loads, targets, terms, arena=arena)
    if fit is None:
        raise ValueError("its points do not fit its model")
    return fit


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _keep_newest(directory: Path) -> None:
    """Removes the oldest profiles, and what a killed writer left an hour ago."""
    aged: list[tuple[float, Path]] = []
    for path in directory.iterdir():
        with contextlib.suppress(OSError):
            modified = path.stat().st_mtime
            if path.suffix == ".json":
                aged.append((modified, path))
            elif path.name.startswith(".") and modified < time.time() - 3600:
                path.unlink()
    for _, path in sorted(aged)[: max(0, len(aged) - MAX_PROFILES)]:
        path.unlink(missing_ok=True)
