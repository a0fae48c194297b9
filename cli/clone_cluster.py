"""`gshare jobs clone NAME --cluster FILE`: a changed copy of a cluster's job, submitted like any other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gshare.agent.jobs.clone import cloned_spec, free_name
from gshare.agent.jobs.spec import RunSpec
from gshare.cli.cluster_flags import options_of, running_coordinator
from gshare.cli.cluster_jobs import CLIENT, find_row
from gshare.cli.submit import submit_run
from gshare.coordinator.api_protocol import JobRows, ListClusterJobs


def clone_cluster_job(
    cluster: Path,
    state_dir: Path | None,
    name: str,
    settings: Mapping[str, str],
    new_name: str | None,
    *,
    json_lines: bool,
    detach: bool,
) -> int:
    """Cold: from new weights. Followed to its end unless `detach`; the exit code."""
    with running_coordinator(cluster, state_dir, CLIENT) as client:
        jobs = client.ask(JobRows, ListClusterJobs, orders=True).jobs
    row = find_row(jobs, name)
    assert row.spec is not None, "asked for with its order"
    beside = Path(row.spec.output_dir).parent
    taken = {job.job for job in jobs}
    if beside.is_dir():
        taken |= {entry.name for entry in beside.iterdir()}
    spec = cloned_spec(
        row.spec, settings, name=new_name or free_name(name, taken), warm=False, base_dir=Path.cwd()
    )
    run = RunSpec(
        model=row.model,
        base_dtype=row.base_dtype,  # type: ignore[arg-type]  # one of them: the job has it
        adapters=(spec,),
    )
    options = options_of(cluster, state_dir)
    return submit_run(run, options, watch=not detach, json_lines=json_lines)
