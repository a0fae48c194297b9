"""A sweep whose disk is full: it stops, nobody is ranked, and with room again it is the same sweep.

Where nothing may be mounted a limit on the size of files stands for the full disk: adapters of rank 64 do not
fit, those of rank 2 do.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gshare.agent.data import tokens
from gshare.agent.errors import GshareError
from gshare.agent.jobs.events import is_of_machine
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.jobs.sweep_records import read_decisions
from gshare.agent.service import output_dir
from gshare.agent.service.output_dir import OutputClaim, RunRecord
from gshare.agent.train.files import disk_errors
from gshare.cli.sweep_board import result_of

WAIT_SECONDS = 300.0
SWEEP = """\
model = "{model}"
base_dtype = "fp32"
[defaults]
data = "data.jsonl"
max_steps = 8
eval_steps = 2
max_length = 32
[sweep]
output_dir = "out"
max_concurrent = {at_once}
[sweep.grid]
learning_rate = [1e-4, 5e-3]
r = [2, 64]
[early_exit]
warmup = 0.25
keep = 0.5
gap_threshold = 10.0
"""
#: Files of at most so many bytes, here and in the trainer, on a disk of little room; then `gshare`.
LIMITED = """
import resource, sys
from types import SimpleNamespace
from gshare.cli import sweep_files
from gshare.cli.main import main

sweep_files.shutil = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=1_500_000))
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
{and_so}
sys.exit(main(sys.argv[1:]))
"""
#: The first decisions are written down, then none.
FORGETFUL = """
import sys
from gshare.agent.errors import GshareError
from gshare.agent.jobs.sweep_records import DecisionLog
from gshare.cli.main import main

left, append = 6, DecisionLog.append

def refuse(self, decision):
    global left
    left -= 1
    if left < 0:
        raise GshareError(f"{self._path}: No space left on device")
    append(self, decision)

DecisionLog.append = refuse
sys.exit(main(sys.argv[1:]))
"""
#: Negative control: a configuration that met the full disk counts as one that failed.
UNHEEDED = "from gshare.agent.service import sweeping; sweeping.is_of_machine = lambda reason: False"


def _write(directory: Path, model: Path, at_once: int) -> Path:
    directory.mkdir()
    rows = [{"prompt": f"{a} and {b}", "completion": f"{a + b}"} for a in range(6) for b in range(5)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = directory / "s.toml"
    path.write_text(SWEEP.format(model=model, at_once=at_once))
    return path


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )


def _sweep(*arguments: str) -> str:
    done = _run("-m", "gshare.cli.main", "sweep", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _adapters(out: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("adapter_model.safetensors")}
    return {name: content for name, content in found.items() if "/checkpoint-" not in name}


@pytest.mark.parametrize("at_once", [0, 1])
def test_it_stops_and_goes_on_when_there_is_room(tiny_checkpoint: Path, tmp_path: Path, at_once: int) -> None:
    path = _write(tmp_path / "full", tiny_checkpoint, at_once)
    done = _run("-c", LIMITED.format(and_so=""), "sweep", str(path))
    assert done.returncode == 1, done.stderr
    assert re.search(r"warning: .*/out: .* may take up to \d\.\d MB, and 1\.5 MB are free", done.stderr)
    assert "disk full while writing" in done.stderr
    assert done.stderr.count("the sweep stops here, since nobody is to be ranked without it") == 1
    assert "--resume goes on with it" in done.stderr
    assert done.stdout.splitlines()[-1].endswith(" samples so far")
    out = path.parent / "out"
    assert not {one.event for one in read_decisions(out)} & {"selected", "failed", "stopped"}

    _sweep(str(path), "--resume")
    whole = _write(tmp_path / "whole", tiny_checkpoint, at_once)
    _sweep(str(whole))
    assert result_of(out)["winner"] == result_of(whole.parent / "out")["winner"]
    assert _adapters(out) == _adapters(whole.parent / "out")
    assert len(_adapters(out)) == 6  # two that completed, and the best of all four


def test_a_sweep_that_does_not_heed_it_ranks_the_rest(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = _write(tmp_path / "unheeded", tiny_checkpoint, 0)
    done = _run("-c", LIMITED.format(and_so=UNHEEDED), "sweep", str(path))
    assert done.returncode == 1, done.stderr
    decisions = read_decisions(path.parent / "out")
    assert {"selected", "failed"} <= {one.event for one in decisions}
    assert not any("r64" in one.job for one in decisions if one.event == "selected")


def test_a_decision_that_is_not_written_down_ends_the_sweep_with_how_far_it_came(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    path = _write(tmp_path / "forgetful", tiny_checkpoint, 0)
    done = _run("-c", FORGETFUL, "sweep", str(path))
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1].endswith(" samples so far")
    assert "--resume goes on with it" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("decisions.jsonl: No space left on device")
    _sweep(str(path), "--resume")
    assert len(_adapters(path.parent / "out")) == 6


# ---------------------------------------------------------------------- a real one, which takes nothing new


@contextmanager
def _disk(where: Path, options: str) -> Iterator[None]:
    """A file system of its own at `where`; skipped where we may not mount."""
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(where)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(where)], check=True)


def _fill(where: Path) -> None:
    with (where / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def _check_left(done: subprocess.CompletedProcess[str], out: Path) -> None:
    assert done.returncode == 1, done.stderr
    assert "--resume goes on with it" in done.stderr
    assert "winner" not in done.stdout
    assert "saved" not in done.stdout
    assert not {one.event for one in read_decisions(out)} & {"selected", "failed", "stopped"}


@pytest.mark.parametrize("at_once", [0, 1])
def test_resumed_while_it_is_still_full_nobody_is_ranked(
    tiny_checkpoint: Path, tmp_path: Path, at_once: int
) -> None:
    """The trainer is refused what it writes before a job's first step."""
    whole = _write(tmp_path / "whole", tiny_checkpoint, at_once)
    _sweep(str(whole))
    path = _write(tmp_path / "full", tiny_checkpoint, at_once)
    out = path.parent / "out"
    with _disk(out, "size=3000k"):
        _check_left(_run("-m", "gshare.cli.main", "sweep", str(path)), out)
        _fill(out)
        done = _run("-m", "gshare.cli.main", "sweep", str(path), "--resume")
        _check_left(done, out)
        assert "run.json: No space left on device" in done.stderr
        (out / "ballast").unlink()
        subprocess.run(["mount", "-o", "remount,size=64m", str(out)], check=True)
        _sweep(str(path), "--resume")
        assert result_of(out)["winner"] == result_of(whole.parent / "out")["winner"]
        assert _adapters(out) == _adapters(whole.parent / "out")


