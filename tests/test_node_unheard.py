"""What goes wrong in an agent where nobody awaits it is told, and costs neither the attempt nor the log."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gshare.agent.jobs.events import Event, JobChanged
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.node import attempts as attempts_module
from gshare.agent.node.attempt import Outcome
from gshare.agent.node.attempts import Attempt, Attempts
from gshare.agent.node.blobs import BlobStore
from gshare.agent.node.loop_errors import QUIET_SECONDS, LoopErrors
from gshare.agent.node.protocol import AttemptStatus, BlobRef, ModelRef, StartAttempt
from gshare.agent.node.records import make_attempt, new_record
from gshare.agent.node.state_dir import open_state_dir
from gshare.agent.service.server import socket_address

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from node_agents import running_agent  # noqa: E402


class Node:
    """`Attempts` on a state directory with one attempt, which is running as far as they know."""

    def __init__(self, tmp_path: Path) -> None:
        self.state = open_state_dir(tmp_path / "node")
        self.said: list[str] = []
        self.events: list[Event] = []
        self.blobs = BlobStore(self.state.blobs)
        self.attempts = self.fresh()

    def fresh(self) -> Attempts:
        return Attempts(
            self.state,
            self.blobs,
            lambda owner, attempt, event, durable: self.events.append(event),
            lambda level, text: self.said.append(f"{level}: {text}"),
        )

    def run_one(self) -> Attempt:
        request = StartAttempt(
            id=1,
            job="a",
            attempt=1,
            spec=AdapterSpec(name="a", data="ignored", output_dir="ignored"),
            model=ModelRef(name="fake", path="fake"),
            base_dtype="fp32",
            data=self.data(),
        )
        record = new_record("owner-one", request, "name-a")
        directory = make_attempt(record, self.state.attempts, self.blobs)
        status = AttemptStatus(owner="owner-one", job="a", attempt=1, state="running", step=7)
        attempt = Attempt(record, directory, status)
        attempt.running = Stopped()  # type: ignore[assignment]
        self.attempts._attempts[record.key] = attempt
        self.attempts._idle.clear()
        return attempt

    def data(self) -> BlobRef:
        digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # of nothing
        self.blobs.put(digest, 0, 0, b"")
        return BlobRef(name="a.jsonl", sha256=digest, size=0)


class Stopped:
    """A running attempt that was stopped already."""

    def stop(self) -> None:
        pass


def no_files_left(*_: object) -> AttemptStatus:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize("readable", [True, False])
def test_an_attempt_whose_files_cannot_be_looked_at_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    node = Node(tmp_path)

    async def main() -> AttemptStatus:
        attempt = node.run_one()
        (attempt.out / "checkpoint-5").mkdir(parents=True)
        if not readable:
            monkeypatch.setattr(attempts_module, "found_on_disk", no_files_left)
        node.attempts._start_ending(attempt, Outcome("failed", "its engine failed"))
        await asyncio.wait_for(node.attempts.interrupt(), 20)
        return attempt.status

    status = asyncio.run(main())
    assert (status.state, status.reason, status.step) == ("failed", "its engine failed", 7)
    assert status.checkpoint_step == (5 if readable else 0)
    assert [event.state for event in node.events if isinstance(event, JobChanged)] == ["failed"]
    assert any("Too many open files" in text for text in node.said) == (not readable)
    # The next agent starts, and has it as it ended.
    node.attempts = node.fresh()
    node.attempts.resume_all(set(), time.time() + 60)
    assert [one.state for one in node.attempts.statuses("")] == ["failed"]


def test_an_end_that_fails_for_an_unforeseen_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    told: list[dict[str, Any]] = []

    def broken(*_: object) -> AttemptStatus:
        raise RuntimeError("a defect")

    monkeypatch.setattr(attempts_module, "found_on_disk", broken)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        node.attempts._start_ending(node.run_one(), Outcome("failed", "its engine failed"))
        await asyncio.wait(set(node.attempts._ending))
        await asyncio.sleep(0)

    asyncio.run(main())
    # At once and by name: not when the garbage collector comes by the task.
    assert [(context["message"], str(context["exception"])) for context in told] == [
        ("the end of an attempt", "a defect")
    ]


def test_each_kind_is_told_once_a_minute_and_how_often_it_came() -> None:
    now = 0.0
    said: list[str] = []
    errors = LoopErrors(lambda level, text: said.append(text), clock=lambda: now)
    loop = asyncio.new_event_loop()
    tracebacks: list[dict[str, Any]] = []
    loop.default_exception_handler = tracebacks.append  # type: ignore[method-assign]

    def fail(error: BaseException) -> None:
        errors(loop, {"message": "accept", "exception": error})

    try:
        for _ in range(100):
            fail(OSError(errno.EMFILE, "Too many open files"))
        assert said == ["accept: Too many open files"]
        fail(OSError(errno.ENFILE, "Too many open files in system"))  # another kind
        fail(ValueError("a defect"))
        assert said[1:] == ["accept: Too many open files in system", "accept: ValueError: a defect"]
        assert len(tracebacks) == 1  # of the defect alone
        now = QUIET_SECONDS
        fail(OSError(errno.EMFILE, "Too many open files"))
        assert said[3:] == ["accept: Too many open files (99 more since it was last told)"]
    finally:
        loop.close()


def test_an_agent_out_of_file_descriptors_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    with running_agent(tmp_path / "node") as agent:
        assert agent.process is not None
        agent.connect().close()  # what an agent opens once is open
        pid = agent.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = max(int(fd) for fd in os.listdir(f"/proc/{pid}/fd")) + 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, hard))
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(32)]
        try:
            for one in waiting:
                with socket_address(agent.socket) as address:
                    one.connect(address)
            deadline = time.monotonic() + 60
            while "Too many open files" not in agent.log.read_text():
                assert time.monotonic() < deadline, agent.log.read_text()
                time.sleep(0.05)
            time.sleep(1.5)  # asyncio tries again after a second
        finally:
            for one in waiting:
                one.close()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert agent.log.read_text().count("Too many open files") == 1
        assert "Traceback" not in agent.log.read_text()
        agent.connect().close()  # and goes on
