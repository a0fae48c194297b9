"""`gshare jobs [list|attach|stop|pause|resume|clone|logs|fetch NAME]`: the jobs of all trainers of this user.

With `--cluster FILE` the jobs of that cluster instead, see `cluster_jobs.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import App, Parameter
from gshare.agent.errors import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_SIGINT,
    GshareError,
    RetryLater,
    Stopped,
    UsageError,
)
from gshare.agent.jobs.events import ENDED
from gshare.agent.jobs.names import nearest, plain
from gshare.agent.jobs.sweep_records import SWEEP_FILE
from gshare.agent.service.client import REPLY_SECONDS, TrainerClient, TrainerGone
from gshare.agent.service.journal import strict_json
from gshare.agent.service.output_dir import CLONE_FILE
from gshare.agent.service.protocol import Done, JobStatus, PauseJobs, ResumeJobs, StopJobs
from gshare.agent.service.registry import collect_dead, finished_jobs, live_trainers, log_path
from gshare.cli.board import columns, number
from gshare.cli.live import View, make_view

app = App(name="jobs", help="List, follow, stop, pause, resume and clone running jobs, here or on a cluster.")
app.command("gshare.cli.clone:clone", name="clone", help="Train a changed copy of a job.")

#: Ended jobs that `list` shows, the newest ones, and for so long.
ENDED_SHOWN = 20
ENDED_SECONDS = 24 * 3600.0
#: A trainer answers `list` at once, even in the middle of a round.
ANSWER_SECONDS = 5.0
#: A command is applied between two rounds, and a stop writes a checkpoint.
COMMAND_SECONDS = 600.0
#: How long `attach` looks for a job whose trainer has died: a new one loads the base first.
RESTART_SECONDS = 300.0
CLIENT = "gshare jobs"
#: Of a log: some thousand lines.
LOG_BYTES = 65536

ClusterFlag = Annotated[Path | None, Parameter(help="The jobs of this cluster file, not of this machine.")]
StateDirFlag = Annotated[Path | None, Parameter(help="The coordinator's, with --cluster.")]


@dataclass(frozen=True)
class Found:
    """A job and where it is: `trainer` is None when it has ended with its trainer."""

    status: JobStatus
    trainer: Path | None
    ended: float = 0.0


@app.default
@app.command(name="list")
def list_jobs(
    *,
    json_lines: Annotated[bool, Parameter(name="--json", negative=())] = False,
    all_: Annotated[bool, Parameter(name=["--all", "-a"], negative=())] = False,
    cluster: ClusterFlag = None,
    state_dir: StateDirFlag = None,
) -> int:
    """List jobs that run or wait for GPU memory, and the last ones that ended.

    Parameters
    ----------
    json_lines
        One JSON line a job, ended ones all.
    all_
        All ended ones that are remembered. Without it the newest 20; of this machine's, those of the last
        day, without completed ones whose directory is gone.
    """
    if cluster is not None:
        from gshare.cli.cluster_jobs import list_cluster_jobs

        return list_cluster_jobs(cluster, state_dir, json_lines=json_lines, all_ended=all_)
    everything = find_all()
    found = everything if all_ or json_lines else _recent(everything)
    if json_lines:
        for job in found:
            trainer = job.trainer.name if job.trainer else None
            fields = {**msgspec.to_builtins(job.status), "trainer": trainer}
            print(json.dumps(strict_json(fields), allow_nan=False))
        return EXIT_OK
    say_left_out(len(everything) - len(found))
    if not found:
        print("no jobs", file=sys.stderr)
        return EXIT_OK
    lines = [("job", "state", "step", "loss", "val loss", "trainer", "output", "")]
    for job in found:
        status = job.status
        lines.append(
            (
                status.job,
                status.state,
                f"{status.step}/{status.total_steps}",
                number(status.loss),
                number(status.val_loss),
                job.trainer.name if job.trainer else "-",
                status.output_dir,
                status.reason,
            )
        )
    print("\n".join(columns(lines)))
    return EXIT_OK


@app.command
def attach(
    name: str,
    *,
    json_lines: Annotated[bool, Parameter(name="--json", negative=())] = False,
    cluster: ClusterFlag = None,
    state_dir: StateDirFlag = None,
) -> int:
    """Follow a job until it ends; says where it waits for GPU memory. Ctrl-C leaves it running.

    Exit code: 0 when it completed, 130 when it was stopped (or Ctrl-C), 1 when it failed or diverged.

    Parameters
    ----------
    name
        The job, as `gshare jobs` lists it.
    json_lines
        One JSON line an event on stdout.
    """
    if cluster is not None:
        from gshare.cli.cluster_jobs import attach_cluster_job

        return attach_cluster_job(cluster, state_dir, name, json_lines=json_lines)
    found = find_job(name, running=False)
    started = time.time()
    view = make_view([(name, found.status.output_dir)], json_lines=json_lines)
    try:
        with view:
            while found.trainer is not None:
                if _follow(found.trainer, name, view):
                    break
                view.say(f"{name}: its trainer is gone; waiting for it to be resumed")
                found = _find_again(name, started)
    except KeyboardInterrupt:
        raise Stopped(f"left {name} running", EXIT_SIGINT) from None
    row = view.board.rows[name]
    if row.state not in ENDED:
        status = found.status  # ended out of our sight
        row.state, row.step, row.total_steps, row.reason = (
            *(status.state, status.step, status.total_steps, status.reason),
        )
        row.loss, row.val_loss, row.best_val_loss = status.loss, status.val_loss, status.best_val_loss
    view.finish()
    if row.reason:
        view.say(f"{name}: {row.state}: {row.reason}")
    if row.state == "completed":
        return EXIT_OK
    return EXIT_SIGINT if row.state == "stopped" else EXIT_FAILURE


@app.command
def stop(*names: str, cluster: ClusterFlag = None, state_dir: StateDirFlag = None) -> int:
    """Checkpoint jobs and stop them; `gshare finetune --resume` goes on with them.

    Those of a cluster go on with `gshare jobs resume NAME --cluster FILE`.
    A job that still waits for GPU memory leaves the queue; the command that waits for it ends with exit 130.

    Parameters
    ----------
    names
        The jobs, as `gshare jobs` lists them.
    """
    if cluster is not None:
        from gshare.cli.cluster_jobs import StopClusterJobs, command_cluster_jobs

        return command_cluster_jobs(cluster, state_dir, names, StopClusterJobs, "told to checkpoint and stop")
    return _command(names, StopJobs, "stopped")


@app.command
def pause(*names: str, cluster: ClusterFlag = None, state_dir: StateDirFlag = None) -> int:
    """Let jobs rest, in memory, until they are resumed.

    Parameters
    ----------
    names
        The jobs, as `gshare jobs` lists them.
    """
    if cluster is not None:
        from gshare.cli.cluster_jobs import PauseClusterJobs, command_cluster_jobs

        return command_cluster_jobs(cluster, state_dir, names, PauseClusterJobs, "told to pause")
    return _command(names, PauseJobs, "paused")


@app.command
def resume(*names: str, cluster: ClusterFlag = None, state_dir: StateDirFlag = None) -> int:
    """Let paused jobs run again; with --cluster also stopped ones, from their newest checkpoint.

    Parameters
    ----------
    names
        The jobs, as `gshare jobs` lists them.
    """
    if cluster is not None:
        from gshare.cli.cluster_jobs import ResumeClusterJobs, command_cluster_jobs

        return command_cluster_jobs(cluster, state_dir, names, ResumeClusterJobs, "told to go on")
    return _command(names, ResumeJobs, "resumed")


@app.command
def logs(
    name: str, *, max_bytes: int = LOG_BYTES, cluster: ClusterFlag = None, state_dir: StateDirFlag = None
) -> int:
    """Show the end of the log of a job's trainer.

    Parameters
    ----------
    name
        The job, as `gshare jobs` lists it.
    max_bytes
        How much of it.
    """
    if max_bytes < 1:
        raise UsageError(f"--max-bytes: must be 1 or more, not {max_bytes}")
    if cluster is not None:
        from gshare.cli.cluster_jobs import show_log

        return show_log(cluster, state_dir, name, max_bytes)
    found = find_job(name, running=True)
    assert found.trainer is not None
    path = log_path(found.trainer.name)
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:
        raise GshareError(f"{path}: {error.strerror}") from None
    print("\n".join(plain(line) for line in text.splitlines()))
    return EXIT_OK


@app.command
def fetch(
    name: str,
    to: Path,
    *,
    kind: Literal["best", "checkpoint", "final"] = "best",
    cluster: ClusterFlag = None,
    state_dir: StateDirFlag = None,
) -> int:
    """Copy files of a cluster's job, as they are now, into a new directory.

    A job that completes is brought to its output_dir without this.

    Parameters
    ----------
    name
        The job, as `gshare jobs` lists it.
    to
        The directory; not there yet, or empty.
    kind
        best (the default), checkpoint (the newest one) or final.
    """
    if cluster is None:
        raise UsageError(
            "jobs of this machine are in their output_dir already; --cluster FILE names a cluster"
        )
    from gshare.cli.cluster_jobs import fetch_job

    return fetch_job(cluster, state_dir, name, kind, to)


def _recent(jobs: list[Found]) -> list[Found]:
    """Those that run, and of the ended ones the newest that are still of use to somebody."""
    here = [job for job in jobs if job.trainer is not None]
    since = time.time() - ENDED_SECONDS
    ended = [job for job in jobs if job.trainer is None and job.ended >= since][:ENDED_SHOWN]
    # A node's agent removes the directory of an attempt whose result has gone home.
    return here + [
        job for job in ended if job.status.state != "completed" or os.path.isdir(job.status.output_dir)
    ]


def say_left_out(count: int) -> None:
    if count:
        print(f"{count} ended {'job is' if count == 1 else 'jobs are'} left out; see --all", file=sys.stderr)


#: What a command finds done, and says instead of doing nothing in silence.
_ALREADY: dict[tuple[type, str], str] = {
    (PauseJobs, "paused"): "paused already",
    (ResumeJobs, "running"): "running already",
}


def _command(names: tuple[str, ...], make: type[StopJobs | PauseJobs | ResumeJobs], done: str) -> int:
    if not names:
        raise UsageError("name at least one job (`gshare jobs` lists them)")
    found = [find_job(name, running=True) for name in names]  # all of them, before anything is done
    for job in found:
        assert job.trainer is not None
        name = job.status.job
        if (already := _ALREADY.get((make, job.status.state))) is not None:
            print(f"{name}: {already}", file=sys.stderr)
            continue
        with connected(job.trainer) as client:
            reply = client.ask(make, jobs=[name], timeout=COMMAND_SECONDS)
        assert isinstance(reply, Done), reply
        if name in reply.failed:
            raise (RetryLater if name in reply.busy else GshareError)(reply.failed[name])
        print(f"{name}: {done}", file=sys.stderr)
    return EXIT_OK


def _follow(trainer: Path, name: str, view: View) -> bool:
    """Shows the job's events until it ends: True; False when the trainer is gone first."""
    try:
        with connected(trainer) as client:
            client.follow([name])
            while view.board.rows[name].state not in ENDED:
                for event in client.poll(0.1):
                    view.take(event)
                view.tick()
    except TrainerGone:
        return False
    return True


