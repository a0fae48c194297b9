"""What has to be in the environment before torch is loaded; torch-free itself.

Set at the spawn of every trainer, and by whatever else runs the engine in its own process (tests, audit).
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_PAGES = "expandable_segments"


def trainer_environment() -> dict[str, str]:
    """The variables that a process which runs the engine must have, as `{name: value}`.

    `MKL_CBWR` is always set, whatever the caller's environment says: with it rows of a GEMM have the same
    bits at every M, offset and thread count; without it they have not (dev/LOG.md, spike on packed GEMMs).
    `OMP_NUM_THREADS` is the caller's when set, else the physical cores this process may run on.
    """
    return {
        "MKL_CBWR": "AVX512,STRICT" if _has_avx512() else "AVX2,STRICT",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(usable_cores()),
        # libgomp's threads spin while they wait; on a machine with anything else to do they then hold the
        # core that the other thread needs. 2 cores, load 5, (40, 576) @ (576, 1536): 20.4 ms a product
        # with the default, 1.3 ms with this.
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT") or "2000",
        "TOKENIZERS_PARALLELISM": "false",
        # cuBLAS picks split-K workspaces by stream unless its workspace is fixed (CUDA docs, cuBLAS
        # "Results reproducibility").
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **_allocator(),
    }


def _allocator() -> dict[str, str]:
    """torch's CUDA allocator maps pages where they are needed, unless the caller has set it otherwise.

    With blocks of fixed places a sweep of sixty adapters ran out of memory on an H200 at 18 GiB of tensors
    under a cap of 40: what the guard had claimed was one block with long-lived tensors in it, and could
    neither be joined nor given to the graphs.
    """
    if any(os.environ.get(name) for name in _ALLOCATOR) or not _maps_pages():
        return {}
    return {_ALLOCATOR[0]: f"{_PAGES}:True"}


def pages_are_mapped() -> bool:
    """Whether torch's CUDA allocator maps pages in this process, as far as its environment says."""
    return any(f"{_PAGES}:true" in os.environ.get(name, "").lower() for name in _ALLOCATOR)


def _maps_pages(release: str = platform.release(), tegra: Path = Path("/etc/nv_tegra_release")) -> bool:
    """Not where drivers are known to refuse it: WSL, Jetson, and slices of a GPU (MIG)."""
    sliced = "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return not (sliced or "microsoft" in release.lower() or tegra.exists())


def usable_cores() -> int:
    """Physical cores, no more than the affinity mask allows; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def _has_avx512(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    for line in text.splitlines():
        if line.startswith("flags"):
            return "avx512f" in line.split()
    return False
