"""The reserve factor: how much of a device the ledger hands out, and where a user may change it.

`[gpu] reserve_factor` in `$XDG_CONFIG_HOME/gshare/config.toml` (`~/.config/gshare/config.toml`).
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import nearest, shorten
from gshare.agent.vram.devices import Device, MemoryType

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: The rest is for the driver, kernels compiled at run time and scratch (15 %); where the memory is the
#: CPU's too, for the system and its programs (40 %).
RESERVE_FACTOR: dict[MemoryType, float] = {"discrete": 0.85, "unified": 0.60, "cpu": 0.60}

GPU_KEYS = ("reserve_factor",)

#: Bytes: a thousand devices take less.
MAX_TOML = 256 * 1024


def config_file(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CONFIG_HOME/gshare/config.toml`; a relative value is ignored, as the XDG spec asks."""
    value = environ.get("XDG_CONFIG_HOME", "")
    return (Path(value) if os.path.isabs(value) else Path.home() / ".config") / "gshare" / "config.toml"


def configured_factor(path: Path) -> float | None:
    """The user's reserve factor, None when unset. UsageError naming file and key when it is none."""
    try:
        table = read_toml(path, what=str(path))
    except FileNotFoundError:
        return None
    gpu = table.get("gpu", {})
    if not isinstance(gpu, dict):
        raise UsageError(f"{path}: [gpu] must be a table")
    for key in gpu:
        if key not in GPU_KEYS:
            near = nearest(key, GPU_KEYS)
            hint = f"; did you mean {near!r}?" if near else f"; known: {', '.join(GPU_KEYS)}"
            raise UsageError(f"{path}: [gpu] unknown key {key!r}{hint}")
    value = gpu.get("reserve_factor")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise UsageError(f"{path}: [gpu] reserve_factor = {shorten(value)} must be more than 0 and at most 1")
    return float(value)


def read_toml(path: Path, *, what: str) -> dict[str, Any]:
    """The tables of a small file. FileNotFoundError when it is missing; UsageError beginning with `what` when
    it is no regular file (a pipe would be waited on for ever), too large, or not TOML.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise UsageError(f"{what}: no regular file")
            data = os.read(fd, MAX_TOML + 1)
        finally:
            os.close(fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{what}: {error.strerror}") from None
    if len(data) > MAX_TOML:
        raise UsageError(f"{what}: larger than {MAX_TOML >> 10} KiB; is it the right file?")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is no TOMLDecodeError
        raise UsageError(f"{what}: not TOML: {error}") from None


def reserve_factor(device: Device, configured: float | None = None) -> float:
    """The part of `device` that may be reserved: the configured one, else by its kind of memory."""
    return configured if configured is not None else RESERVE_FACTOR[device.memory_type]
