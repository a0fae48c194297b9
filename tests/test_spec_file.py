"""The job spec from TOML and flags: what is filled in, and every bad input with its one clear line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gshare.agent.errors import UsageError
from gshare.agent.jobs.faults import TomlFile
from gshare.agent.jobs.spec import LINEARS, RunSpec
from gshare.agent.jobs.spec_file import FLAG_ALIASES, load_run_spec, run_spec_from_flags

GOOD = """\
model = "org/some-model"
base_dtype = "nf4"
schedule = "fair"
seed = 7

[defaults]
r = 8
learning_rate = 1e-3

[[adapter]]
name = "support"
data = "data/a.jsonl"
output_dir = "out/support"
learning_rate = 1e-4

[[adapter]]
data = "data/b.jsonl"
output_dir = "out/sales"
lora_alpha = 5
seed = 3
target_modules = ["v_proj", "q_proj"]
weight = 2
"""


@pytest.fixture(autouse=True)
def data_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in "ab":
        (tmp_path / "data" / f"{name}.jsonl").write_text("{}\n")


def load(tmp_path: Path, text: str, overrides: dict[str, object] | None = None) -> RunSpec:
    (tmp_path / "adapters.toml").write_text(text)
    return load_run_spec(tmp_path / "adapters.toml", overrides)


def faults(tmp_path: Path, text: str, overrides: dict[str, object] | None = None) -> list[str]:
    """The lines of the message, without the directory."""
    with pytest.raises(UsageError) as caught:
        load(tmp_path, text, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def test_a_good_file_with_what_is_filled_in(tmp_path: Path) -> None:
    run = load(tmp_path, GOOD)
    assert (run.model, run.base_dtype, run.schedule, run.seed) == ("org/some-model", "nf4", "fair", 7)
    assert run.source == str(tmp_path / "adapters.toml")
    support, sales = run.adapters
    assert (support.name, support.r, support.lora_alpha, support.seed) == ("support", 8, 16.0, 7)
    assert support.learning_rate == 1e-4
    assert support.data == str(tmp_path / "data/a.jsonl")
    assert support.output_dir == str(tmp_path / "out/support")
    assert support.targets == LINEARS
    assert (sales.name, sales.learning_rate, sales.lora_alpha, sales.seed) == ("sales", 1e-3, 5.0, 3)
    assert sales.targets == ("q_proj", "v_proj")
    assert isinstance(sales.weight, float)


def test_paths_are_relative_to_the_file_and_not_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapters.toml").write_text(GOOD)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_run_spec(Path("../adapters.toml")).adapters[0].data == str(tmp_path / "data/a.jsonl")


def test_a_model_directory_becomes_absolute_and_a_hub_id_stays(tmp_path: Path) -> None:
    assert load(tmp_path, GOOD.replace("org/some-model", "./models/m")).model == str(tmp_path / "models/m")
    assert load(tmp_path, GOOD.replace("org/some-model", "m.gguf")).model == str(tmp_path / "m.gguf")
    (tmp_path / "org/some-model").mkdir(parents=True)
    assert load(tmp_path, GOOD).model == str(tmp_path / "org/some-model")


def test_flags_go_over_the_file(tmp_path: Path) -> None:
    overrides: dict[str, object] = {
        "lr": "5e-5",
        "max-seq-len": 64,
        "schedule": "round_robin",
        "seed": 1,
        "optim": None,
    }
    run = load(tmp_path, GOOD, overrides)
    assert [a.learning_rate for a in run.adapters] == [5e-5, 5e-5]
    assert [a.max_length for a in run.adapters] == [64, 64]
    assert run.schedule == "round_robin"
    assert [a.seed for a in run.adapters] == [1, 3]  # an adapter's own seed stays


def test_every_fault_in_one_run_with_file_line_and_key(tmp_path: Path) -> None:
    text = """\
