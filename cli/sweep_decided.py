"""What earlier lives of a sweep have decided, and the refusal to go on without it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gshare.agent.errors import UsageError
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.jobs.sweep_records import DECISIONS_FILE, Decision, read_decisions
from gshare.agent.service.output_dir import results_in


def decided_before(directory: Path, specs: Iterable[AdapterSpec]) -> list[Decision]:
    """Of the sweep in `directory`, oldest first. GshareError: its log is damaged. UsageError: what its
    configurations have done is not in it.

    A start is on the disk before anybody trains: a sweep that was killed however early has each there that
    has made a step. Without it a configuration that was dropped would be trained on, over what it had left.
    """
    decisions = read_decisions(directory)
    started = {decision.job for decision in decisions if decision.event != "cloned"}
    for spec in specs:
        found = results_in(Path(spec.output_dir))
        if found and spec.name not in started:
            what = f"says nothing of {spec.name}" if decisions else "is gone or empty"
            whose = "which has" if decisions else f"and {spec.name} has"
            raise UsageError(
                f"{directory / DECISIONS_FILE} {what}, {whose} made steps already ({found[0]} in "
                f"{spec.output_dir}): put the file back as it was, or choose another output_dir"
            )
    return decisions
