"""A runner whose process dies by SIGKILL when job "poison" takes its third step (test hook)."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from gshare.agent.train.part import Part
from gshare.agent.train.runner import Runner


class PoisonedRunner(Runner):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.engine.before_pass = self._look

    def _look(self, parts: Sequence[Part]) -> None:
        if any(part.adapter.name.startswith("poison#") and part.step == 2 for part in parts):
            os.kill(os.getpid(), signal.SIGKILL)
