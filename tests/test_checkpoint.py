"""Checkpoints: bit for bit, whatever is killed, full or broken; and PEFT loads them."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.spec import LINEARS, AdapterSpec
from gshare.agent.train import checkpoint, files
from gshare.agent.train.checkpoint import (
    Snapshot,
    adapter_config,
    latest_checkpoint,
    load_checkpoint,
    truncate_metrics,
    write_best,
    write_checkpoint,
    write_final,
)
from gshare.agent.train.checkpoint_writer import CheckpointWriter
from safetensors.torch import load_file

SPEC = AdapterSpec(name="a", data="a.jsonl", output_dir="out", r=4)
CONFIG = adapter_config(SPEC, "toy")
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def snapshot(step: int, *, elements: int = 64) -> Snapshot:
    """Every tensor and counter tells the step, so that a mixture of two steps is seen."""
    return Snapshot(
        job="a",
        step=step,
        adapter={NAME.format(side): torch.full((4, elements), float(step)) for side in "AB"},
        optimizer={f"{NAME.format('A')}.state1": torch.full((elements,), step % 256, dtype=torch.uint8)},
        state={"tokens": step * 10, "best_val_loss": 1 / (step + 1), "fingerprint": {"numerics": 1}},
    )


def assert_is_step(found: Snapshot, step: int) -> None:
    expected = snapshot(step)
    assert (found.job, found.step, found.state) == ("a", step, expected.state)
    for mine, theirs in ((found.adapter, expected.adapter), (found.optimizer, expected.optimizer)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) and mine[k].dtype == theirs[k].dtype for k in mine)


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


# ---------------------------------------------------------------------- round trip


def test_a_snapshot_comes_back_bit_for_bit_and_equal_snapshots_have_equal_bytes(tmp_path: Path) -> None:
    odd = snapshot(7)
    odd.adapter = {**odd.adapter, NAME.format("B"): torch.tensor([[float("nan"), -0.0, 1e-45]])}
    odd.state["loss"] = 0.1 + 0.2
    path = write_checkpoint(odd, tmp_path / "x", CONFIG)
    found = load_checkpoint(path)
    b = found.adapter[NAME.format("B")]
    assert b.view(torch.int32).tolist() == odd.adapter[NAME.format("B")].view(torch.int32).tolist()
    assert found.state == odd.state
    assert names(path) == sorted(
        [
            "adapter_config.json",
            "adapter_model.safetensors",
            "optimizer.safetensors",
            "state.json",
            "manifest.json",
        ]
    )
    again = write_checkpoint(odd, tmp_path / "y", CONFIG)
    for name in names(path):
        assert (path / name).read_bytes() == (again / name).read_bytes(), name


def test_best_and_final_hold_the_adapter(tmp_path: Path) -> None:
    for step in (3, 5):
        best = write_best(snapshot(step), tmp_path, CONFIG)
        metadata = json.loads((best / "metadata.json").read_text())
        assert metadata == {
            "step": step,
            "val_loss": 1 / (step + 1),
            "tokens": step * 10,
            "fingerprint": {"numerics": 1},
        }
        assert not checkpoint.problems(best)
        final = write_final(snapshot(step), tmp_path, CONFIG)
        for directory in (best, final):
            tensors = load_file(directory / "adapter_model.safetensors")
            assert (tensors[NAME.format("A")] == step).all()
            assert json.loads((directory / "adapter_config.json").read_text()) == CONFIG
    assert names(tmp_path) == ["adapter_config.json", "adapter_model.safetensors", "best"]
    with pytest.raises(GshareError, match="best/ holds no optimizer"):
        load_checkpoint(best)


# ---------------------------------------------------------------------- broken ones


def test_latest_is_by_number_and_nothing_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    for step in (9, 10, 2):
        write_checkpoint(snapshot(step), tmp_path, CONFIG)
    (tmp_path / "checkpoint-99").symlink_to(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-011").mkdir()
    (tmp_path / "checkpoint-98").write_text("a file")
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


@pytest.mark.parametrize(
    "name", ["adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors", "state.json"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove", "link"])
def test_damage_is_seen_skipped_with_a_warning_and_named(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        write_checkpoint(snapshot(step), tmp_path, CONFIG)
    path = tmp_path / "checkpoint-2" / name
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "flip":
        data[len(data) * 3 // 4] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "grow":
        path.write_bytes(data + b" ")
    elif damage == "link":
        (tmp_path / "same").write_bytes(data)
        path.symlink_to(tmp_path / "same")
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    assert str(path) in caplog.text
    with pytest.raises(GshareError, match=name):
        load_checkpoint(tmp_path / "checkpoint-2")


@pytest.mark.parametrize(
    "manifest",
    ["", "[]", "{}", '{"format": 2, "files": {}}', '{"format": 1, "files": {}}', '{"format": 1, "files": 3}'],
)
def test_a_bad_manifest_is_no_checkpoint(tmp_path: Path, manifest: str) -> None:
    path = write_checkpoint(snapshot(1), tmp_path, CONFIG)
    (path / "manifest.json").write_text(manifest)
    assert latest_checkpoint(tmp_path) is None
    with pytest.raises(GshareError, match=r"manifest\.json"):
        load_checkpoint(path)


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    path = write_checkpoint(snapshot(1), tmp_path, CONFIG)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../secret"] = manifest["files"]["state.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(GshareError, match=r"names \.\./secret"):
        load_checkpoint(path)


# ---------------------------------------------------------------------- the limit


def test_save_total_limit_keeps_the_newest_whole_ones(tmp_path: Path) -> None:
    for step in range(1, 6):
        write_checkpoint(snapshot(step), tmp_path, CONFIG, save_total_limit=2)
        assert names(tmp_path) == [f"checkpoint-{s}" for s in (step - 1, step) if s > 0]
    # After damage and a resume from step 4: the broken later one goes, the one just written stays.
    (tmp_path / "checkpoint-5" / "state.json").write_text("")
    (tmp_path / "checkpoint-5").rename(tmp_path / "checkpoint-50")
    write_checkpoint(snapshot(5), tmp_path, CONFIG, save_total_limit=1)
    assert names(tmp_path) == ["checkpoint-5"]
    # A whole one of a later step is never removed.
    write_checkpoint(snapshot(3), tmp_path, CONFIG, save_total_limit=1)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-5"]
    write_checkpoint(snapshot(6), tmp_path, CONFIG)
    assert len(names(tmp_path)) == 3  # no limit given: all are kept


# ---------------------------------------------------------------------- killed while writing

Write = Callable[[Snapshot, Path], None]


def atomic(found: Snapshot, output_dir: Path) -> None:
    write_checkpoint(found, output_dir, CONFIG, save_total_limit=1)
    write_best(found, output_dir, CONFIG)
    write_final(found, output_dir, CONFIG)


def in_place(found: Snapshot, output_dir: Path) -> None:
    """Negative control: the same files, written under their final name, the old ones first removed."""
    real = files.temporary_name
    checkpoint.temporary_name = lambda final: final  # type: ignore[assignment]
    checkpoint.publish_dir = lambda temporary, final: None  # type: ignore[assignment]
    try:
        for old in output_dir.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
        write_checkpoint(found, output_dir, CONFIG)
        write_best(found, output_dir, CONFIG)
    finally:
        checkpoint.temporary_name, checkpoint.publish_dir = real, files.publish_dir


def forked(action: Callable[[], None]) -> int:
    """Run `action` in a forked child; its wait status is to be collected by the caller."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return pid


