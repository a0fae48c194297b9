"""What torch and its helpers can do on this machine, as one JSON line on stdout.

    python -m gshare.agent.base.probe

`gshare doctor` runs this in a process of its own: a broken CUDA library or a wheel for another CPU may
end the process instead of raising, and that has to be a finding, not the end of `doctor`. Each part is
`{"ok": bool, …}` with `error` where it is not.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Finding = dict[str, Any]


def _guarded(look: Callable[[], Finding]) -> Finding:
    try:
        return {"ok": True, **look()}
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}".splitlines()[0]}


def look_at_torch() -> Finding:
    """Version, the CUDA that it was built for, and the devices that it can use."""
    import torch

    available = torch.cuda.is_available()
    devices = (
        [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if available else []
    )
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "cuda_available": available,
        "threads": torch.get_num_threads(),
        "devices": [
            {
                "name": device.name,
                "capability": f"{device.major}.{device.minor}",
                "memory_mib": device.total_memory >> 20,
            }
            for device in devices
        ],
    }


def look_at_rows() -> Finding:
    """Whether rows of a packed fp32 GEMM have the bits that they have alone, which exactness on CPU rests on.

    (K 1536, N 576) at 57 to 192 rows and two threads is where MKL differs without its strict mode
    (dev/LOG.md, spike on packed GEMMs).
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(max(2, threads))
    generator = torch.Generator().manual_seed(0)
    x_MK = torch.randn(224, 1536, generator=generator)
    w_NK = torch.randn(576, 1536, generator=generator)
    packed_MN = x_MK @ w_NK.T
    different = [m for m in range(57, 193, 9) if not torch.equal(x_MK[:m] @ w_NK.T, packed_MN[:m])]
    torch.set_num_threads(threads)
    mode = os.environ.get("MKL_CBWR") or "(unset)"
    if different:
        raise RuntimeError(f"{len(different)} of 16 row counts differ from the packed rows, MKL_CBWR={mode}")
    return {"mkl": torch.backends.mkl.is_available(), "mkl_cbwr": mode}


def _import(module: str, distribution: str) -> Callable[[], Finding]:
    def look() -> Finding:
        try:
            found = version(distribution)
        except PackageNotFoundError:
            raise ImportError(f"{distribution} is not installed") from None
        importlib.import_module(module)
        return {"version": found}

    return look


def probe() -> dict[str, Finding]:
    """Every part; torch's first, since nothing else means anything without it."""
    found = {"torch": _guarded(look_at_torch)}
    if found["torch"]["ok"]:
        found["rows"] = _guarded(look_at_rows)
        found["transformers"] = _guarded(_import("transformers", "transformers"))
        found["safetensors"] = _guarded(_import("safetensors.torch", "safetensors"))
        found["bitsandbytes"] = _guarded(_import("bitsandbytes", "bitsandbytes"))
        found["triton"] = _guarded(_import("triton", "triton"))
        found["gguf"] = _guarded(_import("gguf", "gguf"))
        found["accelerate"] = _guarded(_import("accelerate", "accelerate"))
    return found


if __name__ == "__main__":
    json.dump(probe(), sys.stdout)
    print()
