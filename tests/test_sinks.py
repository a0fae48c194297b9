"""`--report-to`: missing packages, unknown names, sinks that break."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest
from gshare.agent.errors import UsageError
from gshare.agent.jobs.events import Evaluated, Event, JobChanged, Stepped
from gshare.agent.jobs.spec import AdapterSpec, JobRequest
from gshare.agent.service import sinks
from gshare.agent.service.sinks import Sinks, check_sinks

REQUEST = JobRequest(
    spec=AdapterSpec(name="a", data="d", output_dir="out/a"), train_store="s", train_hash="h"
)


def step(number: int, loss: float = 1.0) -> Stepped:
    return Stepped(
        job="a",
        step=number,
        total_steps=9,
        epoch=0.5,
        loss=loss,
        grad_norm=1.0,
        learning_rate=1e-4,
        tokens=100,
        label_tokens=10,
        seconds=0.5,
        adapters_in_pass=1,
    )


class FakeRun:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture(params=["wandb", "trackio"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[FakeRun]]:
    runs: list[FakeRun] = []

    def init(**settings: Any) -> FakeRun:
        runs.append(FakeRun(**settings))
        return runs[-1]

    module = types.ModuleType(request.param)
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, request.param, module)
    return request.param, runs


def test_every_step_and_evaluation_is_logged_once(package: tuple[str, list[FakeRun]]) -> None:
    name, runs = package
    fed = Sinks([name], [REQUEST])
    events: list[Event] = [
        step(1),
        step(2, math.nan),
        Evaluated(job="a", step=2, val_loss=2.0, label_tokens=5, best=True),
        step(2),  # again, after a resumption
        step(3),
        JobChanged(job="a", state="completed", step=3, total_steps=3),
    ]
    for event in events:
        fed.take(event)
    fed.close()
    (run,) = runs
    assert run.settings["name"] == "a"
    assert run.settings["config"]["r"] == 16
    assert [number for number, _ in run.logged] == [1, 2, 2, 3]
    assert run.logged[0][1]["tokens_per_second"] == 200.0
    assert "loss" not in run.logged[1][1]  # not finite
    assert run.logged[2][1] == {"val_loss": 2.0}
    assert run.finished == 1


def test_a_sink_that_breaks_is_reported_once_and_left_alone(
    package: tuple[str, list[FakeRun]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def broken(self: FakeRun, values: dict[str, float], step: int) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(FakeRun, "log", broken)
    fed = Sinks([package[0]], [REQUEST])
    fed.take(step(1))
    fed.take(step(2))
    fed.close()
    assert capsys.readouterr().err.count("stopped reporting: ConnectionError: no network") == 1


@pytest.mark.parametrize("name", list(sinks.SINKS))
def test_a_missing_package_says_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # the import fails, whether it is installed or not
    with pytest.raises(UsageError, match=rf"pip install 'gshare\[{name}\]'"):
        check_sinks([name])


def test_an_unknown_sink_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="did you mean wandb"):
        check_sinks(["wanb"])
    with pytest.raises(UsageError, match="known: tensorboard, wandb, trackio"):
        check_sinks(["excel"])
    check_sinks([])
