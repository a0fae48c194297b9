"""`audit` and `generate` reserve as `finetune` does, `export` needs none, and inside `gpu run` nothing is
reserved twice: simulated devices, real processes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gshare.agent.base import generate as base_generate
from gshare.agent.base import load as base_load
from gshare.agent.errors import GshareError
from gshare.agent.jobs.spec import RunSpec
from gshare.agent.service import registry
from gshare.agent.train import audit as train_audit
from gshare.agent.train import peft_files
from gshare.agent.train.audit import run_jobs
from gshare.agent.vram import inherit as inherit_module
from gshare.agent.vram import uses
from gshare.agent.vram.guard import reserve
from gshare.agent.vram.inherit import NotInherited, find_inheritable, inherit
from gshare.agent.vram.ledger import Ledger, Wanted
from gshare.agent.vram.rows import Row
from gshare.agent.vram.uses import noted_mb
from gshare.cli import finetune as command
from gshare.cli.finetune_flags import ReserveFlags
from gshare.cli.main import main
from gshare.kernels.reference_backend import ReferenceBackend

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import weights_after  # noqa: E402
from ledger_children import (  # noqa: E402
    Say,
    WaitFor,
    child,
    device,
    files,
    holder,
    make_ledger,
    plant,
    rows,
    take,
    until,
    write_devices,
)
from toy import request, tiny_base  # noqa: E402

#: `gshare` whose finetune does not tokenise: a job's data file holds its script.
GSHARE = """
import sys
from pathlib import Path
from gshare.agent.jobs.spec import JobRequest
from gshare.cli import finetune, main

def prepare(run, console, *, resume):
    return Path("/nonexistent"), [
        JobRequest(spec=spec, train_store="/nonexistent", train_hash="0" * 64, resume=resume)
        for spec in run.adapters
    ]

