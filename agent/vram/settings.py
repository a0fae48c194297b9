"""The reserve factor: how much of a device the ledger hands out, and where a user may change it.

`[gpu] reserve_factor` in `$XDG_CONFIG_HOME/gshare/config.toml` (`~/.config/gshare/config.toml`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import nearest
from gshare.agent.vram.devices import Device, MemoryType

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: The rest is for the driver, kernels compiled at run time and scratch (15 %); where the memory is the
#: CPU's too, for the system and its programs (40 %).
RESERVE_FACTOR: dict[MemoryType, float] = {"discrete": 0.85, "unified": 0.60, "cpu": 0.60}

GPU_KEYS = ("reserve_factor",)


def config_file(environ: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_CONFIG_HOME/gshare/config.toml`; a relative value is ignored, as the XDG spec asks."""
    value = environ.get("XDG_CONFIG_HOME", "")
    return (Path(value) if os.path.isabs(value) else Path.home() / ".config") / "gshare" / "config.toml"


def configured_factor(path: Path) -> float | None:
    """The user's reserve factor, None when unset. UsageError naming file and key when it is none."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
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
        raise UsageError(f"{path}: [gpu] reserve_factor = {value!r} must be more than 0 and at most 1")
    return float(value)


def reserve_factor(device: Device, configured: float | None = None) -> float:
    """The part of `device` that may be reserved: the configured one, else by its kind of memory."""
    return configured if configured is not None else RESERVE_FACTOR[device.memory_type]
