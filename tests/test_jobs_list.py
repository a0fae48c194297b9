"""Which ended jobs `gshare jobs list` shows: what is of use now, and everything with --all or --json."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from gshare.agent.jobs.events import JobStateName
from gshare.agent.service.protocol import JobStatus
from gshare.agent.service.registry import FinishedJob, record_finished
from gshare.cli.cluster_jobs import recent_jobs
from gshare.cli.jobs import ENDED_SECONDS, ENDED_SHOWN, find_job
from gshare.cli.main import main
from gshare.coordinator.api_protocol import JobRow


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))


def ended(directory: Path, *, ago: float = 0.0, state: JobStateName = "completed") -> None:
    status = JobStatus(job=directory.name, state=state, step=3, total_steps=3, output_dir=str(directory))
    record_finished(FinishedJob(status=status, ended=time.time() - ago, trainer_id="t"))


def listed(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[list[str], str]:
    assert main(["jobs", "list", *flags]) == 0
    captured = capsys.readouterr()
    return [line.split()[0] for line in captured.out.splitlines()[1:]], captured.err


def test_what_ended_long_ago_or_has_gone_home_is_counted_and_with_all_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
    ended(tmp_path / "new")
    ended(tmp_path / "gone")
    ended(tmp_path / "refused", state="failed")  # before it had a directory: that is what one looks for
    ended(tmp_path / "old", ago=ENDED_SECONDS + 60)
    assert listed(capsys) == (["refused", "new"], "2 ended jobs are left out; see --all\n")
    assert listed(capsys, "--all") == (["refused", "gone", "new", "old"], "")
    assert main(["jobs", "list", "--json"]) == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 4


def test_of_many_the_newest_are_shown_and_each_is_found_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`jobs clone` after a sweep of sixty: the first ones were not found."""
    for number in range(ENDED_SHOWN + 5):
        (tmp_path / f"job{number}").mkdir()
        ended(tmp_path / f"job{number}", ago=60.0 - number)
    names, err = listed(capsys)
    assert names == [f"job{number}" for number in reversed(range(5, ENDED_SHOWN + 5))]
    assert "5 ended jobs are left out" in err
    assert find_job("job0", running=False).status.output_dir == str(tmp_path / "job0")


def test_of_a_cluster_all_that_run_and_the_last_submitted_of_the_ended() -> None:
    jobs = [JobRow(job=f"a{number}", state="completed") for number in range(ENDED_SHOWN + 2)]
    jobs.insert(0, JobRow(job="runs", state="running"))
    shown = [job.job for job in recent_jobs(jobs)]
    assert shown == ["runs", *(f"a{number}" for number in range(2, ENDED_SHOWN + 2))]
