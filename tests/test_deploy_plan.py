"""What deploy decides: versions, idleness, disk, the hour between tries."""

from __future__ import annotations

import random
from typing import Any

import pytest
from gshare.coordinator.deploy_plan import (
    NEED_TRAIN_MB,
    Hello,
    Look,
    Running,
    Try,
    about_running,
    disk_fault,
    needed_mb,
    python_is_enough,
    release,
    too_soon,
)
from gshare.coordinator.reconnect import STEADY_SECONDS, Backoff


def look(**values: Any) -> Look:
    base: dict[str, Any] = {
        "python": "3.11.7",
        "executable": "/usr/bin/python3",
        "machine": "x86_64",
        "state_dir": "/home/a/.local/state/gshare/agent",
        "time": 100_000.0,
        "disk_free_mb": 50_000,
        "disk_total_mb": 100_000,
    }
    return Look(**{**base, **values})


OURS = "0.2.0-aaaaaa~111111"


def about(stamp: str, hello: Hello | None, *, force: bool = False, **values: Any) -> str:
    there = look(running=Running(pid=7, stamp=stamp), **values)
    return about_running(there, OURS, "0.2.0", 1, hello, force)[0]


def test_our_own_agent_is_used_without_asking_it() -> None:
    assert about(OURS, None) == "use"


@pytest.mark.parametrize(
    ("stamp", "version", "protocol", "attempts", "step"),
    [
        ("0.1.0-bbbbbb~111111", "0.1.0", 1, 0, "upgrade"),
        ("0.1.0-bbbbbb~111111", "0.1.0", 1, 2, "pending"),
        ("0.1.0-bbbbbb~111111", "0.1.0", 0, 2, "version"),
        ("0.1.0-bbbbbb~111111", "0.1.0", 0, 0, "upgrade"),
        ("0.1.0-bbbbbb~111111", "0.1.0", 0, None, "version"),
        ("0.2.0-cccccc~111111", "0.2.0", 1, 0, "upgrade"),  # another build of the same version
        ("0.2.0-aaaaaa~222222", "0.2.0", 1, 0, "upgrade"),  # another environment
        ("0.2.0-cccccc~111111", "0.2.0", 1, 1, "pending"),
        ("", "0.2.0", 1, 0, "use"),  # started by hand
        ("", "0.1.0", 1, 0, "upgrade"),
        ("0.10.0-dddddd~111111", "0.10.0", 1, 0, "use"),  # newer, same protocol
        ("0.10.0-dddddd~111111", "0.10.0", 2, 0, "version"),
    ],
)
def test_the_agent_that_runs(
    stamp: str, version: str, protocol: int, attempts: int | None, step: str
) -> None:
    assert about(stamp, Hello(gshare=version, protocol=protocol, attempts=attempts)) == step


def test_an_agent_that_does_not_answer_is_left_alone() -> None:
    assert about("0.1.0-bbbbbb~111111", None) == "no_agent"


def test_two_coordinators_do_not_replace_each_others_agent_for_ever() -> None:
    hello = Hello(gshare="0.2.0", protocol=1, attempts=0)
    tried = {f"start {OURS}": Try(time=99_000.0)}
    assert about("0.2.0-cccccc~111111", hello, tries=tried) == "pending"
    assert about("0.2.0-cccccc~111111", hello, tries=tried, force=True) == "upgrade"
    assert about("0.2.0-cccccc~111111", hello, tries=tried, time=99_000.0 + 3600) == "upgrade"


def test_one_try_a_version_and_hour() -> None:
    tries = {"v1": Try(time=100_000.0, fault="no network"), "v2": Try(time=100_000.0)}
    fault = too_soon(look(tries=tries, time=100_000.0 + 3599), "v1")
    assert fault is not None
    assert "no network" in fault
    assert too_soon(look(tries=tries, time=100_000.0 + 3600), "v1") is None
    assert too_soon(look(tries=tries, time=99_000.0), "v1") is None  # the clock was set back
    assert too_soon(look(tries=tries), "v2") is None  # that one went well
    assert too_soon(look(tries=tries), "v3") is None
    cut = [{"v1": Try(time=100_000.0, fault="it was interrupted", interrupted=n)} for n in (1, 2, 3, 4)]
    assert [too_soon(look(tries=tried), "v1") is None for tried in cut] == [True, True, False, False]


def test_disk_is_asked_for_with_a_reserve() -> None:
    assert disk_fault(look(disk_free_mb=9024), NEED_TRAIN_MB) is None
    fault = disk_fault(look(disk_free_mb=9023), NEED_TRAIN_MB)
    assert fault is not None
    assert "state_dir" in fault
    assert disk_fault(look(disk_free_mb=500, disk_total_mb=2000), 400) is None  # 5 % of a small disk
    assert needed_mb("train", True) < needed_mb("", False) < needed_mb("train", False)


def test_versions() -> None:
    assert release("0.10.0") > release("0.9.9") > release("0.9")
    assert [python_is_enough(v) for v in ("3.9.18", "3.10.0", "3.13.1", "")] == [False, True, True, False]


def test_backoff_doubles_to_a_minute_with_jitter_and_starts_anew_after_a_steady_connection() -> None:
    many = [Backoff(random.Random(seed)) for seed in range(200)]
    for number in range(10):
        whole = min(60.0, 2.0**number)
        delays = [backoff.next_delay() for backoff in many]
        assert all(whole / 2 <= delay <= whole for delay in delays)
        assert len(set(delays)) > 190  # not all at once
    many[0].connected(STEADY_SECONDS - 1)
    assert many[0].next_delay() >= 30
    many[0].connected(STEADY_SECONDS)
    assert many[0].next_delay() <= 1
    for _ in range(2000):
        assert many[1].next_delay() <= 60  # no overflow
    with pytest.raises(ValueError, match="first"):
        Backoff(random.Random(0), first=5, most=1)
