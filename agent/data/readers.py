"""From a file to raw rows: JSONL, JSON, CSV, TSV, Parquet, each row with its number.

A row's number is what an editor shows: the 1-based line on which it begins in JSONL and CSV, the
1-based position in a JSON array or a Parquet table. Nothing is guessed from the content: the
extension says the kind. Every fault is one `UsageError` that names file and line.
"""

from __future__ import annotations

import csv
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.errors import UsageError

#: One row may be at most this long: far beyond any model's context, and a file that is not what
#: its name says (one line of many GB) must not fill the memory before it is refused.
MAX_ROW_BYTES = 64 * 1024 * 1024

_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")

Row = dict[str, Any]


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield `(number, row)` for every row of `path`.

    Raises `UsageError` at the call, before the first row, for a path that is not a readable data
    file, and while iterating for a row that cannot be read.
    """
    reader = _reader_for(path)
    return reader(path)


def _reader_for(path: Path) -> _Reader:
    if not path.exists():
        raise UsageError(f"{path}: no such data file")
    if path.is_dir():
        raise UsageError(f"{path}: is a directory; name one data file ({', '.join(_READERS)})")
    if not path.is_file():
        raise UsageError(f"{path}: is not a regular file; it is read twice, so a pipe cannot be used")
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        known = ", ".join(_READERS)
        raise UsageError(f"{path}: unknown extension {path.suffix!r}; known are {known} (unpacked)")
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if not head:
        raise UsageError(f"{path}: is empty")
    if head[:2] in _UTF16_BOMS:
        raise UsageError(f"{path}: is UTF-16; save it as UTF-8")
    return reader


def _read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """One JSON object a line. Lines end at LF or CRLF only: U+2028 may stand inside a string."""
    for number, line in _lines(path):
        if line.strip():
            yield number, _as_row(path, f"line {number}", _decode_json(line, path, number))


def _read_json(path: Path) -> Iterator[tuple[int, Row]]:
    """A JSON array of objects. Many `.json` files are really JSONL; those are read as such."""
    data = path.read_bytes().removeprefix(_UTF8_BOM)
    first = data.lstrip()[:1]
    if first == b"{" and _first_line_is_object(data):
        yield from _read_jsonl(path)
        return
    rows = _decode_json(data, path)
    if not isinstance(rows, list):
        raise UsageError(
            f"{path}: is one JSON {_json_kind(rows)}; a .json data file is an array of row objects "
            f"[{{…}}, {{…}}], or one object a line"
        )
    del data
    for number, row in enumerate(rows, start=1):
        yield number, _as_row(path, f"row {number}", row)


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[tuple[int, Row]]:
    """RFC 4180 with a header line; quoted fields may hold delimiters, quotes and line breaks."""
    # Process-wide in the csv module; 128 KiB, its default, is shorter than a long document.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))
    reader = csv.reader(_text_lines(path), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        number = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            hint = "; is a quote not closed?" if "unexpected end" in str(error) else ""
            raise UsageError(f"{path}, line {number}: not valid CSV: {error}{hint}") from error
        if not any(field.strip() for field in fields):
            if header is not None and len(fields) == len(header) and len(header) > 1:
                yield number, dict(zip(header, fields, strict=True))
            continue
        if header is None:
            header = _csv_header(path, number, fields, delimiter)
        elif len(fields) != len(header):
            raise UsageError(
                f"{path}, line {number}: {len(fields)} fields, but the header has {len(header)} "
                f"({', '.join(header)}); put quotes around a field that holds {delimiter!r}"
            )
        else:
            yield number, dict(zip(header, fields, strict=True))


def _csv_header(path: Path, number: int, fields: list[str], delimiter: str) -> list[str]:
    header = [field.strip() for field in fields]
    if len(header) == 1 and (found := [mark for mark in ",;\t" if mark in header[0] and mark != delimiter]):
        raise UsageError(
            f"{path}, line {number}: the header is one column, {header[0]!r}; columns separated by "
            f"{found[0]!r} need to be saved with {delimiter!r}"
        )
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice or "" in header:
        raise UsageError(f"{path}, line {number}: column names must be unique and not empty: {header}")
    return header


def _read_tsv(path: Path) -> Iterator[tuple[int, Row]]:
    return _read_csv(path, delimiter="\t")


def _read_parquet(path: Path) -> Iterator[tuple[int, Row]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        arrow = importlib.import_module("pyarrow")
    except ImportError as error:
        raise UsageError(
            f"{path}: reading Parquet needs pyarrow: pip install 'gshare[train]', or save it as JSONL"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):  # bounds memory: 1024 rows at once
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}, row {number + 1}: not readable as Parquet: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """`(1-based number, line)` without a byte-order mark, each line bounded by `MAX_ROW_BYTES`."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_ROW_BYTES + 1):
            number += 1
            if len(line) > MAX_ROW_BYTES:
                mib = MAX_ROW_BYTES // 2**20
                raise UsageError(f"{path}, line {number}: longer than {mib} MiB, the most a row may have")
            yield number, line.removeprefix(_UTF8_BOM) if number == 1 else line


def _text_lines(path: Path) -> Iterator[str]:
    for number, line in _lines(path):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(path, number, error) from error
        if "\0" in text:
            raise UsageError(f"{path}, line {number}: holds a NUL byte; is it really text?")
        yield text


def _decode_json(data: bytes, path: Path, line: int | None = None) -> Any:
    """JSON by the letter: no NaN, no lone surrogates, no trailing commas."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, line or data.count(b"\n", 0, error.start) + 1, error) from error
    try:
        return msgspec.json.decode(text)
    except RecursionError as error:
        raise UsageError(f"{path}, line {line or 1}: JSON nested too deeply") from error
    except msgspec.DecodeError as error:
        at = re.search(r"\(byte (\d+)\)", str(error))
        if line is None:  # a whole file: msgspec counts bytes, people count lines
            line = data.count(b"\n", 0, int(at[1]) if at else len(data.rstrip())) + 1
        raise UsageError(f"{path}, line {line}: not valid JSON: {error}") from error


def _first_line_is_object(data: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(data.lstrip().split(b"\n", 1)[0]), dict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _as_row(path: Path, where: str, value: Any) -> Row:
    if isinstance(value, dict):
        return value
    hint = "; a whole array in one file is named .json" if isinstance(value, list) else ""
    raise UsageError(f"{path}, {where}: a row must be a JSON object, found {_json_kind(value)}{hint}")


def _json_kind(value: Any) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> UsageError:
    byte = error.object[error.start]
    return UsageError(f"{path}, line {line}: not UTF-8 (byte 0x{byte:02x}); save the file as UTF-8")


_Reader = Callable[[Path], Iterator[tuple[int, Row]]]

_READERS: dict[str, _Reader] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
