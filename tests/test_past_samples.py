"""The training curve of a cluster's job for who comes late: from its node, else from what came home."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
from cluster_of_straw import LIMITS, Straw, is_ended, run, started
from gshare.agent.service.output_dir import read_record
from gshare.coordinator.api_protocol import JobSamples, JobsDone, ReadJobSamples, StopClusterJobs


async def steps(it: Straw, **fields: int) -> list[int]:
    got = await it.ask(JobSamples, ReadJobSamples, job="job0", **fields)
    return [json.loads(line)["step"] for line in got.lines]


def test_of_a_job_that_is_done_they_are_read_in_its_output_directory(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0")
            agent, attempt = await started(it, "job0", steps=4)
            # Step by step: one that goes on by itself may end before a checkpoint is brought home.
            await it.until(lambda: (kept := it.job("job0").checkpoint) is not None and kept.step == 4)
            for _ in range(2):
                agent.advance(attempt)
            await it.until(lambda: is_ended(it, "job0"))
            await it.until(lambda: bool(agent.forgotten))
            assert await steps(it) == [1, 2, 3, 4, 5, 6]
            assert await steps(it, after_step=2, limit=3) == [3, 4, 5]
            out = tmp_path / "out" / "job0"
            record = read_record(out)
            assert record is not None
            other = msgspec.structs.replace(record, spec=msgspec.structs.replace(record.spec, name="other"))
            (out / "run.json").write_bytes(msgspec.json.encode(other))
            assert await steps(it) == [1, 2, 3, 4], "another job has trained there since: its checkpoint's"
            (out / "run.json").write_bytes(msgspec.json.encode(record))
            (out / "metrics.jsonl").unlink()
            os.mkfifo(out / "metrics.jsonl")
            assert await steps(it) == [1, 2, 3, 4]

    run(tmp_path, test, "a")


def test_of_a_job_that_was_stopped_they_are_those_of_its_newest_checkpoint(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0")
            await started(it, "job0", steps=4)
            await it.ask(JobsDone, StopClusterJobs, jobs=["job0"])
            await it.until(lambda: is_ended(it, "job0") and bool(it.agents["a"].forgotten))
            assert await steps(it) == [1, 2, 3, 4]

    run(tmp_path, test, "a")


def test_while_its_node_is_away_they_reach_as_far_as_came_home(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running(limits=type(LIMITS)(lost_after_s=60.0)):
            await it.submit("job0")
            agent, _ = await started(it, "job0", steps=2)
            await it.until(lambda: it.job("job0").checkpoint is not None)
            it.unreachable.add("a")
            agent.hang_up()
            await it.until(lambda: it.coordinator.sessions["a"].link is None)
            assert await steps(it) == [1, 2]

    run(tmp_path, test, "a")
