"""`gshare finetune` under the ledger: simulated devices, real processes, an engine of straw."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from gshare.agent.jobs.spec import JobRequest, RunSpec
from gshare.agent.service import registry
from gshare.agent.service.client import TrainerClient
from gshare.agent.vram.devices import Device, HostMemory
from gshare.agent.vram.guard import reserve
from gshare.agent.vram.ledger import Ledger
from gshare.agent.vram.rows import Client
from gshare.cli import finetune as command
from gshare.cli import gpu_plan
from gshare.cli.finetune_flags import GpuFlags
from gshare.cli.main import main

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import let_go_to, weights_after  # noqa: E402
from ledger_children import USABLE_MB, device, files, holder, make_ledger, rows, until  # noqa: E402
from straw_runs import LONG, flags, gshare, own_ledger, read_until, start, the_device  # noqa: E402


@pytest.fixture(autouse=True)
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    return own_ledger(tmp_path, monkeypatch)


def saved_step(name: str) -> int:
    path = Path(f"out/{name}/checkpoint.json")
    return json.loads(path.read_text())["step"] if path.exists() else 0


def test_the_trainer_reserves_before_the_engine_and_gives_back_at_its_end(ledger: Ledger) -> None:
    process = start(*flags("a", LONG, "--vram", "2"))
    seen = read_until(process, "step 1 of")
    assert "GPU memory to reserve: 2.0 GiB (--vram)" in seen
    given = "given device=cpu visible=GPU-aaaa-1 may_grow=False threads=None budget=2048 tracer=False"
    assert seen.index("reserved 2.0 GiB on Simulated GPU, GPU-aaaa-1") < seen.index(given)
    (row,) = ledger.look()[0].rows
    (trainer,) = registry.live_trainers()
    assert row.pid == TrainerClient(trainer, "test").hello.pid
    assert row.clients == (Client(name=f"pid-{process.pid}", budget_mb=2048),)
    assert (row.task, row.kind) == ("finetune a", "trainer")
    until(lambda: "save" in ledger.look()[0].rows[0].uses)
    assert ledger.look()[0].rows[0].uses == {"load": 100, "save": 100}
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert files(ledger) == []


def test_without_a_gpu_nothing_is_reserved_and_the_engine_is_told_nothing(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: the same command on a machine that has no device."""
    monkeypatch.delenv("GSHARE_DEVICES")
    monkeypatch.setenv(command.RUNNER_VARIABLE, "reserved_runner:untold")
    code, _, err = gshare(*flags("a", "steps=9", "--vram", "2", "--device", "cpu"))
    assert code == 0, err
    assert "--vram is not used" in err
    assert "(reservation" not in err
    assert not (ledger.directory).exists()


def test_of_two_that_do_not_fit_together_one_waits_and_then_runs(ledger: Ledger) -> None:
    first = start(*flags("a", LONG, "--vram", "5"))
    read_until(first, "step 1 of")
    second = start(*flags("b", "steps=9", "--vram", "5"))
    seen = read_until(second, "waiting for GPU memory, position 1: ")
    assert "5120 MiB asked, 3380 of 8500 MiB free (5120 reserved, 0 used outside the ledger)" in seen
    (waiter,) = the_device(ledger).queue
    assert (waiter.position, waiter.task, waiter.request_mb) == (1, "finetune b", 5120)
    assert not Path("out/b").exists()
    first.send_signal(signal.SIGINT)
    _, err = second.communicate(timeout=60)
    first.communicate(timeout=30)
    assert (first.returncode, second.returncode) == (130, 0), err
    assert "reserved 5.0 GiB" in err
    assert Path("out/b/adapter_model.safetensors").read_text() == weights_after("b", 9)
    assert files(ledger) == []


