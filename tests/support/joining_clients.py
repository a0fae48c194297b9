"""Supervising clients in threads of the test's process, over a base as far as its identity goes."""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from gshare.agent.jobs.events import Event, JobChanged, Stepped, TrainerMessage
from gshare.agent.jobs.spec import AdapterSpec, JobRequest
from gshare.agent.service import registry
from gshare.agent.service.client import TrainerClient
from gshare.agent.service.registry import TrainerConfig
from gshare.agent.service.supervise import StopRequest, Supervisor

LONG = "steps=100000,sleep=0.01,save=5"
#: A loaded machine takes ten of them to start one process.
SECONDS = 120.0


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
    """A supervising client in a thread of this process, as the node agent runs them. Of a sweep's, which has
    `first` ones, the others are let `go_on` at its next event."""

    config: TrainerConfig
    requests: list[JobRequest]
    name: str
    join: bool = True
    first: list[str] | None = None
    events: list[Event] = field(default_factory=list)
    code: int | None = None
    stop: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        self._going_on: list[JobRequest] = []
        self.supervisor = Supervisor(
            config=self.config,
            requests=self.requests,
            on_event=self._heard,
            stop=self.stop,
            client=self.name,
            join=self.join,
            first=self.first,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _heard(self, event: Event) -> None:
        self.events.append(event)
        while self._going_on:
            self.supervisor.go_on(self._going_on.pop())

    def go_on(self, request: JobRequest) -> None:
        self._going_on.append(request)

    def _run(self) -> None:
        self.code = self.supervisor.run()

    def wait(self, seconds: float = SECONDS) -> int:
        self._thread.join(seconds)
        assert self.code is not None, self.events[-20:]
        return self.code

    def until(self, condition: Callable[[list[Event]], bool], seconds: float = SECONDS) -> None:
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


def wait_for(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
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
