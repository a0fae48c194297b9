"""What the agent keeps on disk: blobs, models, attempts, fences, the journal, bundles; through faults."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from pathlib import Path

import msgspec
import pytest
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.jobs.events import CheckpointSaved, Evaluated, JobChanged, LastLosses
from gshare.agent.jobs.spec import AdapterSpec, JobRequest
from gshare.agent.node import blobs as blobs_module
from gshare.agent.node import durable, records
from gshare.agent.node.attempt import _still_prepared
from gshare.agent.node.blobs import BlobStore
from gshare.agent.node.bundles import MAX_BUNDLES, Bundles
from gshare.agent.node.checks import check_owner, check_refs, local_name, owner_tag
from gshare.agent.node.durable import DiskFull, write_struct
from gshare.agent.node.journal import RESTART_JUMP, NodeJournal
from gshare.agent.node.models import collect_models, model_hash, model_path, place_model
from gshare.agent.node.prepare_job import PreparedJob
from gshare.agent.node.progress import advance, found_on_disk
from gshare.agent.node.protocol import (
    CHUNK_BYTES,
    MAX_LOG_BYTES,
    AttemptEvent,
    AttemptStatus,
    BlobRef,
    LogText,
    ModelRef,
    NodeMessage,
    StartAttempt,
)
from gshare.agent.node.records import AttemptRecord, Fences, make_attempt, new_record, read_records
from gshare.agent.node.samples import read_log, read_samples
from gshare.agent.node.state_dir import open_state_dir
from gshare.agent.service.output_dir import RunRecord
from gshare.agent.service.wire import WireError, encode

DATA = bytes(range(256)) * 3000  # three chunks
HASH = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    (tmp_path / "blobs").mkdir()
    return BlobStore(tmp_path / "blobs")


def push(store: BlobStore, data: bytes, name: str) -> BlobRef:
    digest = hashlib.sha256(data).hexdigest()
    for offset in range(0, max(1, len(data)), CHUNK_BYTES):
        store.put(digest, offset, len(data), data[offset : offset + CHUNK_BYTES])
    return BlobRef(name=name, sha256=digest, size=len(data))


def full(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# ---------------------------------------------------------------------- blobs


def test_a_blob_in_chunks_resumed_by_another_process(store: BlobStore, tmp_path: Path) -> None:
    assert store.held(HASH) == (0, False)
    assert store.put(HASH, 0, len(DATA), DATA[:1000]) == (1000, False)
    later = BlobStore(tmp_path / "blobs")  # knows nothing of the hash so far
    assert later.held(HASH) == (1000, False)
    # Sent again, and overlapping: what is there is not written twice.
    assert later.put(HASH, 0, len(DATA), DATA[:1000]) == (1000, False)
    assert later.put(HASH, 500, len(DATA), DATA[500:2000]) == (2000, False)
    for offset in range(2000, len(DATA), CHUNK_BYTES):
        reply = later.put(HASH, offset, len(DATA), DATA[offset : offset + CHUNK_BYTES])
    assert reply == (len(DATA), True)
    assert (tmp_path / "blobs" / HASH).read_bytes() == DATA
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == [HASH]
    assert store.put(HASH, 0, len(DATA), DATA[:10]) == (len(DATA), True)


@pytest.mark.parametrize("data", [b"", b"x"])
def test_small_blobs(store: BlobStore, data: bytes) -> None:
    digest = hashlib.sha256(data).hexdigest()
    assert store.put(digest, 0, len(data), data) == (len(data), True)
    assert store.held(digest) == (len(data), True)


def test_a_wrong_hash_is_dropped_and_can_be_sent_anew(store: BlobStore, tmp_path: Path) -> None:
    store.put(HASH, 0, 2000, DATA[:1000])
    with pytest.raises(UsageError, match="another hash"):
        store.put(HASH, 1000, 2000, DATA[1000:2000])
    assert not list((tmp_path / "blobs").iterdir())
    assert push(store, DATA, "a").sha256 == HASH


@pytest.mark.parametrize(
    ("sha256", "offset", "total", "data", "message"),
    [
        ("../" + "0" * 61, 0, 1, b"x", "no SHA-256"),
        (HASH.upper(), 0, 1, b"x", "no SHA-256"),
        (HASH, 5, 100, b"x", "0 bytes are here"),
        (HASH, 0, 10, b"x" * 11, "inside its file"),
        (HASH, -1, 10, b"x", "inside its file"),
        (HASH, 0, 1 << 50, b"x", "total"),
        (HASH, 0, 1 << 30, b"x" * (CHUNK_BYTES + 1), "at most"),
    ],
)
def test_bad_chunks(
    store: BlobStore, tmp_path: Path, sha256: str, offset: int, total: int, data: bytes, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        store.put(sha256, offset, total, data)
    assert not list((tmp_path / "blobs").iterdir())


def test_room_is_asked_for_before_the_first_byte(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "free_bytes", lambda path: len(DATA) - 1)
    with pytest.raises(DiskFull, match="free some there"):
        store.put(HASH, 0, len(DATA), DATA[:1000])
    assert not list((tmp_path / "blobs").iterdir())
    monkeypatch.setattr(durable, "free_bytes", lambda path: len(DATA))
    assert push(store, DATA, "a").size == len(DATA)


def test_a_disk_that_fills_up_in_a_chunk_keeps_the_chunks_before(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(HASH, 0, len(DATA), DATA[:1000])
    write = os.write

    def half(fd: int, data: bytes) -> int:
        if len(data) <= 250:
            full()
        return write(fd, bytes(data)[: len(data) // 2])

    with monkeypatch.context() as broken:
        broken.setattr(durable.os, "write", half)
        with pytest.raises(DiskFull):
            store.put(HASH, 1000, len(DATA), DATA[1000:2000])
    assert store.held(HASH) == (1000, False)
    for offset in range(1000, len(DATA), CHUNK_BYTES):
        reply = store.put(HASH, offset, len(DATA), DATA[offset : offset + CHUNK_BYTES])
    assert reply == (len(DATA), True)


def test_what_is_linked_or_was_asked_for_today_is_kept(store: BlobStore, tmp_path: Path) -> None:
    used, unused = push(store, b"used", "data.jsonl"), push(store, b"unused", "b")
    store.link([used], tmp_path / "attempt")
    now = (tmp_path / "blobs" / unused.sha256).stat().st_mtime
    assert store.collect(now + blobs_module.KEEP_SECONDS - 10) == 0
    assert store.collect(now + blobs_module.KEEP_SECONDS + 10) == 1
    assert store.held(unused.sha256) == (0, False)
    assert store.held(used.sha256) == (4, True)
    (tmp_path / "blobs" / used.sha256).unlink()
    assert (tmp_path / "attempt" / "data.jsonl").read_bytes() == b"used"


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name",
    [
        *("../x", "a/../b", "/a", "a//b", "a/", ".a", "a/.b", "-rf", "a\\b", "a\nb", "a\x1bb", "", "a" * 201),
        *("a/b/c/d/e", "é" * 101, "\ud800"),
    ],
)
def test_names_that_are_no_paths_here(name: str) -> None:
    with pytest.raises(UsageError, match="file "):
        check_refs([BlobRef(name=name, sha256=HASH, size=1)], what="data")


def test_names_that_people_use() -> None:
    names = [
        "my data (1).jsonl",
        "données.csv",
        "model-00001-of-00002.safetensors",
        "checkpoint-10/state.json",
    ]
    assert check_refs([BlobRef(name=name, sha256=HASH, size=2) for name in names], what="data") == 8


@pytest.mark.parametrize("names", [["a", "a"], ["a", "a/b"], ["a/b/c", "a/b"]])
def test_files_that_cannot_lie_in_one_directory(names: list[str]) -> None:
    with pytest.raises(UsageError):
        check_refs([BlobRef(name=name, sha256=HASH, size=1) for name in names], what="model")


def test_names_inside_a_trainer_tell_owners_apart_and_stay_short() -> None:
    assert local_name("owner-one", "a") != local_name("owner-two", "a")
    long = [local_name("owner-one", "x" * 63 + end) for end in "ab"]
    assert long[0] != long[1]
    assert max(map(len, long)) <= 64
    assert len(owner_tag("../../x")) == 8
    with pytest.raises(UsageError, match="owner"):
        check_owner("../../x")


# ---------------------------------------------------------------------- models and attempts


def ask(store: BlobStore, **fields: object) -> StartAttempt:
    values: dict[str, object] = {
        "id": 1,
        "job": "a",
        "attempt": 1,
        "spec": AdapterSpec(name="a", data="x", output_dir="y"),
        "model": ModelRef(name="m", path="/models/m"),
        "base_dtype": "fp32",
        "data": push(store, b"data", "train.jsonl"),
    }
    return StartAttempt(**{**values, **fields})  # type: ignore[arg-type]


def test_a_pushed_model_is_shared_and_kept_while_used(store: BlobStore, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    files = [push(store, b"{}", "config.json"), push(store, b"weights", "model.safetensors")]
    model = ModelRef(name="m", files=files)
    for _ in range(2):
        place_model(model, models, store)
    directory = Path(model_path(model, models))
    assert (directory / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in models.iterdir()] == [model_hash(model)]
    assert model_hash(ModelRef(name="other", files=files[::-1])) == model_hash(model)
    gguf = ModelRef(name="g", files=[BlobRef(name="q.gguf", sha256=HASH, size=1)])
    assert model_path(gguf, models).endswith("/q.gguf")
    late = directory.stat().st_mtime + 8 * 24 * 3600
    assert collect_models(models, {model_hash(model)}, late) == 0
    assert collect_models(models, set(), late) == 1


def test_an_attempt_appears_whole_or_not_at_all(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = tmp_path / "attempts"
    attempts.mkdir()
    record = new_record("owner-one", ask(store), "name")
    with monkeypatch.context() as broken:
        broken.setattr(records, "write_new", full)
        with pytest.raises(DiskFull):
            make_attempt(record, attempts, store)
    assert not list(attempts.iterdir())
    directory = make_attempt(record, attempts, store)
    assert (directory / "data" / "train.jsonl").read_bytes() == b"data"
    assert list(read_records(attempts)) == [(directory, record)]


def test_a_pushed_run_gets_this_nodes_paths(store: BlobStore, tmp_path: Path) -> None:
    attempts = tmp_path / "attempts"
    attempts.mkdir()
    spec = AdapterSpec(name="there", data="/there/d", output_dir="/there/out", r=8)
    run = RunRecord(model="m", base_dtype="fp32", spec=spec, base="b", train_hash="t")
    pushed = push(store, msgspec.json.encode(run), "run.json")
    metrics = push(store, b'{"step": 1}\n', "metrics.jsonl")
    state = push(store, b"{}", "checkpoint-1/state.json")
    record = new_record("owner-one", ask(store, checkpoint=[pushed, metrics, state]), "here")
    out = make_attempt(record, attempts, store) / "out"
    moved = msgspec.json.decode((out / "run.json").read_bytes(), type=RunRecord)
    assert (moved.base, moved.train_hash, moved.spec.name) == ("b", "t", "here")
    assert moved.spec.output_dir == str(out)
    # A trainer appends to it: must not be the blob.
    with open(out / "metrics.jsonl", "ab") as file:
        file.write(b"more")
    assert store.held(metrics.sha256) == (metrics.size, True)
    assert (out / "checkpoint-1" / "state.json").exists()


def test_fences_survive_and_only_rise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fences = Fences(tmp_path / "fences.json")
    assert fences.highest("o", "a") == 0
    fences.raise_to("o", "a", 3)
    fences.raise_to("o", "a", 2)
    assert Fences(tmp_path / "fences.json").highest("o", "a") == 3
    monkeypatch.setattr(durable, "write_new", full)
    with pytest.raises(OSError, match="space"):
        fences.raise_to("o", "a", 9)
    assert fences.highest("o", "a") == 3
    monkeypatch.undo()
    monkeypatch.setattr(records, "FENCES_KEPT", 2)
    for job in "bc":
        fences.raise_to("o", job, 1)
    assert [fences.highest("o", job) for job in "abc"] == [0, 1, 1]


def test_records_that_cannot_be_read_are_told(store: BlobStore, tmp_path: Path) -> None:
    attempts = tmp_path / "attempts"
    (attempts / "empty-1").mkdir(parents=True)
    (attempts / "torn-1").mkdir()
    (attempts / "torn-1" / "attempt.json").write_text('{"owner": "o"')
    (attempts / ".new-x").mkdir()
    found = dict(read_records(attempts))
    assert all(isinstance(what, str) for what in found.values())
    assert {path.name for path in found} == {"empty-1", "torn-1"}


def test_a_record_is_written_whole(tmp_path: Path, store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    record = new_record("o", ask(store), "n")
    write_struct(tmp_path / "attempt.json", record)
    before = (tmp_path / "attempt.json").read_bytes()
    monkeypatch.setattr(durable, "write_all", full)
    with pytest.raises(OSError, match="space"):
        write_struct(tmp_path / "attempt.json", msgspec.structs.replace(record, paused=True))
    assert (tmp_path / "attempt.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt.json", "blobs"]
    assert msgspec.json.decode(before, type=AttemptRecord) == record


def test_what_was_prepared_is_used_again_only_while_it_is_there(tmp_path: Path) -> None:
    for name in ("model", "tokens"):
        (tmp_path / name).mkdir()
    spec = AdapterSpec(name="a", data="x", output_dir="y")
    request = JobRequest(spec=spec, train_store=str(tmp_path / "tokens"), train_hash="0" * 64)
    prepared = PreparedJob(model_dir=str(tmp_path / "model"), request=request, notes=["said once"])
    path = tmp_path / "prepared.json"
    assert _still_prepared(path) is None
    write_struct(path, prepared)
    assert _still_prepared(path) == msgspec.structs.replace(prepared, notes=[])
    (tmp_path / "tokens").rmdir()
    assert _still_prepared(path) is None
    (tmp_path / "tokens").mkdir()
    path.write_bytes(path.read_bytes()[:40])
    assert _still_prepared(path) is None


# ---------------------------------------------------------------------- state directory


def test_the_state_directory_is_ours_alone_and_keeps_its_identity(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o755)
    state = open_state_dir(tmp_path / "s")
    assert state.path.stat().st_mode & 0o777 == 0o700
    assert state.identity() == open_state_dir(tmp_path / "s").identity()
    lock = state.lock()
    with pytest.raises(RetryLater, match="an agent runs there already"):
        open_state_dir(tmp_path / "s").lock()
    os.close(lock)
    os.close(state.lock())


def test_a_state_directory_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        open_state_dir(tmp_path / "file")
    with pytest.raises(GshareError, match="--state-dir"):
        open_state_dir(tmp_path / "file" / "below")


def test_leftovers_of_a_killed_agent_go(tmp_path: Path) -> None:
    state = open_state_dir(tmp_path)
    for path in (
        state.attempts / ".new-1",
        state.models / ".new-2",
        state.bundles / "b",
        state.attempts / "a-b-1",
    ):
        path.mkdir()
    state.clear_leftovers()
    assert [path.name for path in state.attempts.iterdir()] == ["a-b-1"]
    assert not list(state.models.iterdir())
    assert not list(state.bundles.iterdir())


# ---------------------------------------------------------------------- journal


def event(step: int, job: str = "a") -> AttemptEvent:
    evaluated = Evaluated(job=job, step=step, val_loss=math.nan, label_tokens=1, best=False)
    return AttemptEvent(owner="o", attempt=1, event=evaluated, time=float(step))


def test_the_journal_goes_on_after_a_restart_and_never_gives_a_number_twice(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = NodeJournal(path)
    assert [journal.append(event(step)) for step in range(3)] == [1, 2, 3]
    journal.close()
    with open(path, "ab") as file:
        file.write(b'{"torn": ')
    again = NodeJournal(path)
    assert again.journal_id == journal.journal_id
    # A power cut may have taken lines that a client has seen: their numbers must not come again.
    assert again.append(event(9)) == 3 + RESTART_JUMP + 1
    read, seq = [], 0
    while (found := again.after(seq)) is not None:
        seq, said = found
        assert isinstance(said, AttemptEvent)
        assert isinstance(said.event, Evaluated)
        assert math.isnan(said.event.val_loss)
        read.append(said.event.step)
    assert read == [0, 1, 2, 9]
    third = NodeJournal(path)
    assert third.after(3 + RESTART_JUMP) is not None
    assert third.start_of(third.journal_id, 3) == (3, False)


def test_a_client_that_missed_some_is_told(tmp_path: Path) -> None:
    journal = NodeJournal(tmp_path / "j", keep=4)
    for step in range(10):
        journal.append(event(step))
    assert journal.start_of(journal.journal_id, 6) == (6, False)
    assert journal.start_of(journal.journal_id, 5) == (6, True)
    assert journal.start_of("another", 9) == (6, True)
    # It has seen more than this journal ever gave: the file lost some.
    assert journal.start_of(journal.journal_id, 99) == (10, True)
    fresh = NodeJournal(tmp_path / "k")
    assert fresh.start_of("", 0) == (0, False)


def test_the_journal_is_bounded_on_disk_and_in_memory(tmp_path: Path) -> None:
    journal = NodeJournal(tmp_path / "j", keep=8)
    for step in range(200):
        journal.append(event(step))
    assert len((tmp_path / "j").read_bytes().splitlines()) <= 17
    numbers, seq = [], 0
    while (found := journal.after(seq)) is not None:
        seq = found[0]
        numbers.append(seq)
    assert numbers == list(range(193, 201))
    assert NodeJournal(tmp_path / "j", keep=8).start_of(journal.journal_id, 200) == (200, False)


def test_a_full_disk_costs_lines_and_not_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = NodeJournal(tmp_path / "j")
    journal.append(event(1))
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full)
        assert journal.append(event(2)) == 2
        assert "No space" in journal.problem
    journal.append(event(3))
    assert journal.problem == ""
    kept = journal.after(1)
    assert kept is not None
    assert kept[0] == 2
    lines = [json.loads(line) for line in (tmp_path / "j").read_bytes().splitlines() if line]
    assert [line["seq"] for line in lines] == [1, 3]


def test_gaps_are_closed_without_another_event_once_the_disk_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that nothing happens on was degraded until the next job came."""
    journal = NodeJournal(tmp_path / "j")
    journal.append(event(1))
    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full)
        broken.setattr(os, "replace", full)
        journal.append(event(2))
        journal.mend()
        assert "No space" in journal.problem
        assert os.listdir(tmp_path) == ["j"]
    journal.mend()
    assert journal.problem == ""
    journal.append(event(3))
    lines = [json.loads(line) for line in (tmp_path / "j").read_bytes().splitlines() if line]
    assert [line["seq"] for line in lines] == [1, 2, 3]