def survey(output_dir: Path) -> list[int]:
    """After a death: recover as a resume does, and tell the steps of checkpoint, best and final.
    AssertionError or GshareError when one of them is not whole."""
    files.remove_leftovers(output_dir)
    path = latest_checkpoint(output_dir)
    assert path is not None, "no checkpoint can be loaded"
    found = load_checkpoint(path)
    assert_is_step(found, found.step)
    steps = [found.step]
    best = output_dir / "best"
    assert not checkpoint.problems(best), checkpoint.problems(best)
    steps.append(json.loads((best / "metadata.json").read_text())["step"])
    for directory, step in ((best, steps[-1]), (output_dir, None)):
        if (directory / "adapter_model.safetensors").exists():
            tensors = load_file(directory / "adapter_model.safetensors")
            values = {float(v) for t in tensors.values() for v in t.unique()}
            assert len(values) == 1
            assert step is None or values == {float(step)}
    return steps


def kill_at_operation(write: Write, root: Path, k: int) -> bool:
    """Step 1 stands; writing step 2 dies before its k-th file operation. True when it ran through."""
    root.mkdir()
    atomic(snapshot(1), root)

    def action() -> None:
        left = k

        def before(function: Callable[..., object]) -> Callable[..., object]:
            def wrapper(*args: object, **kwargs: object) -> object:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return function(*args, **kwargs)

            return wrapper

        for name in ("open", "rename", "replace", "unlink", "rmdir", "fsync", "write", "mkdir"):
            setattr(os, name, before(getattr(os, name)))
        files._exchange = before(files._exchange)  # type: ignore[assignment]
        write(snapshot(2), root)

    return os.waitpid(forked(action), 0)[1] == 0


