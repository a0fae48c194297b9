"""The coordinator's store: all of an event or nothing, whenever it is killed; one coordinator a directory."""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from gshare.agent.errors import RetryLater
from gshare.coordinator.actions import Ended, Place, Say, Stop
from gshare.coordinator.events import Evaluation
from gshare.coordinator.facts import CheckpointRef, JobRecord
from gshare.coordinator.store import FILE, MIGRATIONS, Cursor, Store, StoreError

sys.path.insert(0, str(Path(__file__).parent / "support"))
from cluster_model import facts

KILLED = Path(__file__).parent / "support" / "store_killed.py"


def record(name: str, order: int = 1, **changes: object) -> JobRecord:
    job = JobRecord(facts=facts(name, payload=b"the order"), order=order)
    for key, value in changes.items():
        setattr(job, key, value)
    return job


def test_what_was_committed_is_there_after_opening_again(tmp_path: Path) -> None:
    job = record("late", 2, attempt=3, checkpoint=CheckpointRef(attempt=2, step=7, files=(("a", "b", 1),)))
    place = Place(job="late", attempt=3)
    with Store.open(tmp_path) as store:
        owner = store.owner
        store.commit(jobs=[job, record("early")], actions=[place], cursor=Cursor("n", "journal", 5))
    with Store.open(tmp_path) as store:
        assert store.owner == owner
        assert len(owner) == 32
        assert store.jobs() == [record("early"), job]
        assert [row.action for row in store.pending()] == [place]
        assert store.cursor("n") == Cursor("n", "journal", 5)
        assert store.cursor("unknown") == Cursor("unknown", "", 0)


def test_every_commit_is_synced_to_a_log(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        run = store._connection.execute
        assert run("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert run("PRAGMA journal_mode").fetchone() == ("wal",)
        assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_an_action_is_pending_once_until_it_is_done(tmp_path: Path) -> None:
    stop = Stop(node="n", job="j", attempt=1, reason="first")
    again = Stop(node="n", job="j", attempt=1, reason="second")
    with Store.open(tmp_path) as store:
        store.commit(actions=[stop])
        store.commit(actions=[again, Place(job="j", attempt=1)])
        first, second = store.pending()
        assert first.action == stop
        # Done and asked for again in one transaction: it is to be done again.
        store.commit(done=[first.id], actions=[again])
        assert [row.action for row in store.pending()] == [second.action, again]
        assert store.pending(after=second.id)[0].action == again
        store.commit(done=[row.id for row in store.pending()])
        assert store.pending() == []


def test_news_are_numbered_and_not_in_the_outbox(tmp_path: Path) -> None:
    say, ended = Say(level="info", text="hi"), Ended(job="j", state="completed", reason="")
    with Store.open(tmp_path) as store:
        assert store.last_news() == 0
        store.commit(actions=[say, ended])
        assert [(item.seq, item.body) for item in store.news()] == [(1, say), (2, ended)]
        assert [item.seq for item in store.news(after=1)] == [2]
        assert store.last_news() == 2
        assert store.pending() == []


def test_old_news_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gshare.coordinator.store.NEWS_KEPT", 10)
    with Store.open(tmp_path) as store:
        store.commit(actions=[Say(level="info", text="hi")] * 2000)
        assert [item.seq for item in store.news()] == list(range(1991, 2001))


def test_evaluations_are_kept_with_nan_and_the_last_word_on_a_step(tmp_path: Path) -> None:
    def seen(step: int, val_loss: float, attempt: int = 1) -> Evaluation:
        return Evaluation(node="n", job="j", attempt=attempt, step=step, val_loss=val_loss)

    with Store.open(tmp_path) as store:
        store.commit(jobs=[record("j")])
        for evaluation in (seen(20, math.inf), seen(10, math.nan), seen(20, 0.5, attempt=2)):
            store.commit(evaluation=evaluation)
        first, second = store.evaluations("j")
        assert first.step == 10
        assert math.isnan(first.val_loss)
        assert (second.step, second.val_loss, second.attempt) == (20, 0.5, 2)
        assert [e.step for e in store.evaluations("j", after_step=10)] == [20]
        # Another job of that name begins without them.
        other = record("j")
        other.facts = facts("j", submission="second")
        store.commit(jobs=[other])
        assert store.evaluations("j") == []


def test_a_commit_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.commit(jobs=[record("j")])
        run = store._connection.execute
        pages = run("PRAGMA page_count").fetchone()[0]
        run(f"PRAGMA max_page_count = {pages}")  # as a full disk
        big = record("big", 2)
        big.facts = facts("big", payload=b"x" * 100_000)
        with pytest.raises(StoreError, match=r"nothing was written.*make room"):
            store.commit(jobs=[record("j", state="running"), big], actions=[Place(job="j", attempt=1)])
        assert store.jobs() == [record("j")]
        assert store.pending() == []
        run("PRAGMA max_page_count = 100000")
        store.commit(jobs=[record("j", state="running"), big], actions=[Place(job="j", attempt=1)])
        assert [job.facts.name for job in store.jobs()] == ["j", "big"]


def test_a_second_coordinator_on_the_directory_is_told_to_try_later(tmp_path: Path) -> None:
    with (
        Store.open(tmp_path),
        pytest.raises(RetryLater, match=r"another coordinator .*--state-dir") as caught,
    ):
        Store.open(tmp_path)
    assert caught.value.exit_code == 75
    Store.open(tmp_path).close()  # and the lock goes with its holder


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    with pytest.raises(StoreError, match="newer gshare"):
        Store.open(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match=rf"{FILE}.*move .* away"):
        Store.open(tmp_path)


def killed(directory: Path, *options: str) -> dict[str, object]:
    command = [sys.executable, str(KILLED), str(directory), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_killed_at_every_boundary_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    result = killed(tmp_path)
    assert result["kills"] >= 50, result  # type: ignore[operator]
    assert (result["lost"], result["doubled"], result["attempts"]) == (0, 0, [1]), result


def test_without_the_outbox_the_same_loses_jobs(tmp_path: Path) -> None:
    result = killed(tmp_path, "--no-outbox", "--step", "12")
    assert result["lost"] > 0, result  # type: ignore[operator]
