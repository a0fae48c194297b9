"""`gshare generate`: ask the base, or an adapter of it, one question."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from gshare.agent.errors import UsageError
from gshare.agent.jobs.names import shorten
from gshare.agent.jobs.spec import BaseDtype
from gshare.cli.estimate import generation_estimate
from gshare.cli.finetune_flags import ReserveFlags
from gshare.cli.gpu_hold import Held, hold_gpu, say
from gshare.cli.gpu_plan import plan_gpu

if TYPE_CHECKING:
    from gshare.agent.base.decoder import Decoder
    from gshare.agent.base.generate import LoadedLora

_NO_GPU_FLAGS = ReserveFlags()


def generate(
    prompt: Annotated[str, Parameter(allow_leading_hyphen=True)],  # `-` alone would be an unknown option
    *,
    model: str,
    adapter: Path | None = None,
    system: str | None = None,
    raw: Annotated[bool, Parameter(negative=())] = False,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    base_dtype: BaseDtype | None = None,
    device: str = "auto",
    json_output: Annotated[bool, Parameter(name="--json", negative=())] = False,
    gpu_flags: ReserveFlags = _NO_GPU_FLAGS,
) -> None:
    """Answer PROMPT; greedy unless --temperature is given. The answer goes to stdout as it comes.

    Parameters
    ----------
    prompt
        The user's message, or with --raw the text to continue. `-` reads it from stdin.
    model
        The base: directory, hub id or .gguf file.
    adapter
        An adapter's directory: a job's output_dir, or its best/.
    system
        A system message before the prompt.
    raw
        Continue the text as it is, without the chat template.
    max_new_tokens
        Stop after this many tokens.
    temperature
        0 is greedy.
    seed
        Of the sampling.
    base_dtype
        How the base is held; by default what the adapter was trained on, else bf16.
    device
        auto, cpu, cuda or cuda:N.
    json_output
        One JSON object with prompt, answer and token count instead of the bare text.
    """
    if prompt == "-":
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UsageError(f"the prompt on stdin is not UTF-8 text (byte {error.start})") from None
    for name, text in (("the prompt", prompt), ("--system", system or "")):
        try:
            text.encode()
        except UnicodeEncodeError as error:  # bytes of the command line that are no UTF-8
            raise UsageError(f"{name} is not UTF-8 text (character {error.start})") from None
    if not prompt:
        raise UsageError("the prompt is empty")
    if max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {max_new_tokens}: must be at least 1")
    if temperature != 0 and not 1e-6 <= temperature <= 1e6:  # scores / temperature stay finite in fp32
        raise UsageError(f"--temperature {temperature}: must be 0 (greedy), or from 1e-6 to 1e6")
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed {shorten(seed, 40)}: must be from 0 to {2**63 - 1}")
    plan = plan_gpu(gpu_flags, device)
    from gshare.agent.service.environment import trainer_environment

    os.environ.update(trainer_environment())
    from gshare.agent.base.config import read_config
    from gshare.agent.base.resolve import resolve_model
    from gshare.agent.data.build import load_tokenizer
    from gshare.agent.train.peft_files import read_adapter_config, trained_dtype
    from gshare.agent.xdg import cache_dir

    if adapter is not None:
        read_adapter_config(adapter)
    dtype = base_dtype or (trained_dtype(adapter) if adapter is not None else None) or "bf16"
    model_dir = resolve_model(model, cache_dir=cache_dir(), base_dtype=dtype).path
    tokenizer = load_tokenizer(model_dir)
    tokens = _encode(tokenizer, prompt, system=system, raw=raw)
    positions = read_config(model_dir).max_position_embeddings
    if len(tokens) >= positions:
        raise UsageError(f"the prompt has {len(tokens)} tokens; the model has {positions} positions")
    estimate = partial(
        generation_estimate,
        model_dir,
        adapter,
        base_dtype=dtype,
        prompt_tokens=len(tokens),
        new_tokens=max_new_tokens,
    )
    answer: list[int] = []
    shown = ""
    with (
        hold_gpu(plan, estimate, f"generate {model_dir.name}", flags=gpu_flags, device=device) as held,
        _loaded(held, model_dir, dtype, adapter) as (decoder, lora),
    ):
        from gshare.agent.base.generate import generate_tokens

        stop = {*decoder.config.eos_token_ids}
        if tokenizer.eos_token_id is not None:
            stop.add(int(tokenizer.eos_token_id))
        for token in generate_tokens(
            decoder,
            tokens,
            lora=lora,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            stop=frozenset(stop),
        ):
            if token in stop:
                break
            answer.append(token)
            text = tokenizer.decode(answer, skip_special_tokens=True)
            # A character may span tokens: half of one decodes to U+FFFD, and is held back.
            if not json_output and not text.endswith("\ufffd"):
                print(text[len(shown) :], end="", flush=True)
                shown = text
    text = tokenizer.decode(answer, skip_special_tokens=True)
    if json_output:
        print(json.dumps({"prompt": prompt, "answer": text, "tokens": len(answer)}, ensure_ascii=False))
    else:
        print(text[len(shown) :])


@contextmanager
def _loaded(
    held: Held, model_dir: Path, dtype: str, adapter: Path | None
) -> Iterator[tuple[Decoder, LoadedLora | None]]:
    """The model under the reservation. GshareError when it, or what is done with it, runs out of memory."""
    from gshare.agent.base.decoder import Decoder
    from gshare.agent.base.device import pick_device
    from gshare.agent.base.load import load_base
    from gshare.agent.train.gpu_guard import make_guard
    from gshare.agent.train.out_of_memory import told
    from gshare.agent.train.peft_files import check_fits, load_lora
    from gshare.kernels.backend import pick_backend

    where = pick_device(held.device)
    guard = make_guard(held.reservation, asked=held.device, where=where, may_grow=held.may_grow, say=say)
    lora = None
    with told("the base", guard):
        base = load_base(model_dir, base_dtype=dtype, device=where)
        if adapter is not None:
            lora = load_lora(adapter, where, base.compute_dtype)
            check_fits(lora, base.config, adapter)
    guard.record("load")
    with told("the answer", guard):
        yield Decoder(base, pick_backend(where)), lora
    guard.record("generate")


def _encode(tokenizer, prompt: str, *, system: str | None, raw: bool) -> list[int]:
    """Token ids of the prompt, through the chat template when there is one."""
    if raw or not tokenizer.chat_template:
        if system is not None:
            raise UsageError("--system needs a chat template; this model has none (or --raw was given)")
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])
