"""Amounts and times as people write them, and the reserve factor in the user's configuration."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest
from gshare.agent.errors import UsageError
from gshare.agent.vram.budget import MAX_MB, parse_budget, parse_duration, show_mb
from gshare.agent.vram.devices import Device
from gshare.agent.vram.settings import config_file, configured_factor, reserve_factor
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "support"))
from ledger_children import child


@pytest.mark.parametrize(
    ("text", "mb"),
    [
        ("8", 8192),
        (8, 8192),
        (0.5, 512),
        ("8GiB", 8192),
        ("8 gib", 8192),
        ("8g", 8192),
        ("8000MiB", 8000),
        ("8000m", 8000),
        ("8GB", 7630),  # 8e9 bytes, rounded up to whole MiB
        ("1.5", 1536),
        (".25GiB", 256),
        ("1e1", 10240),
        ("1TiB", 1 << 20),
        ("1.2MiB", 2),
        ("16TiB", MAX_MB),
    ],
)
def test_amounts(text: str | float, mb: int) -> None:
    assert parse_budget(text) == mb


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-1", "is not more than zero"),
        ("0", "is not more than zero"),
        ("0.0GiB", "is not more than zero"),
        ("nan", "is not an amount"),
        (float("nan"), "is not an amount"),
        ("inf", "is not an amount"),
        ("-infGiB", "is not an amount"),
        ("8192000", "more than any device has; a bare number is GiB"),
        ("1e300", "more than any device has"),
        ("1e-9", "less than one MiB"),
        ("8KiB", "unknown unit"),
        ("8 apples", "unknown unit"),
        ("", "not an amount of memory"),
        ("GiB", "not an amount of memory"),
        ("8,5", "not an amount of memory"),
        ("0x10", "not an amount of memory|unknown unit"),
        ("8\n9", "not an amount of memory"),
    ],
)
def test_what_is_no_amount_is_one_line_naming_the_flag(text: str | float, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        parse_budget(text, what="--vram")
    assert str(error.value).startswith("--vram: ")
    assert "\n" not in str(error.value)


@given(st.integers(1, MAX_MB))
def test_every_amount_in_mib_comes_back(mb: int) -> None:
    assert parse_budget(f"{mb}MiB") == mb
    assert parse_budget(repr(mb / 1024)) == mb
    assert show_mb(mb).endswith("B")


@given(st.text(max_size=12))
def test_any_text_is_an_amount_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert 1 <= parse_budget(text) <= MAX_MB


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        (90, 90),
        ("90s", 90),
        ("30m", 1800),
        ("2h", 7200),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("1d", 86400),
    ],
)
def test_times(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["0", "-5", "nan", "inf", "", "2 weeks", "2w", "400d", "h", "1h-5m"])
def test_what_is_no_time_is_one_line_naming_the_flag(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--timeout: "):
        parse_duration(text, what="--timeout")


DISCRETE = Device(uuid="GPU-a", name="", index=0)
UNIFIED = Device(uuid="GPU-b", name="", index=0, memory_type="unified")


def test_the_factors_of_the_kinds_of_memory_and_the_users_own() -> None:
    assert reserve_factor(DISCRETE) == 0.85
    assert reserve_factor(UNIFIED) == 0.60
    assert reserve_factor(UNIFIED, 0.9) == 0.9


def test_the_factor_is_read_from_the_users_configuration(tmp_path: Path) -> None:
    path = config_file({"XDG_CONFIG_HOME": str(tmp_path)})
    assert path == tmp_path / "gshare" / "config.toml"
    assert config_file({"XDG_CONFIG_HOME": "relative"}) == Path.home() / ".config" / "gshare" / "config.toml"
    assert configured_factor(path) is None
    path.parent.mkdir()
    path.write_text("[other]\nx = 1\n", encoding="utf-8")
    assert configured_factor(path) is None
    path.write_text("[gpu]\nreserve_factor = 0.7\n", encoding="utf-8")
    assert configured_factor(path) == 0.7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[gpu]\nreserve_factor = 0", "more than 0 and at most 1"),
        ("[gpu]\nreserve_factor = 85", "more than 0 and at most 1"),
        ("[gpu]\nreserve_factor = nan", "more than 0 and at most 1"),
        ("[gpu]\nreserve_factor = '0.5'", "more than 0 and at most 1"),
        ("[gpu]\nreserve_factor = true", "more than 0 and at most 1"),
        ("[gpu]\nreserve_facter = 0.5", "unknown key 'reserve_facter'; did you mean 'reserve_factor'"),
        ("gpu = 5", "must be a table"),
        ("[gpu", "not TOML"),
        (f"[gpu]\nreserve_factor = {'9' * 400}", "more than 0 and at most 1"),
        (f"[gpu]\nreserve_factor = {'9' * 5000}", "not TOML"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_configuration_is_one_line_naming_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message) as error:
        configured_factor(path)
    assert str(error.value).startswith(str(path))


def test_a_configuration_that_is_a_pipe_is_one_line_and_nothing_waits_for_it(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    os.mkfifo(path)
    with child(lambda say, wait: say(str(configured_factor(path)))) as one:
        assert one.line(20) == f"UsageError: {path}: no regular file"
