"""Wheels of what is installed here, packed again from its files: an index for tests without a network."""

from __future__ import annotations

import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def closure(name: str, extras: frozenset[str] = frozenset()) -> dict[str, Distribution]:
    """What `name` needs here, itself left out: name → distribution."""
    found: dict[str, Distribution] = {}
    waiting = [(name, extras)]
    while waiting:
        current, current_extras = waiting.pop()
        for text in distribution(current).requires or ():
            need = Requirement(text)
            wanted = [{"extra": extra} for extra in current_extras] or [{"extra": ""}]
            if need.marker is not None and not any(need.marker.evaluate(values) for values in wanted):
                continue
            if need.name.lower() not in found:
                found[need.name.lower()] = distribution(need.name)
                waiting.append((need.name, frozenset(need.extras)))
    return found


def make_wheelhouse(folder: Path, name: str = "gshare") -> Path:
    """A directory for pip's --find-links that holds all that `name` needs, as installed here."""
    folder.mkdir()
    for its in closure(name).values():
        pack(its, folder)
    return folder


def pack(its: Distribution, folder: Path) -> Path:
    """Its files as a wheel; scripts and caches are left out (nothing here runs them)."""
    tags = [
        line.split()[1] for line in (its.read_text("WHEEL") or "").splitlines() if line.startswith("Tag:")
    ]
    # One file name for several tags: "cp311-cp311-linux_x86_64" parts joined by dots (PEP 425).
    parts = [".".join(dict.fromkeys(part)) for part in zip(*(tag.split("-", 2) for tag in tags), strict=True)]
    base = f"{its.metadata['Name'].replace('-', '_')}-{its.version}"
    path = folder / f"{base}-{'-'.join(parts)}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for file in its.files or ():
            source = Path(str(its.locate_file(file)))
            if ".." in file.parts or "__pycache__" in file.parts or not source.is_file():
                continue
            archive.write(source, str(file))
    return path
