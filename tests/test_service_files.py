"""The files around a trainer: journal, breadcrumb, registry, output directories, environment."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from gshare.agent.errors import GshareError, RetryLater, UsageError
from gshare.agent.jobs.events import Evaluated, JobChanged
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.service import registry
from gshare.agent.service.base_identity import base_identity
from gshare.agent.service.breadcrumb import _SLOT, FILE_NAME, Breadcrumb, read_breadcrumb
from gshare.agent.service.environment import (
    _has_avx512,
    _maps_pages,
    pages_are_mapped,
    trainer_environment,
)
from gshare.agent.service.hold import Joined
from gshare.agent.service.journal import Journal, read_journal
from gshare.agent.service.output_dir import LOCK_FILE, OutputClaim, RunRecord, check_output_dir
from gshare.agent.service.protocol import JobStatus


def change(step: int) -> JobChanged:
    return JobChanged(job="a", state="running", step=step, total_steps=9)


# ---------------------------------------------------------------------- journal


def test_the_journal_is_bounded_in_memory_and_on_disk(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "id", keep=10)
    for step in range(1, 1001):
        assert journal.append(change(step)) == step
        assert len((tmp_path / "j").read_bytes().splitlines()) <= 20
    assert (journal.first_seq, journal.last_seq) == (991, 1000)
    assert journal.after(0) == (991, change(991))  # those before are gone
    assert journal.after(995) == (996, change(996))
    assert journal.after(1000) is None
    assert read_journal(tmp_path / "j", after_seq=998) == [change(999), change(1000)]


def test_a_torn_journal_is_read_up_to_the_tear_and_nan_comes_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", "id")
    journal.append(Evaluated(job="a", step=1, val_loss=math.nan, label_tokens=1, best=False))
    journal.append(change(2))
    text = (tmp_path / "j").read_text()
    assert "NaN" not in text
    (tmp_path / "j").write_text(text[:-10] + "\nnot json\n[]\n{}\n")
    (event,) = read_journal(tmp_path / "j")
    assert isinstance(event, Evaluated)
    assert math.isnan(event.val_loss)
    assert read_journal(tmp_path / "none") == []


# ---------------------------------------------------------------------- breadcrumb


def test_a_torn_breadcrumb_falls_back_to_the_one_before(tmp_path: Path) -> None:
    assert read_breadcrumb(tmp_path) == []
    crumb = Breadcrumb(tmp_path)
    assert read_breadcrumb(tmp_path) == []
    for step in range(5):
        crumb.write([("a" * 64, step), ("ü", step)])
        assert read_breadcrumb(tmp_path) == [("a" * 64, step), ("ü", step)]
    crumb.write([("b", 7)] * 1000)
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    data[6 % 2 * _SLOT + 4000] ^= 1  # the sixth write went to slot 0
    path.write_bytes(data)
    assert read_breadcrumb(tmp_path) == [("a" * 64, 4), ("ü", 4)]
    crumb.write(())
    assert read_breadcrumb(tmp_path) == []


def test_a_breadcrumb_outlives_kill_9(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from gshare.agent.service.base_identity import base_identity
from gshare.agent.service.breadcrumb import Breadcrumb
crumb = Breadcrumb(Path(sys.argv[1]))
crumb.write([("a", 1)]); crumb.write([("a", 2)])
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert read_breadcrumb(tmp_path) == [("a", 2)]


# ---------------------------------------------------------------------- registry


def test_a_runtime_directory_that_is_not_ours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "gshare").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(GshareError, match="must be a directory, not a link"):
        registry.runtime_dir()
    (tmp_path / "gshare").unlink()
    (tmp_path / "gshare").mkdir(mode=0o777)
    assert registry.runtime_dir().stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(GshareError, match="belongs to user id"):
        registry.runtime_dir()


def test_a_lock_is_seen_by_others_and_freed_by_death(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not registry.is_held(path)
    code = "import sys; from gshare.agent.service import registry; from pathlib import Path\n"
    code += "print(registry.take_lock(Path(sys.argv[1])), flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline().strip() != b"None"
    assert registry.is_held(path)
    assert registry.take_lock(path) is None
    holder.kill()
    holder.communicate()
    assert not registry.is_held(path)
    assert registry.take_lock(path) is not None


def test_records_of_ended_jobs_are_bounded_and_the_newest_of_a_name_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(registry, "FINISHED_KEPT", 10)
    for number in range(50):
        status = JobStatus(job=f"job{number % 30}", state="completed", step=number, loss=math.nan)
        registry.record_finished(registry.FinishedJob(status=status, ended=float(number), trainer_id="t"))
        assert len((tmp_path / "gshare/jobs.jsonl").read_bytes().splitlines()) <= 20
    steps = [job.status.step for job in registry.finished_jobs()]
    assert steps[:10] == list(range(49, 39, -1))
    for number in range(30):
        registry.log_path(f"t{number}").write_text("")
    assert len(list((tmp_path / "gshare/logs").iterdir())) == registry.LOGS_KEPT


# ---------------------------------------------------------------------- full disks


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_lines_of_the_journal_and_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "j", "id")
    journal.append(change(1))
    assert journal.problem == ""
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        assert journal.append(change(2)) == 2
    assert "j: No space left" in journal.problem
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))  # the last bytes of the disk
        journal.append(change(3))
    journal.append(change(4))
    assert journal.after(1) == (2, change(2))
    assert read_journal(tmp_path / "j") == [change(1), change(4)]


def test_a_full_disk_leaves_no_old_breadcrumb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crumb = Breadcrumb(tmp_path)
    crumb.write([("a", 1)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", no_space)
        crumb.write([("b", 2)])
    assert read_breadcrumb(tmp_path) == []  # and not a, which may have ended meanwhile
    crumb.write([("c", 3)])
    assert read_breadcrumb(tmp_path) == [("c", 3)]


def test_a_full_runtime_directory_is_named_and_nothing_is_left_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(GshareError, match=r"gshare/trainers: No space left.*XDG_RUNTIME_DIR"):
        registry.create_trainer_dir(registry.TrainerConfig(model="m", model_dir="/m", base_dtype="fp32"))
    assert list((tmp_path / "gshare/trainers").iterdir()) == []


def test_a_record_that_was_cut_off_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    status = JobStatus(job="a", state="running")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
        with pytest.raises(OSError, match="No space left"):
            registry.append_line(tmp_path / "l", status)
    registry.append_line(tmp_path / "l", status)
    assert registry.read_lines(tmp_path / "l", JobStatus) == [status]


def test_a_log_on_a_full_disk_ends_nobody() -> None:
    code = "from gshare.agent.service.log_stream import forgive_output\nimport sys\nforgive_output()\n"
    code += "print('x', flush=True); print('y' * 10**6); print('z', file=sys.stderr)"
    for setup, expected in ((code, 0), (code.replace("forgive_output()", "pass"), 1)):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([sys.executable, "-c", setup], stdout=full, stderr=full, check=False)
        assert (done.returncode != 0) == expected


# ---------------------------------------------------------------------- output directories


def record(tmp_path: Path, **changes: object) -> RunRecord:
    spec = AdapterSpec(
        name="a", data="d.jsonl", output_dir=str(tmp_path / "new" / "out"), lora_alpha=32, seed=0
    )
    run = RunRecord(model="/models/m", base_dtype="bf16", spec=spec, train_hash="1" * 64)
    outer = {key: value for key, value in changes.items() if key in RunRecord.__struct_fields__}
    inner = {key: value for key, value in changes.items() if key not in outer}
    return msgspec.structs.replace(run, spec=msgspec.structs.replace(spec, **inner), **outer)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The directory of a run that has left a checkpoint."""
    claim = OutputClaim(record(tmp_path), resume=False)
    (claim.directory / "checkpoint-5").mkdir()
    claim.release()
    return claim.directory


