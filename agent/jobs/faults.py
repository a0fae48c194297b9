"""Reading a TOML configuration so that every fault of it is reported in one run, with line and key.

`TomlFile` knows on which line a key stands; `Faults` collects one line a fault, like a compiler:

    adapters.toml:12: adapter 'support', key 'r': must be at least 1, not 0

`convert` types one value by its annotation. Used by the job spec and by the cluster file.
"""

from __future__ import annotations

import re
import stat
import sys
import types
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import nearest, shorten

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]#]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([\w-]+))\s*[=.]""")


@dataclass
class Faults:
    """Faults found so far, each once, in the order found."""

    _lines: dict[str, None] = field(default_factory=dict)  # a set that keeps its order

    def add(self, where: str, message: str) -> None:
        """`where` names file, line and key (or the flag); `message` says what is wrong and what to do."""
        self._lines[f"{where}: {message}"] = None

    def raise_if_any(self) -> None:
        """UsageError with all faults, a line each."""
        if self._lines:
            raise UsageError("\n".join(self._lines))


@dataclass
class _Index:
    """Line numbers, from 1: of every [section] and [[section]] by name, ascending, and of every key by the
    line of the header above it (0: none) and its name, the first one."""

    headers: dict[str, list[int]] = field(default_factory=dict)
    keys: dict[tuple[int, str], int] = field(default_factory=dict)


class TomlFile:
    """A parsed TOML file and the lines of its keys. UsageError when it cannot be read or parsed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe would be waited for
                raise UsageError(f"{path}: not a regular file; write the configuration to one")
            text = path.read_bytes().decode("utf-8-sig")
            self.table: dict[str, Any] = tomllib.loads(text)
        except FileNotFoundError:
            raise UsageError(f"{path}: no such file") from None
        except IsADirectoryError:
            raise UsageError(f"{path}: is a directory, not a TOML file") from None
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path}: not valid TOML: {error}") from None
        except RecursionError:
            raise UsageError(f"{path}: not valid TOML: tables or lists are nested too deeply") from None
        except ValueError as error:  # Python's limit on the digits of a number
            raise UsageError(f"{path}: not valid TOML: {str(error).split(';')[0]}") from None
        self._lines = text.splitlines()

    def where(self, key: str | None = None, section: str = "", index: int | None = None) -> str:
        """`file:line`, or the file alone where the line is not found.

        `section` is "" for the top level, else the table's name; `index` counts the tables of an array
        from 0. Without `key`: the line of the section's header. A key that is a table of its own is found
        by its header. Found by looking at the text: a key inside an inline table gets its section's line.
        """
        starts = self._index.headers.get(section, []) if section else [0]
        number = index or 0
        if number >= len(starts):
            return str(self.path)
        line = first = starts[number]
        if key is not None:
            found = self._index.keys.get((first, key))
            if found is None:
                own = self._index.headers.get(f"{section}.{key}" if section else key, [])
                next_start = starts[number + 1] if number + 1 < len(starts) else sys.maxsize
                after = bisect_right(own, first)
                found = own[after] if after < len(own) and own[after] < next_start else first
            line = found
        return f"{self.path}:{line}" if line else str(self.path)

    @cached_property
    def _index(self) -> _Index:
        """Of all lines at once: `where` is asked for every key of a file."""
        index, block = _Index(), 0
        for number, line in enumerate(self._lines, start=1):
            if header := _HEADER.match(line):
                block = number
                index.headers.setdefault(header.group(2).replace('"', ""), []).append(number)
            elif key := _KEY.match(line):
                index.keys.setdefault(
                    (block, next(part for part in key.groups() if part is not None)), number
                )
        return index


def said_once(text: str, kind: str, *, of_all: int = 0) -> str:
    """`text` with the first alone of lines that differ in nothing but whose they are: in "`kind` NAME: ".

    `of_all`: how many there are; what is wrong with all of them is told without a name.
    """
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        lines.setdefault(re.sub(rf"\b{kind} [^:\s]+: ", "", line, count=1), []).append(line)
    return "\n".join(line if len(same) == of_all > 1 else same[0] for line, same in lines.items())


def unknown_key(key: str, known: Iterable[str], hints: dict[str, str] | None = None) -> str:
    """The message for a key that is not known; `hints` maps other people's names to ours."""
    known = list(known)
    hint = (hints or {}).get(key) or nearest(key, known)
    if hint is not None:
        return f"unknown key {shorten(key)}; did you mean {hint!r}?"
    return f"unknown key {shorten(key)}; known keys: {', '.join(known)}"


def check_section(table: object, known: Iterable[str], where: str, faults: Faults) -> dict[str, Any] | None:
    """`table` when it is a TOML table; otherwise a fault and None."""
    if isinstance(table, dict):
        return table
    faults.add(where, f"must be a table of keys ({', '.join(list(known)[:3])}, …), not {shorten(table)}")
    return None


def convert(raw: object, annotation: Any, *, lax: bool = False) -> tuple[Any, str | None]:
    """(`raw` as the type `annotation`, None), or (None, what is wrong with it).

    `lax` is for the command line: numbers may come as text, and text with commas is a list where a list
    is allowed.
    """
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    choices = [choice for member in members if get_origin(member) is Literal for choice in get_args(member)]
    if choices and isinstance(raw, str):
        if raw in choices:
            return raw, None
        hint = nearest(raw, choices)
        known = ", ".join(choices)
        return None, f"unknown value {shorten(raw)}; known: {known}" + (
            f". Did you mean {hint!r}?" if hint else ""
        )
    if lax and isinstance(raw, str) and any(get_origin(member) is tuple for member in members):
        raw = [part.strip() for part in raw.split(",")]
    try:
        return msgspec.convert(raw, annotation, strict=not lax), None
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError):
        wanted = " or ".join(_describe(member) for member in members if member is not types.NoneType)
        return None, f"must be {wanted}, not {shorten(raw)}"


def _describe(annotation: Any) -> str:
    """A type for people."""
    if get_origin(annotation) is dict:
        return "a table of texts"
    if get_origin(annotation) is tuple:
        inner = {"text": "texts", "a whole number": "whole numbers"}.get(_describe(get_args(annotation)[0]))
        return f"a list of {inner or 'values'}"
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(annotation, str(annotation))
