"""The real engine with products whose bits depend on the number of rows: exactness's negative control."""

from __future__ import annotations

from typing import Any

import torch
from gshare.agent.train.runner import Runner
from gshare.kernels.backend import pick_backend


class InexactRunner(Runner):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, backend=pick_backend(torch.device("cpu"), exact=False))
