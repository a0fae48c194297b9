"""What a run has written, for comparing it with another run."""

from __future__ import annotations

import json
from pathlib import Path


def run_files(folder: Path) -> dict[str, object]:
    """Path within `folder` → bytes, of every file but token stores and what holds the time of day; metrics
    as records, without their times."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or "-store" in str(path):
            continue
        name = str(path.relative_to(folder))
        if path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{**line, "seconds": 0} for line in lines]
        elif path.name != "metadata.json":
            found[name] = path.read_bytes()
    return found
