"""What is typed after `/`: words that must occur, and conditions on columns. Pure.

legal                 in any text of the row          state:running   in that column
val<1.3  lr>=1e-4     numbers; unknown never fits     -state:stopped  a minus turns one around
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable

from gshare.tui.columns import FIELDS, Field, Value, find_field
from gshare.tui.frames import Entry
from gshare.tui.rows import Job

_TERM = re.compile(r"(-?)([A-Za-z_][\w/.]*)(:|<=|>=|!=|=|<|>)(.*)", re.DOTALL)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}

JobTest = Callable[[Job], bool]
EntryTest = Callable[[Entry], bool]


class BadFilter(ValueError):
    """What is wrong, in one line for the user."""


def job_filter(text: str, jobs: Iterable[Job]) -> JobTest:
    """BadFilter: no such column, or no number where one must be."""
    jobs = list(jobs)
    tests = [_job_term(term, jobs) for term in text.split()]
    return lambda job: all(test(job) for test in tests)


def _job_term(term: str, jobs: list[Job]) -> JobTest:
    match = _TERM.fullmatch(term)
    if match is None:
        return _words(term, lambda job: (*_texts(job), job.reason))
    minus, name, sign, wanted = match.groups()
    field = find_field(name, jobs)
    if field is None:
        if sign == ":" or not _is_number(wanted):
            return _words(term, lambda job: (*_texts(job), job.reason))  # a name such as run:1
        known = " ".join(one.name for one in FIELDS)
        raise BadFilter(f"no column {name!r}; there are {known} and the hyper-parameters")
    test = _condition(field, sign, wanted)
    return (lambda job: not test(job)) if minus else test


def _texts(job: Job) -> list[str]:
    return [job.name, job.node, job.state, job.client, job.model]


def _words(term: str, texts: Callable[[Job], Iterable[str]]) -> JobTest:
    inverse, word = (True, term[1:]) if term.startswith("-") and len(term) > 1 else (False, term)
    word = word.casefold()
    return lambda job: any(word in text.casefold() for text in texts(job)) != inverse


def _condition(field: Field, sign: str, wanted: str) -> JobTest:
    if sign == ":" or not _is_number(wanted):
        if sign in ("<", "<=", ">", ">="):
            raise BadFilter(f"{field.name}{sign}{wanted}: {wanted!r} is no number")
        word = wanted.casefold()
        inside = (lambda text: word in text) if sign == ":" else (lambda text: word == text)
        turned = sign == "!="
        return lambda job: inside(_text(field.value(job)).casefold()) != turned
    number, compare = float(wanted), _COMPARE[sign]

    def test(job: Job) -> bool:
        value = field.value(job)
        return (
            not isinstance(value, str)
            and value is not None
            and math.isfinite(value)
            and compare(value, number)
        )

    return test


def _text(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


_ENTRY_FIELDS = ("job", "node", "kind", "level")


def entry_filter(text: str) -> EntryTest:
    """The same for the journal: columns job, node, kind, level."""
    tests = [_entry_term(term) for term in text.split()]
    return lambda entry: all(test(entry) for test in tests)


def _entry_term(term: str) -> EntryTest:
    inverse, word = (True, term[1:]) if term.startswith("-") and len(term) > 1 else (False, term)
    name, colon, wanted = word.partition(":")
    if colon and name in _ENTRY_FIELDS:
        wanted = wanted.casefold()
        return lambda entry: (wanted in getattr(entry, name).casefold()) != inverse
    word = word.casefold()
    return lambda entry: (
        any(word in text.casefold() for text in (entry.text, entry.job, entry.node)) != inverse
    )


def line_filter(text: str) -> Callable[[str], bool]:
    """For a log: all words must occur."""
    words = [word.casefold() for word in text.split()]
    return lambda line: all(word in line.casefold() for word in words)
