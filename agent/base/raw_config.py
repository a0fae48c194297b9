"""`config.json` as typed reads that name file and key when something is wrong. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import shorten

_MOST = 1e30  # nothing sensible is above; it and its square root fit in fp32


class RawConfig:
    """The object of a `config.json`. Every read is typed; a default is used only where the key is absent."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    @classmethod
    def read(cls, model_dir: Path) -> RawConfig:
        path = model_dir / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(
                f"{model_dir} has no config.json; give a Hugging Face directory, a hub id or a .gguf file"
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise UsageError(f"{path} must hold a JSON object")
        return cls(values, str(path))

    def has(self, key: str) -> bool:
        """Present and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        """A positive integer up to `most`; without `default` the key must be there. null counts as absent."""
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, f"must be a positive integer, not {shorten(value)}")
        if value > most:
            raise self.error(key, f"must be at most {most}, not {shorten(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; without `default` the key must be there."""
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MOST:
            raise self.error(key, f"must be a positive, finite number, not {shorten(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {value!r}")
        return value

    def table(self, key: str) -> RawConfig | None:
        """A nested object, or None where it is absent or empty."""
        value = self.values.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, not {value!r}")
        return RawConfig(value, f"{self.source}: {key}")

    def error(self, key: str, problem: str) -> UsageError:
        return UsageError(f"{self.source}: {key} {problem}")
