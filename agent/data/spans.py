"""One text with trained character spans → token ids and a trained mask.

What a model sees at inference is the prompt's own tokens, then its answer's. So the tokens of
everything before an answer must be the beginning of the tokens of the whole; where the tokenizer
merges across that boundary, the text is cut there and its pieces are tokenised apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Span = tuple[int, int]  # characters [start, end)

NOTE_SPLIT = "tokens merge across an answer's boundary: split there"
NOTE_SHRUNK = "tokens merge across an answer's boundary: the shared token is not trained"


@dataclass
class Encoded:
    """A row as the model sees it: `tokens` and `trained` of one length, `trained[0]` False."""

    tokens: list[int]
    trained: list[bool]
    notes: tuple[str, ...] = ()  # what a user should hear about, counted in the store's meta


def encode_spans(tokenizer: Any, text: str, spans: list[Span], *, special: bool) -> Encoded:
    """Tokens of `text` with those inside `spans` (ascending, disjoint, not empty) trained.

    `special`: let the tokenizer add what it adds at the start of a document (BOS); what it adds at
    the end is left out. A chat template writes its own, so there it is False.
    """
    start = document_start(tokenizer) if special else []
    cuts = sorted({cut for span in spans for cut in span} | {0, len(text)})
    pieces = [(a, b, ids_of(tokenizer, text[a:b])) for a, b in pairwise(cuts)]
    whole = ids_of(tokenizer, text)
    inside = set(spans)

    def join(parts: list[tuple[int, int, list[int]]], *notes: str) -> Encoded:
        tokens, trained = list(start), [False] * len(start)
        for a, b, ids in parts:
            tokens += ids
            trained += [(a, b) in inside] * len(ids)
        return Encoded(tokens, trained, notes)

    # Fast path, linear in the text: the pieces' tokens in a row are the whole's.
    if [i for _, _, ids in pieces for i in ids] == whole:
        return join(pieces)
    # SentencePiece-like tokenizers put a space before any text: a piece alone is not a piece inside.
    ends = [0]
    for _, b, _ in pieces:
        prefix = whole if b == len(text) else ids_of(tokenizer, text[:b])
        ends.append(len(prefix))
        if prefix != whole[: len(prefix)]:
            break
    else:
        return join([(a, b, whole[i:j]) for (a, b, _), (i, j) in zip(pieces, pairwise(ends), strict=True)])
    split = [i for _, _, ids in pieces for i in ids]
    if _decode(tokenizer, split) == _decode(tokenizer, whole):
        return join(pieces, NOTE_SPLIT)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    trained = [any(s <= a and b <= e for s, e in spans) for a, b in offsets]
    return Encoded(start + whole, [False] * len(start) + trained, (NOTE_SHRUNK,))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text`, nothing added. `verbose=False`: no advice about the model's length."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def document_start(tokenizer: Any) -> list[int]:
    """What the tokenizer itself puts before a document: `[bos]` or nothing."""
    bos = tokenizer.bos_token_id
    with_special = tokenizer("", verbose=False)["input_ids"]
    return [bos] if bos is not None and with_special[:1] == [bos] else []


def single_start(encoded: Encoded, bos: int | None) -> Encoded:
    """Exactly one BOS at the start, where the text or template wrote one and the tokenizer another."""
    extra = 0
    while bos is not None and encoded.tokens[extra : extra + 2] == [bos, bos]:
        extra += 1
    return Encoded(encoded.tokens[extra:], encoded.trained[extra:], encoded.notes)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
