"""Results in an output directory: whole, once, over nothing else, whatever is in the way."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from fake_agent import sha
from gshare.coordinator import blobs as blobs_module
from gshare.coordinator import results as results_module
from gshare.coordinator.blobs import Damaged, DiskFull
from gshare.coordinator.results import OutputTaken, Result, place_results

FILES = {
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"weights" * 100,
    "best/adapter_model.safetensors": b"better" * 100,
    "best/metadata.json": b'{"val_loss": 1}',
    "metrics.jsonl": b"",
}


def results(tmp_path: Path, files: dict[str, bytes] = FILES) -> list[Result]:
    folder = tmp_path / "blobs"
    folder.mkdir(exist_ok=True)
    made = []
    for name, data in files.items():
        (folder / sha(data)).write_bytes(data)
        made.append(Result(name, folder / sha(data), sha(data), len(data)))
    return made


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "out").glob(".gshare-*")]


def test_a_new_directory_appears_whole(tmp_path: Path) -> None:
    place_results(tmp_path / "out" / "a", results(tmp_path), mark="m")
    assert contents(tmp_path / "out" / "a") == FILES
    assert leftovers(tmp_path) == []


def test_the_second_call_changes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out" / "a"
    place_results(out, results(tmp_path), mark="m")
    before = {path: path.stat().st_ino for path in out.rglob("*")}
    for path in (tmp_path / "blobs").iterdir():
        path.unlink()  # not even the sources are needed
    made = [Result(n, tmp_path / "gone", sha(d), len(d)) for n, d in FILES.items()]
    place_results(out, made, mark="m")
    assert {path: path.stat().st_ino for path in out.rglob("*")} == before


def test_what_else_lies_there_stays(tmp_path: Path) -> None:
    out = tmp_path / "out" / "a"
    out.mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    place_results(out, results(tmp_path), mark="m")
    assert contents(out) == {**FILES, "notes.txt": b"mine"}


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "best/metadata.json"])
def test_another_runs_file_is_never_replaced(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out" / "a"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_bytes(b"of another run")
    with pytest.raises(OutputTaken, match="of another run; move"):
        place_results(out, results(tmp_path), mark="m")
    assert contents(out) == {name: b"of another run"}
    assert leftovers(tmp_path) == []
    (out / name).unlink()
    place_results(out, results(tmp_path), mark="m")
    assert contents(out) == FILES


def test_nothing_is_put_beside_a_trainer_that_writes_there(tmp_path: Path) -> None:
    out = tmp_path / "out" / "a"
    out.mkdir(parents=True)
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OutputTaken, match="a trainer is writing"):
            place_results(out, results(tmp_path), mark="m")
        assert contents(out) == {}
    place_results(out, results(tmp_path), mark="m")
    assert contents(out) == FILES


def test_killed_at_any_file_operation_the_next_call_ends_with_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a new directory and into one that holds something: never a part of a file, in the end all."""
    for number, fresh in [(n, fresh) for fresh in (True, False) for n in range(12)]:
        out = tmp_path / "out" / f"{fresh}-{number}"
        if not fresh:
            out.mkdir(parents=True)
            (out / "notes.txt").write_text("mine")
        calls = 0

        class Killed(BaseException):
            pass

        def dying(real: Any, number: int = number) -> Any:
            def operation(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > number:
                    raise Killed
                return real(*arguments, **options)

            return operation

        with monkeypatch.context() as patch:
            for name in ("rename", "fsync"):
                patch.setattr(results_module.os, name, dying(getattr(os, name)))
            try:
                place_results(out, results(tmp_path), mark=str(out))
            except Killed:
                pass
            else:
                assert number > 6
        kept = {} if fresh else {"notes.txt": b"mine"}
        there = contents(out) if out.exists() else {}
        assert there.items() <= {**FILES, **kept}.items()
        if fresh:
            assert there in ({}, FILES)
        place_results(out, results(tmp_path), mark=str(out))
        assert contents(out) == {**FILES, **kept}
    assert leftovers(tmp_path) == []


def test_a_damaged_source_is_noticed(tmp_path: Path) -> None:
    made = results(tmp_path)
    made[1].source.write_bytes(b"Weights" * 100)
    with pytest.raises(Damaged):
        place_results(tmp_path / "out" / "a", made, mark="m")
    assert not (tmp_path / "out" / "a").exists()
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("x" * 226, id="226 bytes"),
        pytest.param("x" * 227, id="227 bytes"),
        pytest.param("x" * 255, id="255 bytes"),
        pytest.param("ü" * 127, id="UTF-8"),
        pytest.param("\udcff" * 255, id="no UTF-8"),
    ],
)
def test_a_directory_of_any_name_that_the_disk_takes(tmp_path: Path, name: str) -> None:
    """The temporary name beside it is longer than the rest of such a name allows."""
    place_results(tmp_path / "out" / name, results(tmp_path), mark="m")
    assert contents(tmp_path / "out" / name) == FILES
    assert leftovers(tmp_path) == []
    with pytest.raises(OutputTaken, match="File name too long"):  # the control: the disk does not take it
        place_results(tmp_path / "out" / "y" / ("x" * 256), results(tmp_path), mark="m")


def test_directories_whose_long_names_begin_alike_are_staged_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged: list[Path] = []

    def stage(where: Path, results: object) -> None:
        staged.append(where)
        where.mkdir()

    monkeypatch.setattr(results_module, "_stage", stage)
    for end in ("a", "b", "a"):
        place_results(tmp_path / "out" / ("x" * 240 + end), results(tmp_path), mark="m")
    one, two, again = staged
    assert one == again != two


def test_what_has_to_be_free_is_the_size_of_the_result_and_little_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 0

    def statvfs(path: object) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, 1 << 20, free // 4096, free // 4096, 9, 9, 9, 0, 255))

    monkeypatch.setattr(blobs_module.os, "statvfs", statvfs)
    for size, enough in ((100, 64 << 10), (1 << 20, (1 << 20) + (128 << 10)), (64 << 20, 69 << 20)):
        made = results(tmp_path, {"adapter_model.safetensors": bytes(size)})
        out = tmp_path / "out" / str(size)
        free = size
        with pytest.raises(DiskFull, match=r"KiB have to be free, but only [\d,]+ KiB are; free space there"):
            place_results(out, made, mark="m")
        assert not out.exists()
        free = enough
        place_results(out, made, mark="m")
        assert out.exists()


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(results_module, "_room_for", lambda results: 1 << 62)
        with pytest.raises(DiskFull, match="free space"):
            place_results(tmp_path / "out" / "a", results(tmp_path), mark="m")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(results_module.os, "fsync", full)
        with pytest.raises(DiskFull, match="No space left"):
            place_results(tmp_path / "out" / "a", results(tmp_path), mark="m")
    assert contents(tmp_path / "out") == {}
    assert leftovers(tmp_path) == []
    place_results(tmp_path / "out" / "a", results(tmp_path), mark="m")
    assert contents(tmp_path / "out" / "a") == FILES
