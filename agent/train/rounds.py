"""One round: every scheduled adapter does one optimizer step, fused into as few passes as fit.

A round is a transaction. Gradients of all passes come first, every update comes last; an out-of-memory
error in between changes nothing: the round starts again with fewer rows in each pass, and since a job
is a pure function the bits are those that the larger passes would have given. Each adapter's update is one
more transaction, of that adapter alone.

A round is started (queued, where the engine has a queue) and finished (read). Where the engine allows it
(`Engine.queues_ahead`) the next one may be started in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from gshare.agent.train.adapter import Adapter
from gshare.agent.train.checkpointing import CUT_FIRST
from gshare.agent.train.engine import Engine, Losses, Verdict, mean_loss
from gshare.agent.train.out_of_memory import OutOfMemory, is_out_of_memory
from gshare.agent.train.part import Part, Row
from gshare.agent.train.passes import StepWork, evaluation_passes, split_passes
from gshare.agent.train.trunk import TrunkUse

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class StepOutcome:
    """What became of it. `error` set: nothing was computed for this adapter and nothing changed."""

    work: StepWork
    losses: list[float] = field(default_factory=list)
    loss: float = float("nan")
    grad_norm: float = float("nan")
    adapters_in_pass: int = 1
    trunk: TrunkUse = field(default_factory=TrunkUse)  # of the passes that it was in
    error: Exception | None = None
    committed: bool = False  # the engine has made the update, if loss and norm are finite
    weights_finite: bool = True  # after an update that the engine made


@dataclass
class Round:
    """A round under way. `error`: it could not be started, and nothing of it was changed."""

    work: Sequence[StepWork]
    rates: Sequence[float] | None
    passes: Sequence[Sequence[Part]]
    under_way: list[Losses] = field(default_factory=list)  # of the passes
    verdicts: Callable[[], list[Verdict]] = list
    error: Exception | None = None


class Rounds:
    """Runs rounds and remembers how many tokens a pass may hold on this machine.

    `more_memory` is asked when one row alone does not fit: True when it is worth another try.
    """

    def __init__(
        self, engine: Engine, max_tokens: int, more_memory: Callable[[], bool] = lambda: False
    ) -> None:
        self.engine = engine
        self.max_tokens = max_tokens
        self.more_memory = more_memory

    def run(self, work: Sequence[StepWork], rates: Sequence[float] | None = None) -> list[StepOutcome]:
        """`start` and `finish`."""
        return self.finish(self.start(work, rates))

    def start(self, work: Sequence[StepWork], rates: Sequence[float] | None = None) -> Round:
        """Start every adapter's step; never raises: what went wrong is dealt with by `finish`, when the round
        before has been read.

        `rates` are the steps' learning rates: with them an engine may make the updates on the device.
        """
        engine, adapters = self.engine, [w.adapter for w in work]
        started = Round(work, rates, split_passes(work, self.max_tokens))
        try:
            engine.begin_round(adapters)
            started.under_way += [engine.queue(parts) for parts in started.passes]
            started.verdicts = engine.finish_round(adapters, [w.step + 1 for w in work], rates)
        except Exception as error:
            # The frames of the traceback hold the activations that there was no room beside.
            started.error = error.with_traceback(None) if is_out_of_memory(error) else error
        return started

    def finish(self, started: Round) -> list[StepOutcome]:
        """Losses and gradient norms of every adapter's step; the caller commits each with `update`.

        A round that ran out of memory is started again with less in each pass. Any other exception is
        retried one adapter at a time, so that it ends only the one that causes it.
        """
        work, rates = started.work, started.rates
        try:
            started = self._until_started(started)
        except Exception as error:
            if len(work) == 1:
                return [StepOutcome(work[0], error=error)]
            log.warning("round of %d adapters failed (%s); running each alone", len(work), error)
            outcomes = []
            for index, one in enumerate(work):
                outcomes += self.run([one], None if rates is None else [rates[index]])
            return outcomes
        try:
            return _read(started)
        except Exception as error:  # updates may have been made: nothing is tried a second time
            return [StepOutcome(one, error=error) for one in work]

    def _until_started(self, started: Round) -> Round:
        """The round as it is under way at last; raises what smaller passes do not mend."""
        while started.error is not None:
            self._make_room(started.passes, started.error)
            self._empty_cache()
            started = self.start(started.work, started.rates)
        return started

    def _make_room(self, passes: Sequence[Sequence[Part]], error: Exception) -> None:
        """Let the next attempt need less, or have more; raises when neither can be done, or help."""
        if not is_out_of_memory(error):
            raise error
        if self._freed_spare():
            return
        largest = max(sum(part.tokens for part in one) for one in passes)
        single = all(sum(len(part.rows) for part in one) == 1 for one in passes)
        if not self.engine.checkpointing and (single or largest <= CUT_FIRST):
            self.engine.checkpointing = True
            log.warning("out of memory at %d tokens a pass; recomputing activations", largest)
        elif not single:
            self.max_tokens = max(largest // 2, 1)
            log.warning("out of memory at %d tokens a pass; going on with %d", largest, self.max_tokens)
        elif not self.more_memory():
            raise OutOfMemory(
                f"out of memory with one row of {largest} tokens in the pass and activations "
                "recomputed; lower max_length"
            ) from error

    def _freed_spare(self) -> bool:
        """Whether memory was got by forgetting trunk states or captured passes, which no bit depends on."""
        if self.engine.give_up_graphs():
            log.warning("out of memory; CUDA graphs are given up, those of small passes are made again")
            self._empty_cache()
            return True
        cache = self.engine.cache
        freed = cache.give_up_device() if cache is not None else 0
        if freed:
            log.warning("out of memory; %d MiB of cached trunk states are dropped", freed >> 20)
            self._empty_cache()
        return freed > 0

    def update(self, outcome: StepOutcome, learning_rate: float) -> bool:
        """Commit one adapter's step; whether all its weights are numbers then.

        An out-of-memory error has changed nothing of the adapter (`Adapter.update`), so the update is made
        again: once after emptying the allocator's cache, then for as long as more memory can be had. After
        that OutOfMemory, which is this adapter's alone: the others have steps of their own.
        """
        if outcome.committed:
            return outcome.weights_finite
        adapter, step = outcome.work.adapter, outcome.work.step + 1
        self._until_it_fits(
            lambda: adapter.update(step=step, learning_rate=learning_rate, norm=outcome.grad_norm)
        )
        return self._until_it_fits(adapter.is_finite)

    def _until_it_fits(self, act: Callable[[], T]) -> T:
        emptied = False
        while True:
            try:
                return act()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if emptied and not self.more_memory():
                    raise OutOfMemory(
                        "out of memory in the optimizer's update; lower r, or train less at once"
                    ) from error
            log.warning("out of memory in an optimizer's update; making it again")
            emptied = True
            self._empty_cache()

    def _empty_cache(self) -> None:
        if self.engine.base.device.type == "cuda":
            torch.cuda.empty_cache()

    def evaluate(self, work: Sequence[tuple[Adapter, Sequence[Row]]]) -> list[float]:
        """Mean validation loss of each adapter over its rows, fused; NaN when not finite."""
        as_steps = [StepWork(adapter, 0, [rows]) for adapter, rows in work]
        while True:
            passes = evaluation_passes(as_steps, self.max_tokens)
            losses: dict[str, list[float]] = {adapter.name: [] for adapter, _ in work}
            try:
                under_way = [self.engine.queue_evaluation(parts) for parts in passes]
                for parts, running in zip(passes, under_way, strict=True):
                    for part, part_losses in zip(parts, running.losses(), strict=True):
                        losses[part.adapter.name] += part_losses
            except Exception as error:
                largest = max(sum(part.tokens for part in one) for one in passes)
                single = all(sum(len(part.rows) for part in one) == 1 for one in passes)
                if not is_out_of_memory(error):
                    raise
                if self._freed_spare():
                    continue
                if single:
                    if self.more_memory():
                        continue
                    raise
                self.max_tokens = max(largest // 2, 1)
                continue
            return [mean_loss(losses[w.adapter.name], w.label_tokens) for w in as_steps]


def _read(started: Round) -> list[StepOutcome]:
    """Waits for the device."""
    outcomes = {w.adapter.name: StepOutcome(w) for w in started.work}
    for parts, running in zip(started.passes, started.under_way, strict=True):
        for part, losses in zip(parts, running.losses(), strict=True):
            outcome = outcomes[part.adapter.name]
            outcome.losses += losses
            outcome.adapters_in_pass = max(outcome.adapters_in_pass, len(parts))
            outcome.trunk += running.trunk
    for w, verdict in zip(started.work, started.verdicts(), strict=True):
        outcome = outcomes[w.adapter.name]
        outcome.loss = mean_loss(outcome.losses, w.label_tokens)
        outcome.grad_norm, outcome.committed = verdict.norm, verdict.committed
        outcome.weights_finite = verdict.finite
    return list(outcomes.values())
