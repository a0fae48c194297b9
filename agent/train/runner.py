"""The runner: admits, stops, pauses and resumes jobs, and runs rounds of them (`pipeline.py`).

Single-threaded; commands come between rounds, when a round may be in flight on the device: a command that
depends on where a job is waits for it. What jobs are and what is said of them is in `books.py`. One job's
failure, of whatever kind, ends that job only.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from gshare.agent.base.device import pick_device
from gshare.agent.base.load import load_base
from gshare.agent.base.weights import Base
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.events import ENDED, Event, TrainerMessage
from gshare.agent.jobs.schedules import make_schedule
from gshare.agent.jobs.spec import JobRequest, WarmStart, cache_bytes
from gshare.agent.service.base_identity import base_identity
from gshare.agent.trace import DISABLED, Tracer
from gshare.agent.train.admission import begin_warm, check_rows, check_spec, restore
from gshare.agent.train.books import Books
from gshare.agent.train.checkpoint import adapter_config, load_checkpoint, truncate_metrics, write_start
from gshare.agent.train.checkpointing import does_not_fit, graphs_mb, spare_bytes
from gshare.agent.train.engines import make_engine
from gshare.agent.train.fingerprint import numerics_fingerprint
from gshare.agent.train.gpu_guard import NoGuard, make_guard
from gshare.agent.train.job import Job
from gshare.agent.train.job_data import JobData
from gshare.agent.train.out_of_memory import is_out_of_memory, told
from gshare.agent.train.pipeline import Pipeline
from gshare.agent.train.read_ahead import ReadAhead
from gshare.agent.train.rounds import Rounds
from gshare.agent.train.trunk_cache import TrunkCache
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
        trunk_cache: float | str = "auto",
        trunk_cache_host: float = 0.0,
    ) -> None:
        """`backend`, `base` and the `guard` that it was loaded under are for callers that compare several
        runs over one base (audit).

        Under a `reservation` the allocator is capped and use is written down; `may_grow` lets it ask the
        ledger for more. GshareError when the base does not fit into it. `trunk_cache` and `trunk_cache_host`
        as in `RunSpec`; "auto" keeps states on the device alone, and nothing without a reservation.
        """
        where = pick_device(device)
        self._guard = guard or make_guard(
            reservation,
            asked=device,
            where=where,
            may_grow=may_grow,
            say=lambda level, text: on_event(TrainerMessage(level=level, text=text)),
            graphs_mb=lambda: graphs_mb(model_dir, base_dtype, max_tokens_per_pass),
        )
        with told("the base", self._guard):
            backend = backend or pick_backend(where, plans=cache_dir() / "gemm-plans.json")
            base = base or load_base(model_dir, base_dtype=base_dtype, device=where)
        self.model_dir = model_dir
        self.engine = make_engine(base, backend)
        self.rounds = Rounds(self.engine, max_tokens_per_pass, self._guard.more_memory)
        self.books = Books(
            emit=on_event,
            schedule=make_schedule(schedule),
            guard=self._guard,
            tracer=tracer,
            model_dir=model_dir,
            fingerprint=numerics_fingerprint(base, backend),
        )
        self._pipeline = Pipeline(
            self.books, self.rounds, max_adapters=max_adapters_per_pass, on_pass=on_pass
        )
        self._max_adapters = max_adapters_per_pass
        asked = cache_bytes(trunk_cache)
        self._cache_is_auto = asked is None
        if asked != 0 or trunk_cache_host:
            self.engine.cache = TrunkCache(
                base.device,
                identity=tuple(sorted(self.fingerprint.items())),
                device_bytes=asked or 0,
                host_bytes=int(trunk_cache_host * 2**30),
                auto=asked is None,
            )
        self._on_pass = on_pass
        self._parked = ReadAhead()
        self._order = 0
        self._guard.record("load")
        size = (base.nbytes + base.scratch.nbytes) / 2**20
        what = f"{model_dir.name}, {base.base_dtype}, {size:,.0f} MiB on {base.device}"
        self.books.say("info", f"base loaded: {what}")

    # ------------------------------------------------------------------ commands

    @property
    def fingerprint(self) -> dict[str, str]:
        """What every checkpoint records of this trainer's numerics."""
        return self.books.fingerprint

    def jobs(self) -> list[Job]:
        """Every job admitted, ended ones included, in order of admission."""
        return list(self.books.jobs.values())

    def expect(self, requests: Sequence[JobRequest]) -> None:
        """These are about to be admitted: make room for all at once, if there is. Refuses none, never raises:
        without it each makes its own, and what is wrong with a job is that job's."""
        self._pipeline.drain()
        specs = []
        for request in requests:
            with contextlib.suppress(GshareError):  # `admit` says so
                check_spec(request, self.engine.base.config, self.engine.most_rank)
                specs.append(request.spec)
        try:
            self.engine.expect(specs)
        except Exception as error:
            log.warning("no room was made for %d adapters at once: %s", len(specs), error)

    def admit(self, request: JobRequest) -> None:
        """Open the job's data, make or load its adapter, and let it run from the next round on.

        Raises GshareError when the job is refused; nothing of it is left and the others do not notice.
        """
        name, config = request.spec.name, self.engine.base.config
        self._pipeline.drain()
        before = self.books.find(name) if name in self.books.jobs else None
        if before is not None and before.state not in ENDED:
            raise UsageError(f"adapter {name}: a job of this name is already running here")
        check_spec(request, config, self.engine.most_rank)
        self._on_pass([(name, 0)])
        try:
            data = JobData.open(request)
            check_rows(request, data, config)
            self._order += 1
            adapter = self.engine.new_adapter(f"{name}#{self._order}", request.spec)
            job = Job(request, data, adapter, self._order)
            try:
                job.output_dir.mkdir(parents=True, exist_ok=True)
                self.books.writer.begin(job.output_dir)
                resumed = request.resume and restore(job, self.fingerprint, self.books.say)
                if not resumed and request.start is not None:
                    begin_warm(job, request.start, self.fingerprint)
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
                raise GshareError(
                    f"adapter {name}: cannot be admitted: {self.books.reason(error)}"
                ) from error
            what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise GshareError(f"adapter {name}: cannot be admitted: {what}") from error
        finally:
            self._on_pass([])
        self.books.jobs[name] = job
        self._choose_checkpointing()
        if resumed:
            self.books.change(job, "running", f"resumed at step {job.step}", job.last_losses())
        else:
            start = request.start
            came = f"starts from {start.parent} at step {start.step}" if start is not None else ""
            self.books.change(job, "running", came)
        if job.step >= job.total_steps:
            self.books.finish(job)
        elif job.at_pause:  # checkpointed there, and killed before anybody heard of it
            if job.evaluated_step != job.step:
                self._pipeline.evaluate([job])
            if job.is_active:
                self.books.park(job)

    def _choose_checkpointing(self) -> None:
        """Recompute activations from the start where the estimate says that they do not fit otherwise; what
        the reservation has left may hold trunk states."""
        specs = [job.spec for job in self.jobs() if job.state not in ENDED and not job.parked]
        limits = {
            "max_tokens": self.rounds.max_tokens,
            "max_adapters": self._max_adapters,
            # What is reserved on a simulated device says nothing of a CPU's memory.
            "budget_mb": self._guard.budget_mb() if self.engine.base.device.type == "cuda" else None,
            "identity": lambda: base_identity(self.model_dir),
        }
        if not self.engine.checkpointing and does_not_fit(self.engine.base, specs, **limits):
            self.engine.checkpointing = True
            self.books.say(
                "info", "activations are recomputed: kept, they would not fit into the reservation"
            )
        if self._cache_is_auto and self.engine.cache is not None:
            # Half: the estimate leaves out the allocator's fragmentation.
            spare = spare_bytes(self.engine.base, specs, **limits) or 0
            self.engine.cache.set_device_budget(max(spare // 2, 0))

    def stop(self, job: str, reason: str) -> None:
        """Checkpoint and end as `stopped`; GshareError for a job that is not here.

        After the step that is in flight, if there is one.
        """
        self._pipeline.drain()
        found = self.books.find(job)
        if found.state in ENDED:
            return
        if not found.parked:
            self.books.save(found, "step")
        self.books.end(found, "stopped", reason)

    def pause(self, job: str) -> None:
        """After the step that is in flight, if there is one."""
        self._pipeline.drain()
        found = self.books.find(job)
        if found.state == "running":
            self.books.change(found, "paused", "")

    def resume(self, job: str, pause_at: int | None = None) -> None:
        """From the next round that is queued on, to the step `pause_at` where it is said. A parked job whose
        adapter cannot be made again fails."""
        found = self.books.find(job)
        if found.state == "paused":
            if pause_at is not None:
                found.request = msgspec.structs.replace(found.request, pause_at=pause_at)
            if found.parked and not self._unpark(found):
                return
            self.books.change(found, "running", "")
        elif found.state in ENDED:
            raise UsageError(f"adapter {job}: has ended as {found.state}; start it again with `--resume`")

    @contextmanager
    def about_to_resume(self, jobs: Sequence[str]) -> Iterator[None]:
        """In this block these are resumed, in this order. It is no fault when they are not."""
        found = [job for name in jobs if (job := self.books.jobs.get(name)) is not None]
        parked = [job for job in found if job.parked and job.state == "paused"]  # its files stand
        with ReadAhead(map(_parked_at, parked)) as self._parked:
            yield
        self._parked = ReadAhead()

    def take_weights(self, job: str, directory: Path) -> WarmStart:
        """Write the job's weights as they are now into `directory`, for a warm clone. The job goes on.

        After the step that is in flight, if there is one. GshareError: it has ended, or the disk is full.
        """
        self._pipeline.drain()
        found = self.books.find(job)
        if found.state in ENDED:
            raise UsageError(f"adapter {job}: has ended as {found.state}; its weights are in its output_dir")
        weights = load_checkpoint(_parked_at(found)).adapter if found.parked else found.adapter.parameters()
        return write_start(
            weights,
            directory,
            adapter_config(found.spec, str(self.model_dir)),
            parent=job,
            step=found.step,
            fingerprint=self.fingerprint,
        )

    def _unpark(self, job: Job) -> bool:
        """Its adapter again, from the checkpoint of its pause; False: it has failed."""
        self._pipeline.drain()
        try:
            snapshot = self._parked.take(_parked_at(job))
            adapter = self.engine.new_adapter(f"{job.name}#{job.order}", job.spec, initial=False)
            try:
                adapter.load(snapshot.adapter, snapshot.optimizer)
            except BaseException:
                adapter.close()
                raise
        except Exception as error:  # of this job: its checkpoint stands, or does not, for whoever resumes it
            self.books.fail(job, error)
            return False
        job.unpark(adapter)
        self._choose_checkpointing()
        return True

    def run_round(self) -> bool:
        """One optimizer step of the scheduled jobs, and what falls due after it. False: nothing runnable."""
        return self._pipeline.run_round()

    def close(self) -> None:
        """Wait for the round and the checkpoints in flight."""
        self._pipeline.drain()
        self.books.wait_for_files()
        self.books.writer.close()
        if summary := self._guard.summary():
            self.books.say("info", summary)


def _parked_at(job: Job) -> Path:
    """The checkpoint of its pause."""
    return job.output_dir / f"checkpoint-{job.step}"
