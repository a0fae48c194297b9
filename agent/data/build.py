"""A data file and a tokenizer → a cached `TokenStore`: reading, parsing, encoding, counting."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

import msgspec
from gshare.agent.data.formats import Conversation, RowParser
from gshare.agent.data.readers import read_rows
from gshare.agent.data.spans import Encoded
from gshare.agent.data.template import RowEncoder, UnfitRow
from gshare.agent.data.tokens import RowCount, StoreMeta, StoreWriter, TokenStore, digest_of
from gshare.agent.data.turns import bad_turn, merge_turns
from gshare.agent.errors import GshareError, UsageError
from gshare.agent.jobs.spec import TurnPolicy

#: Raise when the same input would give other tokens or masks: cached stores are then made anew.
BUILD_VERSION = 1
#: What a tokenizer reads; those that exist are its fingerprint. `config.json`: it names the class.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
)
PROGRESS_EVERY = 64  # rows between two calls of `progress`

DROP_TRUNCATED = "answer truncated away"
DROP_TURNS = "turns do not alternate"
NOTE_TRUNCATED = "longer than max_length: its end is cut"
NOTE_MERGED = "turns that did not alternate were merged"


@dataclass(frozen=True)
class Prepared:
    """One row of the file: `encoded` as the model sees it, or None and the reason in `dropped`."""

    number: int
    encoded: Encoded | None
    dropped: str = ""


def build_token_store(
    source: Path,
    tokenizer_dir: Path,
    *,
    cache_dir: Path,
    data_format: str = "auto",
    max_length: int = 1024,
    on_bad_turns: str = "error",
    train_on_prompt: bool = False,
    progress: Callable[[int], None] | None = None,
) -> TokenStore:
    """Tokenise `source`, or open the store that an equal call made before.

    The cache key is the content of the source and of the tokenizer's files, the options, and the
    versions of the libraries that tokenise. `progress` is told the number of rows read so far.

    Raises `UsageError` for anything wrong with file, rows, options or tokenizer, and when no row is
    left to train on; `GshareError` when the store cannot be written.
    """
    pipeline = Pipeline(
        source,
        tokenizer_dir,
        data_format=data_format,
        max_length=max_length,
        on_bad_turns=on_bad_turns,
        train_on_prompt=train_on_prompt,
    )
    source_sha256 = digest_of(source).sha256
    target = cache_dir / pipeline.key(source_sha256)
    if target.exists():
        try:
            return TokenStore.open(target)
        except GshareError:
            pass  # damaged; the commit below replaces it
    writer = StoreWriter(target)
    try:
        meta = _write(pipeline, writer, source_sha256, progress)
        if digest_of(source).sha256 != source_sha256:
            raise UsageError(f"{source}: changed while it was read; run again")
        return writer.commit(meta)
    finally:
        writer.discard()


class Pipeline:
    """The steps from a raw row to tokens for one file, tokenizer and set of options."""

    def __init__(
        self,
        source: Path,
        tokenizer_dir: Path,
        *,
        data_format: str = "auto",
        max_length: int = 1024,
        on_bad_turns: str = "error",
        train_on_prompt: bool = False,
    ) -> None:
        if on_bad_turns not in get_args(TurnPolicy):
            known = ", ".join(get_args(TurnPolicy))
            raise UsageError(f"on_bad_turns {on_bad_turns!r} is unknown; known: {known}")
        read_rows(source)  # refuses what is not a data file at all before a tokenizer is loaded
        self.source = source
        self.tokenizer_dir = tokenizer_dir
        self.max_length = max_length
        self.on_bad_turns = on_bad_turns
        self.train_on_prompt = train_on_prompt
        self.data_format = data_format
        _check_max_length(max_length, tokenizer_dir)
        self.tokenizer = load_tokenizer(tokenizer_dir)
        self.encoder = RowEncoder(
            self.tokenizer, train_on_prompt=train_on_prompt, extra_eos=_generation_eos(tokenizer_dir)
        )
        self.parser = RowParser(str(source), data_format, has_template=self.encoder.template is not None)
        self.notes: dict[str, list[int]] = {}  # row numbers by note
        self.dropped: dict[str, list[int]] = {}  # row numbers by reason
        self.rows_read = 0

    def rows(self) -> Iterator[Prepared]:
        """Every row in turn; what is dropped or noted is collected in `dropped` and `notes`."""
        for number, raw in read_rows(self.source):
            self.rows_read += 1
            yield self._prepare(number, raw)

    def key(self, source_sha256: str) -> str:
        """Name of the store in the cache."""
        parts = {
            "build": BUILD_VERSION,
            "source": source_sha256,
            "suffix": self.source.suffix.lower(),
            "tokenizer": tokenizer_fingerprint(self.tokenizer_dir),
            "options": [self.data_format, self.max_length, self.on_bad_turns, self.train_on_prompt],
            "versions": {name: _version(name) for name in ("transformers", "tokenizers", "jinja2")},
        }
        return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:32]

    def _prepare(self, number: int, raw: dict[str, Any]) -> Prepared:
        example = self.parser.parse(number, raw)
        notes: list[str] = []
        try:
            if isinstance(example, Conversation):
                example = self._mend_turns(number, example, notes)
            encoded = self.encoder.encode(example)
        except UnfitRow as unfit:
            return self._drop(number, unfit.reason)
        except UsageError as error:
            raise self.parser.fail(number, str(error)) from error
        notes += encoded.notes
        if len(encoded.tokens) > self.max_length:
            encoded = Encoded(encoded.tokens[: self.max_length], encoded.trained[: self.max_length])
            if True not in encoded.trained:
                return self._drop(number, DROP_TRUNCATED)
            notes.append(NOTE_TRUNCATED)
        encoded.notes = tuple(notes)
        for note in notes:
            self.notes.setdefault(note, []).append(number)
        return Prepared(number, encoded)

    def _mend_turns(self, number: int, conversation: Conversation, notes: list[str]) -> Conversation:
        fault = bad_turn(conversation)
        if fault is None:
            return conversation
        if self.on_bad_turns == "error":
            raise UsageError(f'{fault}; mend the row, or set on_bad_turns to "merge" or "drop"')
        if self.on_bad_turns == "merge":
            conversation = merge_turns(conversation)
            if bad_turn(conversation) is None:
                notes.append(NOTE_MERGED)
                return conversation
        raise UnfitRow(DROP_TURNS)

    def _drop(self, number: int, reason: str) -> Prepared:
        self.dropped.setdefault(reason, []).append(number)
        return Prepared(number, None, reason)


def load_tokenizer(tokenizer_dir: Path) -> Any:
    """The fast tokenizer of a local directory; never code from it, never the network."""
    if not any(
        (tokenizer_dir / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    ):
        raise UsageError(
            f"{tokenizer_dir}: holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json)"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError("tokenising needs transformers: pip install 'gshare[train]'") from error
    try:
        return AutoTokenizer.from_pretrained(
            str(tokenizer_dir), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers and tokenizers raise anything, plain Exception included
        raise UsageError(f"{tokenizer_dir}: the tokenizer cannot be loaded: {error}") from error


def tokenizer_fingerprint(tokenizer_dir: Path) -> str:
    """sha256 over names and contents of `TOKENIZER_FILES` in the directory."""
    hasher = hashlib.sha256()
    for name in TOKENIZER_FILES:
        if (tokenizer_dir / name).is_file():
            hasher.update(f"{name} {digest_of(tokenizer_dir / name).sha256}\n".encode())
    return hasher.hexdigest()


def _write(
    pipeline: Pipeline, writer: StoreWriter, source_sha256: str, progress: Callable[[int], None] | None
) -> StoreMeta:
    for row in pipeline.rows():
        if row.encoded is not None:
            writer.add(row.number, row.encoded.tokens, row.encoded.trained)
        if progress is not None and pipeline.rows_read % PROGRESS_EVERY == 0:
            progress(pipeline.rows_read)
    if progress is not None:
        progress(pipeline.rows_read)
    dropped = _counts(pipeline.dropped)
    if writer.n_rows == 0:
        if pipeline.rows_read == 0:
            raise UsageError(f"{pipeline.source}: holds no rows")
        reasons = "; ".join(
            f"{reason}: {rows.count} (rows {', '.join(map(str, rows.first_rows))})"
            for reason, rows in dropped.items()
        )
        raise UsageError(
            f"{pipeline.source}: no row is left to train on, all {pipeline.rows_read} were dropped: {reasons}"
        )
    return StoreMeta(
        source=pipeline.source.name,
        source_sha256=source_sha256,
        data_format=pipeline.parser.format,
        tokenizer=tokenizer_fingerprint(pipeline.tokenizer_dir),
        template=pipeline.encoder.template_hash,
        max_length=pipeline.max_length,
        on_bad_turns=pipeline.on_bad_turns,
        train_on_prompt=pipeline.train_on_prompt,
        vocab_size=len(pipeline.tokenizer),
        rows_read=pipeline.rows_read,
        n_rows=writer.n_rows,
        n_tokens=writer.n_tokens,
        n_label_tokens=writer.n_label_tokens,
        longest_row=writer.longest_row,
        dropped=dropped,
        notes=_counts(pipeline.notes),
    )


def _counts(rows: dict[str, list[int]]) -> dict[str, RowCount]:
    return {
        reason: RowCount(count=len(numbers), first_rows=numbers[:3])
        for reason, numbers in sorted(rows.items())
    }


def _check_max_length(max_length: int, tokenizer_dir: Path) -> None:
    if max_length < 2:  # one token has nothing to be predicted from
        raise UsageError(f"max_length must be at least 2, found {max_length}")
    limit = _read_json(tokenizer_dir / "config.json").get("max_position_embeddings")
    if isinstance(limit, int) and limit < 1:
        raise UsageError(
            f"{tokenizer_dir / 'config.json'}: max_position_embeddings must be a positive integer, "
            f"not {limit}"
        )
    if isinstance(limit, int) and max_length > limit:
        raise UsageError(
            f"max_length {max_length} is beyond the model's max_position_embeddings, {limit} "
            f"({tokenizer_dir / 'config.json'}); set max_length to {limit} or less"
        )


def _generation_eos(tokenizer_dir: Path) -> tuple[int, ...]:
    eos = _read_json(tokenizer_dir / "generation_config.json").get("eos_token_id")
    return tuple(eos) if isinstance(eos, list) else (eos,) if isinstance(eos, int) else ()


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, or an empty one when there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise UsageError(f"{path}: not readable as JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
