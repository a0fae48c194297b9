"""The wheel that nodes get: the same files as a built one, the same bytes each time."""

from __future__ import annotations

import csv
import subprocess
import sys
import zipfile
from io import BytesIO, StringIO
from pathlib import Path

import pytest
from gshare.coordinator import wheel
from gshare.coordinator.wheel import own_wheel

ROOT = Path(__file__).resolve().parent.parent


def names(data: bytes | Path) -> set[str]:
    source = BytesIO(data) if isinstance(data, bytes) else data
    with zipfile.ZipFile(source) as archive:
        assert archive.testzip() is None
        return {name for name in archive.namelist() if name.startswith("gshare/") and not name.endswith("/")}


def test_it_holds_what_a_built_wheel_holds(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is in the dev extra")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = tmp_path.glob("*.whl")
    assert names(own_wheel().data) == names(built)
    assert own_wheel().name == built.name


def test_every_file_is_in_its_record_with_its_hash() -> None:
    with zipfile.ZipFile(BytesIO(own_wheel().data)) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith("/RECORD")]
        rows = {row[0]: row[1:] for row in csv.reader(StringIO(archive.read(record).decode()))}
        assert set(rows) == set(archive.namelist())
        for name in archive.namelist():
            if name != record:
                data = archive.read(name)
                assert rows[name] == [f"sha256={wheel._hash(data)}", str(len(data))]


def test_the_stamp_is_that_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    first = own_wheel()
    own_wheel.cache_clear()
    assert own_wheel() == first  # packed again: the same bytes
    own_wheel.cache_clear()
    monkeypatch.setattr(wheel, "ROOMS", ("agent", "cli", "coordinator", "kernels"))
    try:
        assert own_wheel().stamp != first.stamp
    finally:
        own_wheel.cache_clear()
