"""An engine without torch that does what its jobs tell it to: for tests of the processes around the engine.

A job's `data` is its script, or a file that holds it: "steps=20,sleep=0.01,kill_at=5,…":
    steps=N        optimizer steps (10)          sleep=S      seconds a round (0)
    save=N         checkpoint every N steps (3)  kill_at=K    SIGKILL itself in the round of step K
    kill_once=K    the same, unless it has done so before: the job's directory remembers
    raise_at=K     unforeseen exception there    refuse=1     refused at admission
    fail_at=K      ends as `failed` by itself    nan_at=K     val loss is NaN from there on
    full_at=K      ends as `failed` there: the disk is full
    loss=V         validation loss V + 1 / step (2 / step)
    exit_at=K      ends as `stopped` by a pattern of its losses there
    hold=K         stands still at step K, its pass in flight, until it is told to `go`
    pad=M          the final adapter has M MiB of blanks after the weights
    files=1        checkpoint-<step>/ and best/ with manifests, metrics.jsonl: the engine's own layout
    upto=PATH      no step beyond the number in that file, while there is one (`let_go_to`)
The trainer itself: GSHARE_FAKE_LOAD="sleep=S" | "kill" | "error" | "hold" (loads until it is told to `go`) |
"while=PATH" (as long as it is there).
A word told to all that run is a file in the directory GSHARE_FAKE_WORDS: `go`, or `hurry` (rounds take no
time). So a test decides what happens first, and what it does "in the middle" is in the middle, however slow
the machine is.
The "weights" are a hash chain over (name, step), so a resumed job can be told from one that was not. An
agent's name for a job ("0123abcd-job") counts as the job's own.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from gshare.agent.errors import GshareError
from gshare.agent.jobs.events import (
    ENDED,
    CheckpointSaved,
    Evaluated,
    Event,
    Exit,
    JobChanged,
    LastLosses,
    Stepped,
    TrainerMessage,
)
from gshare.agent.jobs.spec import JobRequest, WarmStart

NAP_SECONDS = 0.02
#: Ten minutes: a test that failed must not leave trainers behind for ever.
MOST_NAPS = 30_000


@dataclass
class FakeJob:
    name: str
    out: Path
    script: dict[str, float]
    step: int = 0
    state: str = "running"
    weights: str = field(default="")
    pause_at: int = 0
    upto: str = ""

    @property
    def may_step(self) -> bool:
        try:
            return not self.upto or self.step < int(Path(self.upto).read_text())
        except FileNotFoundError:
            return True

    @property
    def val_loss(self) -> float:
        return self.script["loss"] + 1 / self.step if "loss" in self.script else 2.0 / self.step

    @property
    def total(self) -> int:
        return int(self.script.get("steps", 10))

    @property
    def chain(self) -> str:
        return re.sub(r"^[0-9a-f]{8}-", "", self.name)

    def newest(self) -> Path | None:
        """The file with the newest state."""
        if "files" not in self.script:
            path = self.out / "checkpoint.json"
            return path if path.exists() else None
        found = self.out.glob("checkpoint-*/state.json")
        return max(found, key=lambda path: int(path.parent.name.split("-")[1]), default=None)

    def publish(self, name: str, files: dict[str, str]) -> Path:
        """A directory with a manifest, whole under its name, in place of the one before."""
        temporary, final = self.out / f".gshare-tmp-{name}", self.out / name
        shutil.rmtree(temporary, ignore_errors=True)  # of a trainer that was killed while it wrote
        temporary.mkdir()
        manifest = {"format": 1, "files": {}}
        for file, text in files.items():
            (temporary / file).write_text(text)
            digest = hashlib.sha256(text.encode()).hexdigest()
            manifest["files"][file] = {"size": len(text.encode()), "sha256": digest}
        (temporary / "manifest.json").write_text(json.dumps(manifest))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        return final


def tell(word: str) -> None:
    """To every engine of this test: `go` or `hurry`."""
    Path(os.environ["GSHARE_FAKE_WORDS"], word).touch()


def told(word: str) -> bool:
    folder = os.environ.get("GSHARE_FAKE_WORDS")
    return folder is not None and Path(folder, word).exists()


def let_go_to(path: Path, step: int) -> str:
    """A script's part: no step beyond `step`, to the end once the file is gone."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(str(step))
    temporary.replace(path)
    return f"upto={path}"