def test_two_that_fit_run_at_once(ledger: Ledger) -> None:
    """The control of the wait: with room for both nobody waits."""
    first = start(*flags("a", LONG, "--vram", "4"))
    read_until(first, "step 1 of")
    code, _, err = gshare(*flags("b", "steps=9", "--vram", "4"))
    assert code == 0
    assert "waiting" not in err
    assert len(rows(ledger)) == 1
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--no-wait-gpu"], "no memory now for finetune a: 2048 MiB asked, 500 of 8500 MiB free"),
        (["--timeout", "3"], "waited 3 s for memory for finetune a, place 1"),
    ],
)
def test_who_may_not_wait_long_enough_exits_75_and_leaves_nothing(
    ledger: Ledger, more: list[str], says: str
) -> None:
    with holder(ledger, 8000) as other:
        row = other.line()
        code, out, err = gshare(*flags("a", "steps=9", "--vram", "2", *more))
        assert code == 75, err
        assert err.count(says) == 1
        assert "a: stopped: not started; it can be tried again later" in err
        assert "log of the trainer" not in err
        assert registry.finished_jobs() == []  # `gshare jobs list` knows of no failure
        assert ("waiting for GPU memory, position 1" in err) == ("--timeout" in more)
        assert err.count("reserve: ") == 1
        assert "resuming" not in err  # no second trainer
        assert "failed" not in out + err
        assert list(rows(ledger)) == [row]
        assert files(ledger) == [f"row-{row}.json", f"row-{row}.life"]
        assert not Path("out").exists()
        assert not list(registry.trainer_dirs())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--vram", "9"], f"9216 MiB can never fit on GPU-aaaa-1: {USABLE_MB} MiB may be reserved"),
        (["--vram", "nan"], "--vram: 'nan' is not an amount"),
        (["--vram=-1"], "--vram: '-1' is not more than zero"),
        (["--vram", "0"], "--vram: '0' is not more than zero"),
        (["--vram", "8GXB"], "--vram: unknown unit"),
        (["--vram", "1", "--timeout", "soon"], "--timeout: 'soon' is not a time"),
        (["--vram", "1", "--timeout", "5", "--no-wait-gpu"], "--timeout and --no-wait-gpu: give one"),
        (["--vram", "1", "--gpus", "GPU-zz"], "--gpus: no device 'GPU-zz' here; there is GPU-aaaa-1"),
        (["--vram", "1", "--gpus", "0,GPU-aaaa"], "--gpus: GPU-aaaa-1 is named twice"),
        (["--vram", "1", "--gpus", "0", "--device", "cuda:0"], "--gpus and --device cuda:0: give one"),
        (["--vram", "1", "--device", "cuda:1"], "--device cuda:1: there are 1 GPUs"),
        (["--vram", "1", "--device", "tpu"], "--device: 'tpu' is unknown"),
        (["--vram", "1", "--gpu-share", "50"], "--gpu-share is for --experimental-mps"),
        (["--vram", "1", "--experimental-mps"], "--gpu-share is missing"),
        (["--vram", "1", "--experimental-mps", "--gpu-share", "101"], "--gpu-share: 101 is no percentage"),
    ],
)
def test_what_can_be_known_to_be_wrong_is_one_line_exit_2_and_no_trainer(
    ledger: Ledger,
    more: list[str],
    says: str,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "prepare", lambda run, console, *, resume: (Path("/nonexistent"), []))
    assert main(flags("a", "steps=9", *more)) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert not Path("out").exists()
    assert not list(registry.trainer_dirs())
    assert not ledger.directory.exists() or files(ledger) == []


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        (["--gpus", "0"], "--gpus: no device '0' here (no NVIDIA driver); there is none"),
        (["--device", "cuda"], "--device cuda: no GPU here (no NVIDIA driver)"),
        (["--experimental-mps", "--gpu-share", "50"], "--experimental-mps: the run is on the CPU"),
    ],
)
def test_a_gpu_asked_for_where_there_is_none_is_refused(
    flag: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    cpu = HostMemory(Device(uuid="CPU", name="x86_64 CPU", index=0, memory_type="cpu"), "no NVIDIA driver")
    monkeypatch.setattr(gpu_plan, "Ledger", lambda: Ledger(source=cpu))
    monkeypatch.delenv("GSHARE_DEVICES")
    assert main(flags("a", "steps=9", *flag)) == 2
    assert says in capsys.readouterr().err


def test_of_several_gpus_any_one_is_taken(tmp_path: Path) -> None:
    ledger = make_ledger(tmp_path, device(), device("GPU-aabb-2", 4000), device("GPU-cccc-3", 20_000))
    code, _, err = gshare(*flags("a", "steps=9", "--vram", "3", "--gpus", "GPU-aabb,0"))
    assert code == 0, err
    assert "visible=GPU-aaaa-1" in err  # the emptier of the two, the third is not among them
    with reserve(8000, task="other", devices=ledger.source.devices()[:1], ledger=ledger):
        code, _, err = gshare(*flags("b", "steps=9", "--vram", "3", "--gpus", "GPU-aabb,0"))
        assert (code, "visible=GPU-aabb-2" in err) == (0, True), err


def test_cuda_visible_devices_of_the_user_is_kept_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_ledger(tmp_path, device(), device("GPU-aabb-2", 4000))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    code, _, err = gshare(*flags("a", "steps=9", "--vram", "3"))
    assert (code, "visible=GPU-aabb-2" in err) == (0, True), err


def test_a_killed_trainer_leaves_no_live_row_and_the_next_reserves_again(ledger: Ledger) -> None:
    """With --no-wait-gpu too: a restart waits for what the driver has not freed yet."""
    upto = Path("upto").absolute()
    script = f"steps=300,sleep=0.01,save=5,{let_go_to(upto, 100)}"  # the looks come before its end
    process = start(*flags("a", script, "--vram", "5", "--no-wait-gpu"))
    until(lambda: saved_step("a") >= 5)
    (before,) = ledger.look()[0].rows
    (trainer,) = registry.live_trainers()
    os.kill(before.pid, signal.SIGSTOP)  # so that nothing happens between the looks
    assert list(rows(ledger)) == [before.id]
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: before.id not in rows(ledger))
    until(lambda: len(rows(ledger)) == 1)
    (after,) = ledger.look()[0].rows
    assert after.budget_mb == 5120
    assert after.pid != before.pid
    upto.unlink()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "the trainer died (killed by SIGKILL)" in err
    assert err.count("(reservation ") == 2
    assert Path("out/a/adapter_model.safetensors").read_text() == weights_after("a", 300)
    assert files(ledger) == []
    assert trainer not in registry.live_trainers()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_client_that_goes_away_while_it_waits_takes_its_place_along(
    ledger: Ledger, number: signal.Signals
) -> None:
    with holder(ledger, 8000) as other:
        row = other.line()
        process = start(*flags("a", "steps=9", "--vram", "2"))
        read_until(process, "waiting for GPU memory")
        assert len(the_device(ledger).queue) == 1
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
        assert ("stopped" in out) == (number == signal.SIGINT)
        until(lambda: not registry.live_trainers())
        assert files(ledger) == [f"row-{row}.json", f"row-{row}.life"]
        assert not Path("out").exists()


