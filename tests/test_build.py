"""From a file to a store: what is dropped and why, what is refused, what is cached."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gshare.agent.base.tiny import CHATML, CHATML_WITH_GENERATION, make_tiny_tokenizer
from gshare.agent.data import build
from gshare.agent.data.build import (
    DROP_TRUNCATED,
    DROP_TURNS,
    NOTE_MERGED,
    NOTE_TRUNCATED,
    build_token_store,
)
from gshare.agent.data.template import NOTE_LAST_USER
from gshare.agent.data.tokens import RowCount, TokenStore
from gshare.agent.errors import UsageError


def talk(*turns: str) -> dict[str, Any]:
    """`talk("who", "me")`: user, assistant in turn; a leading `user:` or `assistant:` says otherwise."""
    messages = []
    for i, turn in enumerate(turns):
        role, _, content = turn.rpartition(":")
        messages.append({"role": role or ("user", "assistant")[i % 2], "content": content})
    return {"messages": messages}


GOOD = talk("who", "me")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model", CHATML)


def save_model(path: Path, template: str | None) -> Path:
    tokenizer = make_tiny_tokenizer(template or "")
    if template is None:
        tokenizer.chat_template = None
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 2048}))
    return path


def make(model: Path, rows: list[Any], **options: Any) -> TokenStore:
    source = model.parent / "d.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build_token_store(source, model, cache_dir=model.parent / "cache", **options)


def test_a_store_of_conversations(model: Path) -> None:
    store = make(model, [GOOD, talk("a", "b", "c", "d")])
    assert (store.n_rows, store.meta.rows_read, store.meta.data_format) == (2, 2, "messages")
    assert store.meta.dropped == store.meta.notes == {}
    ids, trained = store.row(0)
    tokenizer = make_tiny_tokenizer(CHATML)
    assert tokenizer.decode(ids) == "<|im_start|>user\nwho<|im_end|>\n<|im_start|>assistant\nme<|im_end|>"
    assert tokenizer.decode(ids[trained]) == "me<|im_end|>"
    assert store.meta.vocab_size == len(tokenizer) > int(ids.max())


def test_markers_and_prefixes_give_the_same_rows(tmp_path: Path) -> None:
    rows = [GOOD, talk("a", "b", "c", "d"), talk("a", "b", "c")]
    with_markers = make(save_model(tmp_path / "m" / "model", CHATML_WITH_GENERATION), rows)
    without = make(save_model(tmp_path / "p" / "model", CHATML), rows)
    for name in ("tokens.bin", "trained.bin"):
        assert with_markers.meta.files[name] == without.meta.files[name]
    assert with_markers.hash != without.hash  # the template is part of the identity


def test_all_file_kinds_give_the_same_rows(tmp_path: Path, model: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": 'who "is"', "completion": ", me"}, {"prompt": "a", "completion": "b\nc"}]
    for suffix in (".jsonl", ".json", ".csv", ".parquet"):
        path = tmp_path / f"d{suffix}"
        if suffix == ".jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        elif suffix == ".json":
            path.write_text(json.dumps(rows))
        elif suffix == ".csv":
            path.write_text('prompt,completion\n"who ""is""",", me"\na,"b\nc"\n')
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
    stores = [
        build_token_store(path, model, cache_dir=tmp_path / "cache") for path in sorted(tmp_path.glob("d.*"))
    ]
    assert len(stores) == 4
    assert len({store.meta.files["tokens.bin"].sha256 for store in stores}) == 1


