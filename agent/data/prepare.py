"""From a run's spec to requests that a trainer takes: the model found, every data file tokenised and split.

Shared by `gshare finetune`, `gshare audit` and the node's agent (in a process of its own). What is wrong with
the input shows here, before anything is written under an output directory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gshare.agent.jobs.faults import Faults
from gshare.agent.jobs.memory import MemoryEstimate, ModelShape, largest_pass
from gshare.agent.jobs.memory_choice import choose_estimate
from gshare.agent.jobs.model_limits import add_model_faults
from gshare.agent.jobs.spec import AdapterSpec, JobRequest, RunSpec, cache_bytes
from gshare.agent.jobs.spec_rules import check_ranks
from gshare.agent.xdg import cache_dir

if TYPE_CHECKING:
    from gshare.agent.data.tokens import TokenStore

#: What is being done, how much is done, out of how much (0: not known).
Progress = Callable[[str, int, int], None]


def find_model(run: RunSpec, progress: Progress | None = None) -> Path:
    """The model's directory, found, fetched or converted. UsageError: none, or not one for these adapters."""
    model_dir = locate_model(run, progress)
    check_adapters(run, model_dir)
    return model_dir


def locate_model(run: RunSpec, progress: Progress | None = None) -> Path:
    """As `find_model`, whatever the adapters are. UsageError: it is not here, or cannot be loaded.

    From config.json and the headers of the tensor files alone: a trainer would find it only after its start.
    """
    from gshare.agent.base.checkpoint_files import locate_tensors
    from gshare.agent.base.config import read_config
    from gshare.agent.base.resolve import resolve_model

    found = resolve_model(run.model, cache_dir=cache_dir(), base_dtype=run.base_dtype, progress=progress)
    locate_tensors(found.path, read_config(found.path))
    return found.path


def prepare_requests(
    run: RunSpec, model_dir: Path, *, resume: bool, say: Callable[[str], None]
) -> list[JobRequest]:
    """Every adapter's data tokenised and split once. `say` gets a line of counts a file read."""
    requests: list[JobRequest] = []
    known: dict[tuple[object, ...], TokenStore] = {}
    for spec in run.adapters:
        train = _tokenise(spec, spec.data, model_dir, say, known)
        val = _tokenise(spec, spec.val_data, model_dir, say, known) if spec.val_data else None
        if val is None:
            _check_split(spec, train)
        requests.append(
            JobRequest(
                spec=spec,
                train_store=str(train.path),
                train_hash=train.hash,
                val_store=str(val.path) if val else None,
                val_hash=val.hash if val else None,
                resume=resume,
            )
        )
    return requests


def run_estimate(
    run: RunSpec,
    model_dir: Path,
    requests: Sequence[JobRequest],
    *,
    on_gpu: bool,
    cards: Sequence[str] = (),
) -> MemoryEstimate:
    """Memory of training `requests` together; `cards`: names of the GPUs on any of which it may be.

    UsageError: a rank is beyond what a GPU trains.
    """
    from gshare.agent.base.config import read_config
    from gshare.agent.service.base_identity import base_identity

    if on_gpu:
        check_ranks(request.spec for request in requests)
    tokens, longest = largest_pass(run)
    return choose_estimate(
        ModelShape.of(read_config(model_dir)),
        [request.spec for request in requests],
        base_dtype=run.base_dtype,
        device="cuda" if on_gpu else "cpu",
        pass_tokens=tokens,
        longest_row=longest,
        base=lambda: base_identity(model_dir),
        cards=cards,
        trunk_cache=cache_bytes(run.trunk_cache) or 0,
        trunk_cache_host=int(run.trunk_cache_host * 2**30),
    )


def check_adapters(run: RunSpec, model_dir: Path) -> None:
    """UsageError: an adapter beyond its model, which is so on every machine."""
    from gshare.agent.base.config import read_config

    config = read_config(model_dir)
    faults = Faults()
    add_model_faults(run.adapters, config.num_layers, config.max_position_embeddings, faults)
    for spec in run.adapters:
        if Path(spec.output_dir).resolve() == model_dir.resolve():
            faults.add(
                f"adapter {spec.name}: output_dir",
                f"{spec.output_dir} is the model's directory; choose another one",
            )
    faults.raise_if_any()


def _tokenise(
    spec: AdapterSpec,
    data: str,
    tokenizer_dir: Path,
    say: Callable[[str], None],
    known: dict[tuple[object, ...], TokenStore],
) -> TokenStore:
    """From `known` where another adapter has the same: the configurations of a sweep share their data."""
    from gshare.agent.data.build import build_token_store

    same = (data, spec.data_format, spec.max_length, spec.on_bad_turns, spec.train_on_prompt)
    if same in known:
        return known[same]
    store = known[same] = build_token_store(
        Path(data),
        tokenizer_dir,
        cache_dir=cache_dir() / "tokens",
        data_format=spec.data_format,
        max_length=spec.max_length,
        on_bad_turns=spec.on_bad_turns,
        train_on_prompt=spec.train_on_prompt,
    )
    meta = store.meta
    counted = f"{meta.n_rows} rows, {meta.n_tokens} tokens, {meta.n_label_tokens} trained"
    say(f"{spec.name}: {data}: {counted}")
    for kind, counts in (("dropped", meta.dropped), ("note", meta.notes)):
        for reason, rows in counts.items():
            first = ", ".join(map(str, rows.first_rows))
            say(f"{spec.name}: {kind}: {rows.count} rows: {reason} (first: {first})")
    return store


def _check_split(spec: AdapterSpec, store: TokenStore) -> None:
    from gshare.agent.data.split import CannotSplit, split_rows

    assert spec.seed is not None
    try:
        split_rows(store, val_fraction=spec.val_fraction, seed=spec.seed)
    except CannotSplit as error:
        raise CannotSplit(f"adapter {spec.name}: {spec.data}", error.what) from None
