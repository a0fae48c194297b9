"""Toy jobs for engine tests: token stores of random rows, requests, and runs over the tiny checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from gshare.agent.base.load import load_base
from gshare.agent.base.weights import Base
from gshare.agent.data.tokens import StoreMeta, StoreWriter, TokenStore
from gshare.agent.jobs.events import Event
from gshare.agent.jobs.spec import AdapterSpec, JobRequest, RunSpec
from gshare.agent.train.audit import Trace, run_jobs
from gshare.agent.train.runner import Runner
from gshare.kernels.backend import Backend, pick_backend

VOCABULARY = 90
#: Where the toy runs: the suite on "cpu"; a person with a GPU sets GSHARE_TEST_DEVICE=cuda.
DEVICE = os.environ.get("GSHARE_TEST_DEVICE", "cpu")
#: fp32 everywhere but in a person's run on a GPU, where bf16, int8 and nf4 are worth trying too.
BASE_DTYPE = os.environ.get("GSHARE_TEST_BASE_DTYPE", "fp32")


def random_rows(
    lengths: Sequence[int], *, seed: int, label_share: float = 0.6, vocabulary: int = VOCABULARY
) -> list[tuple[list[int], list[bool]]]:
    """Rows of the given lengths whose last `label_share` is trained (at least one token)."""
    draw = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        tokens = draw.integers(3, vocabulary, length).tolist()
        labels = max(1, min(length - 1, round(length * label_share)))
        rows.append((tokens, [False] * (length - labels) + [True] * labels))
    return rows


def write_store(directory: Path, rows: Sequence[tuple[list[int], list[bool]]]) -> TokenStore:
    writer = StoreWriter(directory)
    for number, (tokens, trained) in enumerate(rows, 1):
        writer.add(number, list(tokens), list(trained))
    return writer.commit(
        StoreMeta(
            source=directory.name,
            source_sha256="0" * 64,
            data_format="text",
            tokenizer="0" * 64,
            template="",
            max_length=1024,
            on_bad_turns="error",
            train_on_prompt=False,
            vocab_size=VOCABULARY,
            rows_read=len(rows),
            n_rows=len(rows),
            n_tokens=sum(len(tokens) for tokens, _ in rows),
            n_label_tokens=sum(sum(trained) for _, trained in rows),
            longest_row=max(len(tokens) for tokens, _ in rows),
            dropped={},
            notes={},
        )
    )


def request(
    directory: Path,
    name: str,
    *,
    lengths: Sequence[int] = (9, 17, 30, 5, 12, 24, 8, 40),
    rows: Sequence[tuple[list[int], list[bool]]] | None = None,
    data_seed: int | None = None,
    resume: bool = False,
    client: str = "local",
    **spec: Any,
) -> JobRequest:
    """A job over its own random rows. `spec` overrides the toy defaults (r 4, lr 5e-3, 4 steps)."""
    rows = (
        rows
        if rows is not None
        else random_rows(lengths, seed=data_seed if data_seed is not None else len(name))
    )
    store_dir = directory / f"{name}-store"
    store = TokenStore.open(store_dir) if store_dir.exists() else write_store(store_dir, rows)
    values: dict[str, Any] = {
        "name": name,
        "data": f"{name}.jsonl",
        "output_dir": str(directory / name),
        "r": 4,
        "learning_rate": 5e-3,
        "max_steps": 4,
        "max_length": 64,
        "eval_steps": 2,
        "save_steps": 2,
        "seed": 0,
        "val_fraction": 0.25,
    }
    values.update(spec)
    values.setdefault("lora_alpha", 2.0 * values["r"])
    return JobRequest(
        spec=AdapterSpec(**values),
        train_store=str(store_dir),
        train_hash=store.hash,
        resume=resume,
        client=client,
    )


def new_backend(*, exact: bool = True) -> Backend:
    """The backend of the toy's device."""
    return pick_backend(torch.device(DEVICE), exact=exact)


def tiny_base(checkpoint: Path, base_dtype: str = BASE_DTYPE) -> Base:
    return load_base(checkpoint, base_dtype=base_dtype, device=torch.device(DEVICE))


def train(
    requests: Sequence[JobRequest],
    directory: Path,
    checkpoint: Path,
    base: Base,
    *,
    backend: Backend | None = None,
    joins: dict[str, int] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    **run: Any,
) -> dict[str, Trace]:
    """Train together in `directory` and return what the promise covers, per job."""
    traces, _ = run_jobs(
        RunSpec(model=str(checkpoint), base_dtype=base.base_dtype, **run),
        requests,
        model_dir=checkpoint,
        base=base,
        backend=backend or new_backend(),
        directory=directory,
        joins=joins,
        on_event=on_event,
    )
    return traces


def make_runner(
    checkpoint: Path,
    base: Base,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    backend: Backend | None = None,
    schedule: str = "synchronized",
    max_tokens: int = 16384,
    max_adapters: int = 0,
    on_pass: Callable[[Sequence[tuple[str, int]]], None] = lambda in_flight: None,
) -> Runner:
    return Runner(
        model_dir=checkpoint,
        base_dtype=base.base_dtype,
        schedule=schedule,
        max_tokens_per_pass=max_tokens,
        max_adapters_per_pass=max_adapters,
        device=str(base.device),
        on_event=on_event,
        on_pass=on_pass,
        backend=backend or new_backend(),
        base=base,
    )


def changed(job: JobRequest, **spec: Any) -> JobRequest:
    return msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, **spec))
