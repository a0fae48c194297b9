"""Joined trainers under the ledger: a row with a part for each client, on a simulated device."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest
from gshare.agent.jobs.events import Stepped
from gshare.agent.service import registry
from gshare.agent.service.registry import GpuRequest, TrainerConfig
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.rows import Client as Part

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import weights_after  # noqa: E402
from joining_clients import (  # noqa: E402
    LONG,
    Client,
    job,
    make_base,
    make_config,
    stop,
    trainer_pid,
    wait_for,
    weights,
)
from ledger_children import files, holder  # noqa: E402
from straw_runs import own_ledger, the_device  # noqa: E402

GPU = "GPU-aaaa-1"  # 8500 MiB of it may be reserved


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    return own_ledger(tmp_path, monkeypatch)


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    """A base of 3000 MiB, and adapters of 1000, 600 of which the arena keeps."""
    base = make_base(tmp_path / "base", b"weights")
    return make_config(base, runner="reserved_runner:ReservedRunner", gpu=request())


def request(budget_mb: int = 4000, part_mb: int = 1000, timeout_s: float = 300.0) -> GpuRequest:
    return GpuRequest(
        budget_mb=budget_mb,
        gpus=(GPU,),
        task="finetune",
        timeout_s=timeout_s,
        part_mb=part_mb,
        resident_mb=min(600, part_mb),
    )


def asking(config: TrainerConfig, **changes: object) -> TrainerConfig:
    """The same with another request."""
    assert config.gpu is not None
    return msgspec.structs.replace(config, gpu=msgspec.structs.replace(config.gpu, **changes))


def rows(ledger: Ledger) -> list[tuple[int, tuple[Part, ...]]]:
    return [(row.budget_mb, row.clients) for row in ledger.look()[0].rows]


def test_a_client_that_joins_reserves_what_it_adds_and_gives_it_back(
    config: TrainerConfig, tmp_path: Path, ledger: Ledger
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    assert rows(ledger) == [(4000, (Part(name="A", budget_mb=1000),))]
    b = Client(asking(config, part_mb=1500), [job("b", tmp_path, LONG)], "B")
    b.steps("b", 1)
    both = (Part(name="A", budget_mb=1000), Part(name="B", budget_mb=1500))
    assert rows(ledger) == [(5500, both)]
    assert [part.name for part in the_device(ledger).reservations[0].clients] == ["A", "B"]
    stop(b)
    # The arena keeps the place of B's adapters, 600 MiB, for the next one: who asks for no more gets in.
    wait_for(lambda: rows(ledger) == [(4600, (Part(name="A", budget_mb=1000),))])
    c = Client(config, [job("c", tmp_path, LONG)], "C")
    c.steps("c", 1)
    assert rows(ledger)[0][0] == 5000
    stop(a, c)
    wait_for(lambda: files(ledger) == [])


def test_who_started_the_trainer_leaves_and_the_base_stays_reserved(
    config: TrainerConfig, tmp_path: Path, ledger: Ledger
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    b = Client(config, [job("b", tmp_path, LONG)], "B")
    b.steps("b", 1)
    stop(a)
    wait_for(lambda: rows(ledger) == [(4600, (Part(name="B", budget_mb=1000),))])
    stop(b)
    assert files(ledger) == []


def test_two_clients_of_one_name_have_a_part_each(
    config: TrainerConfig, tmp_path: Path, ledger: Ledger
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "agent")
    a.steps("a", 1)
    b = Client(config, [job("b", tmp_path, LONG)], "agent")
    b.steps("b", 1)
    ((budget, parts),) = rows(ledger)
    assert budget == 5000
    assert [part.budget_mb for part in parts] == [1000, 1000]
    assert len({part.name for part in parts}) == 2
    stop(a, b)


def test_a_part_that_does_not_fit_means_the_queue_as_alone_and_room_means_joining(
    config: TrainerConfig, tmp_path: Path, ledger: Ledger
) -> None:
    """While it waits for a whole trainer's memory, room in a running one is taken when there is some."""
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    with holder(ledger, 3000) as stays:
        stays.line()
        with holder(ledger, 1000) as goes:
            goes.line()
            b = Client(config, [job("b", tmp_path, "steps=9")], "B")
            wait_for(lambda: b.says("waiting for GPU memory, position 1"))
            assert b.says("cannot grow: 1000 MiB asked, 500 of 8500 MiB free")
            assert (4000, (Part(name="A", budget_mb=1000),)) in rows(ledger)
            assert len(registry.live_trainers()) == 2
        # 1500 MiB are free now: enough for a part, not for a trainer.
        assert b.wait() == 0
        assert b.supervisor.joined
        assert b.states("b") == ["running", "completed"]
    stop(a)
    assert rows(ledger) == []


