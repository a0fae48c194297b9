"""The runner: admits jobs, runs scheduled rounds, evaluates, saves, and says what happened.

Single-threaded; commands (`admit`, `stop`, `pause`, `resume`) come between rounds. Files are written by
`CheckpointWriter`'s thread from host snapshots. One job's failure, of whatever kind, ends that job only.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from gshare.agent.base.device import pick_device
from gshare.agent.base.load import load_base
from gshare.agent.base.weights import Base
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.events import (
    ENDED,
    CheckpointSaved,
    Evaluated,
    Event,
    JobChanged,
    JobStateName,
    LastLosses,
    Stepped,
    TrainerMessage,
)
from gshare.agent.jobs.schedules import JobView, make_schedule
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.trace import DISABLED, STEP_SPAN, Tracer
from gshare.agent.train.checkpoint import (
    Snapshot,
    adapter_config,
    latest_checkpoint,
    load_checkpoint,
    truncate_metrics,
)
from gshare.agent.train.checkpoint_writer import CheckpointWriter, Kind
from gshare.agent.train.checkpointing import does_not_fit
from gshare.agent.train.engines import make_engine
from gshare.agent.train.files import remove_leftovers
from gshare.agent.train.fingerprint import fingerprint_changes, numerics_fingerprint
from gshare.agent.train.gpu_guard import NoGuard, make_guard
from gshare.agent.train.job import Job, JobData
from gshare.agent.train.out_of_memory import is_out_of_memory, told, whose_limit
from gshare.agent.train.rounds import Rounds, StepOutcome
from gshare.agent.vram.guard import Reservation
from gshare.agent.xdg import cache_dir
from gshare.kernels.backend import Backend, pick_backend

log = logging.getLogger(__name__)


class Runner:
    """One base, many jobs. See the module's docstring; `on_pass` feeds the crash breadcrumb."""

    def __init__(
        self,
        *,
        model_dir: Path,
        base_dtype: str,
        schedule: str,
        max_tokens_per_pass: int,
        max_adapters_per_pass: int,
        device: str,
        on_event: Callable[[Event], None],
        on_pass: Callable[[Sequence[tuple[str, int]]], None],
        backend: Backend | None = None,
        base: Base | None = None,
        reservation: Reservation | None = None,
        may_grow: bool = False,
        guard: NoGuard | None = None,
        tracer: Tracer = DISABLED,
    ) -> None:
        """`backend`, `base` and the `guard` that it was loaded under are for callers that compare several
        runs over one base (audit).

        Under a `reservation` the allocator is capped and use is written down; `may_grow` lets it ask the
        ledger for more. GshareError when the base does not fit into it.
        """
        where = pick_device(device)
        self._emit = on_event
        self._tracer = tracer
        self._guard = guard or make_guard(
            reservation, asked=device, where=where, may_grow=may_grow, say=self._say
        )
        with told("the base", self._guard):
            backend = backend or pick_backend(where, plans=cache_dir() / "gemm-plans.json")
            base = base or load_base(model_dir, base_dtype=base_dtype, device=where)
        self.model_dir = model_dir
        self.engine = make_engine(base, backend)
        self.rounds = Rounds(self.engine, max_tokens_per_pass, self._guard.more_memory)
        self.fingerprint = numerics_fingerprint(base, backend)
        self._schedule = make_schedule(schedule)
        self._max_adapters = max_adapters_per_pass
        self._on_pass = on_pass
        self._writer = CheckpointWriter()
        self._jobs: dict[str, Job] = {}
        self._order = 0
        self._stepped = False
        self._guard.record("load")
        size = (base.nbytes + base.scratch.nbytes) / 2**20
        what = f"{model_dir.name}, {base.base_dtype}, {size:,.0f} MiB on {base.device}"
        self._say("info", f"base loaded: {what}")

    # ------------------------------------------------------------------ commands

    def jobs(self) -> list[Job]:
        """Every job admitted, ended ones included, in order of admission."""
        return list(self._jobs.values())

    def admit(self, request: JobRequest) -> None:
        """Open the job's data, make or load its adapter, and let it run from the next round on.

        Raises GshareError when the job is refused; nothing of it is left and the others do not notice.
        """
        name = request.spec.name
        before = self._jobs.get(name)
        if before is not None and before.state not in ENDED:
            raise UsageError(f"adapter {name}: a job of this name is already running here")
        self._check_spec(request)
        self._on_pass([(name, 0)])
        try:
            data = JobData.open(request)
            self._check_rows(request, data)
            self._order += 1
            adapter = self.engine.new_adapter(f"{name}#{self._order}", request.spec)
            job = Job(request, data, adapter, self._order)
            try:
                job.output_dir.mkdir(parents=True, exist_ok=True)
                resumed = request.resume and self._restore(job)
                if not resumed:
                    truncate_metrics(job.output_dir / "metrics.jsonl", 0)
            except BaseException:
                adapter.close()
                raise
        except GshareError:
            raise
        except Exception as error:
            # Whatever it is (out of memory, a checkpoint that lies), it is this job's: the others go on.
            log.exception("job %s was not admitted", name)
            if is_out_of_memory(error):
                raise GshareError(f"adapter {name}: cannot be admitted: {self._reason(error)}") from error
            what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise GshareError(f"adapter {name}: cannot be admitted: {what}") from error
        finally:
            self._on_pass([])
        self._jobs[name] = job
        self._choose_checkpointing()
        if resumed:
            self._change(job, "running", f"resumed at step {job.step}", job.last_losses())
        else:
            self._change(job, "running", "")
        if job.step >= job.total_steps:
            self._finish(job)

    def _choose_checkpointing(self) -> None:
        """Recompute activations from the start where the estimate says that they do not fit otherwise."""
        specs = [job.spec for job in self._jobs.values() if job.state not in ENDED]
        if not self.engine.checkpointing and does_not_fit(
            self.engine.base,
            specs,
            max_tokens=self.rounds.max_tokens,
            max_adapters=self._max_adapters,
            # What is reserved on a simulated device says nothing of a CPU's memory.
            budget_mb=self._guard.budget_mb() if self.engine.base.device.type == "cuda" else None,
        ):
            self.engine.checkpointing = True
            self._say("info", "activations are recomputed: kept, they would not fit into the reservation")

    def stop(self, job: str, reason: str) -> None:
        """Checkpoint and end as `stopped`; GshareError for a job that is not here."""
        found = self._find(job)
        if found.state in ENDED:
            return
        self._save(found, "step")
        self._end(found, "stopped", reason)

    def pause(self, job: str) -> None:
        found = self._find(job)
        if found.state == "running":
            self._change(found, "paused", "")

    def resume(self, job: str) -> None:
        found = self._find(job)
        if found.state == "paused":
            self._change(found, "running", "")
        elif found.state in ENDED:
            raise UsageError(f"adapter {job}: has ended as {found.state}; start it again with `--resume`")

    def close(self) -> None:
        """Wait for the checkpoints in flight."""
        self._writer.flush()
        self._writer.close()
        if summary := self._guard.summary():
            self._say("info", summary)

    # ------------------------------------------------------------------ a round

    def run_round(self) -> bool:
        """One optimizer step of the scheduled jobs, and what falls due after it. False: nothing runnable."""
        self._collect_writer_errors()
        runnable = {job.name: job for job in self._jobs.values() if job.state == "running"}
        if not runnable:
            return False
        work = []
        for job in runnable.values():
            try:
                work.append((job, job.next_work()))
            except Exception as error:
                self._fail(job, error)
        views = [
            JobView(
                name=job.name,
                client=job.request.client,
                weight=job.spec.weight,
                order=job.order,
                step=job.step,
                next_tokens=step.tokens,
                last_val_loss=job.last_val_loss,
            )
            for job, step in work
        ]
        chosen = self._schedule.next_round(
            views, max_tokens=self.rounds.max_tokens, max_adapters=self._max_adapters
        )
        jobs = [runnable[name] for name in chosen]
        if not jobs:
            return bool(work)
        self._on_pass([(job.name, job.step) for job in jobs])
        limit, started = self.rounds.max_tokens, time.monotonic()
        with self._tracer.span(STEP_SPAN, adapters=len(jobs)):
            outcomes = self.rounds.run(
                [job.next_work() for job in jobs], [job.learning_rate() for job in jobs]
            )
            if self.rounds.max_tokens < limit:
                self._say("warning", f"out of memory: going on with {self.rounds.max_tokens} tokens a pass")
            seconds = time.monotonic() - started
            for job, outcome in zip(jobs, outcomes, strict=True):
                if job.state == "running":  # a failed save, learnt of when another ended, may have ended it
                    self._commit(job, outcome, seconds)
        self._guard.keep()
        if not self._stepped:
            self._stepped = True
            self._guard.record("first_step")
        self._evaluate([job for job in jobs if job.state == "running" and job.due(job.spec.eval_steps)])
        for job in jobs:
            if job.state == "running":
                self._after_step(job)
        self._on_pass([])
        return True

    def _commit(self, job: Job, outcome: StepOutcome, seconds: float) -> None:
        """Update one adapter from its gradients, or end it when they are not finite."""
        if outcome.error is not None:
            self._fail(job, outcome.error)
            return
        learning_rate = job.learning_rate()
        finite = math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm)
        if finite:
            try:
                finite = self.rounds.update(outcome, learning_rate)
            except Exception as error:  # of this adapter: its newest checkpoint stands, the others go on
                self._fail(job, error)
                return
        job.step += 1
        job.tokens += outcome.work.tokens
        job.last_loss = outcome.loss
        self._schedule.ran(job.name, outcome.work.tokens)
        event = Stepped(
            job=job.name,
            step=job.step,
            total_steps=job.total_steps,
            epoch=job.epoch,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            learning_rate=learning_rate,
            tokens=outcome.work.tokens,
            label_tokens=outcome.work.label_tokens,
            seconds=seconds,
            adapters_in_pass=outcome.adapters_in_pass,
        )
        if not self._record(job, event, type="step"):
            return
        self._emit(event)
        if not finite:
            what = "weights are" if math.isfinite(outcome.loss) else "loss is"
            if math.isfinite(outcome.loss) and not math.isfinite(outcome.grad_norm):
                what = "gradient norm is"
            self._diverge(job, what)

    def _diverge(self, job: Job, what: str) -> None:
        """Nothing more of this job is saved: what is on disk is from when its values were numbers."""
        kept = (
            f"its newest checkpoint is of step {job.saved_step}"
            if job.saved_step > 0
            else "no checkpoint was due yet"
        )
        self._end(
            job, "diverged", f"{what} not finite at step {job.step}; {kept}; a lower learning_rate may help"
        )

    def _evaluate(self, jobs: Sequence[Job]) -> None:
        with_rows = [job for job in jobs if len(job.data.val_rows)]
        if not with_rows:
            return
        try:
            with self._tracer.span("Evaluate", adapters=len(with_rows)):
                losses = self.rounds.evaluate([(job.adapter, job.data.validation()) for job in with_rows])
            self._guard.record("eval")
        except Exception as error:
            if len(with_rows) == 1:
                self._fail(with_rows[0], error)
                return
            log.warning("evaluation of %d jobs failed (%s); evaluating each alone", len(with_rows), error)
            for job in with_rows:
                self._evaluate([job])
            return
        for job, loss in zip(with_rows, losses, strict=True):
            best = job.note_evaluation(loss)
            event = Evaluated(
                job=job.name,
                step=job.step,
                val_loss=loss,
                label_tokens=sum(row.label_tokens for row in job.data.validation()),
                best=best,
            )
            if not self._record(job, event, type="eval"):
                continue
            self._emit(event)
            if not math.isfinite(loss):
                self._diverge(job, "validation loss is")
            elif best:
                self._save(job, "best")

    def _after_step(self, job: Job) -> None:
        if job.due(job.spec.save_steps):
            self._save(job, "step")
        if job.step >= job.total_steps:
            self._finish(job)

    # ------------------------------------------------------------------ ends

    def _finish(self, job: Job) -> None:
        self._save(job, "final")
        self._writer.flush()
        self._collect_writer_errors()
        if job.state == "running":
            self._end(job, "completed", "")

    def _fail(self, job: Job, error: Exception) -> None:
        log.error("job %s failed", job.name, exc_info=error)
        self._end(job, "failed", self._reason(error))

    def _reason(self, error: Exception) -> str:
        """One line for people; of an out-of-memory error under a reservation, whose limit it was."""
        if whose := whose_limit(error, self._guard):
            return whose
        return str(error) if isinstance(error, GshareError) else f"{type(error).__name__}: {error}"

    def _end(self, job: Job, state: JobStateName, reason: str) -> None:
        self._writer.flush()
        self._collect_writer_errors()
        if job.state in ENDED:
            return
        self._schedule.forget(job.name)
        job.adapter.close()
        self._change(job, state, reason)

    def _change(self, job: Job, state: JobStateName, reason: str, last: LastLosses | None = None) -> None:
        job.state, job.reason = state, reason
        self._emit(
            JobChanged(
                job=job.name,
                state=state,
                step=job.step,
                total_steps=job.total_steps,
                reason=reason,
                last=last,
            )
        )

    def _find(self, name: str) -> Job:
        if name not in self._jobs:
            known = ", ".join(self._jobs) or "none"
            raise UsageError(f"no job named {name!r} in this trainer; its jobs: {known}")
        return self._jobs[name]

    # ------------------------------------------------------------------ files

    def _save(self, job: Job, kind: Kind) -> None:
        """Hand a host snapshot to the writer; `kind` is step, best or final."""
        if kind == "step" and job.saved_step == job.step:
            return
        if kind == "step":
            job.saved_step = job.step
        with self._tracer.span("Save", kind=kind):
            snapshot = Snapshot(
                job=job.name,
                step=job.step,
                adapter=job.adapter.parameters(),
                optimizer=job.adapter.optimizer_tensors() if kind == "step" else {},
                state={**job.counters(), "fingerprint": self.fingerprint},
            )
            self._writer.submit(
                snapshot,
                job.output_dir,
                kind,
                adapter_config=adapter_config(job.spec, str(self.model_dir)),
                save_total_limit=job.spec.save_total_limit,
            )
        self._guard.record("save")

    def _collect_writer_errors(self) -> None:
        """Tell what the writer's thread did since the last look; a failed save ends its job."""
        for result in self._writer.results():
            if result.error is None:
                self._emit(CheckpointSaved(job=result.job, step=result.step, path=str(result.path)))
                continue
            job = self._jobs.get(result.job)
            if job is not None and job.state not in ENDED:
                self._schedule.forget(job.name)
                job.adapter.close()
                self._change(job, "failed", f"checkpoint of step {result.step} was not saved: {result.error}")

    def _record(self, job: Job, event: Stepped | Evaluated, *, type: str) -> bool:
        """Append to metrics.jsonl; a full disk ends the job (its last checkpoint stays)."""
        fields = msgspec.structs.asdict(event)
        del fields["job"]
        try:
            job.append_metrics({"type": type, **fields})
        except OSError as error:
            self._fail(job, GshareError(f"{job.output_dir / 'metrics.jsonl'}: {error.strerror}"))
            return False
        return True

    def _restore(self, job: Job) -> bool:
        """Continue from the newest whole checkpoint; False when there is none yet."""
        remove_leftovers(job.output_dir)
        path = latest_checkpoint(job.output_dir)
        self._tell_skipped(job, path)
        if path is None:
            return False
        snapshot = load_checkpoint(path)
        trained_on = snapshot.state["fingerprint"]["base"]
        if trained_on != self.fingerprint["base"]:
            raise UsageError(
                f"adapter {job.name}: {path} was trained on another base (weights {trained_on[:12]}, here "
                f"{self.fingerprint['base'][:12]}); resume with the same model, or choose another output_dir"
            )
        try:
            job.adapter.load(snapshot.adapter, snapshot.optimizer)
        except (KeyError, RuntimeError) as error:
            raise UsageError(
                f"adapter {job.name}: {path} does not fit this spec ({error}); "
                "resume with the r, target_modules and optim that it was trained with"
            ) from error
        job.restore(snapshot.state)
        truncate_metrics(job.output_dir / "metrics.jsonl", job.step)
        changes = fingerprint_changes(snapshot.state.get("fingerprint", {}), self.fingerprint)
        if changes:
            self._say(
                "warning", f"resumed under other numerics, bits may differ: {'; '.join(changes)}", job.name
            )
            job.append_metrics({"type": "fingerprint", "step": job.step, "changes": changes})
        return True

    def _tell_skipped(self, job: Job, chosen: Path | None) -> None:
        """Say when a resume does not start from the newest checkpoint there is."""
        steps = [
            int(path.name.removeprefix("checkpoint-"))
            for path in job.output_dir.glob("checkpoint-*")
            if path.name.removeprefix("checkpoint-").isdecimal()
        ]
        used = int(chosen.name.removeprefix("checkpoint-")) if chosen is not None else 0
        broken = sorted(step for step in steps if step > used)
        if broken:
            self._say(
                "warning",
                f"checkpoint-{broken[-1]} in {job.output_dir} is damaged; going on from step {used} instead",
                job.name,
            )

    # ------------------------------------------------------------------ checks

    def _check_spec(self, request: JobRequest) -> None:
        spec, config = request.spec, self.engine.base.config
        if spec.layers_to_transform is not None:
            beyond = [i for i in spec.layers_to_transform if i >= config.num_layers]
            if beyond:
                raise UsageError(
                    f"adapter {spec.name}: layers_to_transform {beyond}: the model has layers 0 to "
                    f"{config.num_layers - 1}"
                )
        if spec.max_length > config.max_position_embeddings:
            raise UsageError(
                f"adapter {spec.name}: max_length {spec.max_length} is beyond the model's "
                f"{config.max_position_embeddings} positions"
            )

    def _check_rows(self, request: JobRequest, data: JobData) -> None:
        known = self.engine.base.config.vocab_size
        for store in (data.train, data.val):
            if store.meta.vocab_size <= known:
                continue
            largest = max(int(store.row(i)[0].max()) for i in range(store.n_rows))
            if largest >= known:
                raise UsageError(
                    f"adapter {request.spec.name}: {store.meta.source} has token {largest}, outside the "
                    f"model's vocabulary of {known}; it was tokenised for another model"
                )

    def _say(self, level: Literal["info", "warning", "error"], text: str, job: str = "") -> None:
        self._emit(TrainerMessage(level=level, text=text, job=job))
