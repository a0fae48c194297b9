"""A sweep's file: what it makes, and one clear line for each thing that is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gshare.agent.errors import UsageError
from gshare.agent.jobs.early_exit import SweepExit
from gshare.agent.jobs.sweep_ranges import Range
from gshare.agent.jobs.sweep_spec import SweepFile, SweepSpec

HEAD = """\
model = "m"
[defaults]
data = "a.jsonl"
"""
GRID = """\
[sweep]
output_dir = "out"
[sweep.grid]
learning_rate = [1e-5, 2e-4]
r = [16, 32, 64]
"""


def _read(tmp_path: Path, text: str, **overrides: object) -> SweepSpec:
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "v.jsonl").touch()
    path = tmp_path / "rates.toml"
    path.write_text(text)
    return SweepFile(path, overrides).spec()


def _faults(tmp_path: Path, text: str, **overrides: object) -> list[str]:
    with pytest.raises(UsageError) as caught:
        _read(tmp_path, text, **overrides)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def test_a_grid_is_every_combination(tmp_path: Path) -> None:
    sweep = _read(tmp_path, HEAD + GRID)
    assert sweep.name == "rates"
    assert sweep.directory == tmp_path / "out"
    assert [(spec.learning_rate, spec.r, spec.lora_alpha) for spec in sweep.run.adapters] == [
        (rate, r, 2.0 * r) for rate in (1e-5, 2e-4) for r in (16, 32, 64)
    ]
    first = sweep.run.adapters[0]
    assert first.name == "rates-lr1e-05-r16"
    assert first.output_dir == str(tmp_path / "out" / "lr1e-05-r16")
    assert first.data == str(tmp_path / "a.jsonl")
    assert sweep.hyper_parameters[1] == {"learning_rate": 1e-5, "r": 32}
    assert sweep.early_exit == SweepExit()


def test_a_list_and_the_template(tmp_path: Path) -> None:
    text = """\
