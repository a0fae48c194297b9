"""Tokens and masks: by position, with the end of turn trained, and never empty by accident."""

from __future__ import annotations

from typing import Any

import pytest
from gshare.agent.base.tiny import BOS, CHATML, CHATML_WITH_GENERATION, EOS, make_tiny_tokenizer
from gshare.agent.data.formats import Completion, Conversation, Example, Message, Text
from gshare.agent.data.spans import NOTE_SHRUNK, NOTE_SPLIT, Encoded, ids_of
from gshare.agent.data.template import (
    NOTE_EMPTY_TURN,
    NOTE_FOUND_BY_SUBSTITUTION,
    NOTE_LAST_USER,
    RowEncoder,
    UnfitRow,
)
from gshare.agent.errors import UsageError

#: Markers around the content alone: the end of turn stands behind them.
CHATML_TIGHT_MARKERS = CHATML_WITH_GENERATION.replace(
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
)
#: Markers around the line break behind the end of turn too.
CHATML_WIDE_MARKERS = CHATML_WITH_GENERATION.replace(
    "'<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}",
    "'<|im_end|>\n' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}",
)
assert len({CHATML_WITH_GENERATION, CHATML_TIGHT_MARKERS, CHATML_WIDE_MARKERS}) == 3
#: Drops an earlier answer's thoughts and puts empty ones into the last, as Qwen3 does.
CHATML_THOUGHTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: Opens an answer with a thought that it does not store, as R1's distillates do.
CHATML_OPENS_THOUGHT = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
CHATML_TOOLS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALL_CHATML = [CHATML, CHATML_WITH_GENERATION, CHATML_TIGHT_MARKERS, CHATML_WIDE_MARKERS]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def spaced_tokenizer(*, add_bos: bool = True, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """SentencePiece-like: a `▁` before every text and for every space, `<s>` added as BOS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {"<s>": 0, "</s>": 1, "<unk>": 2}
    for symbol in ["▁", *"abcdefghijklmnopqrstuvwxyz:.?[]/INST", *(a + b for a, b in merges)]:
        vocab.setdefault(symbol, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def talk(*turns: tuple[str, str]) -> Conversation:
    return Conversation(tuple(Message(role, text, role == "assistant") for role, text in turns))


def encode(example: Example, tokenizer: Any = CHATML, **options: Any) -> tuple[Encoded, Any]:
    """The encoded row and its tokenizer; a string is a chat template for the toy tokenizer."""
    tokenizer = make_tiny_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    encoded = RowEncoder(tokenizer, **options).encode(example)
    assert len(encoded.tokens) == len(encoded.trained)
    assert not encoded.trained[0]
    assert encoded.trained[-1], "tokens behind the last target are cut"
    return encoded, tokenizer


def shown(example: Example, tokenizer: Any = CHATML, **options: Any) -> str:
    """The row decoded, with `[` and `]` around each trained run."""
    encoded, tokenizer = encode(example, tokenizer, **options)
    out, before = "", False
    start = 0
    for i in range(len(encoded.tokens) + 1):
        now = i < len(encoded.tokens) and encoded.trained[i]
        if now != before or i == len(encoded.tokens):
            out += tokenizer.decode(encoded.tokens[start:i]) + ("[" if now else "]" if before else "")
            start, before = i, now
    return out


QA = talk(("user", "who are you"), ("assistant", "the one"))
QA_SHOWN = "<|im_start|>user\nwho are you<|im_end|>\n<|im_start|>assistant\n[the one<|im_end|>]"


@pytest.mark.parametrize("template", ALL_CHATML)
def test_answer_and_end_of_turn_are_trained_whatever_the_markers(template: str) -> None:
    assert shown(QA, template) == QA_SHOWN


@pytest.mark.parametrize("template", ALL_CHATML)
def test_the_same_text_in_every_turn_is_told_apart_by_position(template: str) -> None:  # case 11
    same = talk(("user", "the"), ("assistant", "the"), ("user", "the"), ("assistant", "the"))
    turn = "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n[the<|im_end|>]"
    assert shown(same, template) == f"{turn}\n{turn}"


@pytest.mark.parametrize("template", ALL_CHATML)
def test_tokens_are_those_of_transformers(template: str) -> None:
    encoded, tokenizer = encode(QA, template)
    messages = [m.for_template() for m in QA.messages]
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert encoded.tokens == whole[: len(encoded.tokens)]
    prompt = tokenizer.apply_chat_template(
        messages[:1], tokenize=True, return_dict=True, add_generation_prompt=True
    )["input_ids"]
    assert encoded.tokens[: len(prompt)] == prompt  # what a model is given at inference
    assert encoded.trained.index(True) == len(prompt)


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_GENERATION])
def test_last_user_turn_is_cut_off_and_noted(template: str) -> None:  # case 1
    asked = talk(("user", "the"), ("assistant", "and"), ("user", "who"))
    encoded, _ = encode(asked, template)
    assert NOTE_LAST_USER in encoded.notes
    assert shown(asked, template) == shown(talk(("user", "the"), ("assistant", "and")), template)
    assert encode(QA, template)[0].notes == ()


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_GENERATION])
def test_only_turns_marked_trained_are(template: str) -> None:
    context = Message("assistant", "you", trained=False)
    row = Conversation((Message("user", "the"), context, Message("user", "who"), *QA.messages[1:]))
    assert shown(row, template).count("[") == 1
    assert shown(row, template).endswith("assistant\n[the one<|im_end|>]")


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_GENERATION])
def test_an_empty_answer_is_not_trained(template: str) -> None:  # case 3
    with pytest.raises(UnfitRow, match="empty completion"):
        encode(talk(("user", "the"), ("assistant", " ")), template)
    row = talk(("user", "the"), ("assistant", ""), ("user", "the"), ("assistant", "and"))
    encoded, _ = encode(row, template)
    assert encoded.notes == (NOTE_EMPTY_TURN,)
    assert shown(row, template).count("[") == 1


def test_rows_without_an_answer_are_unfit() -> None:
    for example, reason in [
        (Text(" \n"), "empty text"),
        (Completion("p", ""), "empty completion"),
        (talk(("user", "the")), "no assistant turn"),
        (talk(), "no assistant turn"),
    ]:
        with pytest.raises(UnfitRow) as caught:
            encode(example)
        assert caught.value.reason == reason


def test_markers_that_mark_nothing_fall_back_to_prefixes() -> None:  # case 12
    nothing = CHATML.replace(
        "{% endfor %}", "{% endfor %}{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    assert RowEncoder(make_tiny_tokenizer(nothing)).has_markers
    assert shown(QA, nothing) == QA_SHOWN


def test_template_that_rewrites_earlier_turns() -> None:
    """The rendering up to an earlier answer is no prefix of the whole; the end of turn ends it."""
    row = talk(("user", "the"), ("assistant", "and"), ("user", "who"), ("assistant", "you"))
    assert shown(row, CHATML_THOUGHTS) == (
        "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n[and<|im_end|>]\n"
        "<|im_start|>user\nwho<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\nyou<|im_end|>]"
    )


def test_template_that_opens_answers_differently_than_it_stores_them() -> None:
    row = talk(("user", "the"), ("assistant", "<think> or not"), ("user", "the"), ("assistant", "<b"))
    assert shown(row, CHATML_OPENS_THOUGHT) == (
        "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n[<think> or not<|im_end|>]\n"
        "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n[<b<|im_end|>]"
    )
    assert NOTE_FOUND_BY_SUBSTITUTION in encode(row, CHATML_OPENS_THOUGHT)[0].notes


def test_a_greeting_first() -> None:
    assert shown(talk(("assistant", "the"), ("user", "who"), ("assistant", "you"))).startswith(
        "<|im_start|>assistant\n[the<|im_end|>]\n<|im_start|>user"
    )


def test_template_whose_answers_cannot_be_found_is_refused() -> None:  # case 12
    hidden = "{% for message in messages %}{{ message['role'] }}{% endfor %}"
    hidden += "{% if add_generation_prompt %}{{ ':' }}{% endif %}"
    with pytest.raises(UsageError, match="generation %} markers"):
        encode(QA, hidden)
    backwards = "{% for message in messages | reverse %}{{ message['content'] + '<|im_end|>' }}{% endfor %}"
    with pytest.raises(UsageError, match="generation %} markers"):
        encode(talk(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")), backwards)


def test_tool_calls_are_rendered_and_trained_and_tool_output_is_not() -> None:  # case 14
    row = Conversation(
        (
            Message("user", "the"),
            Message("assistant", "", True, (CALL,)),
            Message("tool", "f and x"),
            Message("assistant", "and", True),
        )
    )
    assert shown(row, CHATML_TOOLS) == (
        "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
        '[{"name": "f", "arguments": {"x": 1}}<|im_end|>]\n'
        "<|im_start|>tool\nf and x<|im_end|>\n<|im_start|>assistant\n[and<|im_end|>]"
    )
    with pytest.raises(UsageError, match="does not write the tool calls of turn 2"):
        encode(row, CHATML)


def test_pad_equal_to_eos_keeps_the_final_eos() -> None:  # case 9
    tokenizer = make_tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    for example in (QA, Text("the"), Completion("the", " and")):
        encoded, _ = encode(example, tokenizer)
        assert encoded.tokens[-1] == tokenizer.pad_token_id
        assert (
            encoded.tokens.count(tokenizer.pad_token_id)
            == sum(example is QA and message.role == "user" for message in QA.messages) + 1
        )


def test_text_trains_all_and_ends_in_one_eos() -> None:
    assert shown(Text("the end")) == f"the[ end{EOS}]"
    assert encode(Text("the end" + EOS))[0] == encode(Text("the end"))[0]


def test_completion_is_trained_and_with_train_on_prompt_the_prompt_too() -> None:
    row = Completion("the end", " and")
    assert shown(row) == f"the end[ and{EOS}]"
    assert encode(row, train_on_prompt=True)[0].trained.count(False) == 1
    everything, _ = encode(QA, CHATML_WITH_GENERATION, train_on_prompt=True)
    assert everything.trained == [False] + [True] * (len(everything.tokens) - 1)


def test_exactly_one_bos() -> None:  # case 10
    added = spaced_tokenizer()
    added.chat_template = (
        "{{ bos_token }}" + "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    )
    never = spaced_tokenizer(add_bos=False)
    written = [QA, Text("<s>the"), Completion("<s>the", " end")]
    for example in (*written, Text("the"), Completion("the", " end")):
        assert encode(example, added)[0].tokens[:2].count(0) == 1, example
    for example in written[1:]:
        assert encode(example, never)[0].tokens[:2].count(0) == 1, example
    assert 0 not in encode(Text("the"), never)[0].tokens


def test_spaced_tokenizer_boundary_by_prefix_tokens() -> None:
    """A piece alone gets a `▁` that it has not inside; the prefix check finds the boundary anyway."""
    tokenizer = spaced_tokenizer()
    assert len(ids_of(tokenizer, "me")) == 3  # alone
    encoded, _ = encode(Completion("who are you:", "me"), tokenizer)
    assert encoded.tokens == [0, *ids_of(tokenizer, "who are you:me"), 1]
    assert encoded.trained == [False] * (1 + len(ids_of(tokenizer, "who are you:"))) + [True] * 3
    assert encoded.notes == ()


def test_tokens_that_merge_across_the_boundary_are_split_and_noted() -> None:  # case 13
    tokenizer = make_tiny_tokenizer()
    row = Completion("who is t", "he")  # "the" is one token
    assert ids_of(tokenizer, "who is the")[:-1] != ids_of(tokenizer, "who is t")[:-1]
    encoded, _ = encode(row, tokenizer)
    prompt = ids_of(tokenizer, row.prompt)
    assert encoded.tokens == [*prompt, *ids_of(tokenizer, "he"), tokenizer.eos_token_id]
    assert encoded.trained == [False] * len(prompt) + [True, True]
    assert encoded.notes == (NOTE_SPLIT,)


def test_where_a_split_would_change_the_text_the_shared_token_is_not_trained() -> None:  # case 13
    tokenizer = spaced_tokenizer(merges=(("t", "h"), ("th", "e")))
    encoded, _ = encode(Completion("who t", "he end"), tokenizer)
    assert encoded.notes == (NOTE_SHRUNK,)
    assert encoded.tokens == [0, *ids_of(tokenizer, "who the end"), 1]
    first = encoded.trained.index(True)
    assert tokenizer.convert_ids_to_tokens(encoded.tokens[first - 1 : first + 1]) == ["the", "▁"]


def test_models_that_cannot_do_it_are_refused() -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template, which conversations need"):
        encode(QA, tokenizer)
    assert encode(Text("the end"), tokenizer)[0].tokens  # plain rows need none
    tokenizer.eos_token = None
    with pytest.raises(UsageError, match="no eos_token"):
        RowEncoder(tokenizer)


def test_what_the_template_refuses_is_said() -> None:
    picky = "{{ raise_exception('only even turns') }}"
    with pytest.raises(UsageError, match="refuses this conversation: only even turns"):
        encode(QA, picky)


def test_unicode_of_several_tokens_a_character() -> None:
    row = talk(("user", "né 👍"), ("assistant", "日本 👍🏽"))
    assert shown(row).endswith("assistant\n[日本 👍🏽<|im_end|>]")
    assert BOS in shown(row)
