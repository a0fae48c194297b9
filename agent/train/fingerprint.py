"""The numerics fingerprint: everything outside the job that its bits may depend on.

Two runs of one job with equal fingerprints have equal bytes. A resume under another fingerprint is
allowed, and recorded with both.
"""

from __future__ import annotations

import os
import platform

import torch
from gshare.agent.base.weights import Base
from gshare.kernels.backend import Backend
from gshare.kernels.numerics import NUMERICS


def numerics_fingerprint(base: Base, backend: Backend) -> dict[str, str]:
    """Names and values, all strings, for run records, hellos and audits."""
    facts = {
        "numerics": str(NUMERICS),
        "backend": backend.name,
        "torch": torch.__version__,
        "base": base.fingerprint,
        "base_dtype": base.base_dtype,
        "compute_dtype": str(base.compute_dtype).removeprefix("torch."),
        "device": base.device.type,
    }
    if base.device.type == "cuda":
        properties = torch.cuda.get_device_properties(base.device)
        facts["gpu"] = properties.name
        facts["sm_count"] = str(properties.multi_processor_count)
        facts["cuda"] = str(torch.version.cuda)
        facts["mps_percentage"] = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
    else:
        facts["isa"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        facts["threads"] = str(torch.get_num_threads())
        facts["mkl_cbwr"] = os.environ.get("MKL_CBWR", "")
    return facts


def fingerprint_changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """`key: old → new` of every difference, for the message and the record."""
    keys = sorted(before.keys() | now.keys())
    return [f"{k}: {before.get(k, '–')} → {now.get(k, '–')}" for k in keys if before.get(k) != now.get(k)]