def _find_again(name: str, since: float) -> Found:
    """Where the job is resumed, or how it ended."""
    deadline = time.monotonic() + RESTART_SECONDS
    while time.monotonic() < deadline:
        for job in find_all():
            if job.status.job == name and (job.trainer is not None or job.ended >= since):
                return job
        time.sleep(0.5)
    raise GshareError(f"job {name}: its trainer died and nobody has resumed it; continue it with --resume")


@contextlib.contextmanager
def connected(trainer: Path, reply_seconds: float = REPLY_SECONDS) -> Iterator[TrainerClient]:
    client = TrainerClient(trainer, CLIENT, timeout=ANSWER_SECONDS, reply_seconds=reply_seconds)
    try:
        yield client
    finally:
        client.close()


def find_job(name: str, *, running: bool) -> Found:
    """The job of this name that runs, else the last that ended. UsageError with the nearest name."""
    everything = find_all()
    matches = [job for job in everything if job.status.job == name]
    active = [job for job in matches if job.status.state not in ENDED]
    if len(active) > 1:
        places = ", ".join(job.status.output_dir for job in active)
        raise UsageError(
            f"job {name}: {len(active)} jobs of this name are running, in {places}; stop one of them "
            "from where it was started"
        )
    if active:
        return active[0]
    if matches and not running:
        return matches[0]
    if matches:
        raise UsageError(f"job {name} has ended: {matches[0].status.state}{_how_to_go_on(matches[0].status)}")
    known = sorted({job.status.job for job in everything})
    if any(other.endswith(f"-{name}") for other in known):  # `local_name` of a node's agent
        raise UsageError(f"no job named {name} of your own; if it is a cluster's job, add --cluster FILE")
    near = nearest(name, known)
    hint = f"did you mean {near}?" if near else f"known: {', '.join(known[:20]) or 'none'}"
    raise UsageError(f"no job named {name}; {hint}")


