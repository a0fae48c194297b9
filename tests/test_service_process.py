"""Real trainer processes with an engine of straw: sockets, signals, crashes, clients that misbehave."""

from __future__ import annotations

import os
import queue
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from gshare.agent.errors import GshareError
from gshare.agent.jobs.events import Event, JobChanged, Stepped, TrainerMessage
from gshare.agent.jobs.spec import AdapterSpec, JobRequest
from gshare.agent.service import protocol, registry
from gshare.agent.service.client import TrainerClient, TrainerGone
from gshare.agent.service.hold import Spawned, spawn_trainer
from gshare.agent.service.journal import Journal
from gshare.agent.service.registry import TrainerConfig
from gshare.agent.service.server import Connection, Server, connect_socket
from gshare.agent.service.supervise import StopRequest, Supervisor
from gshare.agent.service.wire import FrameReader, convert

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import weights_after  # noqa: E402

#: Nothing here takes so long, but on a machine that has no time for a process at all.
SECONDS = 180.0
CONFIG = TrainerConfig(
    model="fake",
    model_dir="/nonexistent",
    base_dtype="fp32",
    runner="fake_runner:FakeRunner",
    idle_seconds=0.1,
)


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(folder))


@pytest.fixture
def trainer() -> Iterator[Spawned]:
    spawned = spawn_trainer(CONFIG)
    yield spawned
    spawned.process.kill()
    spawned.process.wait()
    spawned.release()


def job(name: str, tmp_path: Path, script: str = "", *, resume: bool = False) -> JobRequest:
    spec = AdapterSpec(name=name, data=script, output_dir=str(tmp_path / "out" / name), lora_alpha=32, seed=0)
    return JobRequest(spec=spec, train_store="/nonexistent", train_hash="0" * 64, resume=resume)


def collect(
    client: TrainerClient, until: Callable[[list[Event]], bool], seconds: float = SECONDS
) -> list[Event]:
    """The client's events until the condition holds."""
    events: list[Event] = []
    deadline = time.monotonic() + seconds
    while not until(events):
        assert time.monotonic() < deadline, events
        events += client.poll(0.05)
    return events


def states(events: list[Event], name: str) -> list[str]:
    return [event.state for event in events if isinstance(event, JobChanged) and event.job == name]


def reached(name: str, state: str) -> Callable[[list[Event]], bool]:
    return lambda events: state in states(events, name)


def stepped(name: str, step: int) -> Callable[[list[Event]], bool]:
    return lambda events: any(isinstance(e, Stepped) and e.job == name and e.step >= step for e in events)