def test_plain_formats_need_no_chat_template_and_conversations_do(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", None)
    plain = [{"text": "a b"}, {"prompt": "a", "completion": "b"}, {"instruction": "a", "output": "b"}]
    assert [make(model, [row]).meta.data_format for row in plain] == ["text", "prompt_completion", "alpaca"]
    with pytest.raises(UsageError, match=r"d.jsonl, row 1: the model's tokenizer has no chat template"):
        make(model, [GOOD])


def test_an_answer_behind_max_length_is_dropped_before_batching(model: Path) -> None:  # case 4
    long = talk("who " * 200, "me")
    store = make(model, [GOOD, long, long, GOOD, long, long], max_length=64)
    assert store.n_rows == 2
    assert store.source_rows.tolist() == [1, 4]
    assert store.meta.dropped == {DROP_TRUNCATED: RowCount(count=4, first_rows=[2, 3, 5])}
    assert store.meta.rows_read == 6
    with pytest.raises(UsageError, match=rf"no row is left to train on.*{DROP_TRUNCATED}: 2 \(rows 1, 2\)"):
        make(model, [long, long], max_length=64)


def test_truncation_keeps_the_start_and_is_noted(model: Path) -> None:
    row = talk("who", "me " * 100)
    whole, cut = make(model, [row]), make(model, [row], max_length=64)
    assert whole.meta.notes == {}
    assert cut.meta.notes == {NOTE_TRUNCATED: RowCount(count=1, first_rows=[1])}
    assert cut.row(0)[0].tolist() == whole.row(0)[0][:64].tolist()
    exact = make(model, [row], max_length=len(whole.row(0)[0]))
    assert exact.meta.notes == {}


def test_zero_target_rows_leave_the_others_as_they_are(model: Path) -> None:  # cases 3 and 5
    bare = make(model, [GOOD, talk("a", "b")])
    mixed = make(model, [talk("a", ""), GOOD, talk("user:a"), talk("a", "b")])
    assert mixed.meta.dropped == {
        "empty completion": RowCount(count=1, first_rows=[1]),
        "no assistant turn": RowCount(count=1, first_rows=[3]),
    }
    assert mixed.meta.files["content.bin"] == bare.meta.files["content.bin"]


def test_row_ending_in_a_user_turn_is_a_counted_warning(model: Path) -> None:  # case 1
    store = make(model, [GOOD, talk("a", "b", "c")])
    assert store.meta.notes == {NOTE_LAST_USER: RowCount(count=1, first_rows=[2])}


def test_turns_that_do_not_alternate_by_policy(model: Path) -> None:  # case 2
    rows = [
        GOOD,
        talk("a", "b", "user:c", "user:d", "assistant:e"),
        talk("user:a", "system:b", "assistant:c"),
    ]
    with pytest.raises(UsageError, match=r"d.jsonl, row 2: turns 3 and 4 are both user turns; .*merge.*drop"):
        make(model, rows)
    merged = make(model, rows, on_bad_turns="merge")
    assert merged.meta.notes == {NOTE_MERGED: RowCount(count=1, first_rows=[2])}
    assert merged.meta.dropped == {DROP_TURNS: RowCount(count=1, first_rows=[3])}
    assert "user\nc\n\nd<|im_end|>" in make_tiny_tokenizer().decode(merged.row(1)[0])
    dropped = make(model, rows, on_bad_turns="drop")
    assert dropped.meta.dropped == {DROP_TURNS: RowCount(count=2, first_rows=[2, 3])}


def test_bad_options_and_models_are_refused(tmp_path: Path, model: Path) -> None:
    for options, says in [
        ({"max_length": 2049}, "beyond the model's max_position_embeddings, 2048"),
        ({"max_length": 1}, "max_length must be at least 2"),
        ({"on_bad_turns": "skip"}, "on_bad_turns 'skip' is unknown; known: error, merge, drop"),
        ({"data_format": "chat"}, "data_format 'chat' is unknown"),
    ]:
        with pytest.raises(UsageError, match=says):
            make(model, [GOOD], **options)
    assert make(model, [GOOD], max_length=2048).n_rows == 1
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": -1}))
    with pytest.raises(UsageError, match="max_position_embeddings must be a positive integer, not -1"):
        make(model, [GOOD], max_length=64)
    (model / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config.json: not readable as JSON"):
        make(model, [GOOD])
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UsageError, match="holds no tokenizer"):
        make(tmp_path / "nothing", [GOOD])
    (model / "config.json").unlink()
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="the tokenizer cannot be loaded"):
        make(model, [GOOD])


def test_refusals_leave_no_file_behind(model: Path) -> None:
    for rows in ([], [GOOD, {"messages": 3}], [talk("a", "")], [GOOD, {"chosen": "a", "rejected": "b"}]):
        with pytest.raises(UsageError):
            make(model, rows)
    cache = model.parent / "cache"
    assert not cache.exists() or list(cache.iterdir()) == []


def test_empty_data_sets(tmp_path: Path, model: Path) -> None:
    for name, data in [("e.jsonl", "\n\n"), ("e.json", "[]"), ("e.csv", "text\n")]:
        (tmp_path / name).write_text(data)
        with pytest.raises(UsageError, match=f"{name}: holds no rows"):
            build_token_store(tmp_path / name, model, cache_dir=tmp_path / "cache")


def test_equal_calls_share_a_store_and_any_change_makes_another(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    first = make(model, [GOOD, GOOD], progress=calls.append)
    assert calls == [2]
    again = make(model, [GOOD, GOOD], progress=calls.append)
    assert (again.path, again.hash) == (first.path, first.hash)
    assert calls == [2]  # not read again
    others = [
        make(model, [GOOD]),
        make(model, [GOOD, GOOD], max_length=100),
        make(model, [GOOD, GOOD], train_on_prompt=True),
    ]
    (model / "chat_template.jinja").write_text(CHATML_WITH_GENERATION)
    others.append(make(model, [GOOD, GOOD]))
    monkeypatch.setattr(build, "BUILD_VERSION", 2)
    others.append(make(model, [GOOD, GOOD]))
    assert len({first.path, *(store.path for store in others)}) == 6


def test_a_damaged_cached_store_is_made_again(model: Path) -> None:
    first = make(model, [GOOD])
    (first.path / "tokens.bin").write_bytes(b"\0" * 4)
    again = make(model, [GOOD])
    assert (again.path, again.hash) == (first.path, first.hash)
    assert [path.name for path in first.path.parent.iterdir()] == [first.path.name]


def test_a_file_that_changes_while_it_is_read_is_refused(model: Path) -> None:
    source = model.parent / "d.jsonl"

    def touch(_: int) -> None:
        source.write_text(json.dumps(talk("who", "you")))

    with pytest.raises(UsageError, match="changed while it was read"):
        make(model, [GOOD], progress=touch)


def test_imports_are_cheap() -> None:
    """Neither torch nor transformers nor pyarrow comes with the modules themselves."""
    modules = (
        "formats",
        "readers",
        "turns",
        "spans",
        "template",
        "tokens",
        "build",
        "split",
        "sampler",
        "preview",
    )
    code = "import sys, " + ", ".join(f"gshare.agent.data.{name}" for name in modules)
    code += "; print(sorted({'torch', 'transformers', 'pyarrow', 'tokenizers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