modle = "m"
base_dtype = "nf5"
learning_rate = 3
[defaults]
rank = 3
lora_dropout = 1.0
[[adapter]]
name = "a"
data = "data/a.jsonl"
output_dir = "out/a"
r = 0
[[adapter]] # the second
data = "data/missing.jsonl"
lr = 1e-3
schedule = "fair"
[sweep]
r = [1, 2]
"""
    assert sorted(faults(tmp_path, text)) == sorted(
        [
            "adapters.toml:1: unknown key 'modle'; did you mean 'model'?",
            "adapters.toml:3: 'learning_rate' is a key of an adapter; put it under [defaults] or [[adapter]]",
            "adapters.toml:16: [sweep]: is for gshare sweep",
            "adapters.toml:5: [defaults], key 'rank': unknown key 'rank'; did you mean 'r'?",
            "adapters.toml:6: [defaults], key 'lora_dropout': must be at least 0 and below 1, not 1.0",
            "adapters.toml:14: adapter 2, key 'lr': unknown key 'lr'; did you mean 'learning_rate'?",
            "adapters.toml:15: adapter 2, key 'schedule': is a key of the whole run; put it at the top of "
            "the file, above every [section]",
            "adapters.toml: missing key 'model': a directory, a hub id or a .gguf file",
            "adapters.toml:2: key 'base_dtype': unknown value 'nf5'; known: nf4, int8, bf16, fp32. "
            "Did you mean 'nf4'?",
            "adapters.toml:11: adapter 'a', key 'r': must be at least 1, not 0",
            "adapters.toml:13: adapter 2, key 'data': no such file: data/missing.jsonl",
            "adapters.toml:12: adapter 2: missing key 'output_dir'",
        ]
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("r = 0", "must be at least 1, not 0"),
        ("r = 2000", "must be at most 1024, not 2000"),
        ("r = 16.0", "must be a whole number, not 16.0"),
        ("r = true", "must be a whole number, not True"),
        ('r = "16"', "must be a whole number, not '16'"),
        ("lora_alpha = 0", "must be a finite number above 0, not 0.0"),
        ("lora_dropout = -0.1", "must be at least 0 and below 1, not -0.1"),
        ("lora_dropout = nan", "must be at least 0 and below 1, not nan"),
        ("learning_rate = inf", "must be a finite number above 0, not inf"),
        ("learning_rate = nan", "must be a finite number above 0, not nan"),
        ("per_device_train_batch_size = 0", "must be at least 1, not 0"),
        ("gradient_accumulation_steps = 0", "must be at least 1, not 0"),
        ("num_train_epochs = 0", "must be a finite number above 0, not 0.0"),
        ("max_steps = 0", "must be -1 (no limit) or at least 1, not 0"),
        ("max_steps = -2", "must be -1 (no limit) or at least 1, not -2"),
        ("max_length = 1", "must be at least 2, not 1"),
        ("max_length = 99999999999", "must be at most 2147483647, not 99999999999"),
        ("val_fraction = 1.0", "must be at least 0 and below 1, not 1.0"),
        ("weight = 0.0", "must be a finite number above 0, not 0.0"),
        ("warmup_ratio = 1.5", "must be between 0 and 1, not 1.5"),
        ("adam_beta1 = 1.0", "must be at least 0 and below 1, not 1.0"),
        ("adam_beta2 = -1", "must be at least 0 and below 1, not -1.0"),
        ("adam_epsilon = 0", "must be a finite number above 0, not 0.0"),
        ("weight_decay = -1", "must be a finite number, 0 or more, not -1.0"),
        ("max_grad_norm = -1", "must be a finite number, 0 or more, not -1.0"),
        ("eval_steps = -1", "must be at least 0, not -1"),
        ("save_steps = -1", "must be at least 0, not -1"),
        ("save_total_limit = 0", "must be at least 1, not 0"),
        ("seed = -1", "must be at least 0, not -1"),
        ('optim = "adamw_8bits"', "Did you mean 'adamw_8bit'?"),
        ('lr_scheduler_type = "cosinus"', "known: constant, linear, cosine. Did you mean 'cosine'?"),
        ('data_format = "mesages"', "Did you mean 'messages'?"),
        ("layers_to_transform = [-1]", "layers count from 0; -1 is none"),
        ("layers_to_transform = [1, 1]", "names a layer twice"),
        ("layers_to_transform = []", "names no layer"),
        ('layers_pattern = "h"', "no layer would match 'h': the list of layers is called \"layers\""),
        ('layers_to_transform = ["x"]', "must be a list of whole numbers, not ['x']"),
        ("target_modules = []", "names no module; known: q_proj, k_proj"),
        (
            'target_modules = ["q_prj"]',
            "unknown module 'q_prj'; known: q_proj, k_proj, v_proj, o_proj, gate_proj",
        ),
        ('target_modules = ["q_proj", "lm_head"]', "lm_head is not supported as a target"),
        ('target_modules = ["embed_tokens"]', "embed_tokens is not supported as a target"),
        ('target_modules = ["q_proj", "q_proj"]', "names a module twice"),
        ('target_modules = "q_proj"', 'write ["q_proj"]'),
        ('target_modules = ".*"', "unknown module '.*'"),
        ("target_modules = 5", "must be text or a list of texts, not 5"),
        ("train_on_prompt = 1", "must be true or false, not 1"),
        ('val_data = "data/nope.jsonl"', "no such file: data/nope.jsonl"),
        ('val_data = "data"', "data is not a file"),
        ('data = ""', "may not be empty"),
        ('data = "a\\u0000b"', "holds control characters"),
        ('output_dir = "data/a.jsonl"', "'data/a.jsonl' is a file, not a directory"),
        ('name = "a/b"', "'a/b' holds a path separator"),
        ('name = ".hidden"', "starts with '.'"),
        ('name = ""', "a name may not be empty"),
        ("name = 5", "must be text, not 5"),
        ("learnin_rate = 1", "unknown key 'learnin_rate'; did you mean 'learning_rate'?"),
        ("epochs = 1", "did you mean 'num_train_epochs'?"),
        ("zzz = 1", "known keys: name, data, output_dir"),
    ],
)
def test_one_bad_line_gives_one_clear_line(tmp_path: Path, line: str, message: str) -> None:
    key = line.split(" =", maxsplit=1)[0]
    rest = {"data": 'data = "data/a.jsonl"', "output_dir": 'output_dir = "out/a"'}
    rest.pop(key, None)
    text = "\n".join(['model = "m"', "[[adapter]]", *rest.values(), line])
    found = faults(tmp_path, text)
    assert len(found) == 1, found
    assert message in found[0]
    assert found[0].startswith(f"adapters.toml:{text.count(chr(10)) + 1}: adapter ")
    assert f"key '{key}'" in found[0]


def test_negative_control_the_file_of_that_test_is_good_without_its_bad_line(tmp_path: Path) -> None:
    text = 'model = "m"\n[[adapter]]\ndata = "data/a.jsonl"\noutput_dir = "out/a"\nr = 1'
    assert load(tmp_path, text).adapters[0].r == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('schedule = "round-robins"', "Did you mean 'round_robin'?"),
        ("max_tokens_per_pass = 0", "must be at least 1, not 0"),
        ("max_adapters_per_pass = -1", "must be at least 0, not -1"),
        ("trunk_cache = -1", 'or "auto" or "off"'),
        ('trunk_cache = "much"', 'must be "auto", "off" or a number of GiB'),
        ("seed = 1.5", "must be a whole number, not 1.5"),
        ("seed = 9223372036854775808", "must be at most 9223372036854775807"),
        ('source = "x"', "unknown key 'source'"),
        ("adapters = 1", "unknown key 'adapters'"),
        ("defaults = 1", "[defaults]: must be a table of keys"),
        ("early_exit = 1", "[early_exit]: is for gshare sweep"),
    ],
)
def test_bad_keys_of_the_run(tmp_path: Path, line: str, message: str) -> None:
    text = f'model = "m"\n{line}\n[[adapter]]\ndata = "data/a.jsonl"\noutput_dir = "out/a"\n'
    found = faults(tmp_path, text)
    assert len(found) == 1, found
    assert message in found[0]
    assert found[0].startswith("adapters.toml")


def test_duplicate_names_and_output_directories(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "out")
    text = 'model = "m"\n' + "".join(
        f'[[adapter]]\nname = "{name}"\ndata = "data/a.jsonl"\noutput_dir = "{out}"\n'
        for name, out in [
            ("a", "out/a"),
            ("a", "out/b"),
            ("c", "./out/x/../a"),
            ("d", "link/a"),
            ("e", "out/a/deep"),
        ]
    )
    assert faults(tmp_path, text) == [
        "adapters.toml:7: adapter 'a', key 'name': a second adapter named 'a'; give each its own name",
        "adapters.toml:13: adapter 'c', key 'output_dir': out/a is already the output of adapter 'a'",
        "adapters.toml:17: adapter 'd', key 'output_dir': out/a is already the output of adapter 'a'",
        "adapters.toml:17: adapter 'd', key 'output_dir': out/a is already the output of adapter 'c'",
        *(
            f"adapters.toml:21: adapter 'e', key 'output_dir': out/a/deep and out/a (adapter '{other}') "
            "lie one inside the other"
            for other in "acd"
        ),
    ]


def calls_of(work: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's, and turns of generators."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_a_file_of_many_adapters_is_read_in_calls_that_grow_with_it_and_not_with_its_square(
    tmp_path: Path,
) -> None:
    def many(count: int) -> str:
        return 'model = "m"\n' + "".join(
            f'[[adapter]]\nname = "a{n}"\ndata = "data/a.jsonl"\noutput_dir = "out/a{n}"\nr = 8\n'
            for n in range(count)
        )

    def calls(count: int) -> int:
        text = many(count)
        return calls_of(lambda: load(tmp_path, text))

    few, most = calls(200), calls(2000)
    assert most < 11 * few

    # Negative control: a look at every pair is seen.
    pairs = [calls_of(lambda n=n: [len("") for _ in range(n) for _ in range(n)]) for n in (20, 200)]
    assert pairs[1] > 50 * pairs[0]


def test_keys_and_headers_are_found_on_their_lines(tmp_path: Path) -> None:
    """Of a key the first line in its own block; of a table its header, unless that is another block's."""
    lines = {
        "top": "r = 1",
        "quoted": '"a b" = 2',
        "dotted": "x.y = 3",
        "first": "[[adapter]]",
        "r1": "  'r'=1",
        "own": "[adapter.extra]",
        "hidden": "deep = 1",
        "second": "[[adapter]]",
        "r2": "r = 2",
        "third": "[[adapter]]  # no key",
    }
    (tmp_path / "f.toml").write_text("\n".join(lines.values()))
    file = TomlFile(tmp_path / "f.toml")
    number = {name: f"{tmp_path / 'f.toml'}:{line}" for line, name in enumerate(lines, start=1)}
    assert [file.where(key) for key in ("r", "a b", "x")] == [
        number[name] for name in ("top", "quoted", "dotted")
    ]
    assert file.where("adapter") == number["first"]
    assert file.where("none") == str(tmp_path / "f.toml")
    headers = [file.where(section="adapter", index=index) for index in range(3)]
    assert headers == [number["first"], number["second"], number["third"]]
    found = [file.where("r", "adapter", index) for index in range(3)]
    assert found == [number["r1"], number["r2"], number["third"]]
    extra = [file.where("extra", "adapter", index) for index in range(3)]
    assert extra == [number["own"], number["second"], number["third"]]
    assert file.where("deep", "adapter.extra") == number["hidden"]
    assert file.where("deep", "adapter", 0) == number["first"]
    assert file.where(section="adapter", index=3) == str(tmp_path / "f.toml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model = \n", "not valid TOML: Invalid value (at line 1, column 9)"),
        (b"\xff\xfe", "not UTF-8 text (byte 0)"),
        (b'model = "m"\n', "no [[adapter]]: name at least one"),
        (b'model = "m"\n[adapter]\nr = 1\n', ":2: write [[adapter]] with double brackets"),
        (b'model = "m"\nadapter = [1]\n', "[[adapter]] 1: must be a table of keys"),
        (b"", "missing key 'model'"),
    ],
)
def test_files_that_are_no_spec(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "adapters.toml").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_run_spec(tmp_path / "adapters.toml")
    assert message in str(caught.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: no such file"):
        load_run_spec(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="is a directory, not a TOML file"):
        load_run_spec(tmp_path)


def test_bom_and_crlf_are_fine(tmp_path: Path) -> None:
    (tmp_path / "adapters.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert len(load_run_spec(tmp_path / "adapters.toml").adapters) == 2


# flags


def from_flags(tmp_path: Path, adapters: list[str], **options: object) -> RunSpec:
    return run_spec_from_flags(model="org/m", adapters=adapters, options=options, base_dir=tmp_path)


def test_flags_alone(tmp_path: Path) -> None:
    run = from_flags(
        tmp_path,
        ["data/a.jsonl:out/a", "sales=data/b.jsonl:out/b"],
        method="qlora",
        rank="8",
        target_modules="q_proj, v_proj",
        layers_to_transform="0,2",
        task="instruct",
    )
    assert (run.base_dtype, run.model, run.source) == ("nf4", "org/m", "command line")
    assert [a.name for a in run.adapters] == ["a", "sales"]
    assert run.adapters[1].data == str(tmp_path / "data/b.jsonl")
    assert (run.adapters[0].r, run.adapters[0].lora_alpha) == (8, 16.0)
    assert run.adapters[0].targets == ("q_proj", "v_proj")
    assert run.adapters[0].layers_to_transform == (0, 2)
    assert (
        from_flags(tmp_path, ["data/a.jsonl:out/a"], target_modules="all-linear").adapters[0].targets
        == LINEARS
    )


@pytest.mark.parametrize(
    ("alias", "key"), [(a, k) for a, k in FLAG_ALIASES.items() if k != "adapters_config"]
)
def test_aliases_mean_their_key(tmp_path: Path, alias: str, key: str) -> None:
    run = run_spec_from_flags(model="m", adapters=["data/a.jsonl:o"], options={alias: 5}, base_dir=tmp_path)
    assert getattr(run.adapters[0], key) == 5


def test_equals_sign_in_a_path_is_no_name(tmp_path: Path) -> None:
    (tmp_path / "data" / "x=y.jsonl").write_text("{}")
    (adapter,) = from_flags(tmp_path, ["data/x=y.jsonl:out/z"]).adapters
    assert (adapter.name, Path(adapter.data).name) == ("z", "x=y.jsonl")


@pytest.mark.parametrize(
    ("adapters", "options", "message"),
    [
        ([], {}, "--adapter: none given"),
        (["data/a.jsonl"], {}, "--adapter 'data/a.jsonl': expected DATA:OUT or NAME=DATA:OUT"),
        (["data/no.jsonl:o"], {}, "--adapter 'data/no.jsonl:o': no such file: "),
        (["../x=data/a.jsonl:o"], {}, "no such file"),
        (["x y=data/a.jsonl:o"], {}, "'x y' holds other characters than letters"),
        (["data/a.jsonl:/"], {}, "'/' is the root of the file system; name a directory below it"),
        (["a=data/a.jsonl:/"], {}, "'/' is the root of the file system; name a directory below it"),
        (["data/a.jsonl:o"], {"rank": 0}, "--rank: must be at least 1, not 0"),
        (["data/a.jsonl:o"], {"rank": "x"}, "--rank: must be a whole number, not 'x'"),
        (["data/a.jsonl:o"], {"rank": 4, "r": 8}, "--r: says 8, but --rank says 4"),
        (["data/a.jsonl:o"], {"method": "full"}, "--method: unknown method 'full'; known: qlora, lora"),
        (
            ["data/a.jsonl:o"],
            {"method": "qlora", "base_dtype": "bf16"},
            "--base-dtype: says 'bf16', but --method qlora",
        ),
        (["data/a.jsonl:o"], {"task": "dpo"}, "--task: unknown task 'dpo'; known: instruct"),
        (["data/a.jsonl:o"], {"name": "x"}, "--name: belongs to one adapter"),
        (
            ["data/a.jsonl:o"],
            {"lerning-rate": 1},
            "--lerning-rate: unknown option 'lerning_rate'; did you mean",
        ),
    ],
)
def test_bad_flags(tmp_path: Path, adapters: list[str], options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        run_spec_from_flags(model="m", adapters=adapters, options=options, base_dir=tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert message in str(caught.value)


def test_nothing_is_written(tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    from_flags(tmp_path, ["data/a.jsonl:out/a"])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("num_train_epochs = 1e19", "must be at most 1e+06"),
        ("num_train_epochs = 1e308", "must be at most 1e+06"),
        ("num_train_epochs = 1e-300", "must be at least 1e-09"),
        ("max_steps = 2147483648", "must be at most 2147483647"),
        ("eval_steps = 9223372036854775807", "must be at most 2147483647"),
        ("save_steps = 2147483648", "must be at most 2147483647"),
        ("per_device_train_batch_size = 1048577", "must be at most 1048576"),
        ("gradient_accumulation_steps = 1048577", "must be at most 1048576"),
        ("per_device_train_batch_size = 2048\ngradient_accumulation_steps = 1024", "2097152 rows a step"),
        ("learning_rate = 1e300", "must be at most 1e+06"),
        ("learning_rate = 1e-320", "must be at least 1e-30"),
        ("adam_epsilon = 1e-46", "must be at least 1e-30"),
        ("weight_decay = 1e4", "must be at most 1000"),
        ("max_grad_norm = 1e300", "must be at most 1e+30"),
        ("weight = 1e300", "must be at most 1e+09"),
        ("lora_alpha = 1e300", "must be at most 1e+06"),
        ("seed = 9223372036854775807", ""),
        ("max_steps = 2147483647\nnum_train_epochs = 1e6", ""),
    ],
)
def test_numbers_beyond_any_use_are_refused(tmp_path: Path, line: str, part: str) -> None:
    """A step count beyond 64 bits used to end the client of every job on the trainer."""
    text = f'model = "m"\n[[adapter]]\ndata = "data/a.jsonl"\noutput_dir = "out/a"\n{line}\n'
    if not part:
        assert load(tmp_path, text).adapters
        return
    (found,) = faults(tmp_path, text)
    assert part in found
    assert "adapter 1" in found


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("r = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("r = " + "{a = " * 5000 + "1" + "}" * 5000, "nested too deeply"),
        ("r = " + "9" * 5000, "not valid TOML: Exceeds the limit"),
        ("r = 0x" + "f" * 5000, "must be"),
        ("learning_rate = 0x" + "f" * 5000, "must be"),
        ("layers_to_transform = [0x" + "f" * 5000 + "]", "a number too large to show is none"),
        # tomllib reads it, tomli (Python 3.10) runs out of stack first: one line either way.
        (".".join(["r"] * 5000) + " = 1", "not a table too large to show|nested too deeply"),
    ],
    ids=["lists", "tables", "digits", "hex integer", "hex number", "hex layer", "dotted"],
)
def test_absurd_toml_is_one_line(tmp_path: Path, line: str, message: str) -> None:
    head = 'model = "m"\n[[adapter]]\ndata = "data/a.jsonl"\noutput_dir = "out/a"\n'
    (found,) = faults(tmp_path, head + line + "\n")
    assert any(part in found for part in message.split("|"))
    assert found.startswith("adapters.toml:")


def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapters.toml")
    with pytest.raises(UsageError, match="not a regular file"):
        load_run_spec(tmp_path / "adapters.toml")


@pytest.mark.parametrize("key", ["data", "val_data", "output_dir", "model"])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("~nosuchuser/x", "home directory"),
        ("loop/x", "loop|symbolic links"),
        ("x" * 256, "name too long"),
        ("é" * 128, "name too long"),
        ("a/" * 2500, "name too long"),
    ],
    ids=["user", "loop", "name", "bytes", "path"],
)
def test_paths_that_no_file_can_have_are_one_line_with_the_key(
    tmp_path: Path, key: str, path: str, reason: str
) -> None:
    if (key, path) == ("model", "loop/x"):
        return  # a hub id
    (tmp_path / "loop").symlink_to("loop")
    values = {"data": "data/a.jsonl", "output_dir": "out/a", "name": "a", key: path}
    model = values.pop("model", "m")
    lines = "".join(f'{name} = "{value}"\n' for name, value in values.items())
    (found,) = faults(tmp_path, f'model = "{model}"\n[[adapter]]\n{lines}')
    assert re.search(reason, found, re.IGNORECASE)
    assert f"key {key!r}" in found
    assert ("adapter 'a'" in found) == (key != "model")
    assert len(found) < 250