@pytest.mark.parametrize("exchange", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_kill_before_every_file_operation_leaves_an_old_or_a_new_checkpoint(
    tmp_path: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    seen = set()
    for k in range(300):
        done = kill_at_operation(atomic, tmp_path / str(k), k)
        steps = survey(tmp_path / str(k))
        assert set(steps) <= {1, 2}
        assert not [n for n in names(tmp_path / str(k)) if n.startswith(".")]
        seen.add(tuple(steps))
        if done:
            break
    assert done, "did not run through"
    assert k >= 50, "the deaths were not spread over the operations"
    assert seen == {(1, 1), (2, 1), (2, 2)}


def test_the_harness_catches_a_writer_that_is_not_atomic(tmp_path: Path) -> None:
    caught = 0
    for k in range(0, 40, 3):
        kill_at_operation(in_place, tmp_path / str(k), k)
        try:
            survey(tmp_path / str(k))
        except (AssertionError, GshareError):
            caught += 1
    assert caught >= 10


def test_kill_at_random_moments_of_a_running_writer(tmp_path: Path) -> None:
    """24 times: a child saves step after step through the writer's thread and is killed at a random moment;
    the next child goes on from what is found, as a resume does."""
    moments = random.Random(0)
    step = 0
    reached = []
    for _ in range(24):
        read_end, write_end = os.pipe()

        def action(first: int = step + 1, pipe: int = write_end) -> None:
            with CheckpointWriter() as writer:
                for at in range(first, first + 10_000):
                    for kind in ("step", "best", "final"):
                        writer.submit(snapshot(at), tmp_path, kind, adapter_config=CONFIG, save_total_limit=2)
                    if at == first + 1:
                        writer.flush()
                        os.write(pipe, b"x")

        pid = forked(action)
        os.close(write_end)
        assert os.read(read_end, 1) == b"x"  # two steps stand
        os.close(read_end)
        time.sleep(moments.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        found, best = survey(tmp_path)
        assert found >= step + 2
        assert best in (found - 1, found)
        step = found
        reached.append(found)
    assert len(set(reached)) == 24


# ---------------------------------------------------------------------- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB; skipped where we may not mount."""
    where = tmp_path / "disk"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(where)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_full_disk_fails_that_save_clearly_and_later_ones_work(small_disk: Path) -> None:
    with CheckpointWriter() as writer:
        for step, elements in ((1, 64), (2, 20_000), (3, 64)):
            writer.submit(snapshot(step, elements=elements), small_disk, "step", adapter_config=CONFIG)
        writer.flush()
        one, two, three = writer.results()
    assert one.error is None
    assert three.error is None
    assert str(two.error).startswith(
        f"disk full while writing {small_disk / 'checkpoint-2'}, last checkpoint intact"
    )
    assert names(small_disk) == ["checkpoint-1", "checkpoint-3"]  # the half-written one freed its space
    assert_is_step(load_checkpoint(small_disk / "checkpoint-1"), 1)


def test_a_file_size_limit_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """The same without a mount: a child under RLIMIT_FSIZE (EFBIG), best/ included."""
    atomic(snapshot(1), tmp_path)
    big = snapshot(2, elements=20_000)  # before the fork: a forked child must not start torch's threads

    def action() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        for write in (write_checkpoint, write_best, write_final):
            with pytest.raises(GshareError, match="disk full while writing"):
                write(big, tmp_path, CONFIG)

    assert os.waitpid(forked(action), 0)[1] == 0
    assert survey(tmp_path) == [1, 1]
    assert not [name for name in names(tmp_path) if name.startswith(".")]


# ---------------------------------------------------------------------- the writer


def test_saves_are_kept_in_order_and_one_failure_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where a directory should be")
    with CheckpointWriter(max_pending=2, threads=3) as writer:
        for step in range(1, 9):
            writer.submit(snapshot(step), tmp_path / "a", "step", adapter_config=CONFIG)
            writer.submit(snapshot(step), tmp_path / "blocked", "step", adapter_config=CONFIG)
        broken = snapshot(9)
        del broken.state["tokens"]
        writer.submit(broken, tmp_path / "a", "best", adapter_config=CONFIG)
        writer.flush()  # or the next best supersedes it
        writer.submit(snapshot(9), tmp_path / "a", "best", adapter_config=CONFIG)
        writer.flush()
        results = writer.results()
        assert writer.results() == []
    good = [r for r in results if r.path.parent == tmp_path / "a"]
    assert [(r.step, r.kind, r.error) for r in good] == [
        *((step, "step", None) for step in range(1, 9)),
        (9, "best", None),
    ]
    bad = [r for r in results if r.error is not None]
    assert [r.step for r in bad if r.path != tmp_path / "a"] == [*range(1, 9)]
    assert all("Not a directory" in str(r.error) for r in bad if r.step < 9)
    assert ["KeyError: 'tokens'" in str(r.error) for r in bad if r.step == 9] == [True]
    assert len(names(tmp_path / "a")) == 9
    writer.close()
    with pytest.raises(AssertionError, match="after close"):
        writer.submit(snapshot(1), tmp_path, "step", adapter_config=CONFIG)


@pytest.mark.parametrize("between", ["nothing", "a checkpoint", "another directory's best"])
def test_a_best_that_waits_gives_way_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    """A checkpoint in between says which step is the best: that one is written (the control)."""
    import threading

    gate, real = threading.Event(), files.fsync_path
    monkeypatch.setattr(files, "fsync_path", lambda path: (gate.wait(30), real(path)))
    with CheckpointWriter(max_pending=4, threads=2) as writer:
        a, b = tmp_path / "a", tmp_path / "b"
        writer.submit(snapshot(1), a, "best", adapter_config=CONFIG)
        while not list(tmp_path.glob("a/.gshare-tmp-*")):  # it is being written: too late for that one
            time.sleep(0.01)
        for step in (2, 3, 4):  # with room for four, the fourth waits for the second and third to give way
            writer.submit(snapshot(step), a, "best", adapter_config=CONFIG)
            if step == 2 and between == "a checkpoint":
                writer.submit(snapshot(step), a, "step", adapter_config=CONFIG)
            if step == 2 and between == "another directory's best":
                writer.submit(snapshot(step), b, "best", adapter_config=CONFIG)
        gate.set()
        writer.flush()
        results = [one for one in writer.results() if one.kind == "best" and one.path.parent == a]
    written = [1, 2, 4] if between == "a checkpoint" else [1, 4]
    assert [one.step for one in results if not one.superseded] == written
    assert sorted(one.step for one in results) == [1, 2, 3, 4]  # each is heard of
    assert json.loads((a / "best" / "metadata.json").read_text())["step"] == 4
    assert checkpoint.problems(a / "best") == []
    assert (b / "best").exists() == (between == "another directory's best")


def test_no_checkpoint_names_a_best_that_could_not_be_written(tmp_path: Path) -> None:
    broken = snapshot(2)
    del broken.state["tokens"]
    with CheckpointWriter() as writer:

        def saved(one: Snapshot, kind: str) -> bool:
            writer.submit(one, tmp_path, kind, adapter_config=CONFIG)  # type: ignore[arg-type]
            writer.flush()
            (result,) = writer.results()
            return result.error is None

        assert saved(snapshot(1), "best")
        assert saved(snapshot(1), "step")
        assert not saved(broken, "best")
        assert not saved(snapshot(2), "step")
        assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
        writer.begin(tmp_path)  # the job goes on from there
        assert saved(snapshot(2), "step")
        assert not saved(broken, "best")
        assert saved(snapshot(3), "best")  # this one stands
        assert saved(snapshot(3), "step")


def test_pending_snapshots_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a disk that stands still, `submit` blocks once three snapshots wait or are being written."""
    import threading

    gate, submitted = threading.Event(), []
    monkeypatch.setattr(files, "fsync_path", lambda path: gate.wait(30))
    with CheckpointWriter(max_pending=3) as writer:

        def produce() -> None:
            for step in range(1, 7):
                writer.submit(snapshot(step), tmp_path, "step", adapter_config=CONFIG)
                submitted.append(step)

        producer = threading.Thread(target=produce)
        producer.start()
        until = time.monotonic() + 30
        while len(submitted) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        producer.join(0.5)
        assert producer.is_alive()
        assert submitted == [1, 2, 3]
        gate.set()
        producer.join(30)
        writer.flush()
        assert len(writer.results()) == 6


@pytest.mark.parametrize(("threads", "waits"), [(2, False), (1, True)])
def test_a_directory_that_is_slow_holds_up_its_own_saves_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, waits: bool
) -> None:
    """With one thread it does: the control."""
    import threading

    gate, real = threading.Event(), files.fsync_path

    def flush(path: Path) -> None:
        if tmp_path / "slow" in (path, *path.parents):
            gate.wait(30)
        real(path)

    monkeypatch.setattr(files, "fsync_path", flush)
    with CheckpointWriter(threads=threads) as writer:
        for step in (1, 2):
            writer.submit(snapshot(step), tmp_path / "slow", "step", adapter_config=CONFIG)
        writer.submit(snapshot(1), tmp_path / "quick", "step", adapter_config=CONFIG)
        until = time.monotonic() + (0.5 if waits else 30)
        while not (found := writer.results()) and time.monotonic() < until:
            time.sleep(0.01)
        assert [result.path.parent.name for result in found] == ([] if waits else ["quick"])
        gate.set()
        writer.flush()
        assert [r.step for r in writer.results() if r.path.parent.name == "slow"] == [1, 2]


# ---------------------------------------------------------------------- metrics


def test_metrics_are_cut_back_and_a_torn_line_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    truncate_metrics(path, 3)
    assert not path.exists()
    lines = [json.dumps({"type": "step", "step": step, "loss": step / 3}) + "\n" for step in range(1, 6)]
    lines.insert(3, json.dumps({"type": "eval", "step": 3, "val_loss": 0.5}) + "\n")
    path.write_text("".join(lines) + '{"type": "step", "st')
    truncate_metrics(path, 5)
    assert path.read_text() == "".join(lines)
    inode = path.stat().st_ino
    truncate_metrics(path, 5)
    assert path.stat().st_ino == inode  # nothing to cut: not rewritten
    truncate_metrics(path, 3)
    assert path.read_text() == "".join(lines[:4])
    truncate_metrics(path, 0)
    assert path.read_text() == ""
    for bad in ("not json", "[1]", '{"loss": 1}', '{"step": null}'):
        path.write_text(lines[0] + bad + "\n" + lines[1])
        with pytest.raises(UsageError, match=r"metrics\.jsonl:2: not a JSON object with a number `step`"):
            truncate_metrics(path, 1)
        assert bad in path.read_text()


# ---------------------------------------------------------------------- PEFT


def toy_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    "changes",
    [
        {"r": 4},
        {"r": 2, "lora_alpha": 5.0, "use_rslora": True, "target_modules": ("q_proj", "down_proj")},
        {"r": 3, "lora_alpha": 1.5, "layers_to_transform": (1,), "lora_dropout": 0.1},
    ],
)
def test_peft_loads_it_and_computes_the_same(tmp_path: Path, changes: dict) -> None:
    peft = pytest.importorskip("peft")
    spec = AdapterSpec(name="a", data="a.jsonl", output_dir="out", **changes)
    model, adapter = toy_model(), {}
    generator = torch.Generator().manual_seed(1)
    expected = toy_model()
    for name, module in expected.named_modules():
        linear, parts = name.split(".")[-1], name.split(".")
        layers = spec.layers_to_transform
        if linear not in spec.targets or (layers is not None and int(parts[2]) not in layers):
            continue
        assert isinstance(module, torch.nn.Linear)
        a = torch.randn(spec.r, module.in_features, generator=generator)
        b = torch.randn(module.out_features, spec.r, generator=generator)
        adapter[f"base_model.model.{name}.lora_A.weight"] = a
        adapter[f"base_model.model.{name}.lora_B.weight"] = b
        with torch.no_grad():
            module.weight += spec.scaling * (b @ a)
    assert {name.split(".")[-3] for name in adapter} == set(spec.targets) <= set(LINEARS)
    found = Snapshot("a", 1, adapter, {}, snapshot(1).state)
    path = write_checkpoint(found, tmp_path, adapter_config(spec, "toy"))
    assert write_best(found, tmp_path, adapter_config(spec, "toy")).is_dir()
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        base = model(tokens).logits
        for directory in (path, tmp_path / "best"):
            loaded = peft.PeftModel.from_pretrained(toy_model(), str(directory)).eval()
            saved = {n.replace(".default", "") for n, _ in loaded.named_parameters() if "lora_" in n}
            assert saved == set(adapter)
            torch.testing.assert_close(loaded(tokens).logits, expected(tokens).logits, rtol=1e-4, atol=1e-4)
    assert (base - expected(tokens).logits).abs().max() > 0.01  # the adapter does something


def test_the_config_has_only_keys_that_peft_knows_and_its_values() -> None:
    peft = pytest.importorskip("peft")
    spec = AdapterSpec(
        name="a", data="d", output_dir="o", r=8, lora_alpha=12.5, target_modules=("v_proj", "q_proj")
    )
    config = adapter_config(spec, "models/toy")
    theirs = peft.LoraConfig(
        r=8, lora_alpha=12.5, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", inference_mode=True
    )
    theirs.base_model_name_or_path = "models/toy"
    known = theirs.to_dict()
    assert config.keys() <= known.keys()
    for key, value in config.items():
        expected = known[key]
        assert value == (
            sorted(expected) if isinstance(expected, set) else getattr(expected, "value", expected)
        ), key
    assert isinstance(adapter_config(SPEC, "x")["lora_alpha"], int)
    assert adapter_config(SPEC, "x")["lora_alpha"] == 8
    assert adapter_config(SPEC, "x")["target_modules"] == list(LINEARS)