@pytest.mark.parametrize(
    ("changes", "resume", "says"),
    [
        ({}, False, "already holds this run .* --resume"),
        ({"r": 8}, False, "another run .*r: 16 → 8"),
        ({"base_dtype": "nf4"}, False, "base_dtype: bf16 → nf4"),
        ({"r": 8}, True, "cannot continue as asked: r: 16 → 8"),
        ({"learning_rate": 1.0, "max_steps": 7}, True, "as asked: learning_rate: 0.0002 → 1.0;"),
        ({"model": "/models/other"}, True, "model: /models/m → /models/other"),
        ({"train_hash": "2" * 64}, True, "training data: tokens 1111"),
        ({"val_fraction": 0.5}, True, "val_fraction"),
        ({}, True, None),
        ({"max_steps": 99, "save_steps": 1}, True, None),
        ({"model": "/moved/m", "data": "moved.jsonl"}, True, None),
        ({"train_hash": None}, True, None),
        ({"base": "b" * 64}, True, None),  # a record from before `base` was kept: by name
        ({"base": "b" * 64, "model": "/models/other"}, True, "model: /models/m → /models/other"),
    ],
)
def test_a_used_directory(
    tmp_path: Path, finished: Path, changes: dict[str, object], resume: bool, says: str | None
) -> None:
    before = sorted(finished.iterdir()), (finished / "run.json").read_bytes()
    run = record(tmp_path, **changes)
    if says is None:
        check_output_dir(run, resume=resume)
    else:
        with pytest.raises(UsageError, match=says):
            OutputClaim(run, resume=resume)
    assert (sorted(finished.iterdir()), (finished / "run.json").read_bytes()) == before


