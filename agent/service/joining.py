"""Which running trainer a client may join instead of loading the base again.

    with looking(key):                    # one at a time: the second sees what the first has started
        found = candidates(config, but=refused)

What must be the same is hashed into the `join_key` of `trainer.json`: the base by its content, how it is
stored, schedule and limits of a pass, engine, kind of device, and the surroundings that bits or the ledger
depend on. The GPU is looked at by itself: one of those that the client's own plan allows.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Collection, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import msgspec
from gshare.agent.errors import GshareError
from gshare.agent.service.base_identity import base_identity
from gshare.agent.service.client import TrainerClient
from gshare.agent.service.environment import trainer_environment
from gshare.agent.service.registry import (
    TrainerConfig,
    live_trainers,
    not_made,
    private_dir,
    read_json,
    runtime_dir,
)

#: Variables that a trainer and its clients must agree on: where the ledger is, and what it is a ledger of.
_LEDGER_VARIABLES = ("GSHARE_LEDGER_DIR", "GSHARE_DEVICES")
#: And those of `trainer_environment` that numerics depend on.
_NUMERIC_VARIABLES = ("MKL_CBWR", "OMP_NUM_THREADS")


#: A trainer answers who only looks at once; one that hangs is passed over.
LOOK_SECONDS = 2.0


class Candidate(NamedTuple):
    """A live trainer and what it was told."""

    directory: Path
    config: TrainerConfig


def with_identity(config: TrainerConfig, *, join: bool) -> TrainerConfig:
    """The configuration with `base` and `join_key` filled in; without a key it is its client's alone."""
    base = config.base or base_identity(Path(config.model_dir)) or ""
    config = msgspec.structs.replace(config, base=base)
    key = "" if not join or not base or _not_shared(config) else _key(config)
    return msgspec.structs.replace(config, join_key=key)


def _not_shared(config: TrainerConfig) -> str:
    """Why a trainer so configured is its client's alone; empty when it is not."""
    gpu = config.gpu
    if config.trace:
        return "it keeps a trace"
    if gpu is not None and gpu.mps_share is not None:
        return "it shares the GPU's cores by MPS"
    if gpu is not None and gpu.inherit:
        return "it runs under a reservation of `gshare gpu run`"
    if gpu is not None and not gpu.part_mb:
        return "it does not say what its adapters take"
    return ""


def _key(config: TrainerConfig) -> str:
    surroundings = {name: os.environ.get(name, "") for name in _LEDGER_VARIABLES}
    numerics = trainer_environment()
    whole = [
        *(config.base, config.base_dtype, config.schedule, config.runner),
        # An adapter's files name the directory of its base: a copy elsewhere would give others than alone.
        os.path.realpath(config.model_dir),
        *(config.max_tokens_per_pass, config.max_adapters_per_pass),
        *(config.trunk_cache, config.trunk_cache_host),
        "cpu" if config.gpu is None else "gpu",
        *(version("gshare"), sys.prefix),
        *surroundings.values(),
        *(numerics[name] for name in _NUMERIC_VARIABLES),
    ]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:32]


@contextlib.contextmanager
def looking(key: str) -> Iterator[None]:
    """Held from the look for a trainer until one's own is started: two at once must not load two bases.

    Nothing slow happens inside, so the wait is not bounded.
    """
    locks = runtime_dir() / "joins"
    try:
        path = private_dir(locks) / key
        fd = _locked(path)
    except OSError as error:
        raise not_made(locks, "a client needs a lock", error) from None
    try:
        yield
    finally:
        # By who holds it, before it is given back: whoever waited for it sees that, and makes a new one.
        path.unlink(missing_ok=True)
        os.close(fd)


def _locked(path: Path) -> int:
    """The file at `path`, made and locked. One that was removed while it was waited for locks nothing."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def candidates(config: TrainerConfig, *, but: Collection[str] = ()) -> list[Candidate]:
    """Live trainers that may be joined, those without a job on trial first, then the oldest; `but` are ids of
    those that are not asked again."""
    found = [one for one in _live() if one.directory.name not in but and _matches(config, one.config)]
    return sorted(found, key=lambda one: not one.config.joinable)


def waiting_on_trial(config: TrainerConfig) -> bool:
    """Whether a trainer that is not open yet waits for GPU memory: whoever holds some should make room."""
    if config.gpu is None:
        return False
    for found in candidates(config):
        if found.config.joinable:
            continue
        with contextlib.suppress(GshareError):
            client = TrainerClient(found.directory, "look", timeout=LOOK_SECONDS, reply_seconds=LOOK_SECONDS)
            client.close()
            if client.hello.waiting and not client.hello.joinable:
                return True
    return False


def _live() -> list[Candidate]:
    found = []
    for directory in live_trainers():
        with contextlib.suppress(GshareError):  # of another version, or just removed
            found.append(Candidate(directory, read_json(directory / "trainer.json", TrainerConfig)))
    return found


def _matches(mine: TrainerConfig, theirs: TrainerConfig) -> bool:
    return theirs.join_key == mine.join_key and (mine.gpu is None or bool(_common_gpus(mine, theirs)))


def _common_gpus(mine: TrainerConfig, theirs: TrainerConfig) -> set[str]:
    if mine.gpu is None or theirs.gpu is None:
        return set()
    return set(mine.gpu.gpus) & set(theirs.gpu.gpus)


def right_gpu(mine: TrainerConfig, theirs: TrainerConfig, reserved: str) -> bool:
    """Whether the GPU that a trainer has `reserved`, or whichever it gets, is one of this client's."""
    if mine.gpu is None or theirs.gpu is None:
        return mine.gpu is None and theirs.gpu is None
    return reserved in mine.gpu.gpus if reserved else set(theirs.gpu.gpus) <= set(mine.gpu.gpus)


def why_not(config: TrainerConfig) -> str:
    """Of a trainer with this base that cannot be joined as it is: what differs; empty without one."""
    for found in _live():
        if not config.base or found.config.base != config.base:
            continue
        if reason := _difference(config, found.config):
            return f"a trainer with this base runs ({found.directory.name}), but {reason}"
    return ""


def why_not_this(mine: TrainerConfig, theirs: TrainerConfig) -> str:
    """Why that trainer cannot be joined; empty when it can."""
    if theirs.join_key and theirs.join_key == mine.join_key:
        return "" if mine.gpu is None or _common_gpus(mine, theirs) else "it is on another GPU"
    if mine.base != theirs.base:
        return f"{theirs.model_dir} has other weights than it has loaded"
    return _difference(mine, theirs) or "it is its client's alone"


def _difference(mine: TrainerConfig, theirs: TrainerConfig) -> str:
    passes = ("max_tokens_per_pass", "max_adapters_per_pass", "trunk_cache", "trunk_cache_host")
    for name in ("base_dtype", "schedule", *passes, "runner"):
        if getattr(mine, name) != getattr(theirs, name):
            return f"its {name} is {getattr(theirs, name)}, not {getattr(mine, name)}"
    if os.path.realpath(mine.model_dir) != os.path.realpath(theirs.model_dir):
        return f"from {theirs.model_dir}"
    if (mine.gpu is None) != (theirs.gpu is None):
        return f"it is on {'the CPU' if theirs.gpu is None else 'a GPU'}"
    if not theirs.join_key:
        return _not_shared(theirs) or "it was started with --no-join"
    if mine.gpu is not None and not _common_gpus(mine, theirs):
        return "it is on another GPU"
    if theirs.join_key != mine.join_key:
        return "its gshare, ledger or number of threads is another"
    return ""