def test_without_room_for_one_more_file_nobody_is_ranked(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = _write(tmp_path / "full", tiny_checkpoint, 1)
    out = path.parent / "out"
    with _disk(out, "size=64m,nr_inodes=40"):
        _check_left(_run("-m", "gshare.cli.main", "sweep", str(path)), out)
        subprocess.run(["mount", "-o", "remount,nr_inodes=0", str(out)], check=True)
        _sweep(str(path), "--resume")
        assert len(_adapters(out)) == 6


# ---------------------------------------------------------------------- what is told of it


def _claim(tmp_path: Path) -> None:
    spec = AdapterSpec(name="a", data="d", output_dir=str(tmp_path / "a"))
    OutputClaim(RunRecord(model="m", base_dtype="fp32", spec=spec), resume=False)


def _disk_error(tmp_path: Path) -> None:
    with disk_errors("writing", tmp_path / "file"):
        (tmp_path / "file").touch()


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE]
)
@pytest.mark.parametrize("what", [_claim, _disk_error])
def test_a_machine_that_refuses_a_file_is_known_by_what_is_told(
    what: Callable[[Path], None], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **more: object) -> None:
        raise OSError(number, os.strerror(number), "a file")

    monkeypatch.setattr(output_dir, "write_json", refuse)
    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(GshareError) as told:
        what(tmp_path)
    assert is_of_machine(str(told.value)), told.value


def test_token_files_that_cannot_be_written_are_the_machine_s_fault(tmp_path: Path) -> None:
    assert is_of_machine(str(tokens._write_error(tmp_path / "x", OSError(28, os.strerror(28)))))


@pytest.mark.parametrize(
    "reason",
    [
        "out of memory: it does not fit beside nobody",
        "validation loss is not finite at step 4",
        "adapter a: data.jsonl: no such file",
        "the trainer died (SIGKILL) with a at step 3 in flight",
    ],
)
def test_a_job_s_own_fault_is_none_of_the_machine(reason: str) -> None:
    assert not is_of_machine(reason)
