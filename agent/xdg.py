"""Where gshare keeps what it can make again: `$XDG_CACHE_HOME/gshare`, else `~/.cache/gshare`."""

from __future__ import annotations

import os
from pathlib import Path


def xdg_dir(variable: str, default: str) -> Path:
    """`$variable/gshare`, else `~/default/gshare`; a relative value is ignored, as the XDG spec asks."""
    value = os.environ.get(variable, "")
    return (Path(value) if os.path.isabs(value) else Path.home() / default) / "gshare"


def cache_dir() -> Path:
    """Converted models and token files. Not made here."""
    return xdg_dir("XDG_CACHE_HOME", ".cache")
