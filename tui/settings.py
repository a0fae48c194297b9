"""What the dashboard remembers between two runs: `$XDG_STATE_HOME/gshare/tui.json`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
from gshare.agent.xdg import xdg_dir
from gshare.tui.themes import DEFAULT

MAX_BYTES = 1 << 20


class Settings(msgspec.Struct, kw_only=True):
    theme: str = DEFAULT
    view: str = "overview"
    sort: str = "val"
    descending: bool = False
    relative: bool = True  # times as ages
    log_scale: bool = False


def default_path() -> Path:
    return xdg_dir("XDG_STATE_HOME", ".local/state") / "tui.json"


def load(path: Path) -> tuple[Settings, str]:
    """The settings, and what was wrong with the file: a damaged one is no reason not to start."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=Settings), ""
    except FileNotFoundError:
        return Settings(), ""
    except (OSError, msgspec.DecodeError, ValueError, RecursionError) as error:
        return Settings(), f"{path}: not readable ({error}); the usual settings are used and will replace it"


def save(path: Path, settings: Settings) -> str:
    """Writes them whole or not at all; returns why it could not be done."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(settings), indent=2) + b"\n")
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        return f"{path}: {error.strerror}"
    return ""
