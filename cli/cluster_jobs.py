"""`gshare jobs … --cluster FILE`: the same commands for the jobs of a cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from gshare.agent.errors import EXIT_OK, GshareError, UsageError
from gshare.agent.jobs.events import ENDED
from gshare.agent.jobs.names import plain
from gshare.agent.node.protocol import MAX_LOG_BYTES, BundleKind
from gshare.agent.service.journal import strict_json
from gshare.cli.cluster import job_table
from gshare.cli.cluster_flags import running_coordinator, state_dir_of
from gshare.cli.cluster_live import watch_jobs
from gshare.cli.jobs import ENDED_SHOWN, say_left_out
from gshare.coordinator.api_protocol import (
    Fetched,
    FetchJob,
    JobLog,
    JobRow,
    JobRows,
    JobsDone,
    ListClusterJobs,
    PauseClusterJobs,
    ReadJobLog,
    ResumeClusterJobs,
    StopClusterJobs,
)

CLIENT = "gshare jobs"
#: A bundle of a large adapter over a slow line.
FETCH_SECONDS = 6 * 3600.0


def list_cluster_jobs(cluster: Path, state_dir: Path | None, *, json_lines: bool, all_ended: bool) -> int:
    with running_coordinator(cluster, state_dir, CLIENT) as client:
        jobs = client.ask(JobRows, ListClusterJobs).jobs
    if json_lines:
        for job in jobs:
            print(json.dumps(strict_json(msgspec.to_builtins(job)), allow_nan=False))
        return EXIT_OK
    shown = jobs if all_ended else recent_jobs(jobs)
    say_left_out(len(jobs) - len(shown))
    if shown:
        print("\n".join(job_table(shown)))
    else:
        print("no jobs", file=sys.stderr)
    return EXIT_OK


def recent_jobs(jobs: Sequence[JobRow]) -> list[JobRow]:
    """Those that have not ended, and the ended ones that were submitted last."""
    ended = [job.job for job in jobs if job.state in ENDED][-ENDED_SHOWN:]
    return [job for job in jobs if job.state not in ENDED or job.job in ended]


def attach_cluster_job(cluster: Path, state_dir: Path | None, name: str, *, json_lines: bool) -> int:
    with running_coordinator(cluster, state_dir, CLIENT) as client:
        row = find_row(client.ask(JobRows, ListClusterJobs).jobs, name)
    return watch_jobs(state_dir_of(state_dir), [(name, row.output_dir)], json_lines=json_lines)


def find_row(jobs: Sequence[JobRow], name: str) -> JobRow:
    """UsageError with what there is."""
    row = next((job for job in jobs if job.job == name), None)
    if row is None:
        known = ", ".join(job.job for job in jobs[:20]) or "none"
        raise UsageError(f"no job named {plain(name)} in this cluster; known: {known}")
    return row


def command_cluster_jobs(
    cluster: Path,
    state_dir: Path | None,
    names: tuple[str, ...],
    make: type[StopClusterJobs | PauseClusterJobs | ResumeClusterJobs],
    done: str,
) -> int:
    """Tells the coordinator; it sees to it, also when the node is away now."""
    if not names:
        raise UsageError("name at least one job (`gshare jobs --cluster FILE` lists them)")
    with running_coordinator(cluster, state_dir, CLIENT) as client:
        reply = client.ask(JobsDone, make, jobs=list(names))
    for name in names:
        if name not in reply.failed:
            print(f"{plain(name)}: {plain(reply.told.get(name, done))}", file=sys.stderr)
    if reply.failed:
        raise GshareError("\n".join(plain(why) for why in reply.failed.values()))
    return EXIT_OK


def show_log(cluster: Path, state_dir: Path | None, name: str, max_bytes: int) -> int:
    if max_bytes > MAX_LOG_BYTES:
        raise UsageError(f"--max-bytes: at most {MAX_LOG_BYTES} for a job of a cluster, not {max_bytes}")
    with running_coordinator(cluster, state_dir, CLIENT) as client:
        log = client.ask(JobLog, ReadJobLog, job=name, max_bytes=max_bytes)
    print(f"{name} on {plain(log.node)}:", file=sys.stderr)
    print("\n".join(plain(line) for line in log.text.splitlines()))
    return EXIT_OK


def fetch_job(cluster: Path, state_dir: Path | None, name: str, kind: BundleKind, to: Path) -> int:
    with running_coordinator(cluster, state_dir, CLIENT) as client:
        fetched = client.ask(
            Fetched,
            FetchJob,
            timeout=FETCH_SECONDS,
            job=name,
            kind=kind,
            directory=str(to.expanduser().absolute()),
        )
    print(f"{name}: {len(fetched.files)} files of step {fetched.step}", file=sys.stderr)
    print(fetched.directory)
    return EXIT_OK
