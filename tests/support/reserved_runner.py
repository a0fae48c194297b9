"""The engine of straw under a reservation: tells what it was given, records its use as the real one does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fake_runner import FakeRunner
from gshare.agent.jobs.events import TrainerMessage
from gshare.agent.trace import DISABLED, STEP_SPAN, Tracer
from gshare.agent.vram.guard import Reservation


class ReservedRunner(FakeRunner):
    def __init__(
        self,
        *,
        reservation: Reservation | None = None,
        may_grow: bool = False,
        tracer: Tracer = DISABLED,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._reservation, self._tracer = reservation, tracer
        budget = reservation.budget_mb if reservation else None
        visible, threads = (
            os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
        )
        given = (
            f"device={options['device']} visible={visible} may_grow={may_grow} "
            f"threads={threads} budget={budget} tracer={tracer.enabled}"
        )
        self._emit(TrainerMessage(level="info", text=f"given {given}"))
        self._record("load")

    def run_round(self) -> bool:
        with self._tracer.span(STEP_SPAN):
            busy = super().run_round()
        return busy

    def _save(self, job: Any) -> None:
        super()._save(job)
        self._record("save")

    def _record(self, phase: str) -> None:
        if self._reservation is not None:
            self._reservation.record_use(phase, 100)


def untold(**options: Any) -> FakeRunner:
    """An engine that knows nothing of reservations: it must not be told of one that is not there."""
    unknown: Sequence[str] = sorted(set(options) & {"reservation", "may_grow", "tracer"})
    assert not unknown, unknown
    return FakeRunner(**options)
