"""One job in the runner: its rows, its adapter, its counters, its `metrics.jsonl`.

A job is a pure function of its spec, its data and the base. What is kept here is exactly what a
checkpoint holds, plus open files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gshare.agent.errors import UsageError
from gshare.agent.jobs.early_exit import Patterns
from gshare.agent.jobs.events import JobStateName, LastLosses
from gshare.agent.jobs.learning_rate import learning_rate_at
from gshare.agent.jobs.spec import AdapterSpec, JobRequest, lineage_line
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.job_data import JobData
from gshare.agent.train.part import Row
from gshare.agent.train.passes import StepWork


class Job:
    """Mutable state of one job; the runner drives it."""

    def __init__(self, request: JobRequest, data: JobData, adapter: Adapter, order: int) -> None:
        self.request = request
        self.spec: AdapterSpec = request.spec
        self.data = data
        self.adapter = adapter
        self.order = order
        self.output_dir = Path(request.spec.output_dir)
        self.state: JobStateName = "running"
        self.reason = ""
        self.step = 0  # optimizer steps done
        self.begun = 0  # optimizer steps begun: one more than done while a step is under way, or two
        self.tokens = 0
        self.last_loss: float | None = None
        self.last_val_loss: float | None = None
        self.best_val_loss: float | None = None
        self.best_step = 0
        self.saved_step = -1  # step of the newest checkpoint submitted
        self.evaluated_step = -1
        self.patterns = Patterns(request.early_exit) if request.early_exit is not None else None
        #: Paused at `pause_at`, or at its end: its adapter is closed. It is made again from the checkpoint of
        #: the pause when the job goes on.
        self.parked = False
        #: What is said of it once its files stand; None: nothing is waited for.
        self.settling: Callable[[], None] | None = None
        self._next: StepWork | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_active(self) -> bool:
        """Whether rounds may have it."""
        return self.state == "running" and not self.parked

    @property
    def total_steps(self) -> int:
        return self.data.sampler.total_steps

    @property
    def epoch(self) -> float:
        return self.data.sampler.epoch_at(self.step)

    def next_work(self) -> StepWork:
        """The rows of the next optimizer step to begin; read once, whatever schedule asks how often."""
        if self._next is None or self._next.step != self.begun:
            self._next = StepWork(self.adapter, self.begun, self.data.micro_batches(self.begun))
        return self._next

    def park(self) -> None:
        """Give its memory back; its files are written, or being written."""
        self.adapter.close()
        self.parked = True

    def unpark(self, adapter: Adapter) -> None:
        """Go on with `adapter`, which is as that checkpoint says."""
        self.adapter, self.parked = adapter, False
        self._next = None  # of the adapter that was closed

    def learning_rate(self) -> float:
        """Of the next step."""
        return learning_rate_at(
            self.begun,
            total_steps=self.total_steps,
            base=self.spec.learning_rate,
            kind=self.spec.lr_scheduler_type,
            warmup_ratio=self.spec.warmup_ratio,
        )

    def due(self, every: int) -> bool:
        """Whether something done every `every` steps (0: only at the end) is due after this step."""
        return self._is_due(every, self.step)

    def _is_due(self, every: int, step: int) -> bool:
        return step == self.total_steps or (every > 0 and step % every == 0)

    @property
    def at_pause(self) -> bool:
        """Whether it has come to the step after which it was asked to pause."""
        return self.step > 0 and self.step == self.request.pause_at

    @property
    def evaluation_is_due(self) -> bool:
        """After this step: by `eval_steps`, at the end, or where it pauses."""
        return self.due(self.spec.eval_steps) or self.at_pause

    def ends_in_host_work(self) -> bool:
        """Whether the step begun last is followed by what must be done before another one is begun: the
        end, a pause, an evaluation or a checkpoint, which read the weights as that step leaves them."""
        evaluated = len(self.data.val_rows) > 0 and self._is_due(self.spec.eval_steps, self.begun)
        pauses = self.begun == self.request.pause_at
        return evaluated or pauses or self._is_due(self.spec.save_steps, self.begun)

    def note_evaluation(self, val_loss: float) -> bool:
        """Take a validation loss in; True when it is the best so far (a tie keeps the earlier step)."""
        self.evaluated_step = self.step
        self.last_val_loss = val_loss
        if math.isfinite(val_loss) and (self.best_val_loss is None or val_loss < self.best_val_loss):
            self.best_val_loss, self.best_step = val_loss, self.step
            return True
        return False

    def last_losses(self) -> LastLosses:
        return LastLosses(loss=self.last_loss, val_loss=self.last_val_loss, best_val_loss=self.best_val_loss)

    # ------------------------------------------------------------------ files

    def append_metrics(self, record: dict[str, Any]) -> None:
        """One line of metrics.jsonl, flushed to the kernel: it survives this process's death."""
        line = json.dumps({key: _finite(value) for key, value in record.items()}, separators=(",", ":"))
        with open(self.output_dir / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def counters(self) -> dict[str, Any]:
        """What a checkpoint keeps beside tensors."""
        return {
            "step": self.step,
            "total_steps": self.total_steps,
            "tokens": self.tokens,
            "last_loss": _finite(self.last_loss),
            "last_val_loss": _finite(self.last_val_loss),
            "best_val_loss": self.best_val_loss,
            "best_step": self.best_step,
            "evaluated_step": self.evaluated_step,
            "train_hash": self.request.train_hash,
            "val_hash": self.request.val_hash,
            **({"start": self.request.start.lineage} if self.request.start is not None else {}),
            "early_exit": self.patterns.state() if self.patterns is not None else None,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `counters`. UsageError when the checkpoint was trained on other data."""
        for key, now in (("train_hash", self.request.train_hash), ("val_hash", self.request.val_hash)):
            if state[key] != now:
                raise UsageError(
                    f"adapter {self.name}: {self.output_dir} was trained on other data ({key} differs); "
                    "resume with the same data file, or choose another output_dir"
                )
        self._check_start(state.get("start"))
        self._check_length(int(state["step"]), int(state["total_steps"]))
        self.step = self.begun = int(state["step"])
        self.tokens = int(state["tokens"])
        self.last_loss = state["last_loss"]
        self.last_val_loss = state["last_val_loss"]
        self.best_val_loss = state["best_val_loss"]
        self.best_step = int(state["best_step"])
        self.evaluated_step = int(state["evaluated_step"])
        self.saved_step = self.step
        # None, or missing: saved by a run without it, or before there was any; it starts from here on.
        if self.patterns is not None and (patterns := state.get("early_exit")) is not None:
            self.patterns.restore(patterns)

    def _check_start(self, before: dict[str, Any] | None) -> None:
        """UsageError when a resume would go on from other weights than the checkpoint's run started from."""
        now = self.request.start.lineage if self.request.start is not None else None
        if before != now:
            shown = ["fresh weights" if one is None else lineage_line(one) for one in (before, now)]
            raise UsageError(
                f"adapter {self.name}: {self.output_dir} started from {shown[0]}, not from {shown[1]}; "
                "choose another output_dir"
            )

    def _check_length(self, done: int, planned: int) -> None:
        """UsageError when a resume's total steps would make it another job than the one that was begun."""
        now = self.total_steps
        if now < done:
            raise UsageError(
                f"adapter {self.name}: {self.output_dir} has done {done} steps already, more than the {now} "
                "asked for; raise max_steps or num_train_epochs"
            )
        if now != planned and (self.spec.lr_scheduler_type != "constant" or self.spec.warmup_ratio > 0):
            raise UsageError(
                f"adapter {self.name}: its learning rate was laid out over {planned} steps, now there would "
                f"be {now}; resume with the same length (only a constant rate without warm-up can go on)"
            )


def _finite(value: Any) -> Any:
    """JSON has no NaN: a non-finite number is written as null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def total_tokens(rows: Sequence[Row]) -> int:
    return sum(len(row.tokens) for row in rows)
