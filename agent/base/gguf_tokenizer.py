"""The tokenizer of a GGUF file, the same whichever transformers is installed.

Built here from the file's own tokens, types, merges or scores. transformers builds one too, but not the same
from version to version: 5.17 gives a Llama file its bos as eos, no pad, and `unk` for bytes outside the
vocabulary; 5.24 puts no blank before a text that begins with one; neither splits digits as SmolLM2 does.

Two kinds, by `tokenizer.ggml.model`: "gpt2", byte-level BPE (SmolLM2, Llama 3, Qwen), as the models' own
tokenizer.json has it; "llama", SentencePiece BPE (Llama 2, Mistral), as llama.cpp reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gshare.agent.errors import UsageError

_GPT2_PRE = ("default", "gpt-2")
_DIGITS_PRE = ("smollm",)
# Published in the tokenizer.json of the models; the two differ in how many digits go together.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_PRE = ("llama-bpe", "llama3")
_SPLIT_PRE = {
    "llama-bpe": _PATTERN.replace("DIGITS", "{1,3}"),
    "llama3": _PATTERN.replace("DIGITS", "{1,3}"),
    "qwen2": _PATTERN.replace("DIGITS", ""),
}

# llama.cpp's token types.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def field(reader: Any, key: str, default: Any = None) -> Any:
    """The value of `key` in the header of a `gguf.GGUFReader`."""
    found = reader.fields.get(key)
    return default if found is None else found.contents()


def read_tokenizer(reader: Any, gguf: Path) -> Any:
    """The file's tokenizer as a transformers fast tokenizer; `reader` is the `GGUFReader` of `gguf`.

    Raises UsageError naming the file when it has no tokenizer, one of a kind unknown here, or ids, merges or
    scores that do not fit its vocabulary.
    """
    from transformers import PreTrainedTokenizerFast

    kind = field(reader, "tokenizer.ggml.model")
    tokens = field(reader, "tokenizer.ggml.tokens")
    if kind is None or tokens is None:
        raise UsageError(f"{gguf} has no tokenizer; use a file made for chat or text generation")
    pre = str(field(reader, "tokenizer.ggml.pre", "default"))
    kinds = field(reader, "tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise UsageError(
            f"{gguf}: {len(tokens)} tokenizer.ggml.tokens but {len(kinds)} tokenizer.ggml.token_type;"
            " fetch it again"
        )
    if kind == "gpt2":
        backend = _byte_level(tokens, field(reader, "tokenizer.ggml.merges", []), pre, gguf)
    elif kind == "llama":
        backend = _sentencepiece(tokens, kinds, reader, gguf)
    else:
        raise UsageError(
            f"{gguf}: tokenizer.ggml.model {kind!r} is not supported (known: gpt2, llama);"
            " use the model's Hugging Face directory"
        )
    _add_whole_tokens(backend, tokens, kinds)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    set_special_tokens(tokenizer, tokens, reader, gguf)
    # Where a file does not say, llama.cpp's default.
    default = kind == "llama" or pre in _LLAMA3_PRE
    tokenizer.add_bos_token = bool(field(reader, "tokenizer.ggml.add_bos_token", default))
    tokenizer.add_eos_token = bool(field(reader, "tokenizer.ggml.add_eos_token", False))
    tokenizer.chat_template = field(reader, "tokenizer.chat_template")
    return tokenizer


def set_special_tokens(tokenizer: Any, tokens: list[str], reader: Any, gguf: Path) -> None:
    """Give `tokenizer` the bos, eos, unk and pad of the file, and none where the file has none.

    Raises UsageError when an id lies outside the vocabulary, or its token has another id in `tokenizer`, as
    when two tokens are spelled the same.
    """
    for name, key in _SPECIAL.items():
        wanted = _token_id(reader, key, tokens, gguf)
        setattr(tokenizer, name, None if wanted is None else tokens[wanted])
        got = getattr(tokenizer, f"{name}_id")
        if got != wanted:
            raise UsageError(
                f"{gguf}: {key} is {wanted} but the tokenizer came out with {got};"
                " use the model's Hugging Face directory"
            )


def _token_id(reader: Any, key: str, tokens: list[str], gguf: Path) -> int | None:
    index = field(reader, key)
    if index is not None and not 0 <= index < len(tokens):
        raise UsageError(f"{gguf}: {key} is {index} but there are {len(tokens)} tokens; fetch it again")
    return index


def _byte_level(tokens: list[str], lines: list[str], pre: str, gguf: Path) -> Any:
    """The `tokenizers.Tokenizer` of a byte-level BPE, without its special tokens; a line is "Ġ t"."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for row, line in enumerate(lines):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= vocab.keys():
            raise UsageError(
                f"{gguf}: tokenizer.ggml.merges[{row}] names no tokens of its own; fetch it again"
            )
        merges.append((left, right))
    # Llama 3 takes a word that is a token whole, even where the merges would not build it.
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3_PRE))
    backend.pre_tokenizer = _pre_tokenizer(pre, gguf)
    if pre == "qwen2":  # in its tokenizer.json, though llama.cpp leaves it out
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(tokens: list[str], kinds: list[int], reader: Any, gguf: Path) -> Any:
    """The `tokenizers.Tokenizer` of a SentencePiece BPE, without its special tokens.

    SentencePiece joins the two neighbours whose piece has the highest score. That is a BPE whose merges are
    all the ways to cut a piece in two pieces, those of the highest score first.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = field(reader, "tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise UsageError(
            f"{gguf}: {len(tokens)} tokenizer.ggml.tokens but {len(scores)} tokenizer.ggml.scores;"
            " fetch it again"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    pieces = {token: index for token, index in vocab.items() if kinds[index] == _NORMAL}
    merges: list[tuple[str, str]] = []
    for piece in sorted(pieces, key=lambda piece: (-scores[pieces[piece]], pieces[piece])):
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        cuts = [(left, right) for left, right in cuts if left in pieces and right in pieces]
        merges += sorted(cuts, key=lambda cut: (pieces[cut[0]], pieces[cut[1]]))
    unknown = tokens[_token_id(reader, _SPECIAL["unk_token"], tokens, gguf) or 0]
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    blanks = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if field(reader, "tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = blanks
    backend.decoder = decoders.Sequence(steps)
    return backend


def _add_whole_tokens(backend: Any, tokens: list[str], kinds: list[int]) -> None:
    """Tokens that are matched in the text before it is split: control tokens, and others like `<think>`."""
    from tokenizers import AddedToken

    for wanted in (_CONTROL, _USER_DEFINED):
        special = wanted == _CONTROL
        backend.add_tokens(
            [
                AddedToken(token, normalized=False, special=special)
                for token, kind in zip(tokens, kinds, strict=True)
                if kind == wanted
            ]
        )


def _pre_tokenizer(pre: str, gguf: Path) -> Any:
    """The splitting that `tokenizer.ggml.pre` names."""
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _GPT2_PRE:
        return byte_level
    if pre in _DIGITS_PRE:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre in _SPLIT_PRE:
        split = pre_tokenizers.Split(Regex(_SPLIT_PRE[pre]), behavior="isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, bytes_only])
    known = ", ".join((*_GPT2_PRE, *_DIGITS_PRE, *_SPLIT_PRE))
    raise UsageError(
        f"{gguf}: pre-tokenizer {pre!r} is not supported (known: {known});"
        " use the model's Hugging Face directory, which has its tokenizer.json"
    )
