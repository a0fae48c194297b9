"""Names of jobs and nodes, and the nearest known word to a mistyped one.

A name becomes a directory, a socket's field and a line on a terminal, so it is kept to characters that
mean nothing to a shell, a path or a terminal: `[A-Za-z0-9._-]`, no leading dot or dash, at most 64.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from gshare.agent.errors import UsageError

MAX_NAME = 64
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\Z")


def name_fault(name: str) -> str | None:
    """What is wrong with `name`, as the end of a sentence that began with it; None when it is fine.

    >>> name_fault("support-v2"), name_fault("a/b")
    (None, "'a/b' holds a path separator; use letters, digits, '.', '_' and '-'")
    """
    shown = shorten(name)
    if not name:
        return "a name may not be empty"
    if len(name) > MAX_NAME:
        return f"{shown} has {len(name)} characters; at most {MAX_NAME} are allowed"
    if "/" in name or "\\" in name:
        return f"{shown} holds a path separator; use letters, digits, '.', '_' and '-'"
    if name[0] in ".-":
        return f"{shown} starts with {name[0]!r}; start with a letter, a digit or '_'"
    if not _NAME.match(name):
        return f"{shown} holds other characters than letters, digits, '.', '_' and '-'"
    return None


def check_name(name: str, *, what: str) -> str:
    """`name` itself when it is valid. UsageError beginning with `what` (such as "job") otherwise."""
    fault = name_fault(name)
    if fault is not None:
        raise UsageError(f"{what}: {fault}")
    return name


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was most likely meant to be, None when nothing is near.

    Case and the choice between dashes and underscores do not count; ties go to the first in `known`.
    """
    plain = {candidate.lower().replace("-", "_"): candidate for candidate in reversed(list(known))}
    # 0.6 is difflib's own default: one or two wrong letters in a word of six.
    found = difflib.get_close_matches(word.lower().replace("-", "_"), list(reversed(plain)), n=1, cutoff=0.6)
    return plain[found[0]] if found else None


def plain(text: str) -> str:
    """Another user's text without what a terminal would obey.

    >>> plain("a\\x1b[2Jb\\n")
    'a?[2Jb?'
    """
    return "".join(char if char.isprintable() else "?" for char in text)


def shorten(text: object, limit: int = 80) -> str:
    """`repr(text)` fit for one line of a message: control characters escaped, at most `limit` long."""
    try:
        shown = ascii(text) if isinstance(text, str) and not text.isprintable() else repr(text)
    except (ValueError, RecursionError):  # thousands of digits, or of levels
        kind = "list" if isinstance(text, (list, tuple)) else "table" if isinstance(text, dict) else "number"
        shown = f"a {kind} too large to show"
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"
