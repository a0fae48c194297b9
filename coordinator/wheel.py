"""This installation's own files as a wheel: what a node gets.

Packed from the files that run here, whether they lie in a checkout or in site-packages, so that a node runs
exactly what its coordinator runs, and no build tool or network is needed. The bytes depend on the files
alone; the stamp is VERSION-HASH over them.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import gshare.agent
from gshare.agent.errors import GshareError

ROOMS = ("agent", "cli", "coordinator", "kernels", "tui")
#: ZIP knows no earlier time; a fixed one keeps the bytes the same.
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Wheel:
    """A pure-Python wheel in memory (well below 1 MiB)."""

    name: str
    data: bytes
    stamp: str
    sha256: str


@lru_cache(maxsize=1)
def own_wheel() -> Wheel:
    """The wheel of the running gshare. GshareError when its metadata cannot be found."""
    try:
        installed = distribution("gshare")
    except PackageNotFoundError:
        raise GshareError("gshare is not installed here, only on the path; pip install it first") from None
    info = f"gshare-{installed.version}.dist-info"
    root = Path(gshare.agent.__file__).parent.parent
    files = {
        f"gshare/{path.relative_to(root).as_posix()}": path.read_bytes()
        for room in ROOMS
        for path in sorted((root / room).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    files[f"{info}/METADATA"] = (installed.read_text("METADATA") or "").encode()
    files[f"{info}/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: gshare\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = "".join(f"{name},sha256={_hash(data)},{len(data)}\n" for name, data in sorted(files.items()))
    stamp = f"{installed.version}-{hashlib.sha256(record.encode()).hexdigest()[:12]}"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    data = _zip(files)
    name = f"gshare-{installed.version}-py3-none-any.whl"
    return Wheel(name=name, data=data, stamp=stamp, sha256=hashlib.sha256(data).hexdigest())


def _hash(data: bytes) -> str:
    """As RECORD writes it (PEP 376, PEP 427): URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _ZIP_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return buffer.getvalue()
