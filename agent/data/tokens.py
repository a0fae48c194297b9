"""`TokenStore`: rows as the trainer reads them, in an immutable, hashed, memory-mapped directory.

    tokens.bin       int32   all rows' tokens, one after another
    trained.bin      uint8   1 where the token is a target
    offsets.bin      int64   (n + 1): row i is tokens[offsets[i]:offsets[i + 1]]
    source_rows.bin  int64   (n): the line or row of the data file that row i came from
    content.bin      bytes   (n × 16): BLAKE2b of each row's tokens and mask, for the split
    meta.json                what it was made from, what was dropped, size and sha256 of each file

All little-endian. A store is written under another name, fsynced, and renamed, so there is no
half-written one; opening verifies every byte.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from gshare.agent.errors import GshareError
from numpy.typing import NDArray

STORE_VERSION = 1
DIGEST_BYTES = 16  # 2^64 rows until a chance collision is likely

_FILES = ("tokens.bin", "trained.bin", "offsets.bin", "source_rows.bin", "content.bin")


class RowCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows, and the first three of them by their number in the data file."""

    count: int
    first_rows: list[int]


class FileDigest(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    sha256: str


class StoreMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What `meta.json` holds."""

    version: int = STORE_VERSION
    hash: str = ""
    source: str  # the data file's name, for messages
    source_sha256: str
    data_format: str
    tokenizer: str  # sha256 over the tokenizer's files
    template: str  # sha256 of the chat template, "" without one
    max_length: int
    on_bad_turns: str
    train_on_prompt: bool
    vocab_size: int  # of the tokenizer, added tokens included; all tokens are below it
    rows_read: int
    n_rows: int
    n_tokens: int
    n_label_tokens: int
    longest_row: int  # tokens
    dropped: dict[str, RowCount]  # by reason
    notes: dict[str, RowCount]  # kept rows that a user should hear about, by reason
    files: dict[str, FileDigest] = {}


class TokenStore:
    """An opened store. Arrays are memory-mapped and read-only."""

    def __init__(self, path: Path, meta: StoreMeta) -> None:
        self.path = path
        self.meta = meta
        self._tokens = _map(path / "tokens.bin", "<i4", meta.n_tokens)
        self._trained = _map(path / "trained.bin", "|u1", meta.n_tokens)
        self.offsets: NDArray[np.int64] = _map(path / "offsets.bin", "<i8", meta.n_rows + 1)
        self.source_rows: NDArray[np.int64] = _map(path / "source_rows.bin", "<i8", meta.n_rows)
        content = _map(path / "content.bin", "|u1", meta.n_rows * DIGEST_BYTES)
        self.content: NDArray[np.uint8] = content.reshape(meta.n_rows, DIGEST_BYTES)

    @property
    def hash(self) -> str:
        """sha256 (hex) over the files' content, the tokenizer and the options: the data's identity."""
        return self.meta.hash

    @property
    def n_rows(self) -> int:
        return self.meta.n_rows

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) tokens of each row."""
        return np.diff(self.offsets)

    def row(self, i: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Row `i` as `(tokens (L,), trained (L,))`.

        `trained[j]` says that token j is a target, predicted from position j - 1; `trained[0]` is False.
        """
        if not 0 <= i < self.n_rows:
            raise IndexError(f"row {i} of a store of {self.n_rows}")
        start, end = int(self.offsets[i]), int(self.offsets[i + 1])
        return self._tokens[start:end], self._trained[start:end].view(np.bool_)

    @classmethod
    def open(cls, path: Path | str, expected_hash: str | None = None) -> TokenStore:
        """Open and verify. `GshareError` names the file that is missing, damaged or another store's."""
        path = Path(path)
        meta_path = path / "meta.json"
        try:
            meta = msgspec.json.decode(meta_path.read_bytes(), type=StoreMeta)
        except OSError as error:
            raise GshareError(f"{meta_path}: cannot be read: {error.strerror}; not a token store?") from error
        except msgspec.DecodeError as error:
            raise GshareError(f"{meta_path}: damaged: {error}; delete {path} and prepare again") from error
        if meta.version != STORE_VERSION:
            raise GshareError(
                f"{meta_path}: store version {meta.version}, this gshare reads {STORE_VERSION}; prepare again"
            )
        if set(meta.files) != set(_FILES) or meta.hash != _store_hash(meta):
            raise GshareError(f"{meta_path}: damaged: its hash does not fit; delete {path} and prepare again")
        for name, wanted in meta.files.items():
            found = digest_of(path / name)
            if found != wanted:
                what = "size" if found.size != wanted.size else "content"
                raise GshareError(f"{path / name}: damaged: wrong {what}; delete {path} and prepare again")
        if expected_hash is not None and meta.hash != expected_hash:
            raise GshareError(
                f"{path}: is another data set than the job was given (hash {meta.hash[:12]}, expected "
                f"{expected_hash[:12]})"
            )
        return cls(path, meta)


class StoreWriter:
    """Writes one store row by row in bounded memory; nothing is at `target` before `commit`."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._files: dict[str, BinaryIO] = {}
        self._temp: Path | None = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._temp = Path(tempfile.mkdtemp(prefix=".store-", dir=target.parent))
            for name in _FILES:
                self._files[name] = (self._temp / name).open("wb")
            self._files["offsets.bin"].write(np.zeros(1, "<i8").tobytes())
        except OSError as error:
            self.discard()
            raise _write_error(target, error) from error
        self.n_rows = self.n_tokens = self.n_label_tokens = self.longest_row = 0

    def add(self, source_row: int, tokens: list[int], trained: list[bool]) -> None:
        assert len(tokens) == len(trained) > 0
        assert not trained[0]
        token_bytes = np.asarray(tokens, "<i4").tobytes()
        trained_bytes = np.asarray(trained, "|u1").tobytes()
        # The length is in both parts' lengths, so (tokens, mask) → bytes is one to one.
        content = hashlib.blake2b(token_bytes + trained_bytes, digest_size=DIGEST_BYTES).digest()
        self.n_rows += 1
        self.n_tokens += len(tokens)
        self.n_label_tokens += sum(trained)
        self.longest_row = max(self.longest_row, len(tokens))
        try:
            self._files["tokens.bin"].write(token_bytes)
            self._files["trained.bin"].write(trained_bytes)
            self._files["offsets.bin"].write(np.asarray([self.n_tokens], "<i8").tobytes())
            self._files["source_rows.bin"].write(np.asarray([source_row], "<i8").tobytes())
            self._files["content.bin"].write(content)
        except OSError as error:
            raise _write_error(self.target, error) from error

    def commit(self, meta: StoreMeta) -> TokenStore:
        """Fsync, rename to `target`, open. A store that is there already is kept if it is whole."""
        assert self._temp is not None
        try:
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
            files = {name: digest_of(self._temp / name) for name in _FILES}
            meta = msgspec.structs.replace(meta, files=files)
            meta = msgspec.structs.replace(meta, hash=_store_hash(meta))
            with (self._temp / "meta.json").open("wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(meta)))
                file.flush()
                os.fsync(file.fileno())
            sync_directory(self._temp)
            self._rename()
        except OSError as error:
            raise _write_error(self.target, error) from error
        return TokenStore.open(self.target)

    def _rename(self) -> None:
        assert self._temp is not None
        try:
            os.rename(self._temp, self.target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            try:  # another process was first: same source, same bytes
                TokenStore.open(self.target)
            except GshareError:  # what lies there is damaged: move it away whole, then delete it
                away = Path(tempfile.mkdtemp(prefix=".store-", dir=self.target.parent))
                os.rename(self.target, away / "damaged")
                os.rename(self._temp, self.target)
                shutil.rmtree(away, ignore_errors=True)
        sync_directory(self.target.parent)

    def discard(self) -> None:
        """Remove what was written and not committed; harmless after `commit`."""
        for file in self._files.values():
            with suppress(OSError):  # its flush fails again on a full disk; it is closed all the same
                file.close()
        if self._temp is not None:
            shutil.rmtree(self._temp, ignore_errors=True)


def digest_of(path: Path) -> FileDigest:
    """Size and sha256 of a file. Raises `GshareError` when it cannot be read."""
    hasher = hashlib.sha256()
    size = 0
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                hasher.update(block)
                size += len(block)
    except OSError as error:
        raise GshareError(f"{path}: cannot be read: {error.strerror}") from error
    return FileDigest(size=size, sha256=hasher.hexdigest())


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _store_hash(meta: StoreMeta) -> str:
    """Everything that the rows' bytes and their meaning depend on; not names, not counts of the dropped."""
    identity = {
        "version": meta.version,
        "files": {name: meta.files[name].sha256 for name in _FILES},
        "tokenizer": meta.tokenizer,
        "template": meta.template,
        "max_length": meta.max_length,
        "train_on_prompt": meta.train_on_prompt,
    }
    return hashlib.sha256(msgspec.json.encode(identity, order="deterministic")).hexdigest()


def _map(path: Path, dtype: str, count: int) -> NDArray:
    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


def _write_error(target: Path, error: OSError) -> GshareError:
    hint = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return GshareError(f"{target.parent}: cannot write the token files: {error.strerror}{hint}")