finetune.prepare = prepare
sys.exit(main.main(sys.argv[1:]))
"""
PROGRAM = (sys.executable, "-c", GSHARE)
LONG = "steps=100000,sleep=0.01,save=5"  # ended by its test


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """One simulated device of 8500 usable MiB, and directories of this test's own."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    monkeypatch.setenv(command.RUNNER_VARIABLE, "reserved_runner:ReservedRunner")
    monkeypatch.setenv("GSHARE_LEDGER_DIR", str(tmp_path / "ledger"))
    monkeypatch.setenv("GSHARE_DEVICES", str(tmp_path / "devices.toml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    for name in ("CUDA_VISIBLE_DEVICES", "GSHARE_RESERVATION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        (tmp_path / name).mkdir(mode=0o700)
        monkeypatch.setenv(name, str(tmp_path / name))
    return make_ledger(tmp_path)


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def gshare(*arguments: str, **environment: str) -> tuple[int, str, str]:
    process = start(*arguments, **environment)
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Its stderr up to the line with `text`."""
    assert process.stderr is not None
    seen = ""
    while text not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    return seen


def finetune(name: str, script: str, *more: str) -> list[str]:
    Path(f"{name}.jsonl").write_text(script)
    return ["finetune", "--model", "fake", "--adapter", f"{name}.jsonl:out/{name}", *more]


def under_run(vram: str, *arguments: str) -> list[str]:
    """`gpu run --vram … -- gshare …`."""
    return ["gpu", "run", "--vram", vram, "--", *PROGRAM, *arguments]


def standing(ledger: Ledger) -> list[Row]:
    return ledger.look()[0].rows


# ---------------------------------------------------------------------- finetune inside gpu run


def test_inside_gpu_run_its_reservation_is_used_and_no_second_one_made(ledger: Ledger) -> None:
    process = start(*under_run("3", *finetune("a", LONG)))
    seen = read_until(process, "step 1 of")
    (row,) = standing(ledger)
    assert (row.kind, row.budget_mb, row.clients) == ("run", 3072, ())
    assert f"GPU memory: 3.0 GiB of reservation {row.id} (`gshare gpu run`)" in seen
    assert f"using 3.0 GiB on Simulated GPU, GPU-aaaa-1 (reservation {row.id} of `gshare gpu run`)" in seen
    assert "given device=cpu visible=GPU-aaaa-1 may_grow=False threads=None budget=3072" in seen
    assert files(ledger) == [f"row-{row.id}.json", f"row-{row.id}.life", f"use-{row.id}.life"]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    until(lambda: not registry.live_trainers())
    assert files(ledger) == []


def test_without_the_variable_it_would_be_two(ledger: Ledger) -> None:
    """The control: the same processes, and the inner one is not told."""
    arguments = ["env", "-u", "GSHARE_RESERVATION", *PROGRAM, *finetune("a", LONG, "--vram", "2")]
    process = start("gpu", "run", "--vram", "3", "--", *arguments)
    read_until(process, "step 1 of")
    assert sorted((row.kind, row.budget_mb) for row in standing(ledger)) == [("run", 3072), ("trainer", 2048)]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    until(lambda: files(ledger) == [])


def test_what_needs_more_than_half_of_the_device_runs_inside_gpu_run(ledger: Ledger) -> None:
    """8192 of 8500 MiB: a second reservation would wait for the first one's end for ever."""
    code, _, err = gshare(*under_run("8", *finetune("a", "steps=9", "--vram", "8", "--no-wait-gpu")))
    assert code == 0, err
    assert Path("out/a/adapter_model.safetensors").read_text() == weights_after("a", 9)
    assert files(ledger) == []


def test_less_may_be_asked_for_inside_and_more_is_refused(ledger: Ledger) -> None:
    code, _, err = gshare(*under_run("3", *finetune("a", "steps=9", "--vram", "2")))
    assert (code, "budget=2048" in err) == (0, True), err
    code, _, err = gshare(*under_run("3", *finetune("b", "steps=9", "--vram", "4")))
    assert code == 2
    assert "--vram: 4096 MiB are more than the 3072 MiB of reservation " in err
    assert "raise the --vram of `gshare gpu run`" in err
    code, _, err = gshare(
        *under_run("3", *finetune("c", "steps=9", "--experimental-mps", "--gpu-share", "50"))
    )
    assert code == 2
    assert "--experimental-mps: this runs under reservation " in err
    assert files(ledger) == []


def test_of_two_inside_one_gpu_run_one_uses_it_and_the_other_reserves(ledger: Ledger) -> None:
    """Two caps of the whole reservation each would be twice the reservation."""
    first, second = (shlex.join([*PROGRAM, *finetune(name, LONG, "--vram", "2")]) for name in ("a", "b"))
    wait = "while ! grep -q 'step 1 of' first; do sleep 0.05; done"
    script = f'{first} 2> first & a=$!; {wait}; {second} & trap "kill $a $!" TERM; wait; wait'
    process = start("gpu", "run", "--vram", "3", "--", "sh", "-c", script)
    seen = read_until(process, "step 1 of")
    assert "is not used: another gshare uses it now; reserving anew" in seen
    assert sorted((row.kind, row.budget_mb) for row in standing(ledger)) == [("run", 3072), ("trainer", 2048)]
    assert "using 2.0 GiB" in Path("first").read_text()
    process.terminate()
    process.communicate(timeout=60)
    until(lambda: not registry.live_trainers())
    assert files(ledger) == []


def test_a_trainer_that_is_killed_inside_gpu_run_comes_back_under_the_same_reservation(
    ledger: Ledger,
) -> None:
    # By itself, once: from here the kill came too late where this process had no time for 3 s.
    code, _, err = gshare(*under_run("5", *finetune("a", "steps=30,save=5,kill_once=12")))
    assert code == 0, err
    assert "the trainer died (killed by SIGKILL)" in err
    first, again = re.findall(r"\(reservation (\w+) of `gshare gpu run`\)", err)
    assert first == again
    assert "reserved" not in err  # anew
    assert Path("out/a/adapter_model.safetensors").read_text() == weights_after("a", 30)
    assert files(ledger) == []


def test_a_detached_run_outlives_gpu_run_and_reserves_anew(ledger: Ledger) -> None:
    code, out, err = gshare(*under_run("3", *finetune("a", LONG, "--vram", "2", "--detach")))
    assert (code, out) == (0, "a\n"), err
    assert "is not used: a detached run outlives it; reserving anew" in err
    (row,) = standing(ledger)
    assert (row.kind, row.budget_mb) == ("trainer", 2048)
    assert main(["jobs", "stop", "a"]) == 0
    until(lambda: not registry.live_trainers())
    assert files(ledger) == []


# ---------------------------------------------------------------------- a name alone proves nothing


def test_a_forged_name_is_told_and_the_run_reserves_as_usual(ledger: Ledger) -> None:
    code, _, err = gshare(*finetune("a", "steps=9", "--vram", "2"), GSHARE_RESERVATION="0123456789ab")
    assert code == 0, err
    assert (
        "warning: GSHARE_RESERVATION='0123456789ab' is not used: there is no such reservation; reserving anew"
    ) in err
    assert "reserved 2.0 GiB" in err


def test_another_program_s_reservation_is_not_used(ledger: Ledger) -> None:
    """Of the same user, alive, of `gpu run`: but no ancestor of ours."""
    other = start("gpu", "run", "--vram", "5", "--", "sleep", "600")
    until(lambda: rows(ledger) != {})
    (row,) = standing(ledger)
    code, _, err = gshare(*finetune("a", "steps=9", "--vram", "2"), GSHARE_RESERVATION=row.id)
    assert code == 0, err
    assert f"is not used: its process {other.pid} is no ancestor of this one" in err
    assert "reserved 2.0 GiB" in err
    code, _, err = gshare(
        *finetune("b", "steps=9", "--vram", "5", "--no-wait-gpu"), GSHARE_RESERVATION=row.id
    )
    assert code == 75, err  # what does not fit beside it does not fit, whatever it says
    other.terminate()
    other.wait(30)


@pytest.mark.parametrize("kind", ["trainer", "hold"])
def test_a_reservation_that_gpu_run_did_not_make_is_not_used(ledger: Ledger, kind: str) -> None:
    """Not even an ancestor's own: it is capped and counted by its holder, who knows of no other."""
    devices = ledger.source.devices()
    if kind == "trainer":
        row_id = reserve(3000, task="t", devices=devices, timeout_s=0, kind="trainer", ledger=ledger).id
    else:
        grant = ledger.reserve(Wanted(mb=3000, devices=devices, task="t", kind="hold", lease_s=60.0))
        row_id = getattr(grant, "row").id  # noqa: B009
    code, _, err = gshare(*finetune("a", "steps=9", "--vram", "2"), GSHARE_RESERVATION=row_id)
    assert (code, f"it is a {kind}'s, not of `gshare gpu run`" in err) == (0, True), err


def in_a_child_of_the_holder(ledger: Ledger, work: Callable[[Row], str]) -> str:
    """What `work` says, in a forked child of the process that holds a `gpu run` row of 3000 MiB."""
    with reserve(
        3000, task="t", devices=ledger.source.devices(), timeout_s=0, kind="run", ledger=ledger
    ) as reservation:

        def inside(say: Say, wait: WaitFor) -> None:
            say(work(reservation.row))

        with child(inside) as made:
            return made.line()


def reason(ledger: Ledger, row: Row, devices: Any = None) -> str:
    try:
        found = find_inheritable(ledger, row.id, ledger.source.devices() if devices is None else devices)
    except NotInherited as error:
        return str(error)
    return f"inheritable {found.row.budget_mb} on {found.device.uuid}"


def test_a_child_of_the_holder_may_use_it(ledger: Ledger) -> None:
    """The control of the refusals below."""
    assert (
        in_a_child_of_the_holder(ledger, lambda row: reason(ledger, row)) == "inheritable 3000 on GPU-aaaa-1"
    )


def test_another_user_s_is_not_used(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_another(row: Row) -> str:
        monkeypatch.setattr(inherit_module.os, "geteuid", lambda: 54321)
        return reason(ledger, row)

    assert (
        in_a_child_of_the_holder(ledger, as_another)
        == f"it belongs to uid {os.geteuid()}, and this is uid 54321"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_row_that_another_user_has_written_in_our_name_is_not_used(ledger: Ledger) -> None:
    def given_away(row: Row) -> str:
        os.chown(ledger.directory / f"row-{row.id}.json", 54321, -1)
        return reason(ledger, row)

    assert in_a_child_of_the_holder(ledger, given_away).startswith("it belongs to uid")


def test_a_row_on_a_device_that_the_run_may_not_use_is_not_used(ledger: Ledger) -> None:
    said = in_a_child_of_the_holder(ledger, lambda row: reason(ledger, row, devices=()))
    assert said == "it is on GPU-aaaa-1, which is not among the devices for this run"


def test_the_pid_of_an_ancestor_that_is_another_process_by_now_proves_nothing(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reused(row: Row) -> str:
        real = inherit_module.holder
        monkeypatch.setattr(inherit_module, "holder", lambda pid: real(pid)._replace(start=1))
        return reason(ledger, row)

    assert in_a_child_of_the_holder(ledger, reused) == f"its process {os.getpid()} is no ancestor of this one"


def test_a_planted_row_without_a_living_holder_is_not_used(ledger: Ledger) -> None:
    """A file that says all the right things in the name of our parent: dead, so cleaned away."""
    row = plant(ledger, kind="run", pid=os.getppid())
    assert reason(ledger, row) == "there is no such reservation"


def test_used_by_one_at_a_time_and_given_back_however_the_user_ends(ledger: Ledger) -> None:
    devices = ledger.source.devices()

    def inside(row: Row) -> str:
        said: list[str] = []
        with inherit(ledger, row.id, devices=devices, budget_mb=2000) as mine:
            said.append(f"{mine.budget_mb}")
            said.append(reason(ledger, row))
            with pytest.raises(NotInherited, match="another gshare uses it now"):
                inherit(ledger, row.id, devices=devices, budget_mb=2000)

            def dies(say: Say, wait: WaitFor) -> None:
                say(reason(ledger, row))

            with child(dies) as other:
                said.append(other.line())
        said.append(reason(ledger, row))

        def killed(say: Say, wait: WaitFor) -> None:
            inherit(ledger, row.id, devices=devices, budget_mb=2000)
            say(reason(ledger, row))
            wait()

        with child(killed) as other:
            said.append(other.line())
            other.kill()
        said.append(reason(ledger, row))
        return " | ".join(said)

    used, free = "another gshare uses it now", "inheritable 3000 on GPU-aaaa-1"
    assert in_a_child_of_the_holder(ledger, inside) == " | ".join(["2000", used, used, free, used, free])
    assert rows(ledger) == {}  # the next operation clears up what was killed
    assert files(ledger) == []


def test_the_row_is_neither_written_nor_grown_by_the_one_inside(ledger: Ledger) -> None:
    def inside(row: Row) -> str:
        warned: list[str] = []
        used = inherit(
            ledger, row.id, devices=ledger.source.devices(), budget_mb=9000, on_warning=warned.append
        )
        with used as mine:
            before = (ledger.directory / f"row-{row.id}.json").read_bytes()
            mine.record_use("load", 4000)
            assert (ledger.directory / f"row-{row.id}.json").read_bytes() == before
            assert "4000 MiB used after load, 33% more than the 3000 MiB reserved" in warned[0]
            with pytest.raises(
                Exception, match="cannot grow by 100 MiB from here; raise the --vram of `gshare"
            ):
                mine.grow(100)
            assert mine.cap(500, 10_000).mb == 2500
        (after,) = standing(ledger)
        return f"{after.budget_mb} {after.peak_mb}"

    assert in_a_child_of_the_holder(ledger, inside) == "3000 0"


def test_a_proof_of_use_that_was_lost_is_put_back(ledger: Ledger) -> None:
    def inside(row: Row) -> str:
        warned: list[str] = []
        devices = ledger.source.devices()
        use = ledger.directory / f"use-{row.id}.life"
        said = []
        with inherit(ledger, row.id, devices=devices, budget_mb=2000, on_warning=warned.append) as mine:
            mine.record_use("load", 700)
            for _ in range(2):
                use.unlink()
                said.append(reason(ledger, row))  # the control: this is what others see until then
                mine.keep()
                said.append(f"{reason(ledger, row)} {noted_mb(ledger.directory, row.id)}")
            (warning,) = warned
            assert "something removed or damaged its files" in warning
            use.unlink()
            with inherit(ledger, row.id, devices=devices, budget_mb=500):
                with pytest.raises(GshareError, match="another gshare uses reservation"):
                    mine.keep()
                assert noted_mb(ledger.directory, row.id) == 0
        return " | ".join(said)

    used, free = "another gshare uses it now 700", "inheritable 3000 on GPU-aaaa-1"
    assert in_a_child_of_the_holder(ledger, inside) == " | ".join([free, used, free, used])
    assert files(ledger) == []


def test_what_is_used_inside_is_believed_of_a_living_process_of_this_user_alone(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inside(row: Row) -> str:
        said = []
        with inherit(ledger, row.id, devices=ledger.source.devices(), budget_mb=2000) as mine:
            said.append(noted_mb(ledger.directory, row.id))
            for mb in (1234567, 12):
                mine.record_use("load", mb)
                mine.record_use("step", mb)
                said.append(noted_mb(ledger.directory, row.id))
            with monkeypatch.context() as other_user:
                other_user.setattr(uses.os, "geteuid", lambda: 54321)
                said.append(noted_mb(ledger.directory, row.id))
            os.pwrite(mine.life, b"-1 MiB    \n", 0)
            said.append(noted_mb(ledger.directory, row.id))
            mine.record_use("eval", 800)
            fcntl.flock(mine.life, fcntl.LOCK_UN)  # as when it is dead
            said.append(noted_mb(ledger.directory, row.id))
        said.append(noted_mb(ledger.directory, row.id))
        return str(said)

    assert in_a_child_of_the_holder(ledger, inside) == "[0, 1234567, 12, 0, 0, 0, 0]"


def test_gpu_run_sees_what_a_gshare_inside_uses_on_a_simulated_device(ledger: Ledger) -> None:
    """Which is listed by no driver: the straw engine says 100 MiB."""
    process = start(*under_run("50MiB", *finetune("a", LONG)))
    read_until(process, "100 MiB used, 50 MiB reserved")
    until(lambda: [row.peak_mb for row in standing(ledger)] == [100])
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143


@pytest.mark.parametrize(("vram", "code"), [("50MiB", 1), ("200MiB", 0)])
def test_strict_stops_a_gshare_inside_that_uses_too_much(ledger: Ledger, vram: str, code: int) -> None:
    script = LONG if code else "steps=200,sleep=0.01"
    before, after = under_run(vram)[:4], under_run(vram, *finetune("a", script))[4:]
    process = start(*before, "--strict", *after)
    _, err = process.communicate(timeout=90)
    assert process.returncode == code, err
    assert ("used 100 MiB, more than the 50 MiB reserved, and was stopped (--strict)" in err) == bool(code)
    until(lambda: files(ledger) == [])


def test_only_the_own_process_is_measured_inside_a_reservation_with_others(
    ledger: Ledger, tmp_path: Path
) -> None:
    """Else a neighbour's memory in the same `gpu run` would be taken for the context."""

    def inside(row: Row) -> str:
        with inherit(ledger, row.id, devices=ledger.source.devices(), budget_mb=9000) as mine:
            listed = f"[{{ pid = {os.getpid()}, used_mb = 700 }}, {{ pid = {os.getppid()}, used_mb = 900 }}]"
            write_devices(tmp_path / "devices.toml", device(processes=listed))
            return str(mine.listed_mb(mine.read_device()))

    assert in_a_child_of_the_holder(ledger, inside) == "700"


# ---------------------------------------------------------------------- generate, audit, export

HELLO = ("generate", "hello", "--max-new-tokens", "4", "--json")


@pytest.fixture
def seen(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Row, ...]]:
    """The rows whenever a base is loaded; and torch is not asked for a GPU before one is reserved."""
    looks: list[tuple[Row, ...]] = []
    real, available = base_load.load_base, torch.cuda.is_available

    def load(*arguments: Any, **keys: Any) -> Any:
        looks.append(tuple(standing(ledger)))
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == "GPU-aaaa-1"
        return real(*arguments, **keys)

    def asked() -> bool:
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == "GPU-aaaa-1", (
            "asked for a GPU before it was reserved"
        )
        return available()

    monkeypatch.setattr(base_load, "load_base", load)
    monkeypatch.setattr(train_audit, "load_base", load)
    monkeypatch.setattr(torch.cuda, "is_available", asked)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(asked()))
    return looks


def test_generate_reserves_before_it_loads_and_gives_back(
    ledger: Ledger, tiny_checkpoint: Path, seen: list[tuple[Row, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*HELLO, "--model", str(tiny_checkpoint), "--vram", "2"]) == 0
    ((row,),) = seen
    assert (row.task, row.kind, row.budget_mb) == ("generate tiny-llama", "trainer", 2048)
    assert files(ledger) == []
    said = capsys.readouterr()
    assert "GPU memory to reserve: 2.0 GiB (--vram)" in said.err
    assert f"reserved 2.0 GiB on Simulated GPU, GPU-aaaa-1 (reservation {row.id})" in said.err
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert main([*HELLO, "--model", str(tiny_checkpoint)]) == 0
    (estimated,) = seen[1]
    assert 768 + 64 < estimated.budget_mb < 900  # a tiny model: nearly all of it is the allowance
    assert json.loads(capsys.readouterr().out) == json.loads(said.out)


def test_without_a_gpu_nothing_changes(
    ledger: Ledger,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The control: no row, no line about memory, the same answer."""
    arguments = [*HELLO, "--model", str(tiny_checkpoint)]
    with monkeypatch.context() as no_gpu:
        no_gpu.delenv("GSHARE_DEVICES")
        assert main([*arguments, "--device", "cpu"]) == 0
        without = capsys.readouterr()
        assert "reserve" not in without.err
        assert main([*arguments, "--device", "cpu", "--vram", "2"]) == 0
        assert "--vram is not used: the run is on the CPU" in capsys.readouterr().err
        assert not ledger.directory.exists()
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert (said.out, "reserved" in said.err) == (without.out, True)


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (
            ["--vram", "2", "--no-wait-gpu"],
            75,
            "no memory now for generate tiny-llama: 2048 MiB asked, 500 of",
        ),
        (["--vram", "2", "--timeout", "1"], 75, "waited 1 s for memory for generate tiny-llama, place 1"),
        (["--vram", "9"], 2, "9216 MiB can never fit on GPU-aaaa-1"),
        (["--vram", "nan"], 2, "--vram: 'nan' is not an amount"),
        (["--gpus", "GPU-zz"], 2, "--gpus: no device 'GPU-zz' here"),
        (["--timeout", "5", "--no-wait-gpu"], 2, "--timeout and --no-wait-gpu: give one of them"),
        (["--device", "cuda:1"], 2, "--device cuda:1: there are 1 GPUs"),
    ],
)
def test_what_cannot_be_had_has_the_exit_codes_of_finetune(
    ledger: Ledger,
    tiny_checkpoint: Path,
    seen: list[tuple[Row, ...]],
    more: list[str],
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with holder(ledger, 8000) as other:
        row = other.line()
        assert main([*HELLO, "--model", str(tiny_checkpoint), *more]) == code
        said = capsys.readouterr()
        assert (says in said.err, said.out) == (True, ""), said.err
        assert seen == []
        assert files(ledger) == [f"row-{row}.json", f"row-{row}.life"]


def test_generate_waits_for_its_turn_and_ctrl_c_leaves_the_queue(
    ledger: Ledger, tiny_checkpoint: Path
) -> None:
    arguments = [*HELLO, "--model", str(tiny_checkpoint), "--vram", "2"]
    with holder(ledger, 8000) as other:
        row = other.line()
        stopped = start(*arguments)
        read_until(stopped, "waiting for GPU memory, position 1")
        stopped.send_signal(signal.SIGINT)
        out, err = stopped.communicate(timeout=60)
        assert (stopped.returncode, out) == (130, ""), err
        assert files(ledger) == [f"row-{row}.json", f"row-{row}.life"]
        patient = start(*arguments)
        read_until(patient, "waiting for GPU memory, position 1")
        other.go_on()
        out, err = patient.communicate(timeout=60)
        assert patient.returncode == 0, err
    assert json.loads(out)["prompt"] == "hello"
    assert files(ledger) == []


@pytest.mark.parametrize(("where", "what"), [("load", "the base"), ("answer", "the answer")])
def test_out_of_memory_names_the_reservation(
    tiny_checkpoint: Path,
    ledger: Ledger,
    where: str,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def no_room(*arguments: object, **keys: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if where == "load":
        monkeypatch.setattr(base_load, "load_base", no_room)
    else:
        monkeypatch.setattr(base_generate, "generate_tokens", no_room)
    assert main([*HELLO, "--model", str(tiny_checkpoint), "--vram", "2"]) == 1
    err = capsys.readouterr().err
    assert f"{what}: out of memory; reservation " in err
    assert " is 2048 MiB on GPU-aaaa-1: raise it with --vram" in err
    assert files(ledger) == []


def audit_arguments(checkpoint: Path) -> list[str]:
    for name in ("a", "b"):
        lines = [{"prompt": f"{name} {i}", "completion": f" answer {i * 7} and more"} for i in range(12)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return [
        *("audit", "--model", str(checkpoint), "--base-dtype", "fp32", "--r", "4", "--max-steps", "2"),
        *("--max-length", "64", "--adapter", "a.jsonl:out/a", "--adapter", "b.jsonl:out/b", "--json"),
    ]


def test_audit_reserves_once_for_both_arms_and_records_its_use(
    ledger: Ledger,
    tiny_checkpoint: Path,
    seen: list[tuple[Row, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    uses: list[dict[str, int]] = []

    def look(*arguments: Any, **keys: Any) -> Any:
        done = run_jobs(*arguments, **keys)
        uses.append(standing(ledger)[0].uses)
        return done

    monkeypatch.setattr(train_audit, "run_jobs", look)
    assert main([*audit_arguments(tiny_checkpoint), "--vram", "3"]) == 0
    ((row,),) = seen
    assert (row.task, row.kind, row.budget_mb) == ("audit a, b", "trainer", 3072)
    assert len(uses) == 3
    assert set(uses[0]) == {"load", "first_step", "eval", "save"}
    assert files(ledger) == []
    assert json.loads(capsys.readouterr().out)["passed"]


def test_audit_that_does_not_fit_now_exits_75(
    ledger: Ledger, tiny_checkpoint: Path, seen: list[tuple[Row, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    with holder(ledger, 8000) as other:
        other.line()
        assert main([*audit_arguments(tiny_checkpoint), "--vram", "3", "--no-wait-gpu"]) == 75
    assert "no memory now for audit a, b: 3072 MiB asked" in capsys.readouterr().err
    assert seen == []


def test_generate_looks_for_its_adapter_before_it_reserves(
    ledger: Ledger, tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full device: who reserves first is told to come back later."""
    arguments = [*HELLO, "--model", str(tiny_checkpoint), "--no-wait-gpu"]
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text('{"r": 0}')
    (broken / "adapter_model.safetensors").touch()
    with take(ledger, 8500):
        assert main(arguments) == 75  # the control
        capsys.readouterr()
        for adapter, says in ((tmp_path / "nowhere", "is missing"), (broken, "r must be a whole number")):
            assert main([*arguments, "--adapter", str(adapter)]) == 2
            err = capsys.readouterr().err
            assert says in err
            assert "GPU memory" not in err


def test_generate_and_audit_use_the_reservation_of_gpu_run(ledger: Ledger, tiny_checkpoint: Path) -> None:
    for arguments in ([*HELLO, "--model", str(tiny_checkpoint)], audit_arguments(tiny_checkpoint)):
        code, _, err = gshare(*under_run("8", *arguments, "--no-wait-gpu"))
        assert code == 0, err
        assert "using 8.0 GiB on Simulated GPU, GPU-aaaa-1" in err
        assert files(ledger) == []


def test_a_merge_computes_on_the_cpu_and_needs_no_memory_of_a_gpu(
    ledger: Ledger, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full device it runs, which `generate` does not; no GPU is visible to it meanwhile."""
    train_audit.run_jobs(
        RunSpec(model=str(tiny_checkpoint), base_dtype="fp32"),
        [request(tmp_path, "a", max_steps=1)],
        model_dir=tiny_checkpoint,
        base=tiny_base(tiny_checkpoint),
        backend=ReferenceBackend(),
        directory=tmp_path / "jobs",
    )
    visible: list[str | None] = []
    real = peft_files.merge

    def merge(*arguments: Any, **keys: Any) -> int:
        visible.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return real(*arguments, **keys)

    monkeypatch.setattr(peft_files, "merge", merge)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with take(ledger, 8500) as full:
        merged = ["export", str(tmp_path / "jobs" / "a"), "--merge", str(tmp_path / "merged")]
        assert main([*merged, "--model", str(tiny_checkpoint)]) == 0
        assert list(rows(ledger)) == [full.id]
        assert main([*HELLO, "--model", str(tiny_checkpoint), "--no-wait-gpu"]) == 75
    assert visible == [""]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize("name", ["audit", "generate", "finetune"])
def test_the_flags_have_the_same_names_everywhere(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    for flag in ReserveFlags.__dataclass_fields__:
        assert f"--{flag.replace('_', '-')}" in text
    assert "--no-wait-gpu" in text
    assert ("--experimental-mps" in text) == (name == "finetune")
