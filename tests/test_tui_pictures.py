"""The README's pictures are made of the recorded run by one command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from gshare.tui import frames as f
from gshare.tui.recording import Recorder, Recording

PICTURES = Path(__file__).parent.parent / "examples" / "pictures"
#: What GitHub shows without a download link is far larger; a clone should not be.
MOST_PICTURE, MOST_RECORDING = 150_000, 1_000_000


def make(*arguments: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PICTURES / "make.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)


def words(svg: Path) -> str:
    root = ElementTree.fromstring(svg.read_text("utf-8"))
    return " ".join("".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text"))


def test_one_command_makes_the_pictures_that_the_readme_shows(tmp_path: Path) -> None:
    done = make(PICTURES / "cluster.gshare", tmp_path)
    assert done.returncode == 0, done.stderr
    shown = re.findall(
        r"\(examples/pictures/(\w+)\.svg\)", (PICTURES.parent.parent / "README.md").read_text()
    )
    assert {f"{name}.svg" for name in shown} == {path.name for path in tmp_path.iterdir()}
    assert len(shown) == 3
    for name, told in (("overview", "completed"), ("lost", "unreachable"), ("compare", "≠")):
        for path in (tmp_path / f"{name}.svg", PICTURES / f"{name}.svg"):  # made now, and as it is shown
            assert told in words(path)
            assert path.stat().st_size < MOST_PICTURE
            assert "http" not in re.sub(r"xmlns=\S+|<!--.*?-->", "", path.read_text("utf-8"))


def test_the_recording_is_small_and_names_no_machine_of_ours() -> None:
    path = PICTURES / "cluster.gshare"
    assert path.stat().st_size < MOST_RECORDING
    recording = Recording(path)
    try:
        text = msgspec.json.encode(list(recording.read())).decode()
    finally:
        recording.close()
    assert set(re.findall(r'"hostname":"([^"]*)"', text)) == {"lab"}
    assert {found.split("/")[1] for found in re.findall(r"/[a-z]+/[^\s\"]+", text)} <= {
        "home",
        "lab",
        "checkpoint",
    }
    assert re.search(r"/home/(?!lab)", text) is None


def test_a_recording_in_which_no_node_is_away_is_refused(tmp_path: Path) -> None:
    at = {"time": 1.0, "received": 1.0}
    with Recorder(tmp_path / "calm.gshare", 1.0) as recorder:
        recorder.write(f.Snapshot(**at, nodes=(f.NodeView(node="a", state="ready"),), jobs=()))
    done = make(tmp_path / "calm.gshare", tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'calm.gshare'}: no node is ever away in it\n"


@pytest.mark.parametrize("content", [b"", b"something else"])
def test_what_is_no_recording_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "none").write_bytes(content)
    done = make(tmp_path / "none", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is no recording" in done.stderr
