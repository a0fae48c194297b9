"""What survives the coordinator: jobs, the outbox, cursors, evaluations, news. SQLite in the state directory.

One event is one transaction: the jobs it changed, the actions that came of it, the actions it ends, and how
far the node's journal was read. So wherever the process is killed, either all of an event happened or none
of it: an event that did not is delivered again (the cursor stands before it), an action that was committed
and perhaps carried out is carried out again (all actions are idempotent), and none is forgotten.

    with Store.open(state_dir) as store:
        cluster = Cluster(…, jobs=store.jobs())
        actions = cluster.handle(event)
        store.commit(jobs=cluster.take_changed(), actions=actions, cursor=…, done=…)
        for row in store.pending(): …
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec
from gshare.agent.errors import GshareError, RetryLater
from gshare.coordinator.actions import CheckBest, ClusterAction, Ended, Say, action_key
from gshare.coordinator.events import Evaluation
from gshare.coordinator.facts import JobRecord

FILE = "coordinator.db"
#: News kept for those who follow: some tens of bytes each.
NEWS_KEPT = 50_000
#: Seconds to wait for another reader of the file (`sqlite3` by hand); nobody else may write.
_BUSY_S = 10.0

#: Schema by version: each script leads from the one before. Never changed once released, only added to.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE jobs (
        name TEXT PRIMARY KEY, number INTEGER NOT NULL, state TEXT NOT NULL, record BLOB NOT NULL);
    CREATE TABLE orders (name TEXT PRIMARY KEY, submission TEXT NOT NULL, payload BLOB NOT NULL);
    CREATE TABLE outbox (
        id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, action BLOB NOT NULL);
    CREATE TABLE cursors (
        node TEXT PRIMARY KEY, journal_id TEXT NOT NULL, seq INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE evaluations (
        job TEXT NOT NULL, step INTEGER NOT NULL, attempt INTEGER NOT NULL, node TEXT NOT NULL,
        val_loss BLOB NOT NULL, label_tokens INTEGER NOT NULL, best INTEGER NOT NULL, time REAL NOT NULL,
        PRIMARY KEY (job, step)) WITHOUT ROWID;
    CREATE TABLE news (seq INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, body BLOB NOT NULL);
    """,
)

News = Ended | Say


class Pending(NamedTuple):
    """A row of the outbox, oldest first: carry `action` out, then `commit(done=[id])`."""

    id: int
    action: ClusterAction


class Cursor(NamedTuple):
    """How far a node's journal was read; `seq` 0: nothing yet."""

    node: str
    journal_id: str
    seq: int


class NewsItem(NamedTuple):
    seq: int
    time: float  # Unix s
    body: News


class StoreError(GshareError):
    """The database cannot be used; the message says which file and what to do."""


