"""From a job's spec and `KEY=VALUE` to its clone's: what may change, what may not, and how it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from gshare.agent.errors import UsageError
from gshare.agent.jobs.clone import cloned_spec, free_name, parse_settings, spec_toml
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.jobs.spec_file import load_run_spec


@pytest.fixture
def parent(tmp_path: Path) -> AdapterSpec:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    data, out = str(tmp_path / "a.jsonl"), str(tmp_path / "out/a")
    return AdapterSpec(name="a", data=data, output_dir=out, lora_alpha=32.0, seed=7)


def make(parent: AdapterSpec, *texts: str, warm: bool = False, name: str = "b") -> AdapterSpec:
    base_dir = Path(parent.data).parent
    return cloned_spec(parent, parse_settings(texts), name=name, warm=warm, base_dir=base_dir)


def test_what_is_set_changes_and_everything_else_stays(parent: AdapterSpec) -> None:
    spec = make(parent, "lr=1e-4", "optim=adamw_8bit", "target-modules=q_proj,v_proj", "max_steps=9")
    changed = {
        "name": "b",
        "output_dir": str(Path(parent.output_dir).parent / "b"),
        "learning_rate": 1e-4,
        "optim": "adamw_8bit",
        "target_modules": ("q_proj", "v_proj"),
        "max_steps": 9,
    }
    assert spec == msgspec.structs.replace(parent, **changed)


def test_alpha_follows_r_only_where_it_was_twice_r(parent: AdapterSpec) -> None:
    assert make(parent, "r=64").lora_alpha == 128
    assert make(parent, "r=64", "lora_alpha=8").lora_alpha == 8
    own = msgspec.structs.replace(parent, lora_alpha=24.0)
    assert make(own, "r=64").lora_alpha == 24


def test_paths_start_at_the_working_directory(parent: AdapterSpec, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text("{}\n")
    spec = make(parent, "data=c.jsonl", "output_dir=there")
    assert (spec.data, spec.output_dir) == (str(tmp_path / "c.jsonl"), str(tmp_path / "there"))


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (
            ["learning_rat=1"],
            {},
            "--set 'learning_rat=1': unknown key 'learning_rat'; did you mean 'learning_rate'?",
        ),
        (["learning_rate"], {}, "expected KEY=VALUE"),
        (["=3"], {}, "expected KEY=VALUE"),
        (["lr=1", "learning_rate=2"], {}, "learning_rate is set twice"),
        (["base_dtype=nf4"], {}, "base_dtype is of the whole run"),
        (["name=c"], {}, "say it as --name c"),
        (["r=0"], {}, "--set r='0': must be at least 1, not 0"),
        (["r=two"], {}, "--set r='two': must be a whole number, not 'two'"),
        (["optim=adam"], {}, "Did you mean 'adamw'?"),
        (["data=none.jsonl"], {}, "--set data='none.jsonl': no such file"),
        (["learning_rate=nan"], {}, "must be a finite number above 0"),
        (["per_device_train_batch_size=2000", "gradient_accumulation_steps=2000"], {}, "4000000 rows a step"),
        (["r=8"], {"warm": True}, "a warm clone has the shapes of its parent's weights"),
        (["target_modules=q_proj"], {"warm": True}, "a warm clone has the shapes"),
        (["layers_to_transform=0"], {"warm": True}, "a warm clone has the shapes"),
        ([], {}, "nothing of a is changed"),
        (["eval_steps=1", "weight=2"], {}, "nothing of a is changed"),
        (["learning_rate=2e-4"], {}, "nothing of a is changed"),
        (["lr=1"], {"name": "../b"}, "--name: '../b' holds a path separator"),
    ],
)
def test_what_is_wrong_is_named(
    parent: AdapterSpec, texts: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as raised:
        make(parent, *texts, **options)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_warm_clone_may_change_nothing_and_name_the_shapes_that_it_has(parent: AdapterSpec) -> None:
    assert make(parent, "r=16", warm=True) == make(parent, warm=True)


def test_a_free_name_is_found_and_fits() -> None:
    assert free_name("a", {"a"}) == "a-clone"
    assert free_name("a", {"a", "a-clone", "a-clone-2"}) == "a-clone-3"
    long = "x" * 64
    assert free_name(long, {long, "x" * 58 + "-clone"}) == "x" * 56 + "-clone-2"


def test_the_written_spec_is_read_back_as_it_was(parent: AdapterSpec, tmp_path: Path) -> None:
    name = tmp_path / 'q"uo\\te ü.jsonl'
    name.write_text("{}\n")
    odd = {"data": str(name), "layers_to_transform": (0, 2), "target_modules": ("v_proj",), "seed": 2**62}
    spec = msgspec.structs.replace(parent, **odd, adam_epsilon=1e-12, use_rslora=True)
    (tmp_path / "m").mkdir()
    text = spec_toml({"model": str(tmp_path / "m"), "base_dtype": "nf4", "seed": 1}, spec, "of a")
    file = tmp_path / "clone.toml"
    file.write_text(text, encoding="utf-8")
    run = load_run_spec(file)
    assert run.adapters == (spec,)
    assert (run.model, run.base_dtype, run.seed) == (str(tmp_path / "m"), "nf4", 1)
