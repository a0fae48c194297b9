"""Jobs that come over the socket and not from `gshare submit`: refused whole before the store has them; and
what gets through all the same fails its own job alone."""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster_of_straw import Straw, agents_of_straw, submission
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.node import protocol as p
from gshare.coordinator import carry_out, events
from gshare.coordinator.api_client import CoordinatorGone
from gshare.coordinator.api_protocol import (
    Fetched,
    FetchJob,
    JobEvaluations,
    JobLog,
    JobRow,
    JobRows,
    JobSubmission,
    ListClusterJobs,
    ReadEvaluations,
    ReadJobLog,
    Submitted,
    SubmitToCluster,
)
from gshare.coordinator.home import Home
from gshare.coordinator.orders import facts_of, orders_of, read_order
from gshare.coordinator.submission_rules import MAX_MIB, check_submission, directory_fault

replace = msgspec.structs.replace


def run(tmp_path: Path, test: Callable[[Straw], Awaitable[None]], **fields: Any) -> None:
    async def main() -> None:
        async with agents_of_straw(tmp_path, "a", "b", **fields) as it:
            await asyncio.wait_for(test(it), 60)

    asyncio.run(main())


def request(tmp_path: Path, names: tuple[str, ...] = ("job0",), **fields: Any) -> SubmitToCluster:
    return SubmitToCluster(id=1, **{**submission(tmp_path, names), **fields})


def changed(tmp_path: Path, spec: dict[str, Any], **job: Any) -> SubmitToCluster:
    """The good submission, but for its job's spec and fields."""
    good = request(tmp_path).jobs[0]
    return request(tmp_path, jobs=(replace(good, spec=replace(good.spec, **spec), **job),))