def test_ends_are_found_again(tmp_path: Path) -> None:
    journal = NodeJournal(tmp_path / "j", keep=2)
    journal.append(NodeMessage(level="info", text="x", time=5.0))
    ended = JobChanged(job="a", state="completed", step=1, total_steps=1)
    journal.append(AttemptEvent(owner="o", attempt=2, event=ended, time=6.0))
    assert journal.ends() == ({("o", "a", 2)}, 0.0)
    journal.append(event(3))
    journal.append(event(4))
    assert journal.ends() == (set(), 3.0)


# ---------------------------------------------------------------------- progress, samples, bundles


def test_a_status_follows_its_events() -> None:
    status = AttemptStatus(owner="o", job="a", attempt=1, state="queued")
    last = LastLosses(loss=1.5, val_loss=None, best_val_loss=1.2)
    status = advance(status, JobChanged(job="a", state="running", step=4, total_steps=9, last=last))
    assert (status.loss, status.val_loss, status.best_val_loss, status.step) == (1.5, None, 1.2, 4)
    status = advance(status, Evaluated(job="a", step=5, val_loss=1.0, label_tokens=1, best=True))
    status = advance(status, Evaluated(job="a", step=6, val_loss=1.1, label_tokens=1, best=False))
    assert (status.best_step, status.best_val_loss, status.val_loss) == (5, 1.0, 1.1)
    for path in ("/o/checkpoint-6", "/o/best", "/o/checkpoint-x", "/o"):
        status = advance(status, CheckpointSaved(job="a", step=6, path=path))
    assert status.checkpoint_step == 6
    stopped = advance(status, JobChanged(job="a", state="stopped", step=0, total_steps=0))
    assert (stopped.step, stopped.total_steps) == (4, 9)


