"""`gshare finetune` with the real engine, from data file to adapter, its trainer killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gshare.agent.base.tiny import make_tiny_checkpoint
from gshare.agent.data.build import build_token_store
from gshare.agent.jobs.spec import JobRequest
from gshare.agent.jobs.spec_file import run_spec_from_flags
from gshare.agent.service import registry
from gshare.agent.service.client import TrainerClient
from gshare.agent.train.runner import Runner
from gshare.cli.main import main

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))
from fake_runner import let_go_to  # noqa: E402

OPTIONS = {"r": 4, "max_steps": 40, "save_steps": 5, "max_length": 32, "eval_steps": 10}


def train_alone(model: Path, name: str) -> bytes:
    """The adapter of a job that had a trainer for itself, with nothing between it and the engine."""
    run = run_spec_from_flags(model=str(model), adapters=[f"{name}.jsonl:alone/{name}"], options=OPTIONS)
    (spec,) = run.adapters
    store = build_token_store(Path(spec.data), model, cache_dir=Path("tokens"), max_length=spec.max_length)
    runner = Runner(
        model_dir=model,
        base_dtype="fp32",
        schedule="synchronized",
        max_tokens_per_pass=16384,
        max_adapters_per_pass=0,
        device="cpu",
        on_event=lambda event: None,
        on_pass=lambda in_flight: None,
    )
    runner.admit(JobRequest(spec=spec, train_store=str(store.path), train_hash=store.hash))
    while runner.run_round():
        pass
    runner.close()
    return Path(spec.output_dir, "adapter_model.safetensors").read_bytes()


def test_a_killed_trainer_and_a_neighbour_leave_no_trace_in_the_bits(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        (tmp_path / variable).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    upto = tmp_path / "upto"
    let_go_to(upto, 12)  # the rest takes less than a second
    monkeypatch.setenv("GSHARE_TEST_RUNNER", "held_runner:HeldRunner")
    monkeypatch.setenv("GSHARE_TEST_UPTO", str(upto))
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    for name in ("a", "b"):
        rows = [{"prompt": f"{name} {i}", "completion": f" answer {i * 7}"} for i in range(20)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = [text for key, value in OPTIONS.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    arguments = [
        *(sys.executable, "-m", "gshare.cli.main", "finetune", "--model", str(tiny_checkpoint)),
        *("--base-dtype", "fp32", "--device", "cpu", *flags),
        *("--adapter", "a.jsonl:out/a", "--adapter", "b.jsonl:out/b"),
    ]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not Path("out/a/checkpoint-5").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (trainer,) = registry.live_trainers()
    os.kill(TrainerClient(trainer, "test").hello.pid, signal.SIGKILL)
    upto.unlink()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "the trainer died (killed by SIGKILL)" in err
    assert out.count("40/40  completed") == 2
    fused = {name: Path(f"out/{name}/adapter_model.safetensors").read_bytes() for name in ("a", "b")}
    assert fused["a"] == train_alone(tiny_checkpoint, "a")
    assert fused["a"] != fused["b"]
    again = subprocess.run([*arguments, "--resume"], check=False, capture_output=True, text=True, timeout=300)
    assert (again.returncode, again.stdout) == (0, out), (
        again.stderr
    )  # finished: the losses are those on disk


def test_a_poisonous_job_fails_and_its_co_tenants_keep_their_bits(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "poison" kills the trainer's process at its third step, every time: it fails, the others finish."""
    monkeypatch.chdir(tmp_path)
    for variable in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        (tmp_path / variable).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("GSHARE_TEST_RUNNER", "poison:PoisonedRunner")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    for name in ("a", "b", "poison"):
        rows = [{"prompt": f"{name} {i}", "completion": f" answer {i * 7}"} for i in range(20)]
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = [text for key, value in OPTIONS.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "gshare.cli.main", "finetune", "--model", str(tiny_checkpoint)),
            *("--base-dtype", "fp32", "--device", "cpu", *flags),
            *(word for name in ("a", "poison", "b") for word in ("--adapter", f"{name}.jsonl:out/{name}")),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("40/40  completed") == 2
    (end,) = [line for line in done.stdout.splitlines() if line.split()[1:2] == ["poison"]]
    assert "failed" in end
    assert not Path("out/poison/adapter_model.safetensors").exists()
    for name in ("a", "b"):
        fused = Path(f"out/{name}/adapter_model.safetensors").read_bytes()
        assert fused == train_alone(tiny_checkpoint, name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers-to-transform", "0,99"], "adapter a: layers_to_transform: 99 is no layer of this model"),
        (["--max-length", "100000"], "adapter a: max_length: 100000 is beyond"),
        (["--adapter", "b=a.jsonl:model"], "adapter b: output_dir: "),
        (["shape"], "config.json asks for"),
        (["truncated"], "truncated or not a safetensors file"),
        (["no weights"], "has neither model.safetensors nor"),
    ],
)
def test_what_does_not_fit_the_model_shows_before_a_trainer_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    model = make_tiny_checkpoint(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    weights = model / "model.safetensors"
    if arguments == ["shape"]:
        config = json.loads((model / "config.json").read_text())
        config["intermediate_size"] += 2
        (model / "config.json").write_text(json.dumps(config))
    elif arguments == ["truncated"]:
        weights.write_bytes(weights.read_bytes()[:5000])
    elif arguments == ["no weights"]:
        weights.unlink()
    flags = arguments if arguments[0].startswith("--") else []
    length = [] if "--max-length" in flags else ["--max-length", "64"]
    assert main(["finetune", "--model", "model", "--adapter", "a=a.jsonl:out/a", *length, *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "XDG_RUNTIME_DIR").exists()
    assert not (tmp_path / "out").exists()
