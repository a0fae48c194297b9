"""`gshare finetune` and `gshare jobs` with a trainer that several runs share: on the CPU, no flags."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from gshare.agent.service import registry
from gshare.agent.service.joining import looking

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import weights_after  # noqa: E402
from joining_clients import make_base, wait_for  # noqa: E402
from straw_runs import LONG, flags, gshare, own_ledger, read_until, start  # noqa: E402


@pytest.fixture(autouse=True)
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_ledger(tmp_path, monkeypatch)
    monkeypatch.delenv("GSHARE_DEVICES")
    monkeypatch.setenv("STRAW_BASE", str(make_base(tmp_path / "base", b"weights")))


def test_three_runs_share_one_trainer_and_are_listed_and_stopped_one_by_one() -> None:
    first = start(*flags("a", LONG))
    read_until(first, "step 1 of")
    code, out, err = gshare(*flags("b", LONG, "--detach"))
    assert (code, out) == (0, "b\n"), err
    third = start(*flags("c", "steps=30,sleep=0.01"))
    seen = read_until(third, "step 1 of")
    (trainer,) = registry.live_trainers()
    assert f"joins trainer {trainer.name} of job a, b" in seen
    assert "a trainer loads" not in seen
    _, err = third.communicate(timeout=60)
    assert third.returncode == 0, err
    assert Path("out/c/adapter_model.safetensors").read_text() == weights_after("c", 30)

    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert first.returncode == 130
    code, out, err = gshare("jobs", "list", "--json")
    listed = {job["job"]: (job["state"], job["trainer"]) for job in map(json.loads, out.splitlines())}
    assert listed["b"] == ("running", trainer.name)
    assert listed["a"][0] == "stopped"
    assert gshare("jobs", "stop", "b")[0] == 0
    assert gshare("jobs", "attach", "b")[0] == 130
    wait_for(lambda: not list(registry.trainer_dirs()))


def test_with_no_join_a_run_has_its_own() -> None:
    """The control."""
    first = start(*flags("a", LONG))
    read_until(first, "step 1 of")
    code, _, err = gshare(*flags("b", "steps=9", "--no-join"))
    assert code == 0, err
    assert "joins trainer" not in err
    assert "a trainer loads fake" in err
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)


def test_the_lock_of_a_search_leaves_no_file_and_holds_out_all_others(tmp_path: Path) -> None:
    """Each of many threads finds the shared list empty: whoever removed the file has let in one at a time."""
    inside: list[int] = []
    seen: list[int] = []

    def search(number: int) -> None:
        for _ in range(20):
            with looking("key"):
                inside.append(number)
                seen.append(len(inside))
                time.sleep(0.0005)
                inside.remove(number)

    threads = [threading.Thread(target=search, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [1] * 120
    assert list((registry.runtime_dir() / "joins").iterdir()) == []