def test_who_may_not_wait_exits_75_where_neither_joining_nor_starting_is_possible(
    config: TrainerConfig, tmp_path: Path, ledger: Ledger
) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    with holder(ledger, 4000) as other:
        other.line()
        b = Client(asking(config, timeout_s=0.0), [job("b", tmp_path, "steps=9")], "B")
        assert b.wait() == 75
    stop(a)


def test_a_trainer_that_waits_for_memory_is_joined_and_keeps_its_place_when_its_client_leaves(
    config: TrainerConfig, tmp_path: Path, ledger: Ledger
) -> None:
    with holder(ledger, 8000) as other:
        other.line()
        a = Client(config, [job("a", tmp_path, LONG)], "A")
        wait_for(lambda: a.says("waiting for GPU memory, position 1"))
        b = Client(config, [job("b", tmp_path, "steps=9,sleep=0.01")], "B")
        wait_for(lambda: b.says("has the same base; it is waiting for GPU memory, position 1"))
        assert len(registry.live_trainers()) == 1
        stop(a)
        time.sleep(0.5)
        assert b.code is None
    assert b.wait() == 0
    assert b.supervisor.joined


def test_a_client_waits_for_anothers_trainer_no_longer_than_it_may(
    config: TrainerConfig, tmp_path: Path, ledger: Ledger
) -> None:
    with holder(ledger, 8000) as other:
        other.line()
        a = Client(config, [job("a", tmp_path, LONG)], "A")
        wait_for(lambda: a.says("waiting for GPU memory, position 1"))
        b = Client(asking(config, timeout_s=1.0), [job("b", tmp_path, "steps=9")], "B")
        assert b.wait() == 75
        (reason,) = [e.reason for e in b.events if getattr(e, "state", "") == "failed"]
        assert "waited 1 s for trainer" in reason
        assert "--resume" in reason
        stop(a)


def test_a_trainer_on_another_gpu_is_not_joined(config: TrainerConfig, tmp_path: Path) -> None:
    a = Client(config, [job("a", tmp_path, LONG)], "A")
    a.steps("a", 1)
    b = Client(asking(config, gpus=("GPU-bbbb-2",)), [job("b", tmp_path, "steps=9")], "B")
    assert b.wait() == 1  # there is no such device here; what counts is that it was looked for
    assert b.says("it is on another GPU")
    stop(a)


def test_after_a_crash_all_go_on_where_only_one_base_fits(
    config: TrainerConfig, tmp_path: Path, ledger: Ledger
) -> None:
    """Each client's jobs are tried alone on a trainer of its own, which has to wait for the other's to leave;
    in the end they share one again."""
    config = asking(config, budget_mb=7000)  # of 8500
    script = "steps=400,sleep=0.01,save=5"
    a = Client(config, [job("a", tmp_path, script)], "A")
    a.steps("a", 3)
    b = Client(config, [job("b", tmp_path, script)], "B")
    b.steps("b", 10)
    assert b.supervisor.joined
    os.kill(trainer_pid(), signal.SIGKILL)
    wait_for(lambda: a.says("the trainer died") and b.says("the trainer died"))
    wait_for(lambda: len({e.adapters_in_pass for e in last_steps(a, 5) + last_steps(b, 5)}) == 2)
    assert (a.wait(), b.wait()) == (0, 0)
    for client, name in ((a, "a"), (b, "b")):
        assert weights(job(name, tmp_path)) == weights_after(name, 400)
        # It had to make room or wait, so there were more trainers than deaths, and no more deaths than one.
        assert sum("the trainer died" in getattr(e, "text", "") for e in client.events) == 1
        assert last_steps(client, 1)[0].step == 400
    assert rows(ledger) == []


def last_steps(client: Client, n: int) -> list[Stepped]:
    return [e for e in list(client.events) if isinstance(e, Stepped)][-n:]
