"""Every kind of data file, and every way one is broken: one message that names file and line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from gshare.agent.data import readers
from gshare.agent.data.readers import read_rows
from gshare.agent.errors import UsageError


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def rows(path: Path) -> list[tuple[int, dict]]:
    return list(read_rows(path))


def fault(path: Path) -> str:
    """The message of the `UsageError` that reading `path` to its end raises."""
    with pytest.raises(UsageError) as caught:
        rows(path)
    message = str(caught.value)
    assert message.startswith(str(path)), message
    assert caught.value.exit_code == 2
    return message


def test_jsonl_numbers_are_lines_with_bom_crlf_and_empty_lines(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b\xe2\x80\xa8c"}'
    assert rows(write(tmp_path / "a.jsonl", data)) == [(1, {"text": "a"}), (4, {"text": "b\u2028c"})]


def test_json_array_and_jsonl_named_json(tmp_path: Path) -> None:
    array = write(tmp_path / "a.json", '\n[\n{"text": "a"},\n{"text": "b"}]\n')
    assert rows(array) == [(1, {"text": "a"}), (2, {"text": "b"})]
    lines = write(tmp_path / "b.json", '{"text": "a"}\n\n{"text": "b"}\n')
    assert rows(lines) == [(1, {"text": "a"}), (3, {"text": "b"})]


def test_csv_quotes_line_breaks_bom_and_crlf(tmp_path: Path) -> None:
    data = '\ufeffprompt,completion\r\n"a, ""b""","c\r\nd"\r\n\r\ne,\r\n,\r\n'
    assert rows(write(tmp_path / "a.csv", data)) == [
        (2, {"prompt": 'a, "b"', "completion": "c\r\nd"}),
        (5, {"prompt": "e", "completion": ""}),
        (6, {"prompt": "", "completion": ""}),
    ]


def test_tsv(tmp_path: Path) -> None:
    assert rows(write(tmp_path / "a.tsv", "prompt\tcompletion\na,b\tc\n")) == [
        (2, {"prompt": "a,b", "completion": "c"})
    ]


def test_csv_field_longer_than_the_csv_modules_default(tmp_path: Path) -> None:
    long = "x" * 200_000
    assert rows(write(tmp_path / "a.csv", f"text\n{long}\n")) == [(2, {"text": long})]


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = [{"text": str(i), "messages": [{"role": "user", "content": "a"}]} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == list(enumerate(table, start=1))
    broken = write(tmp_path / "b.parquet", (tmp_path / "a.parquet").read_bytes()[:-9])
    assert "not readable as Parquet" in fault(broken)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "b"\n', "line 2: not valid JSON"),
        ("a.jsonl", '{"text": NaN}', "line 1: not valid JSON"),
        ("a.jsonl", '{"text": "\\ud800"}', "line 1: not valid JSON"),
        ("a.jsonl", '{"text": "a"}\n["b"]', "line 2: a row must be a JSON object, found array"),
        ("a.jsonl", '{"text": "a"}\n3', "line 2: a row must be a JSON object, found number"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "line 2: not UTF-8 (byte 0xff)"),
        ("a.jsonl", "[" * 100_000, "line 1: JSON nested too deeply"),
        ("a.json", '[\n{"text": "a"},\n{"text": }\n]', "line 3: not valid JSON"),
        ("a.json", '[\n{"text": "a"},\n', "line 2: not valid JSON"),
        ("a.json", '{"data":\n [{"text": "a"}]}', "is one JSON object"),
        ("a.json", '[{"text": "a"}, "b"]', "row 2: a row must be a JSON object, found string"),
        ("a.csv", 'text\na\n"b\nc\n', "line 3: not valid CSV"),
        ("a.csv", "prompt,completion\na,b\nc,d,e\n", "line 3: 3 fields, but the header has 2"),
        ("a.csv", "prompt;completion\na;b\n", "columns separated by ';'"),
        ("a.csv", "text,text\na,b\n", "column names must be unique"),
        ("a.csv", b"text\na\nb\xe9\n", "line 3: not UTF-8 (byte 0xe9)"),
        ("a.csv", b"text\na\0b\n", "line 2: holds a NUL byte"),
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "is UTF-16"),
        ("a.txt", "a", "unknown extension '.txt'; known are .jsonl"),
        ("a", "a", "unknown extension ''"),
        ("a.jsonl.gz", "a", "unknown extension '.gz'"),
    ],
)
def test_faults_name_file_and_line(tmp_path: Path, name: str, data: str | bytes, says: str) -> None:
    assert says in fault(write(tmp_path / name, data))


def test_what_is_not_a_file_is_refused_before_the_first_row(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    for name, says in [
        ("none.jsonl", "no such data file"),
        ("folder.jsonl", "is a directory"),
        ("pipe.jsonl", "not a regular file"),
    ]:
        with pytest.raises(UsageError, match=says):
            read_rows(tmp_path / name)  # not iterated


def test_a_row_longer_than_the_limit_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_ROW_BYTES", 64)
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n' + json.dumps({"text": "x" * 65}))
    assert "line 2: longer than" in fault(path)
    assert len(rows(write(tmp_path / "b.jsonl", json.dumps({"text": "x" * 50})))) == 1