def write_model(directory: Path, tensors: dict[str, bytes], **config: object) -> Path:
    """A safetensors model directory, every tensor in one file of its own."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"hidden_size": 4, **config}))
    for name, data in tensors.items():
        header = {name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
        text = json.dumps(header).encode()
        (directory / f"{name}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return directory


def test_a_base_is_known_by_its_content(tmp_path: Path) -> None:
    tensors = {"a": b"1" * 10_000, "b": b"2" * 100}
    base = base_identity(write_model(tmp_path / "x" / "m", tensors))
    assert base is not None
    moved = write_model(tmp_path / "moved", tensors, _name_or_path="moved", transformers_version="9")
    assert base_identity(moved) == base
    (moved / "a.safetensors").rename(moved / "model-00002.safetensors")
    assert base_identity(moved) == base
    others = [
        write_model(tmp_path / "y" / "m", {**tensors, "a": b"3" * 10_000}),
        write_model(tmp_path / "z" / "m", {**tensors, "b": b"2" * 99 + b"3"}),
        write_model(tmp_path / "c" / "m", tensors, rope_theta=1),
        write_model(tmp_path / "n" / "m", {"a": tensors["a"]}),
    ]
    assert len({base, *map(base_identity, others)}) == 5
    (moved / "b.safetensors").write_bytes(b"x")
    assert base_identity(moved) is None
    assert base_identity(tmp_path / "none") is None


def test_a_run_is_not_continued_on_another_base_of_the_same_name(tmp_path: Path) -> None:
    claim = OutputClaim(record(tmp_path, base="1" * 64), resume=False)
    (claim.directory / "checkpoint-5").mkdir()
    claim.release()
    with pytest.raises(UsageError, match=r"cannot continue as asked: model: .*other weights"):
        check_output_dir(record(tmp_path, base="2" * 64, model="/elsewhere/m"), resume=True)
    check_output_dir(record(tmp_path, base="1" * 64, model="/elsewhere/renamed"), resume=True)
    # Before the model is found nothing can be said; when nothing can be told at all, the name counts.
    check_output_dir(record(tmp_path, train_hash=None, model="/elsewhere/renamed"), resume=True)
    with pytest.raises(UsageError, match="model: "):
        check_output_dir(record(tmp_path, model="/elsewhere/renamed"), resume=True)


def test_adapter_files_that_nobody_knows_are_never_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    out.mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    check_output_dir(record(tmp_path), resume=False)  # what is no result is nobody's run
    (out / "adapter_model.safetensors").write_text("theirs")
    for resume in (False, True):
        with pytest.raises(UsageError, match=r"adapter_model.safetensors, which is not from a run of gshare"):
            OutputClaim(record(tmp_path), resume=resume)
    assert not (out / LOCK_FILE).exists()
    (out / "run.json").write_text("{")
    with pytest.raises(UsageError, match=r"run.json is not one that gshare wrote"):
        check_output_dir(record(tmp_path), resume=True)


def test_a_directory_is_claimed_by_one(tmp_path: Path) -> None:
    first = OutputClaim(record(tmp_path), resume=False)
    with pytest.raises(RetryLater, match="another trainer is writing"):
        OutputClaim(record(tmp_path), resume=True)
    (first.directory / "checkpoint-5").mkdir()
    with pytest.raises(RetryLater, match="another trainer is writing"):  # and no advice to --resume
        OutputClaim(record(tmp_path), resume=False)
    first.release()
    OutputClaim(record(tmp_path), resume=True).release()


def test_a_refused_job_takes_its_traces_along_and_nobody_elses(tmp_path: Path, finished: Path) -> None:
    OutputClaim(record(tmp_path), resume=True).undo()
    assert (finished / "run.json").exists()
    other = record(tmp_path, output_dir=str(tmp_path / "x"))
    OutputClaim(other, resume=False).undo()
    assert not (tmp_path / "x").exists()


def test_an_output_dir_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output_dir in ("file", "file/below"):
        with pytest.raises(UsageError, match="is a file"):
            check_output_dir(record(tmp_path, output_dir=str(tmp_path / output_dir)), resume=False)


# ---------------------------------------------------------------------- environment


def test_pages_are_mapped_but_where_drivers_are_known_to_refuse_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = tmp_path / "none"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _maps_pages("6.8.0-31-generic", none)
    assert not _maps_pages("5.15.90.1-microsoft-standard-WSL2", none)
    assert not _maps_pages("6.8.0-31-generic", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-8f3d")
    assert not _maps_pages("6.8.0-31-generic", none)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    for value, mapped in (("backend:native,expandable_segments:True", True), ("backend:native", False)):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", value)
        assert pages_are_mapped() is mapped


def test_the_environment_sets_strict_mkl_whatever_the_caller_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    environment = trainer_environment()
    assert environment["MKL_CBWR"] in ("AVX512,STRICT", "AVX2,STRICT")
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= int(trainer_environment()["OMP_NUM_THREADS"]) <= len(os.sched_getaffinity(0))
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx2 avx512f\n")
    assert _has_avx512(cpuinfo)
    cpuinfo.write_text("flags\t\t: fpu avx2\nbugs: avx512f\n")
    assert not _has_avx512(cpuinfo)
    assert not _has_avx512(tmp_path / "none")


@pytest.mark.parametrize("own", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("said", ["", "backend:native"])
def test_the_allocator_maps_pages_unless_told(own: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {own: said})
    told = {name: value for name, value in trainer_environment().items() if "ALLOC" in name}
    assert told == ({} if own and said else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_records_are_strict_json(tmp_path: Path) -> None:
    registry.append_line(tmp_path / "l", JobStatus(job="a", state="running", loss=math.inf))
    assert json.loads((tmp_path / "l").read_text(), parse_constant=pytest.fail)["loss"] is None


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("info: base loaded\n", "it left no exit code"),
        ("info: base loaded\nMemoryError\n", "it left no exit code: MemoryError"),
        ("", "it left no exit code"),
    ],
)
def test_a_line_about_what_went_well_is_no_reason_of_a_death(tmp_path: Path, log: str, says: str) -> None:
    (tmp_path / "log").write_text(log)
    assert Joined(tmp_path, tmp_path / "log", -1).how_it_died(None) == says
