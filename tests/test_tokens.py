"""The token store: what was written is what is read, and nothing damaged is ever opened."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import msgspec
import numpy as np
import pytest
from gshare.agent.data import tokens
from gshare.agent.data.tokens import StoreMeta, StoreWriter, TokenStore
from gshare.agent.errors import GshareError

ROWS = [(3, [5, 6, 7], [False, False, True]), (4, [8, 9], [False, True]), (9, [5, 6, 7], [False, True, True])]


def meta_for(writer: StoreWriter, **changes: object) -> StoreMeta:
    meta = StoreMeta(
        source="d.jsonl",
        source_sha256="0" * 64,
        data_format="text",
        tokenizer="t",
        template="",
        max_length=16,
        on_bad_turns="error",
        train_on_prompt=False,
        vocab_size=10,
        rows_read=writer.n_rows,
        n_rows=writer.n_rows,
        n_tokens=writer.n_tokens,
        n_label_tokens=writer.n_label_tokens,
        longest_row=writer.longest_row,
        dropped={},
        notes={},
    )
    return msgspec.structs.replace(meta, **changes)


def make(target: Path, rows: list[tuple[int, list[int], list[bool]]] = ROWS, **changes: object) -> TokenStore:
    writer = StoreWriter(target)
    try:
        for row in rows:
            writer.add(*row)
        return writer.commit(meta_for(writer, **changes))
    finally:
        writer.discard()


def test_rows_come_back(tmp_path: Path) -> None:
    made = make(tmp_path / "s")
    store = TokenStore.open(tmp_path / "s", made.hash)
    assert (store.n_rows, store.meta.n_tokens, store.meta.n_label_tokens, store.meta.longest_row) == (
        3,
        8,
        4,
        3,
    )
    for i, (number, ids, trained) in enumerate(ROWS):
        got_ids, got_trained = store.row(i)
        assert (got_ids.dtype, got_trained.dtype) == (np.dtype("<i4"), np.dtype(bool))
        assert (got_ids.tolist(), got_trained.tolist()) == (ids, trained)
        assert store.source_rows[i] == number
    assert store.lengths.tolist() == [3, 2, 3]
    for i in (-1, 3):
        with pytest.raises(IndexError):
            store.row(i)
    with pytest.raises(ValueError, match="read-only"):
        store.row(0)[0][0] = 1


def test_content_digest_covers_tokens_and_mask(tmp_path: Path) -> None:
    store = make(tmp_path / "s", [*ROWS, ROWS[0]])
    digests = [store.content[i].tobytes() for i in range(4)]
    assert digests[0] == digests[3]
    assert len(set(digests)) == 3  # row 2 has row 0's tokens under another mask


def test_hash_follows_content_and_options_and_not_names_or_counts(tmp_path: Path) -> None:
    base = make(tmp_path / "a").hash
    assert make(tmp_path / "b", source="e.jsonl", rows_read=7).hash == base
    flipped = [(3, [5, 6, 7], [False, True, True]), *ROWS[1:]]
    others = [
        make(tmp_path / "c", flipped),
        make(tmp_path / "d", ROWS[::-1]),
        make(tmp_path / "e", tokenizer="u"),
        make(tmp_path / "f", max_length=17),
    ]
    assert len({base, *(store.hash for store in others)}) == 5


@pytest.mark.parametrize("name", tokens._FILES)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    make(tmp_path / "s")
    path = tmp_path / "s" / name
    data = path.read_bytes()
    for damaged, what in [(data[:-1], "wrong size"), (bytes([data[0] ^ 1]) + data[1:], "wrong content")]:
        path.write_bytes(damaged)
        with pytest.raises(GshareError, match=f"{name}: damaged: {what}"):
            TokenStore.open(tmp_path / "s")
    path.unlink()
    with pytest.raises(GshareError, match=f"{name}: cannot be read"):
        TokenStore.open(tmp_path / "s")


def test_damaged_meta_and_foreign_stores(tmp_path: Path) -> None:
    store = make(tmp_path / "s")
    with pytest.raises(GshareError, match="another data set than the job was given"):
        TokenStore.open(tmp_path / "s", "f" * 64)
    path = tmp_path / "s" / "meta.json"
    whole = path.read_text()
    for damaged, says in [
        (whole.replace('"max_length": 16', '"max_length": 17'), "its hash does not fit"),
        (whole.replace('"version": 1', '"version": 2'), "store version 2"),
        (whole[:-20], "meta.json: damaged"),
    ]:
        assert damaged != whole
        path.write_text(damaged)
        with pytest.raises(GshareError, match=says):
            TokenStore.open(tmp_path / "s", store.hash)
    with pytest.raises(GshareError, match="not a token store"):
        TokenStore.open(tmp_path / "nothing")


def test_nothing_is_at_the_target_before_commit_and_nothing_is_left_without(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "s")
    writer.add(*ROWS[0])
    assert not (tmp_path / "s").exists()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_crash_before_the_rename_leaves_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokens.os, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tokens.os, "fsync", full)
    with pytest.raises(GshareError, match="No space left on device; free some space"):
        make(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_the_second_of_two_writers_keeps_a_whole_store_and_replaces_a_damaged_one(tmp_path: Path) -> None:
    first = make(tmp_path / "s")
    made = (tmp_path / "s" / "tokens.bin").stat().st_ino
    assert make(tmp_path / "s").hash == first.hash
    assert (tmp_path / "s" / "tokens.bin").stat().st_ino == made
    (tmp_path / "s" / "tokens.bin").write_bytes(b"")
    assert make(tmp_path / "s").hash == first.hash
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_row_whose_first_token_is_trained_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        make(tmp_path / "s", [(1, [5, 6], [True, True])])


def test_a_full_disk_leaves_no_half_written_store(tmp_path: Path) -> None:
    """Closing a file flushes what is buffered, which fails again; a limit on file size acts the same."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limit[1]))
    try:
        with pytest.raises(GshareError, match="cannot write the token files") as caught:
            make(tmp_path / "s", ROWS * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []
