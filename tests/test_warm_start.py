"""A warm clone in the engine: its bytes are a function of the weights that it started from.

Its parent does not notice that its weights were read; a clone that was stopped goes on with the same bits.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec
import pytest
from gshare.agent.base.weights import Base
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.events import Event, JobChanged
from gshare.agent.jobs.spec import JobRequest, WarmStart
from gshare.agent.train.runner import Runner
from toy import changed, make_runner, request, tiny_base, train

FILES = ("adapter_model.safetensors", "checkpoint-6/optimizer.safetensors", "best/metadata.json")


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Base:
    return tiny_base(tiny_checkpoint)


def job(directory: Path, name: str, **spec: object) -> JobRequest:
    """Of all names the same rows, so that what differs is the start."""
    values = {"max_steps": 6, "save_steps": 3, "lora_dropout": 0.1, **spec}
    return request(directory, name, data_seed=3, **values)  # type: ignore[arg-type]


def finish(runner: Runner) -> None:
    while runner.run_round():
        pass
    runner.close()


def in_company(
    tiny_checkpoint: Path, base: Base, directory: Path, *, at: int = 3, **spec: object
) -> tuple[WarmStart, JobRequest]:
    """Parent a trains beside c; after `at` steps b is cloned from it and trains beside both."""
    runner = make_runner(tiny_checkpoint, base)
    runner.admit(job(directory, "a"))
    runner.admit(job(directory, "c", learning_rate=1e-3, max_steps=9))
    for _ in range(at):
        runner.run_round()
    clone = job(directory, "b", learning_rate=1e-3, **spec)
    start = runner.take_weights("a", Path(clone.spec.output_dir) / "start")
    clone = msgspec.structs.replace(clone, start=start)
    runner.admit(clone)
    finish(runner)
    return start, clone


def alone(tiny_checkpoint: Path, base: Base, clone: JobRequest, directory: Path) -> Path:
    train([clone], directory, tiny_checkpoint, base)
    return directory / clone.spec.name


def differing(one: Path, other: Path) -> list[str]:
    return [file for file in FILES if (one / file).read_bytes() != (other / file).read_bytes()]


@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
def test_a_clone_has_the_bytes_of_a_run_alone_from_the_same_weights(
    tiny_checkpoint: Path, base: Base, tmp_path: Path, optim: str
) -> None:
    start, clone = in_company(tiny_checkpoint, base, tmp_path / "packed", optim=optim)
    assert (start.parent, start.step) == ("a", 3)
    solo = alone(tiny_checkpoint, base, clone, tmp_path / "solo")
    assert differing(Path(clone.spec.output_dir), solo) == []


def test_the_control_other_weights_or_none_give_other_bytes(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    start, clone = in_company(tiny_checkpoint, base, tmp_path / "packed")
    other, later = in_company(tiny_checkpoint, base, tmp_path / "later", at=4)
    assert other.sha256 != start.sha256
    moved = msgspec.structs.replace(clone, start=later.start)
    assert differing(
        Path(clone.spec.output_dir), alone(tiny_checkpoint, base, moved, tmp_path / "x")
    ) == list(FILES)
    cold = msgspec.structs.replace(clone, start=None)
    assert differing(Path(clone.spec.output_dir), alone(tiny_checkpoint, base, cold, tmp_path / "y")) == list(
        FILES
    )


def test_the_parent_and_its_neighbour_have_the_bytes_of_a_run_without_a_clone(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    in_company(tiny_checkpoint, base, tmp_path / "cloned")
    runner = make_runner(tiny_checkpoint, base)
    runner.admit(job(tmp_path / "plain", "a"))
    runner.admit(job(tmp_path / "plain", "c", learning_rate=1e-3, max_steps=9))
    finish(runner)
    assert differing(tmp_path / "cloned/a", tmp_path / "plain/a") == []
    final = "adapter_model.safetensors"
    assert (tmp_path / "cloned/c" / final).read_bytes() == (tmp_path / "plain/c" / final).read_bytes()
    assert differing(tmp_path / "cloned/a", tmp_path / "cloned/b") == list(FILES)  # the comparison can fail


def test_the_weights_taken_are_those_of_the_checkpoint_of_that_step(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    start, clone = in_company(tiny_checkpoint, base, tmp_path)
    saved = (tmp_path / "a/checkpoint-3/adapter_model.safetensors").read_bytes()
    assert start.sha256 == hashlib.sha256(saved).hexdigest()
    lineage = {"parent": "a", "step": 3, "sha256": start.sha256}
    out = Path(clone.spec.output_dir)
    assert json.loads((out / "best/metadata.json").read_text())["start"] == lineage
    assert json.loads((out / "checkpoint-6/state.json").read_text())["state"]["start"] == lineage
    assert lineage.items() <= json.loads((out / "start/metadata.json").read_text()).items()
    assert "start" not in json.loads((tmp_path / "a/best/metadata.json").read_text())


def test_a_stopped_clone_goes_on_with_the_same_bits(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    _, clone = in_company(tiny_checkpoint, base, tmp_path / "packed")
    stopped = changed(clone, output_dir=str(tmp_path / "stopped" / "b"))
    runner = make_runner(tiny_checkpoint, base)
    runner.admit(stopped)
    for _ in range(4):
        runner.run_round()
    runner.stop("b", "")
    runner.close()
    events: list[Event] = []
    runner = make_runner(tiny_checkpoint, base, events.append)
    runner.admit(msgspec.structs.replace(stopped, resume=True))
    finish(runner)
    assert next(e.reason for e in events if isinstance(e, JobChanged)) == "resumed at step 4"
    assert differing(Path(clone.spec.output_dir), tmp_path / "stopped/b") == []

    for start in (None, msgspec.structs.replace(clone.start, step=2)):  # type: ignore[type-var]
        other = msgspec.structs.replace(stopped, resume=True, start=start)
        with pytest.raises(
            UsageError, match=r"started from a at step 3 \(weights \w+\), not from (fresh|a at)"
        ):
            make_runner(tiny_checkpoint, base).admit(other)


def test_damaged_foreign_or_misshapen_weights_are_refused_and_nothing_is_left(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    start, clone = in_company(tiny_checkpoint, base, tmp_path)
    runner = make_runner(tiny_checkpoint, base)
    elsewhere = changed(clone, name="d", output_dir=str(tmp_path / "d"))

    def refused(request: JobRequest) -> str:
        with pytest.raises(UsageError) as raised:
            runner.admit(request)
        assert not runner.jobs()
        return str(raised.value)

    def with_start(**change: object) -> JobRequest:
        return msgspec.structs.replace(elsewhere, start=msgspec.structs.replace(start, **change))

    assert "do not fit this spec" in refused(changed(elsewhere, r=8))
    assert "do not fit this spec" in refused(
        changed(elsewhere, target_modules="all-linear", layers_to_transform=None, r=2)
    )
    assert "other weights than those of a at step 3" in refused(with_start(sha256="0" * 64))
    assert "No such file" in refused(with_start(directory=str(tmp_path / "nowhere")))
    metadata = Path(start.directory) / "metadata.json"
    good = metadata.read_bytes()
    metadata.write_bytes(good.replace(b'"step"', b'"stop"'))
    assert "SHA-256 differs" in refused(elsewhere)
    metadata.write_bytes(good)
    weights = Path(start.directory) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert "not those that were written" in refused(elsewhere)


def test_a_job_that_paused_where_it_was_to_gives_the_weights_of_that_step(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    """Its memory is given back: they come from its checkpoint."""
    runner = make_runner(tiny_checkpoint, base)
    runner.admit(msgspec.structs.replace(job(tmp_path, "a"), pause_at=2))
    while runner.run_round():
        pass
    assert runner.jobs()[0].parked
    start = runner.take_weights("a", tmp_path / "start")
    saved = (tmp_path / "a/checkpoint-2/adapter_model.safetensors").read_bytes()
    assert (start.step, start.sha256) == (2, hashlib.sha256(saved).hexdigest())


def test_only_a_job_that_has_not_ended_gives_weights_and_a_paused_one_does(
    tiny_checkpoint: Path, base: Base, tmp_path: Path
) -> None:
    runner = make_runner(tiny_checkpoint, base)
    runner.admit(job(tmp_path, "a"))
    runner.run_round()
    runner.pause("a")
    assert runner.take_weights("a", tmp_path / "start").step == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(GshareError, match="file"):
        runner.take_weights("a", tmp_path / "file" / "start")
    assert runner.jobs()[0].state == "paused"  # the disk's trouble is the clone's, not the parent's
    runner.resume("a")
    finish(runner)
    with pytest.raises(UsageError, match="has ended as completed"):
        runner.take_weights("a", tmp_path / "start")
