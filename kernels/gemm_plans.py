"""Which library multiplies which product on this card, remembered between processes in one JSON file.

    {"format": 1, "cards": {card and versions: {product: "cublas" or "triton"}}}

A plan says that cuBLAS had the own GEMM's bits for one shape and number of rows. It holds for exactly the
card, versions, environment and own GEMM (its source) that its key names; anything else is checked anew.
The file is a convenience: missing, damaged or unwritable it costs the checks again and nothing more.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast

import torch
import triton
from gshare.kernels.numerics import NUMERICS

log = logging.getLogger(__name__)

Plan = Literal["cublas", "triton"]

FORMAT = 1
#: Kept are the newest: 8 cards or versions, 4,096 products each, 60 bytes a product.
MAX_CARDS, MAX_PLANS = 8, 4096
#: A larger file is none of ours.
MAX_BYTES = 4 << 20
#: What besides versions changes cuBLAS's choice of kernel: the size of its workspace.
_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
#: The own GEMM: its kernel and its tiles.
_SOURCES = ("gemm_triton.py", "tile_tables.py", "triton_common.py")


class PlanCache:
    """The plans of one key. `path` None: nothing is kept."""

    def __init__(self, path: Path | None, key: str) -> None:
        self._path, self._key = path, key
        self._known: dict[str, Plan] = {} if path is None else dict(_read(path).get(key, {}))

    def get(self, product: str) -> Plan | None:
        return self._known.get(product)

    def put(self, product: str, plan: Plan) -> None:
        """Remember, and write the file with what others have added since. Of two at once one may be lost."""
        self._known[product] = plan
        if self._path is None:
            return
        cards = _read(self._path)
        mine: dict[str, Plan] = {**cards.pop(self._key, {}), product: plan}
        # Newest last, in both.
        cards[self._key] = dict(list(mine.items())[-MAX_PLANS:])
        kept = dict(list(cards.items())[-MAX_CARDS:])
        try:
            _write(self._path, json.dumps({"format": FORMAT, "cards": kept}, indent=0))
        except OSError as error:
            log.info("GEMM plans are not kept: %s: %s", self._path, error.strerror)
            self._path = None


def card_key(device: torch.device) -> str | None:
    """Everything that a plan depends on but the product; None where cuBLAS does not tell its version."""
    cublas = _cublas_version()
    if cublas is None:
        return None
    card = torch.cuda.get_device_properties(device)
    parts = (
        f"{card.name} sm_{card.major}{card.minor} × {card.multi_processor_count}",
        f"torch {torch.__version__}",
        f"CUDA {torch.version.cuda}",
        f"cuBLAS {cublas}",
        f"triton {triton.__version__}",
        f"numerics {NUMERICS}",
        f"GEMM {own_gemm_hash()}",
        *(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ),
    )
    return ", ".join(parts)


def own_gemm_hash() -> str:
    """12 hex digits over the own GEMM's source, its choice of tiles included."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:12]


def _cublas_version() -> int | None:
    """Of the cuBLASLt that this process has loaded: the loader finds it by its name."""
    major = (torch.version.cuda or "").split(".")[0]
    try:
        version = ctypes.CDLL(f"libcublasLt.so.{major}").cublasLtGetVersion
    except (OSError, AttributeError):
        return None
    version.restype = ctypes.c_size_t
    return int(version())


def _read(path: Path) -> dict[str, dict[str, Plan]]:
    """Card key → product → plan; empty where the file is missing or not what `PlanCache` writes."""
    try:
        if path.stat().st_size > MAX_BYTES:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, Mapping) or found.get("format") != FORMAT:
        return {}
    cards = found.get("cards")
    if not isinstance(cards, Mapping) or not all(map(_is_plans, cards.values())):
        return {}
    return cast("dict[str, dict[str, Plan]]", cards)


def _is_plans(found: Any) -> bool:
    return isinstance(found, Mapping) and all(plan in ("cublas", "triton") for plan in found.values())


def _write(path: Path, text: str) -> None:
    """All of it or nothing: a file of its own (mode 0600), renamed into place."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        raise