def publish(out: Path, name: str, files: dict[str, bytes]) -> None:
    (out / name).mkdir(parents=True)
    entries = {}
    for file, data in files.items():
        (out / name / file).write_bytes(data)
        entries[file] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (out / name / "manifest.json").write_text(json.dumps({"format": 1, "files": entries}))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    publish(out, "checkpoint-2", {"state.json": b"2"})
    publish(out, "checkpoint-10", {"state.json": b"10"})
    publish(out, "best", {"metadata.json": b'{"step": 4, "val_loss": 0.5}'})
    (out / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    return out


@pytest.fixture
def bundles(tmp_path: Path) -> Bundles:
    (tmp_path / "bundles").mkdir()
    return Bundles(tmp_path / "bundles")


def read_all(bundles: Bundles, bundle: str, name: str) -> bytes:
    data = b""
    while chunk := bundles.read("o", bundle, name, len(data), 3):
        data += chunk
    return data


def test_a_bundle_stays_as_it_was(bundles: Bundles, out: Path, tmp_path: Path) -> None:
    bundle = bundles.pin("o", out, "checkpoint", 11)
    assert bundle.step == 10
    (out / "checkpoint-10" / "state.json").unlink()
    with open(out / "metrics.jsonl", "ab") as file:
        file.write(b'ep": 3}\n')
    assert read_all(bundles, bundle.id, "checkpoint-10/state.json") == b"10"
    assert read_all(bundles, bundle.id, "metrics.jsonl") == b'{"step": 1}\n{"step": 2}\n'
    assert "best/metadata.json" in bundle.files
    for name, ref in bundle.files.items():
        data = read_all(bundles, bundle.id, name)
        assert (len(data), hashlib.sha256(data).hexdigest()) == (ref.size, ref.sha256)
    bundles.release("o", bundle.id)
    assert not list((tmp_path / "bundles").iterdir())


def test_a_broken_checkpoint_is_passed_over(bundles: Bundles, out: Path) -> None:
    (out / "checkpoint-10" / "state.json").write_bytes(b"longer")
    assert bundles.pin("o", out, "checkpoint", 0).step == 2
    (out / "checkpoint-11").symlink_to(out / "checkpoint-2")
    manifest = {"format": 1, "files": {"../../secret": {"size": 1, "sha256": HASH}}}
    publish(out, "checkpoint-12", {"state.json": b"12"})
    (out / "checkpoint-12" / "manifest.json").write_text(json.dumps(manifest))
    assert bundles.pin("o", out, "checkpoint", 0).step == 2


def test_best_and_final(bundles: Bundles, out: Path) -> None:
    best = bundles.pin("o", out, "best", 11)
    assert (best.step, best.val_loss) == (4, 0.5)
    with pytest.raises(UsageError, match="has not completed"):
        bundles.pin("o", out, "final", 11)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (out / name).write_text(name)
    final = bundles.pin("o", out, "final", 11)
    assert (final.step, final.val_loss) == (11, 0.5)
    assert set(final.files) == {"adapter_config.json", "adapter_model.safetensors", "metrics.jsonl"}


def test_a_bundle_is_its_owners_and_names_only_its_files(bundles: Bundles, out: Path, tmp_path: Path) -> None:
    bundle = bundles.pin("o", out, "best", 0)
    for owner, identity, name, offset, length in (
        ("p", bundle.id, "best/metadata.json", 0, 1),
        ("o", "../" + bundle.id, "best/metadata.json", 0, 1),
        ("o", bundle.id, "../../out/metrics.jsonl", 0, 1),
        ("o", bundle.id, "best/metadata.json", -1, 1),
        ("o", bundle.id, "best/metadata.json", 0, CHUNK_BYTES + 1),
    ):
        with pytest.raises(UsageError, match="bundle"):
            bundles.read(owner, identity, name, offset, length)
    bundles.expire(bundle.expires - 1)
    assert bundles.read("o", bundle.id, "best/metadata.json", 0, 1) == b"{"
    bundles.expire(bundle.expires)
    with pytest.raises(UsageError, match="pin it again"):
        bundles.read("o", bundle.id, "best/metadata.json", 0, 1)
    assert not list((tmp_path / "bundles").iterdir())
    for _ in range(MAX_BUNDLES):
        bundles.pin("o", out, "best", 0)
    with pytest.raises(RetryLater, match="release some"):
        bundles.pin("o", out, "best", 0)


def test_a_full_disk_leaves_no_bundle(
    bundles: Bundles, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", full)
    with pytest.raises(DiskFull):
        bundles.pin("o", out, "best", 0)
    assert not list((tmp_path / "bundles").iterdir())


def test_samples_and_logs(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\nnot json\n[]\n{"step": 2}\n{"step": 3}\n{"step": 4')
    assert read_samples(path, 1, 10) == (['{"step": 2}', '{"step": 3}'], False)
    assert read_samples(path, 0, 2) == (['{"step": 1}', '{"step": 2}'], True)
    assert read_samples(tmp_path / "none", 0, 2) == ([], False)
    with pytest.raises(UsageError, match="limit"):
        read_samples(path, 0, 10**9)
    assert read_log(path, 4) == 'p": 4'[-4:]
    assert read_log(tmp_path / "none", 10) == ""
    for size in (0, MAX_LOG_BYTES + 1):
        with pytest.raises(UsageError, match="max_bytes"):
            read_log(path, size)


def test_the_longest_log_fits_a_frame_even_when_it_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff" * (MAX_LOG_BYTES + 1))
    text = read_log(path, MAX_LOG_BYTES)
    assert len(text) == MAX_LOG_BYTES
    assert len(encode(LogText(reply_to=1, text=text))) > 3 * MAX_LOG_BYTES
    with pytest.raises(WireError):  # the next power of two would not
        encode(LogText(reply_to=1, text=2 * text))


def test_what_a_run_left_is_found_again(out: Path) -> None:
    status = AttemptStatus(owner="o", job="a", attempt=1, state="queued", checkpoint_step=3)
    found = found_on_disk(status, out)
    assert (found.checkpoint_step, found.best_step, found.best_val_loss) == (10, 4, 0.5)
    assert found_on_disk(status, out / "nothing") == status