def _how_to_go_on(status: JobStatus) -> str:
    """Of one that was stopped or has failed."""
    if status.state not in ("stopped", "failed"):
        return ""
    own = Path(status.output_dir) / CLONE_FILE
    if own.is_file():
        return f"; it goes on with `gshare finetune --adapters-config {own} --resume`"
    if (own.parent.parent / SWEEP_FILE).is_file():
        return ""  # what a sweep has stopped, or somebody in it, is not trained on
    return "; it goes on with the command that it was started by, and --resume"


def _jobs_of(trainer: Path) -> tuple[list[Found], str]:
    """The trainer's jobs, and what is wrong with it."""
    try:
        with connected(trainer, ANSWER_SECONDS) as client:
            return [Found(status, trainer) for status in client.jobs()], ""
    except TrainerGone:
        return [], ""  # it ended just now
    except GshareError as error:
        return [], f"trainer {trainer.name} does not answer: {error}"


def find_all() -> list[Found]:
    """Jobs of live trainers, then ended ones, newest first."""
    collect_dead()
    here: list[Found] = []
    trainers = live_trainers()
    with ThreadPoolExecutor(max_workers=max(1, len(trainers))) as pool:
        # All at once: several that hang cost no more time than one.
        for found, problem in pool.map(_jobs_of, trainers):
            here += found
            if problem:
                print(problem, file=sys.stderr)
    known = {job.status.job for job in here}
    return here + [
        Found(job.status, None, job.ended) for job in finished_jobs() if job.status.job not in known
    ]