def test_a_detached_run_returns_when_it_has_its_place(ledger: Ledger) -> None:
    with holder(ledger, 8000) as other:
        other.line()
        code, _, err = gshare(*flags("no", "steps=9", "--vram", "2", "--no-wait-gpu", "--detach"))
        assert code == 75, err
        code, out, err = gshare(*flags("a", "steps=9", "--vram", "2", "--detach"))
        assert (code, out) == (0, "a\n"), err
        (waiter,) = the_device(ledger).queue
        assert waiter.task == "finetune a"
        other.go_on()
        other.wait()
        until(lambda: Path("out/a/adapter_model.safetensors").exists())
    until(lambda: not registry.live_trainers())
    assert files(ledger) == []


def test_a_trace_holds_the_ledger_and_the_steps_and_is_found_by_the_jobs_name(
    capsys: pytest.CaptureFixture,
) -> None:
    code, _, err = gshare(*flags("a", "steps=9,sleep=0.01", "--vram", "2", "--trace"))
    assert code == 0, err
    assert "tracer=True" in err
    assert main(["gpu", "trace", "a", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    times = {stat["name"]: stat["times"] for stat in found["stats"] if stat["kind"] == "span"}
    assert times["TrainStep"] >= 9
    assert times["Load"] == times["LedgerRelease"] == 1
    assert times["LedgerReserve"] >= 2  # the reservation, and a use that was written down
    assert found["sharing_ms"] > 0
    assert found["step_ms"] >= 90


def test_without_the_flag_there_is_no_trace(capsys: pytest.CaptureFixture) -> None:
    assert gshare(*flags("a", "steps=9", "--vram", "2"))[0] == 0
    assert main(["gpu", "trace", "a"]) == 2
    assert "gpu trace: 'a'" in capsys.readouterr().err


def test_under_mps_the_environment_is_set_before_the_engine_and_checkpoints_come_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_ledger(tmp_path, device(compute_mode='"EXCLUSIVE_PROCESS"'))
    pipes = Path("p")
    pipes.mkdir()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "p"))
    more = ["--vram", "2", "--experimental-mps", "--gpu-share", "40", "--save-steps", "500"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as daemon:
        daemon.bind("p/control")
        daemon.listen()
        code, _, err = gshare(*flags("a", "steps=9", *more))
    assert code == 0, err
    assert "threads=40" in err
    assert "MPS enabled — a GPU fault in any job will crash all jobs on GPU-aaaa-1" in err
    assert json.loads(Path("out/a/run.json").read_text())["spec"]["save_steps"] == 100
    code, _, err = gshare(*flags("b", "steps=9", *more))  # the daemon is gone
    assert (code, "the MPS daemon of" in err) == (1, True), err
    assert not Path("out/b").exists()


def test_without_mps_nothing_of_it_is_set() -> None:
    """The control: neither the percentage nor the checkpoints."""
    code, _, err = gshare(*flags("a", "steps=9", "--vram", "2", "--save-steps", "500"))
    assert code == 0
    assert "threads=None" in err
    assert "MPS" not in err
    assert json.loads(Path("out/a/run.json").read_text())["spec"]["save_steps"] == 500


def test_the_budget_is_the_estimate_with_its_allowance_and_is_shown(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the tiny model the allowance is nearly all of it: 768 + 64 MiB, and a few for the tensors."""
    monkeypatch.setattr(command, "prepare", lambda run, console, *, resume: (tiny_checkpoint, []))
    assert main(flags("a", "steps=9", "--dry-run", "--max-length", "64")) == 0
    captured = capsys.readouterr()
    assert "peak on the GPU" in captured.out
    line = next(line for line in captured.err.splitlines() if line.startswith("GPU memory to reserve: "))
    budget = int(line.split()[4])
    total = float(next(row for row in captured.out.splitlines() if row.startswith("total")).split()[1])
    assert 0 <= budget - (768 + 64 + 1.1 * total) < 1.2
    assert line.endswith("(estimate, with CUDA's context, workspaces and fragmentation; --vram sets it)")


def test_a_dry_run_as_json_is_one_object_with_what_the_table_says(
    tiny_checkpoint: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(run: RunSpec, console: object, *, resume: bool) -> tuple[Path, list[JobRequest]]:
        return tiny_checkpoint, [
            JobRequest(spec=spec, train_store="/nonexistent", train_hash="0" * 64, resume=resume)
            for spec in run.adapters
        ]

    monkeypatch.setattr(command, "prepare", prepare)
    arguments = flags("a", "steps=9", "--dry-run", "--max-length", "64", "--base-dtype", "int8")
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert set(found) == {
        *("type", "model", "model_dir", "base_dtype", "schedule", "adapters", "gpu", "memory", "trunk"),
    }
    assert found["trunk"] is None
    assert (found["type"], found["base_dtype"], found["schedule"]) == ("dry_run", "int8", "synchronized")
    (adapter,) = found["adapters"]
    assert (adapter["name"], adapter["output_dir"]) == ("a", str(Path("out/a").absolute()))
    memory = found["memory"]
    assert memory["device"] == "cuda"
    assert memory["total_bytes"] == sum(part["bytes"] for part in memory["parts"] if not part["host"])
    shown = {name: mb for name, mb, *_ in map(str.split, table.splitlines())}
    bytes_of = {part["name"]: part["bytes"] for part in memory["parts"]} | {"total": memory["total_bytes"]}
    assert shown == {name: f"{nbytes / 2**20:,.1f}" for name, nbytes in bytes_of.items()}
    assert found["gpu"]["gpus"] == ["GPU-aaaa-1"]
    assert found["gpu"]["reservation"] is None
    assert 768 + 64 < found["gpu"]["budget_mb"] < 900
    assert main([*arguments, "--json", "--vram", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"]["budget_mb"] == 3072
    monkeypatch.delenv("GSHARE_DEVICES")
    assert main([*arguments, "--json", "--device", "cpu"]) == 0
    on_cpu = json.loads(capsys.readouterr().out)
    assert (on_cpu["gpu"], on_cpu["memory"]["device"]) == (None, "cpu")
    assert not Path("out").exists()


def test_every_field_of_the_flags_is_in_the_help(capsys: pytest.CaptureFixture) -> None:
    assert main(["finetune", "--help"]) == 0
    text = capsys.readouterr().out
    for name in GpuFlags.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text
    assert "--no-wait-gpu" in text