model = "m"
[[adapter]]
name = "mine"
data = "a.jsonl"
output_dir = "here"
r = 4
[sweep]
max_concurrent = 3
[[sweep.configuration]]
r = 8
[[sweep.configuration]]
target_modules = ["q_proj", "v_proj"]
[early_exit]
warmup = 0.2
divergence = false
"""
    sweep = _read(tmp_path, text)
    assert sweep.name == "mine"
    assert sweep.max_concurrent == 3
    assert [spec.r for spec in sweep.run.adapters] == [8, 4]
    assert [Path(spec.output_dir) for spec in sweep.run.adapters] == [
        tmp_path / "here" / "c1",  # a list of modules makes no name
        tmp_path / "here" / "c2",
    ]
    assert sweep.hyper_parameters[1] == {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    assert sweep.early_exit == SweepExit(warmup=0.2, divergence=False)


def test_ranges_wait_for_what_is_drawn(tmp_path: Path) -> None:
    text = HEAD + (
        '[sweep]\noutput_dir = "out"\nn_trials = 20\nbatch = 5\n'
        "[sweep.ranges]\nlearning_rate = { low = 1e-5, high = 1e-3, log = true }\nr = [8, 16]\n"
    )
    (tmp_path / "a.jsonl").touch()
    path = tmp_path / "s.toml"
    path.write_text(text)
    file = SweepFile(path)
    empty = file.spec()
    assert empty.run.adapters == ()
    assert empty.sampled is not None
    assert empty.sampled.ranges == {"learning_rate": Range(1e-5, 1e-3, log=True), "r": [8, 16]}
    one, two = {"learning_rate": 1e-4, "r": 8}, {"learning_rate": 2e-4, "r": 8}
    names = [spec.name for spec in file.spec([one, two]).run.adapters]
    assert names == ["s-c01", "s-c02"]
    assert [spec.name for spec in file.spec([one]).run.adapters] == names[:1]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (HEAD, ["rates.toml: no [sweep]: say what to try, as [sweep.grid] with lists of values"]),
        (HEAD + '[sweep]\noutput_dir = "o"\n', ["takes one of [sweep.grid]"]),
        (HEAD + '[sweep]\noutput_dir = "o"\n[sweep.grid]\n', ["[sweep.grid]: is empty; name keys of an"]),
        (
            HEAD + '[sweep]\noutput_dir = "o"\n[sweep.grid]\nr = []\n',
            ["[sweep.grid], key 'r': is empty; list the values to try"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\n[sweep.grid]\nlearning_rat = [1e-3]\n',
            [
                "rates.toml:7: [sweep.grid], key 'learning_rat': unknown key 'learning_rat'; did you mean "
                "'learning_rate'?"
            ],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\nmax_concurent = 1\n[sweep.grid]\nr = [0, 8]\n',
            ["rates.toml:6: [sweep], key 'max_concurent': unknown key 'max_concurent'; did you mean"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\n[sweep.grid]\nr = [0, 8]\n',
            ["rates.toml:7: [sweep.grid], key 'r': must be at least 1, not 0"],
        ),
        (HEAD + "[sweep]\n[sweep.grid]\nr = [8]\n", ["[sweep]: missing key 'output_dir'"]),
        (
            HEAD + "val_fraction = 0.0\n" + GRID,
            ["rates.toml:4: [defaults], key 'val_fraction': no validation data, and a sweep ranks by"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\n[sweep.grid]\nseed = [1, 2]\n',
            ["key 'seed': changes the validation rows, so losses would not compare; set val_data too"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\n[sweep.grid]\nmax_length = [64, 128]\n',
            ["key 'max_length': changes what the validation loss is measured on; fix it for all"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\n[sweep.grid]\noutput_dir = ["a"]\n',
            ["key 'output_dir': is given by the sweep to each configuration"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\n[sweep.grid]\nr = [8, 8]\n',
            ["[sweep.grid]: the same configuration twice: r = 8"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\n[sweep.grid]\nlora_alpha = [32, 32.0, 8]\n',
            ["[sweep.grid]: the same configuration twice: lora_alpha = 32.0"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\n[sweep.grid]\n'
            'target_modules = [["q_proj", "v_proj"], ["v_proj", "q_proj"]]\n',
            ["[sweep.grid]: the same configuration twice: target_modules = ['v_proj', 'q_proj']"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\n[[sweep.configuration]]\nr = 8\n'
            "[[sweep.configuration]]\nr = 8\nlora_alpha = 16\n",
            ["[sweep.configuration]: the same configuration twice: r = 8, lora_alpha = 16"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "a.jsonl"\n[sweep.grid]\nr = [8]\n',
            ["rates.toml:5: [sweep], key 'output_dir': 'a.jsonl' is a file, not a directory"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "a.jsonl/b"\n[sweep.grid]\nr = [8]\n',
            ["[sweep], key 'output_dir': 'a.jsonl/b' lies below a.jsonl, which is no directory"],
        ),
        *(
            (
                HEAD + f'[sweep]\noutput_dir = "{place}"\n[sweep.grid]\nr = [8]\n',
                [f"rates.toml:5: [sweep], key 'output_dir': {fault}"],
            )
            for place, fault in (
                ("/", "'/' is the root of the file system; name a directory below it"),
                ("~no_such_user/x", "'~no_such_user/x' cannot be used: Could not determine home directory"),
            )
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\nn_trials = 0\n[sweep.ranges]\nr = [8]\n',
            ["rates.toml:6: [sweep], key 'n_trials': must be at least 1"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\n[sweep.grid]\nr = 8\n',
            ["[sweep], key 'grid': must be blocks of keys with values"],
        ),
        (
            HEAD + GRID + "[early_exit]\nwarmup = 5\n",
            ["[early_exit], key 'warmup': must be above 0 and below"],
        ),
        (HEAD + GRID + "[early_exit]\nwindow = 1\n", ["[early_exit], key 'window': must be at least 2"]),
        *(
            (
                HEAD + GRID + f"[early_exit]\n{key} = {2**64}\n",
                [f"rates.toml:10: [early_exit], key '{key}': must be at most 2147483647"],
            )
            for key in ("window", "divergence_patience", "overfitting_patience")
        ),
        *(
            (
                HEAD + f'[sweep]\noutput_dir = "o"\n{key} = {value}\n[sweep.grid]\nr = [8]\n',
                [f"rates.toml:6: [sweep], key '{key}': must be at {bound}"],
            )
            for key, value, bound in (
                ("max_concurrent", 2**64, "most 2147483647, not 18446744073709551616"),
                ("batch", 2**64, "most 2147483647, not"),
                ("batch", 0, "least 1, not 0"),
                ("n_trials", 2**64, "most 4096, not 18446744073709551616"),
                ("n_trials", 4097, "most 4096"),
                ("seed", 2**63, "most 9223372036854775807, not"),
                ("seed", -1, "least 0, not -1"),
            )
        ),
        (
            HEAD + GRID + "[early_exit]\nkep = 1\n",
            ["[early_exit], key 'kep': unknown key 'kep'; did you mean"],
        ),
        (HEAD + GRID + "[early_exit]\nkeep = nan\n", ["[early_exit], key 'keep': must be above 0"]),
        (
            HEAD + GRID + '[[adapter]]\ndata="a.jsonl"\n[[adapter]]\ndata="a.jsonl"\n',
            ["a sweep takes one [[adapter]] at most"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\n[sweep.ranges]\nr = [8]\n',
            ["[sweep]: missing key 'n_trials': how many configurations to draw"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\nn_trials = 2\n[sweep.ranges]\nr = { low = 8, high = 4 }\n',
            ["[sweep.ranges], key 'r': low must be below high"],
        ),
        (
            HEAD + '[sweep]\noutput_dir = "o"\n[sweep.grid]\n' + "r = [1,2,3,4,5,6,7,8]\nlora_alpha = "
            f"{list(range(1, 1001))}\n",
            ["8,000 combinations; at most 4,096"],
        ),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_each_fault_is_one_clear_line(tmp_path: Path, text: str, messages: list[str]) -> None:
    found = _faults(tmp_path, text)
    assert len(found) == len(messages), found
    for line, message in zip(found, messages, strict=True):
        assert message in line
        assert line.startswith("rates.toml")


@pytest.mark.parametrize(
    ("key", "interval", "message"),
    [
        ("r", "low = 4, high = 16, step = -4", "step must be above 0 and at most high - low, not -4"),
        ("r", "low = 4, high = 16, step = 0", "step must be above 0"),
        ("r", "low = 4, high = 16, step = nan", "step must be above 0 and at most high - low, not nan"),
        ("r", "low = 4, high = 16, step = 13", "step must be above 0 and at most high - low, not 13"),
        ("r", "low = 4, high = 16, step = 0.5", "low, high and step must be whole numbers"),
        ("r", "low = 4.5, high = 16", "low, high and step must be whole numbers"),
        ("r", "low = -inf, high = 16", "low must be below high, both finite"),
        ("r", "low = 4, high = 16, log = true, step = 4", "takes a step or log = true, not both"),
        ("lora_dropout", "low = 0.0, high = 2.0", "2.0"),
        ("r", "low = 1, high = 8, step = 3", "nothing above 7 would be drawn; set high = 7, or another step"),
        ("lora_dropout", "low = 0.0, high = 0.35, step = 0.1", "high - low must be a multiple of step"),
        ("lora_dropout", "low = 0.0, high = 0.5, step = 1e-40", "step 1e-40 is too small for an interval"),
        ("r", "low = 1, high = 7, step = 3", None),
        ("learning_rate", "low = 1e-5, high = 7e-5, step = 2e-5", None),
        ("r", "low = 4, high = 16, step = 4", None),
        ("lora_dropout", "low = 0.0, high = 0.5, step = 0.1", None),
    ],
)
def test_an_interval_that_nothing_can_be_drawn_from_is_named(
    tmp_path: Path, key: str, interval: str, message: str | None
) -> None:
    text = f'{HEAD}[sweep]\noutput_dir = "o"\nn_trials = 2\n[sweep.ranges]\n{key} = {{ {interval} }}\n'
    if message is None:
        assert _read(tmp_path, text).sampled is not None
        return
    (fault,) = _faults(tmp_path, text)
    assert f"[sweep.ranges], key '{key}': " in fault
    assert message in fault


def test_a_flag_over_a_swept_key_is_refused(tmp_path: Path) -> None:
    (fault,) = _faults(tmp_path, HEAD + GRID, rank=8)
    assert "key 'r': is fixed by --rank; leave one of them out" in fault


def test_keys_that_choose_validation_rows_may_be_swept_beside_val_data(tmp_path: Path) -> None:
    text = HEAD + 'val_data = "v.jsonl"\n[sweep]\noutput_dir = "o"\n[sweep.grid]\nseed = [1, 2]\n'
    assert [spec.seed for spec in _read(tmp_path, text).run.adapters] == [1, 2]


def test_what_all_configurations_lack_is_said_once(tmp_path: Path) -> None:
    text = 'model = "m"\n' + GRID
    assert _faults(tmp_path, text) == ["rates.toml: missing key 'data'"]
    # The control: of one alone it is told which.
    two = 'model = "m"\n[sweep]\noutput_dir = "o"\n[[sweep.configuration]]\nr = 8\ndata = "a.jsonl"\n'
    found = _faults(
        tmp_path,
        two.replace("[sweep]", '[defaults]\nval_data = "v.jsonl"\n[sweep]', 1)
        + ("[[sweep.configuration]]\nr = 16\n"),
    )
    assert found == ["rates.toml: configuration r16: missing key 'data'"]
    # Nothing is there, or it is wrong, in one place of the file.
    assert len(_faults(tmp_path, HEAD.replace("a.jsonl", "none.jsonl") + GRID)) == 1
    batch = "per_device_train_batch_size = 1048576\ngradient_accumulation_steps = 2\n"
    assert len(_faults(tmp_path, HEAD + batch + GRID)) == 1


def test_faults_come_together(tmp_path: Path) -> None:
    text = 'model = "m"\nbase_dtype = "x"\n[defaults]\ndata = "none.jsonl"\n' + GRID.replace("16", "0")
    text += "[early_exit]\nwarmup = 5\nkeep = 7\n"
    found = _faults(tmp_path, text)
    assert len(found) == 2, found
    assert "warmup" in found[0]
    assert "keep" in found[1]
    found = _faults(tmp_path, text.replace("warmup = 5\nkeep = 7\n", ""))
    assert [line for line in found if "unknown value 'x'" in line]
    assert [line for line in found if "no such file" in line]
    assert [line for line in found if "must be at least 1, not 0" in line]