BAD: dict[str, tuple[Callable[[Path], SubmitToCluster], str]] = {
    "name": (lambda t: changed(t, {"name": "../../../esc"}), "path separator"),
    "output with NUL": (lambda t: changed(t, {"output_dir": f"{t}/n\0ul"}), "control characters"),
    "relative output": (lambda t: changed(t, {"output_dir": "rel/out"}), "absolute path"),
    "output with ..": (lambda t: changed(t, {"output_dir": f"{t}/../x"}), "absolute path"),
    "output at the root": (lambda t: changed(t, {"output_dir": "/"}), "of a job's own"),
    "long output": (lambda t: changed(t, {"output_dir": f"{t}/{'ä' * 128}"}), "longer than"),
    "NaN": (lambda t: changed(t, {"learning_rate": math.nan}), "learning_rate"),
    "rank": (lambda t: changed(t, {"r": 0}), "r: must be"),
    "rows": (
        lambda t: changed(t, {"per_device_train_batch_size": 2**15, "gradient_accumulation_steps": 2**15}),
        "rows a step",
    ),
    "memory": (lambda t: changed(t, {}, adapter_mb=MAX_MIB + 1), "adapter_mb"),
    "less than no memory": (lambda t: changed(t, {}, base_mb=-5), "base_mb"),
    "hash": (lambda t: changed(t, {}, data=replace(request(t).jobs[0].data, sha256="../x")), "sha256"),
    "size": (lambda t: changed(t, {}, data=replace(request(t).jobs[0].data, size=-1)), "bytes"),
    "file name": (lambda t: changed(t, {}, data=replace(request(t).jobs[0].data, name="../x")), "data"),
    "file path": (lambda t: changed(t, {}, val_data=replace(request(t).jobs[0].data, path="x")), "val_data"),
    "passes": (lambda t: request(t, max_tokens_per_pass=0), "max_tokens_per_pass"),
    "parameters": (lambda t: request(t, model=replace(request(t).model, parameters=2**62)), "parameters"),
    "model": (lambda t: request(t, model=replace(request(t).model, name="a\x1b[2J")), "model"),
    "identity": (lambda t: request(t, submission="s" * 100_000), "submission"),
    "no job": (lambda t: request(t, jobs=()), "no job"),
    "two of one output": (
        lambda t: request(
            t,
            jobs=tuple(
                replace(job, spec=replace(job.spec, output_dir=f"{t}/one"))
                for job in request(t, ("job0", "job1")).jobs
            ),
        ),
        "that of job job0",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_each_is_refused_in_one_line(tmp_path: Path, what: str) -> None:
    make, told = BAD[what]
    with pytest.raises(UsageError) as caught:
        check_submission(make(tmp_path))
    assert told in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
    check_submission(request(tmp_path, ("job0", "job1")))  # the control


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    bad = changed(tmp_path, {"name": "a/b", "output_dir": "x", "learning_rate": math.inf}, base_mb=-1)
    with pytest.raises(UsageError) as caught:
        check_submission(bad)
    assert len(str(caught.value).splitlines()) == 4


def test_what_is_refused_is_not_in_the_store_and_the_next_is_served(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            for make, told in BAD.values():
                fields = msgspec.structs.asdict(make(tmp_path))
                del fields["id"]
                with pytest.raises(UsageError) as caught:
                    await it.ask(Submitted, SubmitToCluster, **fields)
                assert told in str(caught.value)
            assert it.coordinator.store.jobs() == []
            await it.submit("job0")
            await it.until(lambda: it.job("job0").state == "completed")

    run(tmp_path, test, auto=True)


def test_other_questions_that_nobody_can_answer_are_refused_too(tmp_path: Path) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0")
            await it.until(lambda: it.job("job0").state == "completed")
            with pytest.raises(UsageError, match="control characters"):
                await it.ask(Fetched, FetchJob, job="job0", kind="best", directory=f"{tmp_path}/a\0b")
            with pytest.raises(UsageError, match="newest"):
                await it.ask(JobEvaluations, ReadEvaluations, newest=-5)
            with pytest.raises((CoordinatorGone, GshareError), match="64 bits"):
                await it.ask(JobLog, ReadJobLog, job="job0", max_bytes=2**63)
            assert not it.task.done()

    run(tmp_path, test, auto=True)


def test_an_answer_that_fits_into_no_frame_is_refused_and_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(it: Straw) -> None:
        async with it.running():

            async def handle(request: Any) -> JobRows:
                return JobRows(reply_to=request.id, jobs=[JobRow(job="j", state="x" * (17 << 20))])

            monkeypatch.setattr(it.coordinator._api, "_handle", handle)
            with pytest.raises(GshareError, match="too large"):
                await it.ask(JobRows, ListClusterJobs)

    run(tmp_path, test)


# --- what got through all the same


def poisoned(tmp_path: Path, name: str, output_dir: str) -> events.Submit:
    """As an older version took it."""
    good: JobSubmission = request(tmp_path, (name,)).jobs[0]
    job = replace(good, spec=replace(good.spec, output_dir=output_dir))
    order = orders_of(request(tmp_path, jobs=(job,)))[0]
    return events.Submit(facts=facts_of(order, "old"))


def test_an_output_that_cannot_be_one_fails_its_job_alone_and_the_next_start_is_a_start(
    tmp_path: Path,
) -> None:
    async def test(it: Straw) -> None:
        async with it.running():
            it.coordinator.feed(poisoned(tmp_path, "bad", f"{tmp_path}/n\0ul"))
            await it.submit("good")
            await it.until(lambda: it.job("good").state == "completed" and it.job("bad").state == "failed")
            assert "placing the results failed: ValueError" in it.job("bad").reason
            assert it.job("bad").attempt == 1
        async with it.running():
            await it.submit("later", identity="s2")
            await it.until(lambda: it.job("later").state == "completed")
            await it.until(lambda: it.coordinator.store.pending() == [])

    run(tmp_path, test, auto=True)


@pytest.mark.parametrize("step", ["push_files", "pull_bundle"])
def test_a_defect_in_one_jobs_transfer_is_that_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Files of the bad job are known by their number: three attempts' worth would be three calls."""
    real = getattr(carry_out, step)

    async def broken(link: Any, what: Any, *more: Any) -> Any:
        if what == "bad" or (isinstance(what, list) and "bad.jsonl" in str(what[0].path)):
            raise KeyError("a defect")
        return await real(link, what, *more)

    monkeypatch.setattr(carry_out, step, broken)

    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("bad", "good")
            await it.until(lambda: it.job("good").state == "completed" and it.job("bad").state == "failed")
            assert "KeyError" in it.job("bad").reason
            assert it.job("bad").attempt == 1

    run(tmp_path, test, auto=True)


def test_a_disk_that_fails_for_a_moment_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = carry_out.push_files, 0

    async def push_files(*arguments: Any) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(errno.EMFILE, "Too many open files", "/data/x")
        await real(*arguments)

    monkeypatch.setattr(carry_out, "push_files", push_files)
    monkeypatch.setattr(carry_out, "FIRST_PAUSE_SECONDS", 0.01)

    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0")
            await it.until(lambda: it.job("job0").state == "completed")
            assert it.job("job0").attempt == 1
            assert sum("starting waits: /data/x: Too many open files" in text for text in it.said) == 1

    run(tmp_path, test, auto=True)


def test_placing_goes_on_after_an_error_that_is_none_of_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = Home.place, 0

    def place(*arguments: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise OSError(errno.EIO, "Input/output error", "/out")
        real(*arguments)

    monkeypatch.setattr(Home, "place", place)

    async def test(it: Straw) -> None:
        async with it.running():
            await it.submit("job0")
            await it.until(lambda: it.job("job0").state == "completed")

    run(tmp_path, test, auto=True)


def test_what_every_agent_would_refuse_is_asked_of_none_and_not_tried_again(tmp_path: Path) -> None:
    good = poisoned(tmp_path, "bad", str(tmp_path / "out" / "bad")).facts
    order = read_order(good)
    job = replace(order.job, spec=replace(order.job.spec, learning_rate=math.nan))
    bad = facts_of(replace(order, job=job), "old")

    async def test(it: Straw) -> None:
        async with it.running():
            it.coordinator.feed(events.Submit(facts=bad))
            await it.until(lambda: it.job("bad").state == "failed")
            assert "learning_rate" in it.job("bad").reason
            assert it.job("bad").attempt == 1
            asked = [one for agent in it.agents.values() for one in agent.requests]
            assert not any(isinstance(one, p.StartAttempt | p.PutChunk) for one in asked)

    run(tmp_path, test, auto=True)


def test_what_one_agent_refuses_for_its_own_sake_is_tried_under_the_next_number(tmp_path: Path) -> None:
    """Negative control of the one above; a number that was used on the node before is such a reason."""

    async def test(it: Straw) -> None:
        for agent in it.agents.values():
            real = agent._answer

            def answer(asked: Any, *more: Any, real: Any = real) -> Any:
                if isinstance(asked, p.StartAttempt) and asked.attempt == 1:
                    return p.NodeRefused(reply_to=asked.id, reason="attempt 1 has been here")
                return real(asked, *more)

            agent._answer = answer  # type: ignore[method-assign]
        async with it.running():
            await it.submit("job0")
            await it.until(lambda: it.job("job0").state == "completed")
            assert it.job("job0").attempt == 2

    run(tmp_path, test, auto=True)


@pytest.mark.parametrize(
    ("text", "fine"), [("/a/b", True), ("/a/b/", True), ("a", False), ("/", False), ("/a/../b", False)]
)
def test_a_directory_is_absolute_and_has_a_name(text: str, fine: bool) -> None:
    assert (directory_fault(text) is None) == fine
