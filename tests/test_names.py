"""Names that are safe as a directory and on a terminal; the nearest known word."""

from __future__ import annotations

from pathlib import Path

import pytest
from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import MAX_NAME, check_name, name_fault, nearest, shorten
from hypothesis import given
from hypothesis import strategies as st


@given(st.text(max_size=80))
def test_a_valid_name_is_safe_as_a_path_and_on_a_terminal(name: str) -> None:
    if name_fault(name) is None:
        assert Path("dir", name).parent == Path("dir")
        assert name.isascii()
        assert name.isprintable()
        assert not set(name) & set(" /\\$`'\"[]*?<>|&;\n")
        assert len(name) <= MAX_NAME


@pytest.mark.parametrize(
    "name", ["../x", "$(touch pwned)", "[/]", "a\nb", "a" * 65, ".", "..", "-rf", "é", "a b", "a\x00"]
)
def test_hostile_names(name: str) -> None:
    with pytest.raises(UsageError, match=r"^job: ") as caught:
        check_name(name, what="job")
    assert str(caught.value).isprintable()  # the name itself cannot break the message's line


def test_nearest_and_shorten() -> None:
    assert nearest("Learning-Rate", ["weight", "learning_rate"]) == "learning_rate"
    assert nearest("zzz", ["weight", "learning_rate"]) is None
    assert len(shorten("x" * 5000)) == 80


@pytest.mark.parametrize("name", ["a", "support-v2", "A.b_c", "_x", "0", "a" * MAX_NAME])
def test_good_names(name: str) -> None:
    assert check_name(name, what="job") == name
