"""What to tell a user who asks for files of a job that its node does not keep any more."""

from __future__ import annotations

from gshare.agent.jobs.names import plain
from gshare.agent.node.attempts import NOT_HERE
from gshare.coordinator.facts import ENDED_STATES, JobRecord
from gshare.coordinator.link import LinkRefused
from gshare.coordinator.orders import read_order


def where_instead(job: JobRecord, refusal: LinkRefused, what: str) -> str | None:
    """One line: `what` ("log", "files") is gone, and what there is. None: the node refused something else.

    A node forgets an attempt once its end is at home: results in `output_dir`, or the newest checkpoint.
    """
    name = job.facts.name
    if job.state not in ENDED_STATES or NOT_HERE not in str(refusal):
        return None
    gone = f"job {name} is {job.state}, and its node keeps its {what} no longer"
    if job.published:
        return f"{gone}; its results are in {plain(read_order(job.facts).job.spec.output_dir)}"
    resumes = "" if job.state == "diverged" else f"`gshare jobs resume {name} --cluster FILE` continues it"
    fetches = "`gshare jobs fetch --kind checkpoint` brings its newest checkpoint" if job.checkpoint else ""
    return "; ".join(filter(None, (gone, fetches, resumes)))