def wait_for(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def supervise(
    requests: list[JobRequest], config: TrainerConfig = CONFIG
) -> tuple[int, list[Event], Supervisor]:
    events: list[Event] = []
    supervisor = Supervisor(config=config, requests=requests, on_event=events.append)
    return supervisor.run(), events, supervisor


def weights(request: JobRequest) -> str:
    return (Path(request.spec.output_dir) / "adapter_model.safetensors").read_text()


# ---------------------------------------------------------------------- the trainer and its clients


def test_two_clients_share_a_trainer_and_it_ends_when_both_are_gone(tmp_path: Path, trainer: Spawned) -> None:
    one, two = (TrainerClient(trainer.directory, name) for name in ("one", "two"))
    assert one.hello.trainer_id == two.hello.trainer_id == trainer.directory.name
    one.follow(["a"])
    two.follow()
    for client, name in ((one, "a"), (two, "b")):
        # To pause: else one may have completed before the other has come, and they share no pass.
        request = msgspec.structs.replace(job(name, tmp_path, "steps=30,sleep=0.01"), pause_at=10)
        reply = client.ask(protocol.SubmitJobs, jobs=[request])
        assert reply == protocol.Done(reply_to=2, jobs=[name])
    collect(two, lambda e: reached("a", "paused")(e) and reached("b", "paused")(e))
    two.ask(protocol.ResumeJobs, jobs=["a", "b"])
    seen = collect(two, lambda e: reached("a", "completed")(e) and reached("b", "completed")(e))
    assert any(isinstance(e, Stepped) and e.adapters_in_pass == 2 for e in seen)
    mine = collect(one, reached("a", "completed"))
    assert {e.job for e in mine if not isinstance(e, TrainerMessage)} == {"a"}
    listed = {status.job: status for status in one.jobs()}
    assert {name: status.state for name, status in listed.items()} == {"a": "completed", "b": "completed"}
    assert listed["a"].client == "one"
    assert listed["a"].loss == 2.0 / 30
    one.close()
    time.sleep(0.5)
    assert trainer.process.poll() is None
    two.close()
    assert trainer.process.wait(SECONDS) == 0
    assert registry.read_exit(trainer.directory) == registry.ExitRecord(
        code=0, reason="no clients and no jobs"
    )


def test_jobs_that_come_together_are_expected_before_the_first_is_admitted(
    tmp_path: Path, trainer: Spawned
) -> None:
    client = TrainerClient(trainer.directory, "c")
    client.follow()
    client.ask(protocol.SubmitJobs, jobs=[job("a", tmp_path, "steps=3")])
    client.ask(protocol.SubmitJobs, jobs=[job(name, tmp_path, "steps=3") for name in ("b", "c")])
    seen = collect(client, reached("c", "completed"))
    said = [e.text for e in seen if isinstance(e, TrainerMessage) and "expected" in e.text]
    assert said == ["2 jobs expected"]
    at = [isinstance(e, TrainerMessage) and "expected" in e.text for e in seen].index(True)
    assert min(i for i, e in enumerate(seen) if e.job in ("b", "c")) > at
    client.close()


def test_who_only_looks_does_not_keep_a_trainer_and_its_memory(tmp_path: Path, trainer: Spawned) -> None:
    owner, looker = (TrainerClient(trainer.directory, name) for name in ("owner", "looker"))
    looker.follow()
    owner.ask(protocol.SubmitJobs, jobs=[job("a", tmp_path, "steps=3")])
    collect(looker, reached("a", "completed"))
    assert owner.others() == 0  # so the owner waits for the trainer's end
    time.sleep(2 * CONFIG.idle_seconds)
    assert trainer.process.poll() is None  # the control: it stays for its owner
    owner.close()
    assert trainer.process.wait(SECONDS) == 0


def test_a_sample_comes_before_the_durable_events_that_followed_it(tmp_path: Path) -> None:
    """The journal is ahead of what the server's thread was told: what it was not told of yet waits."""
    journal = Journal(tmp_path / "journal.jsonl", "j")
    server = Server(tmp_path / "socket", journal, hello=unused, job_list=list, commands=queue.SimpleQueue())
    connection = Connection(key=1, client="c", following=True)
    server._connections[1] = connection
    first = JobChanged(job="a", state="running", step=0, total_steps=1)
    sample = step_of("a", 1)
    last = JobChanged(job="a", state="completed", step=1, total_steps=1)
    server._publish(None, journal.append(first))
    before = journal.last_seq  # of the sample: taken, and on its way
    journal.append(last)
    assert sent(server, connection) == [first]
    server._publish(sample, before)
    server._publish(None, journal.last_seq)
    assert sent(server, connection) == [sample, last]


def unused() -> protocol.TrainerHello:
    raise AssertionError("nobody connects")


def sent(server: Server, connection: Connection) -> list[Event]:
    reader = FrameReader()
    events: list[Event] = []
    while (frame := server._next_frame(connection)) is not None:
        for message in reader.feed(frame):
            event_frame = convert(message, protocol.FromTrainer)
            assert isinstance(event_frame, protocol.EventFrame)
            events.append(event_frame.event)
    return events


def step_of(name: str, step: int) -> Stepped:
    return Stepped(
        job=name, step=step, total_steps=9, epoch=0.0, loss=1.0, grad_norm=1.0, learning_rate=1e-4, tokens=9,
        label_tokens=5, seconds=0.1, adapters_in_pass=1,
    )  # fmt: skip


def test_socket_and_directories_are_closed_to_others(trainer: Spawned) -> None:
    TrainerClient(trainer.directory, "c").close()
    path = trainer.directory / "socket"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for directory in (trainer.directory, trainer.directory.parent, trainer.directory.parent.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_directory_too_deep_for_a_socket_path_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 100)
    deep.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    code, _, _ = supervise([job("a", tmp_path)])
    assert code == 0


def test_garbage_on_the_socket_is_refused_and_disturbs_nobody(tmp_path: Path, trainer: Spawned) -> None:
    client = TrainerClient(trainer.directory, "good")
    client.follow()
    client.ask(protocol.SubmitJobs, jobs=[job("a", tmp_path, "steps=40,sleep=0.01")])
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xc1" * 100, os.urandom(1 << 20), b""):
        with connect_socket(trainer.directory / "socket") as raw:
            try:
                raw.sendall(garbage)
                raw.shutdown(socket.SHUT_WR)
                answer = raw.recv(1 << 16)
            except OSError:
                continue  # it hung up on us while we were still sending
            assert not answer or b"refused" in answer
    events = collect(client, reached("a", "completed"))
    assert [e.step for e in events if isinstance(e, Stepped)] == list(range(1, 41))


def test_another_protocol_version_is_refused_with_both_versions(
    trainer: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gshare.agent.service.client.PROTOCOL_VERSION", 99)
    with pytest.raises(GshareError, match=r"speaks protocol 1, .* speaks 99"):
        TrainerClient(trainer.directory, "new")


def test_a_client_that_never_reads_holds_up_nobody(tmp_path: Path, trainer: Spawned) -> None:
    deaf = TrainerClient(trainer.directory, "deaf")
    deaf._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.send(protocol.Follow)
    good = TrainerClient(trainer.directory, "good")
    good.follow()
    request = job("a", tmp_path, "steps=8000,save=100000")
    good.ask(protocol.SubmitJobs, jobs=[request])
    collect(good, reached("a", "completed"))
    assert weights(request) == weights_after("a", 8000)
    # The deaf one has lost samples, and nothing else.
    deaf.ask(protocol.ListJobs)
    late = collect(deaf, reached("a", "completed"))
    assert states(late, "a") == ["running", "completed"]
    assert len([e for e in late if isinstance(e, Stepped)]) < 8000


def test_one_that_floods_without_reading_is_cut_off(trainer: Spawned) -> None:
    deaf, good = (TrainerClient(trainer.directory, name) for name in ("deaf", "good"))
    deaf._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    def flood() -> None:
        for _ in range(200_000):
            deaf.send(protocol.ListJobs)

    with pytest.raises(GshareError):
        flood()
    assert good.jobs() == []


def test_durable_events_come_exactly_once_to_who_says_where_it_stopped(
    tmp_path: Path, trainer: Spawned
) -> None:
    owner = TrainerClient(trainer.directory, "owner")
    owner.ask(protocol.SubmitJobs, jobs=[job("a", tmp_path, "steps=60,sleep=0.01,save=1")])
    durable: list[Event] = []
    journal_id, seq = "", 0
    while "completed" not in states(durable, "a"):
        client = TrainerClient(trainer.directory, "follower")
        assert client.follow(journal_id=journal_id, after_seq=seq) is False
        events = collect(client, lambda events: any(not isinstance(e, Stepped) for e in events))
        durable += [event for event in events if not isinstance(event, Stepped)]
        journal_id, seq = client.journal_id, client.seq
        client.close()
    evaluations = [event.step for event in durable if type(event).__name__ == "Evaluated"]
    assert evaluations == list(range(1, 61))
    assert registry.read_lines(trainer.directory / "jobs.jsonl", protocol.JobStatus)[0].job == "a"


def test_a_job_may_be_paused_resumed_and_stopped_by_another_client(tmp_path: Path, trainer: Spawned) -> None:
    owner, other = (TrainerClient(trainer.directory, name) for name in ("owner", "other"))
    other.follow()
    owner.ask(protocol.SubmitJobs, jobs=[job("a", tmp_path, "steps=100000,sleep=0.01")])
    collect(other, stepped("a", 3))
    other.ask(protocol.PauseJobs, jobs=["a"])
    paused_at = {status.job: status.step for status in other.jobs()}["a"]
    time.sleep(0.2)
    assert {status.job: status.step for status in other.jobs()}["a"] == paused_at
    other.ask(protocol.ResumeJobs, jobs=["a"])
    collect(other, stepped("a", paused_at + 2))
    assert other.ask(protocol.StopJobs, jobs=["a", "b"]) == protocol.Done(
        reply_to=6, jobs=["a"], failed={"b": "job b is not in this trainer"}
    )
    assert [job.status.state for job in registry.finished_jobs()] == ["stopped"]


def test_a_client_that_is_killed_stops_its_jobs_only(tmp_path: Path, trainer: Spawned) -> None:
    other = TrainerClient(trainer.directory, "other")
    other.follow()
    other.ask(protocol.SubmitJobs, jobs=[job("b", tmp_path, "steps=100,sleep=0.01")])
    lost, kept = job("lost", tmp_path, "steps=100000,save=100000"), job("kept", tmp_path, "steps=150")
    for request, then in ((lost, ""), (kept, "client.ask(protocol.Detach)")):
        code = f"""
import os, signal, sys
from pathlib import Path
import msgspec
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.service import protocol
from gshare.agent.service.client import TrainerClient
client = TrainerClient(Path(sys.argv[1]), "killed")
client.ask(protocol.SubmitJobs, jobs=[msgspec.json.decode(sys.argv[2], type=JobRequest)])
{then}
os.kill(os.getpid(), signal.SIGKILL)
"""
        arguments = [
            sys.executable,
            "-c",
            code,
            str(trainer.directory),
            msgspec.json.encode(request).decode(),
        ]
        assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL
    events = collect(
        other, lambda e: all(reached(n, s)(e) for n, s in (("lost", "stopped"), ("kept", "completed")))
    )
    (change,) = [e for e in events if isinstance(e, JobChanged) and (e.job, e.state) == ("lost", "stopped")]
    assert change.reason == "its client left"
    assert (Path(lost.spec.output_dir) / "checkpoint.json").exists()
    if "completed" not in states(events, "b"):
        collect(other, reached("b", "completed"))


def test_a_name_that_runs_already_is_refused_and_the_runner_left_alone(
    tmp_path: Path, trainer: Spawned
) -> None:
    client = TrainerClient(trainer.directory, "c")
    long = job("a", tmp_path, "steps=100000,sleep=0.01")
    requests = [long, job("a", tmp_path / "2"), job("../b", tmp_path)]
    reply = client.ask(protocol.SubmitJobs, jobs=requests)
    assert isinstance(reply, protocol.Done)
    assert "path separator" in reply.failed.pop("../b")
    assert "runs in this trainer" in reply.failed["a"]
    assert [status.state for status in client.jobs()] == ["running"]


def test_sigterm_checkpoints_everything_and_exits_143(tmp_path: Path, trainer: Spawned) -> None:
    client = TrainerClient(trainer.directory, "c")
    client.follow()
    request = job("a", tmp_path, "steps=100000,sleep=0.01,save=100000")
    client.ask(protocol.SubmitJobs, jobs=[request])
    collect(client, stepped("a", 3))
    trainer.process.send_signal(signal.SIGINT)  # ignored: it is the client who decides
    collect(client, stepped("a", 5))
    trainer.process.terminate()
    events = collect(client, reached("a", "stopped"))
    assert isinstance(events[-1], JobChanged)
    with pytest.raises(TrainerGone):
        collect(client, lambda _: False)
    assert trainer.process.wait(SECONDS) == 143
    assert (Path(request.spec.output_dir) / "checkpoint.json").exists()


def test_sigterm_while_the_base_is_loaded_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSHARE_FAKE_LOAD", "sleep=600")
    spawned = spawn_trainer(CONFIG)
    client = TrainerClient(spawned.directory, "c")
    assert client.hello.ready is False
    spawned.process.terminate()
    assert spawned.process.wait(SECONDS) == 143
    spawned.release()


#: A trainer that is told to end once it answers clients, before it has said what it does then.
EARLY = """
import os, signal, sys
from gshare.agent.service import trainer

run = trainer.Trainer.run

def late(self):
    os.kill(os.getpid(), signal.SIGTERM)
    return run(self)

trainer.Trainer.run = late
sys.exit(trainer.main(["--dir", sys.argv[1]]))
"""


def test_sigterm_as_soon_as_it_listens_is_no_crash() -> None:
    directory, lock, supervisor = registry.create_trainer_dir(CONFIG)
    os.close(lock)
    done = subprocess.run(
        [sys.executable, "-c", EARLY, str(directory)], capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 143, done.stderr
    assert registry.read_exit(directory) == registry.ExitRecord(code=143, reason="SIGTERM")
    os.close(supervisor)


# ---------------------------------------------------------------------- the supervising client


def test_a_poisonous_job_fails_and_its_co_tenants_finish_with_their_own_bits(tmp_path: Path) -> None:
    good = [job(name, tmp_path, "steps=30,sleep=0.002,save=4") for name in ("a", "b")]
    bad = job("bad", tmp_path, "steps=30,kill_at=10")
    code, events, supervisor = supervise([good[0], bad, good[1]])
    assert code == 1
    assert {status.job: status.state for status in supervisor.table.all()} == {
        "a": "completed",
        "bad": "failed",
        "b": "completed",
    }
    for request in good:
        assert weights(request) == weights_after(request.spec.name, 30)
    assert weights_after("a", 30) != weights_after("a", 29)  # the chain tells steps apart
    reason = next(e.reason for e in events if isinstance(e, JobChanged) and e.state == "failed")
    assert "killed by SIGKILL" in reason
    died = [e for e in events if isinstance(e, TrainerMessage) and "died" in e.text]
    assert len(died) >= 1
    assert "bad at step 10" in died[0].text
    assert not list(registry.trainer_dirs())


def test_an_unforeseen_exception_is_a_crash_and_names_itself(tmp_path: Path) -> None:
    code, events, _ = supervise([job("bad", tmp_path, "raise_at=2")])
    assert code == 1
    (failed,) = [e for e in events if isinstance(e, JobChanged) and e.state == "failed"]
    assert "the engine met something unforeseen in bad" in failed.reason


def test_a_trainer_killed_from_outside_costs_nothing(tmp_path: Path) -> None:
    requests = [job(name, tmp_path, "steps=150,sleep=0.01,save=7") for name in ("a", "b")]
    kills = 0

    def on_event(event: Event) -> None:
        nonlocal kills
        if isinstance(event, Stepped) and event.job == "a" and event.step == 40 * (kills + 1) and kills < 2:
            kills += 1
            assert supervisor._trainer is not None
            supervisor._trainer.process.kill()

    supervisor = Supervisor(config=CONFIG, requests=requests, on_event=on_event)
    assert supervisor.run() == 0
    assert kills == 2
    for request in requests:
        assert weights(request) == weights_after(request.spec.name, 150)


@pytest.mark.parametrize("second", [6, 0])
def test_a_job_that_has_paused_goes_on_to_the_next_step_it_is_told(tmp_path: Path, second: int) -> None:
    """In the trainer that it paused in: what that was told first must not be all."""
    request = msgspec.structs.replace(job("a", tmp_path, "steps=9,sleep=0.01"), pause_at=3)
    later = [second, 0]
    paused: list[int] = []

    def on_event(event: Event) -> None:
        if isinstance(event, JobChanged) and event.state == "paused":
            paused.append(event.step)
            supervisor.go_on(msgspec.structs.replace(request, pause_at=later[len(paused) - 1]))

    supervisor = Supervisor(config=CONFIG, requests=[request], on_event=on_event)
    assert supervisor.run() == 0
    assert paused == [3, *([second] if second else [])]
    assert len(supervisor.logs) == 1, "one trainer had it all the time"
    assert weights(request) == weights_after("a", 9)


def test_durable_events_are_not_lost_in_a_crash(tmp_path: Path) -> None:
    """What the journal holds and the socket never sent still comes, once."""
    requests = [
        job("a", tmp_path, "steps=40,save=1,sleep=0.001"),
        job("bad", tmp_path, "steps=40,kill_at=20"),
    ]
    _, events, _ = supervise(requests)
    resumed = [e.step for e in events if isinstance(e, JobChanged) and "resumed" in e.reason and e.job == "a"]
    evaluated = [e.step for e in events if type(e).__name__ == "Evaluated" and e.job == "a"]  # type: ignore[union-attr]
    assert resumed
    assert evaluated == list(range(1, 41))


def test_a_trainer_that_dies_while_loading_is_given_up_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSHARE_FAKE_LOAD", "kill")
    code, _, supervisor = supervise([job("a", tmp_path), job("b", tmp_path)])
    assert code == 1
    assert [status.state for status in supervisor.table.all()] == ["failed", "failed"]
    assert "no step in flight" in supervisor.table.all()[0].reason
    assert len(supervisor.logs) == 2


def test_an_error_of_the_trainer_itself_is_not_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSHARE_FAKE_LOAD", "error")
    code, _, supervisor = supervise([job("a", tmp_path)])
    assert code == 1
    assert "no such model" in supervisor.table.all()[0].reason
    assert len(supervisor.logs) == 1


def test_a_refused_job_fails_and_leaves_nothing_behind(tmp_path: Path) -> None:
    refused, good = job("refused", tmp_path, "refuse=1"), job("good", tmp_path)
    code, events, _ = supervise([refused, good])
    assert code == 1
    assert states(events, "good")[-1] == "completed"
    reasons = [e.reason for e in events if isinstance(e, JobChanged) and e.job == "refused"]
    assert "refused by its script" in reasons[-1]
    assert not Path(refused.spec.output_dir).exists()


def test_a_job_that_lacks_its_adapter_only_makes_no_further_step(tmp_path: Path, trainer: Spawned) -> None:
    """Interrupted between the checkpoint of its last step and the end: the next trainer finishes at once."""
    client = TrainerClient(trainer.directory, "c")
    client.follow()
    request = job("a", tmp_path, "steps=6")
    client.ask(protocol.SubmitJobs, jobs=[request])
    collect(client, reached("a", "completed"))
    adapter = Path(request.spec.output_dir) / "adapter_model.safetensors"
    expected = adapter.read_text()
    adapter.unlink()
    done = client.ask(protocol.SubmitJobs, jobs=[msgspec.structs.replace(request, resume=True)])
    assert isinstance(done, protocol.Done)
    assert done.failed == {}
    events = collect(client, reached("a", "completed"))
    assert "running" in states(events, "a")
    assert not any(isinstance(event, Stepped) for event in events)
    assert weights(request) == expected == weights_after("a", 6)


def test_one_directory_is_never_written_by_two_trainers(tmp_path: Path, trainer: Spawned) -> None:
    client = TrainerClient(trainer.directory, "c")
    client.ask(protocol.SubmitJobs, jobs=[job("a", tmp_path, "steps=100000,sleep=0.01")])
    code, events, _ = supervise([job("a", tmp_path, "steps=100000,sleep=0.01", resume=True)])
    assert code == 75
    assert "another trainer is writing" in next(e.reason for e in events if isinstance(e, JobChanged))
    # The control: once the first is gone the same request is taken.
    client.ask(protocol.StopJobs, jobs=[])
    request = job("a", tmp_path, "steps=100000,sleep=0.01", resume=True)
    second = spawn_trainer(CONFIG)
    owner = TrainerClient(second.directory, "d")  # kept: a trainer that its client has left ends by itself
    assert owner.ask(protocol.SubmitJobs, jobs=[request]) == protocol.Done(reply_to=1, jobs=["a"])
    second.process.terminate()
    assert second.process.wait(SECONDS) == 143
    second.release()


def test_a_stop_while_the_base_is_loaded_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSHARE_FAKE_LOAD", "sleep=600")
    stop = StopRequest()
    supervisor = Supervisor(
        config=CONFIG,
        requests=[job("a", tmp_path)],
        on_event=lambda _: None,
        on_connected=lambda: threading.Timer(0.3, lambda: setattr(stop, "exit_code", 130)).start(),
        stop=stop,
    )
    assert supervisor.run() == 130
    assert [status.state for status in supervisor.table.all()] == ["stopped"]


def test_a_state_directory_that_takes_nothing_costs_the_log_and_the_list_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    code, events, _ = supervise([job("a", tmp_path, "steps=3"), job("b", tmp_path, "steps=6,fail_at=2")])
    assert code == 1
    assert states(events, "a")[-1] == "completed"
    assert states(events, "b")[-1] == "failed"
    warnings = [event.text for event in events if isinstance(event, TrainerMessage)]
    assert sum("no log is kept" in text for text in warnings) == 1
    assert sum("`gshare jobs` will not list" in text for text in warnings) == 1


def test_a_runtime_directory_that_fills_up_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full_disk.py").write_text(FULL_DISK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    config = msgspec.structs.replace(CONFIG, runner="full_disk:FullDisk")
    code, events, supervisor = supervise([job("a", tmp_path, "steps=20,sleep=0.01")], config)
    assert (code, len(supervisor.logs)) == (0, 1)
    assert states(events, "a")[-1] == "completed"
    assert any("No space left" in e.text for e in events if isinstance(e, TrainerMessage))


#: An engine whose trainer finds the disk of its own directory full once it is loaded.
FULL_DISK = """
import errno, os
from fake_runner import FakeRunner
from gshare.agent.service import breadcrumb, journal, registry, trainer

def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

class Full:
    write = pwrite = replace = staticmethod(no_space)
    def __getattr__(self, name):
        return getattr(os, name)

class FullDisk(FakeRunner):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        breadcrumb.os = journal.os = Full()
        main = __import__("sys").modules["__main__"]
        main.append_line = main.write_json = no_space
"""


# ---------------------------------------------------------------------- whose directory is whose


def test_directories_that_go_while_they_are_listed_are_gone_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another collector removes each at the worst moment: after the look, before the next call."""
    for number in range(3):
        (registry.trainers_dir() / f"dead{number}").mkdir()
    look = Path.exists

    def exists(path: Path) -> bool:
        """The collector that comes between a look and what follows it."""
        found = look(path)
        if path.name.startswith("dead"):
            registry.remove_trainer_dir(path)
        return found

    monkeypatch.setattr(Path, "exists", exists)
    stat = Path.stat

    def stat_late(path: Path, **options: bool) -> os.stat_result:
        if path.name == "dead1":
            registry.remove_trainer_dir(path)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", stat_late)
    assert sorted(path.name for path in registry.trainer_dirs()) == ["dead0", "dead1", "dead2"]
    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(registry, "is_shared", lambda path: registry.remove_trainer_dir(path.parent))
    assert registry.collect_dead() == []
    assert list(registry.trainers_dir().iterdir()) == []


def test_a_dead_trainers_directory_is_collected_by_its_locks_not_by_its_pid(tmp_path: Path) -> None:
    spawned = spawn_trainer(CONFIG)
    client = TrainerClient(spawned.directory, "c")
    client.ask(protocol.SubmitJobs, jobs=[job("a", tmp_path, "steps=100000,sleep=0.01")])
    assert registry.live_trainers() == [spawned.directory]
    assert registry.collect_dead() == []
    spawned.process.kill()
    wait_for(lambda: not registry.live_trainers())  # not waited for: a zombie still, and dead all the same
    assert registry.collect_dead() == []  # its supervisor still needs the breadcrumb
    spawned.release()
    (lost,) = registry.collect_dead()
    assert (lost.status.job, lost.status.state) == ("a", "failed")
    assert "--resume" in lost.status.reason
    assert not spawned.directory.exists()
    assert [job.status.job for job in registry.finished_jobs()] == ["a"]
    spawned.process.wait()
