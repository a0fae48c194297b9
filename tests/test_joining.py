"""Clients that join a running trainer instead of loading the base again: real processes, engine of straw."""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from gshare.agent.jobs.events import Event, JobChanged, Stepped, TrainerMessage
from gshare.agent.jobs.spec import AdapterSpec, JobRequest
from gshare.agent.service import registry
from gshare.agent.service.client import TrainerClient
from gshare.agent.service.joining import with_identity
from gshare.agent.service.registry import TrainerConfig
from gshare.agent.service.supervise import StopRequest, Supervisor

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import weights_after  # noqa: E402

LONG = "steps=100000,sleep=0.01,save=5"


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(name, str(folder))


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    return make_config(make_base(tmp_path / "base", b"weights"))


def make_base(directory: Path, content: bytes) -> Path:
    """A model as far as `base_identity` looks at it."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    entry = {"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
    header = json.dumps(entry).encode()
    (directory / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + content)
    return directory


def make_config(base: Path, **changes: object) -> TrainerConfig:
    config = TrainerConfig(
        model="fake",
        model_dir=str(base),
        base_dtype="fp32",
        runner="fake_runner:FakeRunner",
        idle_seconds=0.1,
    )
    return msgspec.structs.replace(config, **changes)


def job(name: str, tmp_path: Path, script: str = "", *, resume: bool = False) -> JobRequest:
    spec = AdapterSpec(name=name, data=script, output_dir=str(tmp_path / "out" / name), lora_alpha=32, seed=0)
    return JobRequest(spec=spec, train_store="/nonexistent", train_hash="0" * 64, resume=resume)


@dataclass
class Client:
    """A supervising client in a thread of this process, as the node agent runs them."""

    config: TrainerConfig
    requests: list[JobRequest]
    name: str
    join: bool = True
    events: list[Event] = field(default_factory=list)
    code: int | None = None
    stop: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(
            config=self.config,
            requests=self.requests,
            on_event=self.events.append,
            stop=self.stop,
            client=self.name,
            join=self.join,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.code = self.supervisor.run()

    def wait(self, seconds: float = 40.0) -> int:
        self._thread.join(seconds)
        assert self.code is not None, self.events[-20:]
        return self.code

    def until(self, condition: Callable[[list[Event]], bool], seconds: float = 40.0) -> None:
        wait_for(lambda: condition(self.events) or self.code is not None, seconds)
        assert condition(self.events), self.events[-20:]

    def steps(self, name: str, step: int) -> None:
        self.until(lambda events: any(_is_step(event, name, step) for event in list(events)))

    def says(self, text: str) -> bool:
        return any(isinstance(e, TrainerMessage) and text in e.text for e in list(self.events))

    def states(self, name: str) -> list[str]:
        return [e.state for e in list(self.events) if isinstance(e, JobChanged) and e.job == name]


def _is_step(event: Event, name: str, step: int) -> bool:
    return isinstance(event, Stepped) and event.job == name and event.step >= step


def wait_for(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stop(*clients: Client) -> None:
    for client in clients:
        client.stop.exit_code = 130
    for client in clients:
        assert client.wait() == 130


def trainer_pid() -> int:
    (directory,) = registry.live_trainers()
    client = TrainerClient(directory, "test")
    client.close()
    return client.hello.pid


def weights(request: JobRequest) -> str:
    return (Path(request.spec.output_dir) / "adapter_model.safetensors").read_text()


# ---------------------------------------------------------------------- one trainer for many


def test_a_second_client_joins_and_both_are_trained_fused_in_one_process(
    config: TrainerConfig, tmp_path: Path
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 3)
    b = Client(config, [job("b", tmp_path, "steps=20,sleep=0.01")], "B")
    assert b.wait() == 0
    assert len(registry.live_trainers()) == 1
    assert b.says(f"joins trainer {registry.live_trainers()[0].name} of job a")
    assert b.supervisor.joined
    assert any(isinstance(e, Stepped) and e.adapters_in_pass == 2 for e in b.events)
    assert {e.job for e in a.events if not isinstance(e, TrainerMessage)} == {"a"}
    assert weights(job("b", tmp_path)) == weights_after("b", 20)
    stop(a)
    assert list(registry.trainer_dirs()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schedule": "fair"}, "its schedule is synchronized, not fair"),
        ({"max_tokens_per_pass": 7}, "its max_tokens_per_pass is 16384, not 7"),
        ({"base_dtype": "nf4"}, "its base_dtype is fp32, not nf4"),
    ],
)
def test_other_settings_mean_another_trainer_and_the_reason_is_said(
    config: TrainerConfig, tmp_path: Path, change: dict[str, object], says: str
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    b = Client(msgspec.structs.replace(config, **change), [job("b", tmp_path, LONG)], "B")
    b.steps("b", 1)
    assert len(registry.live_trainers()) == 2
    assert b.says(says)
    stop(a, b)


def test_another_base_in_the_same_directory_is_not_joined(config: TrainerConfig, tmp_path: Path) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    other = make_base(tmp_path / "other", b"WEIGHTS")
    (other / "m.safetensors").replace(Path(config.model_dir) / "m.safetensors")
    b = Client(config, [job("b", tmp_path, LONG)], "B")
    b.steps("b", 1)
    assert len(registry.live_trainers()) == 2
    stop(a, b)


@pytest.mark.parametrize("which", ["first", "second"])
def test_no_join_forbids_both_ways(config: TrainerConfig, tmp_path: Path, which: str) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A", join=which != "first")
    a.steps("a", 1)
    b = Client(config, [job("b", tmp_path, LONG)], "B", join=which != "second")
    b.steps("b", 1)
    assert len(registry.live_trainers()) == 2
    assert b.says("it was started with --no-join") == (which == "first")
    stop(a, b)


def test_a_traced_trainer_is_its_clients_alone(config: TrainerConfig) -> None:
    assert with_identity(config, join=True).join_key
    assert not with_identity(msgspec.structs.replace(config, trace=True), join=True).join_key


def test_four_started_at_once_share_one_trainer_that_is_still_loading(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSHARE_FAKE_LOAD", "sleep=1")
    clients = [Client(config, [job(name, tmp_path, LONG)], name) for name in "abcd"]
    for client in clients:
        client.steps(client.name, 1)
    assert len(registry.live_trainers()) == 1
    assert sum(client.supervisor.joined for client in clients) == 3
    stop(*clients)
    wait_for(lambda: not list(registry.trainer_dirs()))


# ---------------------------------------------------------------------- clients that go away


def test_ctrl_c_of_one_takes_out_its_own_jobs_only_whoever_started_the_trainer(
    config: TrainerConfig, tmp_path: Path
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 3)
    b = Client(config, [job("b", tmp_path, LONG)], "B")
    b.steps("b", 3)
    c = Client(config, [job("c", tmp_path, LONG)], "C")
    c.steps("c", 3)
    pid = trainer_pid()
    stop(a)
    assert a.states("a")[-1] == "stopped"
    b.steps("b", int(max(e.step for e in b.events if isinstance(e, Stepped))) + 5)
    stop(c)
    assert trainer_pid() == pid
    assert b.states("b") == ["running"]
    stop(b)
    assert list(registry.trainer_dirs()) == []


def test_a_stop_while_the_base_is_loaded_leaves_the_trainer_to_the_others(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSHARE_FAKE_LOAD", "sleep=3")
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    wait_for(lambda: bool(registry.live_trainers()))
    b = Client(config, [job("b", tmp_path, "steps=9")], "B")
    wait_for(lambda: b.supervisor._finder.asking)
    a.stop.exit_code = 130
    assert b.wait() == 0
    assert b.supervisor.joined
    assert a.wait() == 130
    assert not (tmp_path / "out" / "a").exists()


def test_everybody_stopping_while_the_base_is_loaded_ends_the_trainer(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSHARE_FAKE_LOAD", "sleep=600")
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    wait_for(lambda: bool(registry.live_trainers()))
    b = Client(config, [job("b", tmp_path, LONG)], "B")
    wait_for(lambda: b.supervisor._finder.asking)
    stop(a, b)
    wait_for(lambda: not list(registry.trainer_dirs()), 10.0)


def test_a_trainer_that_is_just_exiting_costs_no_error(config: TrainerConfig, tmp_path: Path) -> None:
    """Clients that come as the last one leaves, again and again: each is trained, by whatever trainer."""
    for number in range(8):
        first = Client(config, [job(f"a{number}", tmp_path, "steps=3")], "A")
        wait_for(lambda first=first: first.supervisor.table.active() == [])
        time.sleep(0.03 * number)
        second = Client(config, [job(f"b{number}", tmp_path, "steps=3")], "B")
        assert (first.wait(), second.wait()) == (0, 0)


def test_a_trainer_that_hangs_is_passed_over(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gshare.agent.service.finding.HELLO_SECONDS", 0.5)
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    pid = trainer_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        b = Client(config, [job("b", tmp_path, "steps=3")], "B")
        assert b.wait() == 0
        assert b.says("cannot be joined: the trainer did not say hello in time")
    finally:
        os.kill(pid, signal.SIGCONT)
    stop(a)


# ---------------------------------------------------------------------- names and directories


def test_a_job_of_the_same_name_elsewhere_gets_a_trainer_of_its_own(
    config: TrainerConfig, tmp_path: Path
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    b = Client(config, [job("a", tmp_path / "2", "steps=9")], "B")
    assert b.wait() == 0
    assert b.says("a job named a runs in it")
    assert not b.supervisor.joined
    stop(a)


def test_a_directory_in_use_means_try_again_later_when_joined_too(
    config: TrainerConfig, tmp_path: Path
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    request = job("b", tmp_path)
    spec = msgspec.structs.replace(request.spec, output_dir=str(tmp_path / "out" / "a"))
    b = Client(config, [msgspec.structs.replace(request, spec=spec)], "B")
    assert b.wait() == 75
    assert b.supervisor.joined
    stop(a)


def test_a_job_is_resumed_in_the_trainer_it_was_stopped_in(config: TrainerConfig, tmp_path: Path) -> None:
    """The trainer's journal still tells of its first life, which must not be taken for the second's."""
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    b = Client(config, [job("b", tmp_path, "steps=60,sleep=0.01,save=5")], "B")
    b.steps("b", 12)
    stop(b)
    again = Client(config, [job("b", tmp_path, "steps=60,sleep=0.01,save=5", resume=True)], "B2")
    assert again.wait() == 0
    assert again.supervisor.joined
    assert again.states("b") == ["running", "completed"]
    assert weights(job("b", tmp_path)) == weights_after("b", 60)
    stop(a)


def test_a_full_trainer_is_not_joined(
    config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    (directory,) = registry.live_trainers()
    crowd = [TrainerClient(directory, "crowd") for _ in range(63)]
    b = Client(config, [job("b", tmp_path, "steps=9")], "B")
    assert b.wait() == 0
    assert b.says("this trainer has 64 clients already")
    for client in crowd:
        client.close()
    stop(a)
