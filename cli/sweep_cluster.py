"""`gshare sweep FILE --cluster FILE`: the configurations are jobs of a coordinator, this process steers them.

The data is tokenised here too: how long each configuration is has to be known before it is submitted.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.packing import Packing
from gshare.agent.jobs.sweep import Added, Sweep
from gshare.agent.jobs.sweep_records import DecisionLog
from gshare.agent.jobs.sweep_spec import SweepFile
from gshare.agent.node.protocol import EARLY_EXIT
from gshare.agent.service.deciding import Deciding, Job
from gshare.agent.service.stopping import StopRequest
from gshare.cli.cluster_live import Shown
from gshare.cli.live import View, make_view
from gshare.cli.streams import stderr_console
from gshare.cli.submit import say
from gshare.cli.sweep_board import Progress, print_result
from gshare.cli.sweep_decided import decided_before
from gshare.cli.sweep_prepared import Prepared, check_same, claimed, earlier
from gshare.cli.sweep_values import drawn
from gshare.coordinator.api_client import CoordinatorClient
from gshare.coordinator.api_protocol import (
    JobRow,
    JobRows,
    ListClusterJobs,
    LocalFile,
    ReloadCluster,
    Reloaded,
)
from gshare.coordinator.config import load_cluster
from gshare.coordinator.facts import ENDED_STATES
from gshare.coordinator.main import Options, checked_client, connect_or_start
from gshare.coordinator.submission import build_submission
from gshare.coordinator.sweeping import ClusterSweep

CLIENT = "gshare sweep"


def sweep_on_cluster(source: SweepFile, options: Options, *, resume: bool, json_lines: bool) -> int:
    """The exit code. UsageError before anything is written: what is wrong with file, data or names."""
    load_cluster(options.cluster)  # what is wrong with it shows before the data is read
    before = earlier(source, resume=resume, on_cluster=True)
    sampled = before.sampled if before is not None else []
    made = Prepared(source, sampled, stderr_console(), resume=before is not None)
    client, started = connect_or_start(options, CLIENT)
    with client:
        _check_knows(client)
        if started:
            say(f"started coordinator {client.welcome.pid}; `gshare coordinator stop` ends it")
        else:
            client.ask(Reloaded, ReloadCluster)
        made.cluster = client.welcome.owner
        if before is None:
            made.submission = secrets.token_hex(16)
            _check_free(made, client.ask(JobRows, ListClusterJobs).jobs)
        else:
            made.cluster, made.submission = before.cluster, before.submission
            _check_owner(client, made)
            check_same(before, made.record())
    with claimed(made, before, resume=resume):
        return _run(made, options, json_lines=json_lines)


def _check_knows(client: CoordinatorClient) -> None:
    if EARLY_EXIT not in client.welcome.knows:
        raise GshareError(
            f"the coordinator that runs (pid {client.welcome.pid}) is gshare {client.welcome.gshare}, which "
            "knows no early exit: end it with `gshare coordinator stop` (jobs run on), and start this again"
        )


def _check_owner(client: CoordinatorClient, made: Prepared) -> None:
    if client.welcome.owner != made.cluster:
        raise UsageError(
            f"the sweep in {made.source.directory} is of another coordinator than the one that runs here: "
            "name its --state-dir, or choose another output_dir"
        )


def _check_free(made: Prepared, jobs: Sequence[JobRow]) -> None:
    """UsageError naming a configuration whose name, or directory, a job of the cluster has."""
    busy = [job for job in jobs if job.state not in ENDED_STATES]
    owners = {job.job: job.job for job in busy} | {job.output_dir: job.job for job in busy}
    for request in made.all_requests():
        owner = owners.get(request.spec.name) or owners.get(request.spec.output_dir)
        if owner is not None:
            raise UsageError(
                f"configuration {request.spec.name}: job {owner} of the cluster has its name or directory "
                "and has not ended; stop it first, or give the sweep another name and output_dir"
            )


class _Submissions:
    """The fields of `SubmitToCluster`; every file is hashed once, however often more jobs are drawn."""

    def __init__(self, made: Prepared) -> None:
        self._made = made
        self._known: dict[Path, LocalFile] = {}

    def __call__(self, names: Sequence[str]) -> dict[str, Any]:
        boundaries = {trial.name: trial.boundary for trial in self._made.trials()}
        requests = [self._made.jobs[name].request for name in names]
        run = msgspec.structs.replace(
            self._made.spec.run, adapters=tuple(request.spec for request in requests)
        )
        fields = build_submission(run, say, self._known)
        fields["jobs"] = tuple(
            msgspec.structs.replace(
                job, early_exit=request.early_exit, pause_at=boundaries[request.spec.name]
            )
            for job, request in zip(fields["jobs"], requests, strict=True)
        )
        del fields["submission"]
        return fields


def _run(made: Prepared, options: Options, *, json_lines: bool) -> int:
    directory = made.source.directory
    decided = decided_before(directory, made.specs())
    machine = Sweep(
        made.trials(),
        made.spec.early_exit,
        Packing(lambda names: True, most=made.spec.max_concurrent),  # the coordinator's placement decides
        expects_more=made.spec.sampled is not None,
    )
    machine.replay(decided)
    requests = made.all_requests()
    view = make_view([(one.spec.name, one.spec.output_dir) for one in requests], json_lines=json_lines)
    names = [one.spec.name for one in requests]
    shown = Shown(view, set(names))

    def connect() -> CoordinatorClient:
        client = checked_client(options, CLIENT)
        try:
            _check_knows(client)
            _check_owner(client, made)
        except GshareError:
            client.close()
            raise
        return client

    def draw() -> tuple[Added, dict[str, Job]]:
        before = len(made.jobs)
        more = made.draw(machine)
        for line in drawn(made.spec, before):
            view.say(line)
        return more

    with StopRequest().listening() as stop, view, DecisionLog(directory) as log:
        for line in drawn(made.spec):
            view.say(line)
        run = ClusterSweep(
            deciding=Deciding(machine, made.jobs, log, view.take, draw),
            decided=decided,
            names=names,
            submission=made.submission,
            connect=connect,
            fields=_Submissions(made),
            on_event=shown.take,
            on_row=shown.take_row,
            say=view.say,
            on_tick=view.tick,
            on_look=shown.tell_waits,
            stop=stop,
        )
        code = run.run()
    left = None if machine.done else _progress(run, made)
    print_result(directory, json_lines=json_lines, left=left)
    if stop.exit_code is not None and code == stop.exit_code:
        _tell_left(run, view, made, options)
    return code


def _progress(run: ClusterSweep, made: Prepared) -> dict[str, Progress]:
    """Of the configurations that the coordinator had at the last look."""
    return {
        row.job: Progress(row.step, made.jobs[row.job].work.samples(row.step), row.best_val_loss, row.state)
        for row in run.rows.values()
        if row.job in made.jobs
    }


def _tell_left(run: ClusterSweep, view: View, made: Prepared, options: Options) -> None:
    busy = sum(row.state not in ENDED_STATES and not row.parked for row in run.rows.values())
    view.say(
        f"left {busy} {'job' if busy == 1 else 'jobs'} running on the cluster: each goes on to the end of "
        "its warm-up and waits there, or of its training. "
        f"`gshare sweep {made.spec.run.source} --cluster {options.cluster} --resume` goes on with the sweep; "
        f"`gshare jobs stop NAME --cluster {options.cluster}` ends a job"
    )