class Store:
    """The open store. One process at a time; not shared between threads."""

    def __init__(self, state_dir: Path, lock: int, connection: sqlite3.Connection) -> None:
        self.state_dir, self._lock, self._connection = state_dir, lock, connection
        self._orders = dict(connection.execute("SELECT name, submission FROM orders"))
        self.owner = self._owner()

    @classmethod
    def open(cls, state_dir: Path) -> Store:
        """The store in `state_dir`, made (0700) when missing, its schema brought up to date.

        RetryLater (exit 75) when another coordinator has it; StoreError when the file is damaged, or was
        written by a newer gshare.
        """
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _take_lock(state_dir)
        path = state_dir / FILE
        try:
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            connection = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_S)
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                # FULL syncs the log at every commit: NORMAL may lose the last ones with the power.
                connection.execute("PRAGMA synchronous = FULL")
                _migrate(connection, path)
                return cls(state_dir, lock, connection)
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            os.close(lock)
            raise StoreError(
                f"{path}: {error}: move {FILE}, {FILE}-wal and {FILE}-shm away together to begin anew (jobs "
                "that run on nodes are not stopped by that)"
            ) from error
        except BaseException:
            os.close(lock)
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()
        os.close(self._lock)

    # --- the transaction

    def commit(
        self,
        *,
        jobs: Iterable[JobRecord] = (),
        actions: Iterable[ClusterAction] = (),
        done: Iterable[int] = (),
        cursor: Cursor | None = None,
        evaluation: Evaluation | None = None,
    ) -> None:
        """All of it or, however this ends, nothing.

        `done` are ids of `Pending` rows; they are taken out before `actions` are put in, so an action that
        ends and is asked for again at once stays. StoreError when it could not be written (disk full): what
        was to be committed can be committed again.
        """
        run = self._connection.execute
        orders = {}
        try:
            run("BEGIN IMMEDIATE")
            try:
                for row in done:
                    run("DELETE FROM outbox WHERE id = ?", (row,))
                for job in jobs:
                    orders.update(self._write_job(job))
                for action in actions:
                    self._write_action(action)
                if evaluation is not None:
                    self._write_evaluation(evaluation)
                if cursor is not None:
                    run("INSERT OR REPLACE INTO cursors VALUES (?, ?, ?)", cursor)
                run("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    run("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise StoreError(
                f"{self.state_dir / FILE}: nothing was written: {error}; when the disk is full, make room"
            ) from error
        self._orders.update(orders)

    def _write_job(self, job: JobRecord) -> dict[str, str]:
        """The order (some KiB) is written once, the record (some 300 bytes) at every change."""
        run, name, submission = self._connection.execute, job.facts.name, job.facts.submission
        written: dict[str, str] = {}
        if self._orders.get(name) != submission:
            run("INSERT OR REPLACE INTO orders VALUES (?, ?, ?)", (name, submission, job.facts.payload))
            run("DELETE FROM evaluations WHERE job = ?", (name,))  # of an earlier job of that name
            written[name] = submission
        small = msgspec.structs.replace(job, facts=msgspec.structs.replace(job.facts, payload=b""))
        row = (name, job.order, job.state, _encode(small))
        run("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?)", row)
        return written

    def _write_action(self, action: ClusterAction) -> None:
        if isinstance(action, CheckBest):
            return
        run, key = self._connection.execute, action_key(action)
        if key is not None:
            run("INSERT OR IGNORE INTO outbox (key, action) VALUES (?, ?)", (key, _encode(action)))
            return
        seq = run("INSERT INTO news (time, body) VALUES (?, ?)", (time.time(), _encode(action))).lastrowid
        if seq is not None and seq % 1000 == 0:
            run("DELETE FROM news WHERE seq <= ?", (seq - NEWS_KEPT,))

    def _write_evaluation(self, seen: Evaluation) -> None:
        """The last word on a step stands: an attempt that goes on from a checkpoint makes steps again."""
        row = (seen.job, seen.step, seen.attempt, seen.node, _loss(seen.val_loss), seen.label_tokens)
        self._connection.execute(
            "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*row, int(seen.best), seen.time),
        )

    # --- reading

    def jobs(self) -> list[JobRecord]:
        """All jobs in the order of their submission."""
        rows = self._connection.execute(
            "SELECT record, payload FROM jobs JOIN orders USING (name) ORDER BY number"
        )
        found = []
        for record, payload in rows:
            job = msgspec.msgpack.decode(record, type=JobRecord)
            job.facts = msgspec.structs.replace(job.facts, payload=payload)
            found.append(job)
        return found

    def pending(self, after: int = 0) -> list[Pending]:
        """Actions not acknowledged, oldest first; `after`: only rows with a greater id."""
        rows = self._connection.execute("SELECT id, action FROM outbox WHERE id > ? ORDER BY id", (after,))
        return [Pending(id, msgspec.msgpack.decode(action, type=ClusterAction)) for id, action in rows]

    def cursor(self, node: str) -> Cursor:
        row = self._connection.execute(
            "SELECT journal_id, seq FROM cursors WHERE node = ?", (node,)
        ).fetchone()
        return Cursor(node, row[0], row[1]) if row else Cursor(node, "", 0)

    def evaluations(self, job: str, after_step: int = -1, newest: int = 0) -> list[Evaluation]:
        """Of the job, by step; `newest`: only so many, 0: all."""
        rows = self._connection.execute(
            "SELECT step, attempt, node, val_loss, label_tokens, best, time FROM evaluations"
            " WHERE job = ? AND step > ? ORDER BY step DESC LIMIT ?",
            (job, after_step, newest or -1),
        ).fetchall()
        return [
            Evaluation(
                node=node,
                job=job,
                attempt=attempt,
                step=step,
                val_loss=float(val_loss),
                label_tokens=label_tokens,
                best=bool(best),
                time=when,
            )
            for step, attempt, node, val_loss, label_tokens, best, when in reversed(rows)
        ]

    def news(self, after: int = 0, limit: int = 1000) -> list[NewsItem]:
        """What happened after number `after`, oldest first."""
        rows: Sequence[tuple[int, float, bytes]] = self._connection.execute(
            "SELECT seq, time, body FROM news WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit)
        ).fetchall()
        return [NewsItem(seq, when, msgspec.msgpack.decode(body, type=News)) for seq, when, body in rows]

    def last_news(self) -> int:
        """The number of the newest item, 0 when there was none."""
        return self._connection.execute("SELECT coalesce(max(seq), 0) FROM news").fetchone()[0]

    def _owner(self) -> str:
        """The id that this store's attempts carry, drawn when the store was made."""
        run = self._connection.execute
        run("INSERT OR IGNORE INTO meta VALUES ('owner', ?)", (secrets.token_hex(16),))
        return run("SELECT value FROM meta WHERE key = 'owner'").fetchone()[0]


def _encode(value: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(value)


def _loss(value: float) -> float | str:
    """SQLite turns NaN into NULL; as text it stays."""
    return value if math.isfinite(value) else repr(value)


def _take_lock(state_dir: Path) -> int:
    """The descriptor of the locked file; the lock goes with the process, however it ends."""
    lock = os.open(state_dir / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pid = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        os.close(lock)
        who = f" (process {pid})" if pid.isdigit() else ""
        raise RetryLater(
            f"{state_dir}: another coordinator runs on this state directory{who}: use that one, stop it, or "
            "give this one another --state-dir"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Brings the schema up to `len(MIGRATIONS)`, one transaction a step; a crash leaves a whole step."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise StoreError(
            f"{path}: its schema {version} is of a newer gshare (this one knows {len(MIGRATIONS)}): install "
            "that version, or use another --state-dir"
        )
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in filter(str.strip, script.split(";")):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
