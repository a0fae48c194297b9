"""`gshare gpu …` as a user runs it: output, exit codes, one line a fault, an unharmed ledger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.status import status
from gshare.cli.gpu_view import lines, show_age

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import device, files, holder, make_ledger, rows, take, until, write_devices


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path, device(), device("GPU-aabb-2", 4000))


def environment(folder: Path, **variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    own = {"GSHARE_LEDGER_DIR": str(folder / "ledger"), "GSHARE_DEVICES": str(folder / "devices.toml")}
    return {**kept, "XDG_CONFIG_HOME": str(folder / "config"), **own, **variables}


def start(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gshare.cli.main", "gpu", *arguments],
        env=environment(folder, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )


def gpu(folder: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    process = start(folder, *arguments, **variables)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_run_waits_for_nothing_and_hands_the_arguments_on(ledger: Ledger, tmp_path: Path) -> None:
    program = (
        "--",
        "sh",
        "-c",
        'echo "$CUDA_VISIBLE_DEVICES" "$@"; exit 3',
        "x",
        "--strict",
        "-v",
        "--",
        "a b",
    )
    code, out, err = gpu(tmp_path, "run", "--vram", "1", "--gpu", "GPU-aabb", *program)
    assert (code, out, err) == (3, "GPU-aabb-2 --strict -v -- a b\n", "")
    assert files(ledger) == []


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("run", "--vram", "nan", "--", "true"), 2, "--vram: 'nan' is not an amount"),
        (("run", "--vram=-1", "--", "true"), 2, "--vram: '-1' is not more than zero"),
        (("run", "--vram", "0", "--", "true"), 2, "is not more than zero"),
        (("run", "--vram", "1e9", "--", "true"), 2, "more than any device has"),
        (("run", "--vram", "9", "--", "true"), 2, "can never fit on"),
        (("run", "--vram", "1", "--gpu", "GPU-zz", "--", "true"), 2, "no device 'GPU-zz' here"),
        (
            ("run", "--vram", "1", "--gpu", "GPU-aa", "--", "true"),
            2,
            "the beginning of GPU-aaaa-1, GPU-aabb-2",
        ),
        (("run", "--vram", "1", "--gpu", "", "--", "true"), 2, "an empty name"),
        (("run", "--vram", "1", "--timeout", "soon", "--", "true"), 2, "--timeout: 'soon' is not a time"),
        (("run", "--vram", "1", "--", "/nonexistent"), 2, "cannot run '/nonexistent': No such file"),
        (("run", "--vram", "1"), 2, "no program; write it after --"),
        (("run", "--", "true"), 2, "--vram"),
        (("hold", "--for", "2h"), 2, "--vram is missing"),
        (("hold", "--vram", "1", "--for", "0"), 2, "--for: '0' must be more than zero"),
        (("hold", "--vram", "1", "--for", "1h", "--pid", "999999999"), 2, "there is no such process"),
        (("release", "nothing"), 2, "no reservation begins with 'nothing'"),
        (("release",), 2, "requires an argument"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_the_ledger_unharmed(
    ledger: Ledger, tmp_path: Path, arguments: tuple[str, ...], code: int, text: str
) -> None:
    with take(ledger, 100) as reservation:
        answer, out, err = gpu(tmp_path, *arguments)
        assert (answer, out) == (code, "")
        assert text in err
        assert err.startswith("gshare: ")
        assert err.count("\n") == 1
        assert rows(ledger) == {reservation.id: 100}


@pytest.mark.parametrize(
    ("variables", "code", "text"),
    [
        ({"GSHARE_DEVICES": "/nonexistent.toml"}, 2, "GSHARE_DEVICES: /nonexistent.toml: No such file"),
        ({"GSHARE_LEDGER_DIR": "relative"}, 2, "GSHARE_LEDGER_DIR: 'relative' must be an absolute path"),
        ({"GSHARE_LEDGER_DIR": "/proc/none/ledger"}, 1, "cannot use /proc/none/ledger for the ledger"),
        ({"CUDA_VISIBLE_DEVICES": ""}, 2, "CUDA_VISIBLE_DEVICES leaves no device"),
    ],
)
def test_a_wrong_environment_is_one_line(
    ledger: Ledger, tmp_path: Path, variables: dict[str, str], code: int, text: str
) -> None:
    answer, _, err = gpu(tmp_path, "run", "--vram", "1", "--", "true", **variables)
    assert answer == code, err
    assert text in err
    assert err.count("\n") == 1


def test_when_it_does_not_fit_no_wait_exits_75_at_once_and_a_timeout_after_it(
    ledger: Ledger, tmp_path: Path
) -> None:
    request = ("run", "--vram", "4", "--gpu", "0", "--", "true")
    with take(ledger, 8000):
        code, _, err = gpu(tmp_path, *request[:3], "--no-wait-gpu", *request[3:])
        assert code == 75
        assert "no memory now for true: 4096 MiB asked, 500 of 8500 MiB free" in err
        code, _, err = gpu(tmp_path, *request[:3], "--timeout", "3", *request[3:])
        assert code == 75
        said, late = err.splitlines()
        assert said.startswith("gshare: waiting for GPU-aaaa-1, place 1: 4096 MiB asked")
        assert "waited 3 s" in late
        assert not [name for name in files(ledger) if name.startswith("wait-")]


def test_a_waiting_run_starts_when_memory_comes_free(ledger: Ledger, tmp_path: Path) -> None:
    block = take(ledger, 8000)
    waiting = start(tmp_path, "run", "--vram", "4", "--gpu", "0", "--task", "mine", "--", "echo", "done")
    until(lambda: bool(status(ledger).devices[0].queue))
    (queued,) = status(ledger).devices[0].queue
    assert (queued.position, queued.pid, queued.task, queued.request_mb) == (1, waiting.pid, "mine", 4096)
    assert "4096 MiB asked" in queued.reason
    block.release()
    assert waiting.communicate(timeout=60)[0] == "done\n"
    assert waiting.returncode == 0
    assert files(ledger) == []


def test_hold_renew_and_release(ledger: Ledger, tmp_path: Path) -> None:
    code, out, err = gpu(
        tmp_path, "hold", "--vram", "2GiB", "--for", "2h", "--gpu", "0", "--task", "note\nbook"
    )
    assert code == 0, err
    held = out.strip()
    assert f"GSHARE_RESERVATION={held} CUDA_VISIBLE_DEVICES=GPU-aaaa-1" in err
    (row,) = ledger.look()[0].rows
    assert (row.id, row.kind, row.budget_mb, row.pid, row.task) == (held, "hold", 2048, 0, "note book")
    assert gpu(tmp_path, "hold", "--renew", held[:5], "--for", "5h")[1].strip() == held
    (shown,) = status(ledger).devices[0].reservations
    assert shown.lease_left_s is not None
    assert 4.9 * 3600 < shown.lease_left_s < 5 * 3600
    code, _, err = gpu(tmp_path, "release", held[:5])
    assert (code, err) == (0, f"gshare: released {held}: 2048 MiB on GPU-aaaa-1\n")
    assert rows(ledger) == {}


def test_a_hold_takes_a_notebooks_memory_as_its_own(ledger: Ledger, tmp_path: Path) -> None:
    used = f"[{{ pid = {os.getpid()}, used_mb = 2000 }}]"
    write_devices(tmp_path / "devices.toml", device(processes=used))
    assert status(ledger).devices[0].outside_mb == 2000
    assert gpu(tmp_path, "hold", "--vram", "4", "--for", "1h", "--pid", str(os.getpid()))[0] == 0
    shown = status(ledger).devices[0]
    assert (shown.outside_mb, shown.available_ledger_mb) == (0, 8500 - 4096)
    used = f"[{{ pid = {os.getpid()}, used_mb = 6000 }}]"
    write_devices(tmp_path / "devices.toml", device(processes=used))  # nobody writes a hold's peak down
    shown = status(ledger).devices[0]
    assert (shown.outside_mb, shown.available_ledger_mb) == (6000 - 4096, 8500 - 6000)
    assert gpu(tmp_path, "run", "--vram", "2501MiB", "--no-wait-gpu", "--", "true")[0] == 75
    assert gpu(tmp_path, "run", "--vram", "2500MiB", "--no-wait-gpu", "--", "true")[0] == 0


def test_release_of_a_living_process_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    with take(ledger, 100) as reservation:
        code, _, err = gpu(tmp_path, "release", reservation.id)
        assert code == 1
        assert f"is held by process {os.getpid()} (test)" in err


def test_repair_says_what_it_did(ledger: Ledger, tmp_path: Path) -> None:
    assert gpu(tmp_path, "repair") == (0, "", "gshare: nothing to repair\n")
    (ledger.directory / "row-0123456789ab.json").write_text("{", encoding="utf-8")
    code, out, _ = gpu(tmp_path, "repair")
    assert code == 0
    assert "row-0123456789ab.json: not JSON" in out
    assert "taken out, kept as" in out
    with take(ledger, 500) as reservation:
        (ledger.directory / f"row-{reservation.id}.json").write_text("{", encoding="utf-8")
        code, out, _ = gpu(tmp_path, "repair")
        assert code == 1
        assert "still counted" in out


def test_repair_prints_nothing_that_a_terminal_would_obey(ledger: Ledger, tmp_path: Path) -> None:
    rows(ledger)
    for name in (b"row-\x1b[2J\xff.json", b"lease-0123456789ab.json"):
        (ledger.directory / os.fsdecode(name)).write_text('{"kind": "\\u001b]0;x\\u0007"}', encoding="utf-8")
    code, out, err = gpu(tmp_path, "repair")
    assert (code, err) == (0, "")
    assert "row-?[2J?.json: " in out
    assert out.count("taken out, kept as") == 2
    assert out.replace("\n", "").isprintable()


def test_status_as_json_has_everything(ledger: Ledger, tmp_path: Path) -> None:
    table = device(used_by_others_mb=700)
    write_devices(tmp_path / "devices.toml", table, device("GPU-aabb-2", 4000, state='"lost"'))
    with holder(ledger, 3000, task="run[lr=1e-4]") as one:
        row_id = one.line()
        code, out, err = gpu(tmp_path, "status", "--json")
        assert (code, err) == (0, "")
        first, second = json.loads(out)["devices"]
    assert {key: first[key] for key in ("uuid", "memory_type", "state", "reserve_factor", "processes")} == {
        "uuid": "GPU-aaaa-1",
        "memory_type": "discrete",
        "state": "ok",
        "reserve_factor": 0.85,
        "processes": 1,
    }
    assert (first["used_mb"], first["total_mb"], first["outside_mb"]) == (700, 10000, 700)
    assert (first["available_ledger_mb"], first["available_driver_mb"]) == (8500 - 700 - 3000, 9300)
    (row,) = first["reservations"]
    assert (row["id"], row["pid"], row["budget_mb"], row["task"]) == (row_id, one.pid, 3000, "run[lr=1e-4]")
    assert row["age_s"] >= 0
    assert (second["state"], second["total_mb"], second["available_ledger_mb"]) == ("lost", None, None)


def test_status_as_text_shows_names_with_brackets_and_what_is_wrong(ledger: Ledger, tmp_path: Path) -> None:
    write_devices(tmp_path / "devices.toml", device(used_by_others_mb=700), device("GPU-cc", state='"lost"'))
    with holder(ledger, 3000, task="[/]run[lr=1e-4]") as one:
        one.line()
        (ledger.directory / "row-0123456789ab.json").write_text("{", encoding="utf-8")
        code, out, _ = gpu(tmp_path, "status", NO_COLOR="1")
    assert code == 0
    for text in (
        "GPU-aaaa-1: Simulated GPU (9.8 GiB, discrete)",
        "Reserve factor: 85%",
        "VRAM: 700 MiB / 9.8 GiB (7%)",
        "Outside the ledger: 700 MiB",
        f"PID {one.pid} ",
        "2.9 GiB budget / 0 MiB peak ([/]run[lr=1e-4])",
        "Available for new jobs: N/A (ledger) / 9.1 GiB (driver)",  # the damaged row blocks
        "lost: Simulated GPU: lost (simulated)",
        "damaged row row-0123456789ab.json: not JSON",
        "blocks on every device until gshare gpu repair",
    ):
        assert text in out


def test_status_shows_a_shared_trainer_a_hold_and_a_row_on_a_device_that_is_gone(
    ledger: Ledger, tmp_path: Path
) -> None:
    with take(ledger, 3000) as trainer:
        trainer.set_client("alice", 1024)
        assert gpu(tmp_path, "hold", "--vram", "1", "--for", "2h", "--gpu", "GPU-aabb-2")[0] == 0
        write_devices(tmp_path / "devices.toml", device())
        text = "\n".join(line.plain for line in lines(status(ledger)))
    assert "; alice 1.0 GiB" in text
    assert "on a device that is not here: " in text
    assert "no process" in text
    assert "ends in 1h 59m" in text


def test_another_users_text_cannot_drive_the_terminal(ledger: Ledger) -> None:
    with take(ledger, 100, task="\x1b[2Jgone\r") as reservation:
        reservation.set_client("a\x1b]0;title\x07", 10)
        (ledger.directory / "row-\x1bc.json").write_text("{", encoding="utf-8")
        text = "".join(line.plain for line in lines(status(ledger)))
    assert "?[2Jgone?" in text
    assert all(char.isprintable() for char in text)


def test_ages() -> None:
    shown = [show_age(seconds) for seconds in (0, 59.9, 60, 3599, 8100, 90_000, None)]
    assert shown == ["0s", "59s", "1m 0s", "59m 59s", "2h 15m", "1d 1h", "before the last boot"]


# Streams that take nothing


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ("> /dev/full", "its id cannot be printed: No space left on device; nothing stays reserved"),
        (">&-", "stdout is closed; the id that it prints is needed to give the hold back"),
        ("| sleep 0", "its id cannot be printed: Broken pipe; nothing stays reserved"),
    ],
)
def test_a_hold_whose_id_nobody_learns_is_not_made(
    ledger: Ledger, tmp_path: Path, out: str, text: str
) -> None:
    with subprocess.Popen(["sleep", "60"]) as idle:
        try:
            line = f"{sys.executable} -m gshare.cli.main gpu hold --vram 1 --for 1h --pid {idle.pid}"
            # The reader of the pipe is gone before anything is written: Python takes longer to start.
            done = subprocess.run(
                ["bash", "-c", f"set -o pipefail; {line} {out}"],
                env=environment(tmp_path),
                capture_output=True,
                text=True,
                timeout=60,
                cwd="/",
                check=False,
            )
        finally:
            idle.kill()
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"gshare: gpu hold: {text}\n")
    assert rows(ledger) == {}


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_cannot_be_printed_is_one_line(ledger: Ledger, tmp_path: Path, unbuffered: str) -> None:
    """Buffered, it fails when it is flushed, and once more when the interpreter ends."""
    for arguments in ("gpu status", "gpu status --json", "--help", "version"):
        done = subprocess.run(
            ["sh", "-c", f"exec {sys.executable} -m gshare.cli.main {arguments} > /dev/full"],
            env=environment(tmp_path, PYTHONUNBUFFERED=unbuffered),
            capture_output=True,
            text=True,
            timeout=60,
            cwd="/",
            check=False,
        )
        answer = (done.returncode, done.stderr)
        assert answer == (1, "gshare: stdout cannot be written: No space left on device\n"), arguments


@pytest.mark.parametrize("err", ["2> /dev/full", "2>&-", "2> >(sleep 0)"])
def test_a_run_that_can_tell_nobody_waits_watches_and_keeps_the_code(
    ledger: Ledger, tmp_path: Path, err: str
) -> None:
    block = take(ledger, 8000)
    write_devices(tmp_path / "devices.toml", device(), device("GPU-aabb-2", 4000))
    script = f"echo $$ > {tmp_path}/pid; while [ ! -e {tmp_path}/done ]; do sleep 0.05; done; exit 7"
    command = f"{sys.executable} -m gshare.cli.main gpu run --vram 4 --gpu 0 -- sh -c '{script}' {err}"
    process = subprocess.Popen(["bash", "-c", command], env=environment(tmp_path), cwd="/")
    try:
        until(lambda: bool(status(ledger).devices[0].queue))
        block.release()
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(encoding="utf-8") != "")
        pid = (tmp_path / "pid").read_text(encoding="utf-8").strip()
        used = f"[{{ pid = {pid}, used_mb = 6000 }}]"  # 46 % too much: two warnings
        write_devices(tmp_path / "devices.toml", device(processes=used), device("GPU-aabb-2", 4000))
        until(lambda: list(rows(ledger).values()) == [6000])
        (tmp_path / "done").touch()
        assert process.wait(60) == 7
    finally:
        (tmp_path / "done").touch()
        process.wait(60)
    assert files(ledger) == []


# Flags that contradict each other


@pytest.mark.parametrize("timeout", ["1h", "nan"])
def test_to_wait_so_long_and_not_to_wait_is_refused(ledger: Ledger, tmp_path: Path, timeout: str) -> None:
    both = ("--no-wait-gpu", "--timeout", timeout)
    for command in (
        ("run", "--vram", "1", *both, "--", "true"),
        ("hold", "--vram", "1", "--for", "1h", *both),
    ):
        code, out, err = gpu(tmp_path, *command)
        assert (code, out) == (2, "")
        assert err == "gshare: --timeout and --no-wait-gpu: give one of them\n"


def test_renewing_changes_the_time_alone(ledger: Ledger, tmp_path: Path) -> None:
    held = gpu(tmp_path, "hold", "--vram", "1", "--for", "1h")[1].strip()
    flags = {
        "--vram": "2",
        "--gpu": "0",
        "--pid": "1",
        "--timeout": "1h",
        "--task": "hold",
        "--no-wait-gpu": None,
    }
    for flag, value in flags.items():
        more = (flag,) if value is None else (flag, value)
        code, out, err = gpu(tmp_path, "hold", "--renew", held, "--for", "5h", *more)
        assert (code, out) == (2, "")
        assert err == f"gshare: gpu hold: --renew changes the time alone; leave {flag} out\n"
    (row,) = ledger.look()[0].rows
    assert row.lease_until_boot_s is not None
    assert row.lease_until_boot_s - row.created_boot_s < 3601
