"""The engine that goes with a backend."""

from __future__ import annotations

from gshare.agent.base.weights import Base
from gshare.agent.train.engine import Engine
from gshare.kernels.backend import Backend


def make_engine(base: Base, backend: Backend) -> Engine:
    """References run anywhere; the kernels' engine needs Triton, which is imported only then."""
    if backend.name == "reference":
        return Engine(base, backend)
    from gshare.agent.train.device_engine import DeviceEngine

    return DeviceEngine(base, backend)