def weights_after(name: str, steps: int, start: str = "") -> str:
    """What a job's weights must be after `steps` steps from `start`, however often it was interrupted."""
    value = start
    for step in range(steps):
        value = hashlib.sha256(f"{value}{name}{step}".encode()).hexdigest()
    return value


class FakeRunner:
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
    ) -> None:
        self._emit = on_event
        self._on_pass = on_pass
        self._jobs: dict[str, FakeJob] = {}
        self._holding = False
        self._naps = 0  # while all jobs were held back
        self.fingerprint = {"numerics": "fake"}
        load = os.environ.get("GSHARE_FAKE_LOAD", "")
        if load == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if load == "error":
            raise GshareError(f"{model_dir}: no such model")
        if load.startswith("sleep="):
            time.sleep(float(load.removeprefix("sleep=")))
        while load == "hold" and not told("go"):
            time.sleep(0.01)
        while load.startswith("while=") and Path(load.removeprefix("while=")).exists():
            time.sleep(0.02)
        self._emit(TrainerMessage(level="info", text=f"base loaded by process {os.getpid()}"))

    def expect(self, requests: Sequence[JobRequest]) -> None:
        self._emit(TrainerMessage(level="info", text=f"{len(requests)} jobs expected"))

    def admit(self, request: JobRequest) -> None:
        spec = request.spec
        text = Path(spec.data).read_text() if Path(spec.data).is_file() else spec.data
        script = dict(part.split("=") for part in text.split(",") if part)
        self._on_pass([(spec.name, 0)])
        if "refuse" in script:
            self._on_pass(())
            raise GshareError(f"adapter {spec.name}: refused by its script")
        upto = script.pop("upto", "")
        numbers = {key: float(value) for key, value in script.items()}
        job = FakeJob(spec.name, Path(spec.output_dir), numbers, upto=upto)
        job.out.mkdir(parents=True, exist_ok=True)
        saved = job.newest()
        if request.resume and saved is not None:
            state = json.loads(saved.read_text())
            job.step, job.weights = state["step"], state["weights"]
        elif request.start is not None:
            job.weights = (Path(request.start.directory) / "adapter_model.safetensors").read_text()
        job.pause_at = request.pause_at
        self._jobs[job.name] = job
        self._on_pass(())
        last = (
            LastLosses(loss=job.val_loss, val_loss=job.val_loss, best_val_loss=job.val_loss)
            if job.step
            else None
        )
        self._change(job, "running", f"resumed at step {job.step}" if job.step else "", last)
        if job.step >= job.total:
            self._complete(job)  # it was interrupted between its last checkpoint and its adapter
        elif job.step and job.step == job.pause_at:
            self._change(job, "paused", "it was to pause here")

    def stop(self, job: str, reason: str) -> None:
        found = self._jobs[job]
        self._save(found)
        self._change(found, "stopped", reason)

    def pause(self, job: str) -> None:
        self._change(self._jobs[job], "paused")

    def resume(self, job: str, pause_at: int | None = None) -> None:
        if pause_at is not None:
            self._jobs[job].pause_at = pause_at
        self._change(self._jobs[job], "running")

    def about_to_resume(self, jobs: Sequence[str]) -> AbstractContextManager[None]:
        return nullcontext()

    def take_weights(self, job: str, directory: Path) -> WarmStart:
        found = self._jobs[job]
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "adapter_model.safetensors").write_text(found.weights)
        digest = hashlib.sha256(found.weights.encode()).hexdigest()
        return WarmStart(directory=str(directory), sha256=digest, parent=job, step=found.step)

    def run_round(self) -> bool:
        jobs = [job for job in self._jobs.values() if job.state == "running"]
        if not jobs:
            if self._holding:
                self._holding = False
                self._on_pass(())
            return False
        kept = [job for job in jobs if not job.may_step]
        if len(kept) == len(jobs) and self._naps < MOST_NAPS:
            self._naps += 1
            time.sleep(NAP_SECONDS)
            return True
        if self._naps < MOST_NAPS:
            jobs = [job for job in jobs if job not in kept]
        held = [] if told("go") else [job for job in jobs if job.script.get("hold") == job.step]
        self._holding = bool(held)
        self._on_pass([(job.name, job.step) for job in jobs])
        if not told("hurry"):
            time.sleep(max([job.script.get("sleep", 0.0) for job in jobs] + [0.01] * len(held)))
        for job in jobs:
            if job.script.get("kill_at") == job.step or self._is_to_die_once(job):
                os.kill(os.getpid(), signal.SIGKILL)
            if job.script.get("raise_at") == job.step:
                raise RuntimeError(f"the engine met something unforeseen in {job.name}")
        for job in jobs:
            if job not in held:
                self._step(job, len(jobs))
        if not held:
            self._on_pass(())
        return True

    def close(self) -> None:
        pass

    def _is_to_die_once(self, job: FakeJob) -> bool:
        done = job.out / "killed_once"
        if job.script.get("kill_once") != job.step or done.exists():
            return False
        done.touch()
        return True

    def _step(self, job: FakeJob, sharing: int) -> None:
        if job.script.get("fail_at") == job.step:
            self._change(job, "failed", "its script says so")
            return
        if job.script.get("full_at") == job.step:
            self._change(job, "failed", "checkpoint of step 2 was not saved: disk full while writing it")
            return
        job.weights = hashlib.sha256(f"{job.weights}{job.chain}{job.step}".encode()).hexdigest()
        job.step += 1
        loss = 2.0 / job.step
        if "files" in job.script:
            with open(job.out / "metrics.jsonl", "a") as metrics:
                metrics.write(json.dumps({"type": "step", "step": job.step, "loss": loss}) + "\n")
        self._emit(
            Stepped(
                job=job.name,
                step=job.step,
                total_steps=job.total,
                epoch=0.0,
                loss=loss,
                grad_norm=1.0,
                learning_rate=1e-4,
                tokens=100,
                label_tokens=50,
                seconds=0.01,
                adapters_in_pass=sharing,
            )
        )
        if job.step % int(job.script.get("save", 3)) == 0 or job.step == job.pause_at:
            self._save(job)
            diverged = job.step >= job.script.get("nan_at", math.inf)
            val_loss = math.nan if diverged else job.val_loss
            if "files" in job.script and not diverged:
                metadata = {"step": job.step, "val_loss": loss, "tokens": 100 * job.step, "fingerprint": {}}
                files = {"adapter_model.safetensors": job.weights, "metadata.json": json.dumps(metadata)}
                job.publish("best", {"adapter_config.json": "{}", **files})
            self._emit(
                Evaluated(job=job.name, step=job.step, val_loss=val_loss, label_tokens=10, best=not diverged)
            )
        if job.script.get("exit_at") == job.step:
            cause = Exit(pattern="overfitting", step=job.step, evidence={"gap": 0.5})
            self._write_adapter(job)
            self._change(job, "stopped", f"overfitting at step {job.step}", exit=cause)
        elif job.step >= job.total:
            self._complete(job)
        elif job.step == job.pause_at:
            self._change(job, "paused", "it was to pause here")

    def _complete(self, job: FakeJob) -> None:
        self._save(job)
        self._write_adapter(job)
        self._change(job, "completed")

    def _write_adapter(self, job: FakeJob) -> None:
        (job.out / "adapter_config.json").write_text("{}")
        blanks = " " * (int(job.script.get("pad", 0)) << 20)
        (job.out / "adapter_model.safetensors").write_text(job.weights + blanks)

    def _save(self, job: FakeJob) -> None:
        if "files" in job.script:
            state = json.dumps({"step": job.step, "weights": job.weights})
            path = job.publish(f"checkpoint-{job.step}", {"state.json": state})
            self._emit(CheckpointSaved(job=job.name, step=job.step, path=str(path)))
            return
        temporary = job.out / ".checkpoint.json.new"
        temporary.write_text(json.dumps({"step": job.step, "weights": job.weights}))
        temporary.replace(job.out / "checkpoint.json")
        self._emit(CheckpointSaved(job=job.name, step=job.step, path=str(job.out / "checkpoint.json")))

    def _change(
        self,
        job: FakeJob,
        state: str,
        reason: str = "",
        last: LastLosses | None = None,
        exit: Exit | None = None,
    ) -> None:
        assert job.state not in ENDED, f"{job.name} has ended"
        job.state = state
        self._emit(
            JobChanged(
                job=job.name,
                state=state,  # type: ignore[arg-type]
                step=job.step,
                total_steps=job.total,
                reason=reason,
                last=last,
                exit=exit,
            )
        )
