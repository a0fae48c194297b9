"""Toy checkpoints: a random model of a few hundred thousand parameters with a tokenizer of its own.

Used by the tests, by `gshare doctor` and by the examples, so that everything runs without a download.
The directory is what `save_pretrained` of transformers writes, so whatever reads it reads real
checkpoints too. Weights come from a generator of our own, drawn in the order of sorted names, so their
bytes depend on `seed` and the shapes, not on how the installed transformers initialises a model.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gshare.agent.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

#: ChatML without generation markers, as SmolLM2 and Qwen have it.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

#: The same text with the markers that transformers' `return_assistant_tokens_mask` needs.
CHATML_WITH_GENERATION = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

#: A few merges, so that words are several tokens and tokens are several characters. `Ġ` is the space.
_MERGES: tuple[tuple[str, str], ...] = (
    *(("t", "h"), ("Ġ", "t"), ("Ġ", "a"), ("h", "e"), ("i", "n"), ("r", "e"), ("o", "n"), ("e", "r")),
    *(("a", "t"), ("n", "d"), ("th", "e"), ("Ġt", "he"), ("o", "u"), ("in", "g"), ("e", "n"), ("l", "l")),
    *(("Ġa", "nd"), ("o", "r"), ("e", "s"), ("Ġ", "y"), ("Ġy", "ou"), ("i", "s"), ("Ġ", "is"), ("Ġ", "w")),
)


def make_tiny_tokenizer(chat_template: str = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: every string round-trips, no unknown token, 283 ids.

    Pad is `<|endoftext|>` (id 0), bos `<|im_start|>` (1), eos `<|im_end|>` (2); encoding adds no bos.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab: dict[str, int] = {PAD: 0, BOS: 1, EOS: 2}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    for left, right in _MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(_MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (PAD, BOS, EOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_checkpoint(
    directory: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    hidden_size: int = 64,
    intermediate_size: int = 176,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 320,
    tie: bool = False,
    dtype: str = "float32",
    max_shard_size: str | int = "5GB",
    chat_template: str = CHATML,
    **config_overrides: Any,
) -> Path:
    """Write a random checkpoint of `family` (a transformers `model_type`) with a tokenizer; return its path.

    `config_overrides` go to transformers' config class as they are (`head_dim`, `sliding_window`,
    `attention_bias`, `rope_parameters`, `max_position_embeddings`, …). `max_shard_size` in bytes or as
    transformers reads it ("200KB") splits the weights over several files with an index. Norms and biases
    are random too (a model whose norms are all one and biases all zero hides mistakes in both).

    Raises UsageError when `vocab_size` is too small for the tokenizer.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tiny_tokenizer(chat_template)
    if vocab_size < len(tokenizer):
        raise UsageError(f"vocab_size {vocab_size} is smaller than the toy tokenizer's {len(tokenizer)} ids")
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tie,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **config_overrides,
    }
    config = AutoConfig.for_model(family, **settings)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.copy_(_draw(name, tuple(parameter.shape), seed))
    model.to(dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = 2
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(path)
    return path


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Any:
    """fp32 values of one parameter: N(0, 1/fan_in) matrices, norms in [0.5, 1.5), biases N(0, 0.1²)."""
    import torch

    # One generator a parameter: adding a layer or a bias does not move the others' values.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    if len(shape) == 2:
        return torch.randn(shape, generator=generator) * shape[1] ** -0.5
    if name.endswith(".bias"):
        return torch.randn(shape, generator=generator) * 0.1
    return 0.5 + torch.rand(shape, generator=generator)
