"""A runner that trains no job beyond the step in the file GSHARE_TEST_UPTO, while it is there (test hook)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gshare.agent.train.part import Part
from gshare.agent.train.runner import Runner

#: A test that failed must not leave a trainer behind for ever.
MOST_SECONDS = 600.0


class HeldRunner(Runner):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.engine.before_pass = self._hold

    def _hold(self, parts: Sequence[Part]) -> None:
        upto, until = Path(os.environ["GSHARE_TEST_UPTO"]), time.monotonic() + MOST_SECONDS
        while time.monotonic() < until:
            try:
                if all(part.step < int(upto.read_text()) for part in parts):
                    return
            except FileNotFoundError:
                return
            time.sleep(0.01)
