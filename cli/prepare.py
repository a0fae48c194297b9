"""From flags or a TOML file to requests a trainer takes: spec, model, token files.

Shared by `gshare finetune` and `gshare audit`. What is wrong with the input shows here, before anything
is written under an output directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gshare.agent.errors import UsageError
from gshare.agent.jobs.faults import Faults
from gshare.agent.jobs.spec import AdapterSpec, JobRequest, RunSpec
from gshare.agent.jobs.spec_file import load_run_spec, run_spec_from_flags
from gshare.agent.xdg import cache_dir
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from gshare.agent.data.tokens import TokenStore


def read_spec(
    model: str | None, adapters: Sequence[str], config: Path | None, options: dict[str, object]
) -> RunSpec:
    """The run from a file or from flags, never both; `options` are the flags that were given."""
    if config is not None:
        if adapters:
            raise UsageError(f"--adapter and --adapters-config {config}: give one of them")
        return load_run_spec(config, {**options, "model": _absolute(model)})
    if model is None:
        raise UsageError(
            "--model is missing: a directory, a hub id or a .gguf file (or give --adapters-config FILE)"
        )
    return run_spec_from_flags(model=model, adapters=adapters, options=options)


def _absolute(model: str | None) -> str | None:
    """A path on the command line is relative to here, whatever directory the file is in."""
    try:
        return str(Path(model).absolute()) if model is not None and Path(model).exists() else model
    except OSError:  # a name too long for a file: `load_run_spec` says so
        return model


def prepare(run: RunSpec, console: Console, *, resume: bool) -> tuple[Path, list[JobRequest]]:
    """The model found or converted, every data file tokenised and split once: what is wrong shows here."""
    from gshare.agent.base.resolve import resolve_model

    with console.status(Text(f"looking for {Path(run.model).name}")) as status:

        def progress(what: str, done: int, total: int) -> None:
            status.update(Text(f"{what}: {done / total:.0%}" if total else what))

        found = resolve_model(run.model, cache_dir=cache_dir(), base_dtype=run.base_dtype, progress=progress)
        _check_model(run, found.path)
        requests: list[JobRequest] = []
        for spec in run.adapters:
            train = _tokenise(spec, spec.data, found.path, console)
            val = _tokenise(spec, spec.val_data, found.path, console) if spec.val_data else None
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
    return found.path, requests


def _check_model(run: RunSpec, model_dir: Path) -> None:
    """What the trainer would find only after it has started: a model it cannot load, an adapter beyond it.

    From config.json and the headers of the tensor files alone.
    """
    from gshare.agent.base.checkpoint_files import locate_tensors
    from gshare.agent.base.config import read_config

    config = read_config(model_dir)
    locate_tensors(model_dir, config)
    faults = Faults()
    for spec in run.adapters:
        where = f"adapter {spec.name}"
        beyond = [layer for layer in spec.layers_to_transform or () if layer >= config.num_layers]
        if beyond:
            faults.add(
                f"{where}: layers_to_transform",
                f"{beyond[0]} is no layer of this model, which has {config.num_layers} "
                f"(0 to {config.num_layers - 1})",
            )
        if spec.max_length > config.max_position_embeddings:
            faults.add(
                f"{where}: max_length",
                f"{spec.max_length} is beyond the model's max_position_embeddings, "
                f"{config.max_position_embeddings}; set it to that or less",
            )
        if Path(spec.output_dir).resolve() == model_dir.resolve():
            faults.add(
                f"{where}: output_dir", f"{spec.output_dir} is the model's directory; choose another one"
            )
    faults.raise_if_any()


def _tokenise(spec: AdapterSpec, data: str, tokenizer_dir: Path, console: Console) -> TokenStore:
    from gshare.agent.data.build import build_token_store

    store = build_token_store(
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
    console.print(Text(f"{spec.name}: {data}: {counted}"))
    for kind, counts in (("dropped", meta.dropped), ("note", meta.notes)):
        for reason, rows in counts.items():
            first = ", ".join(map(str, rows.first_rows))
            console.print(Text(f"{spec.name}: {kind}: {rows.count} rows: {reason} (first: {first})"))
    return store


def _check_split(spec: AdapterSpec, store: TokenStore) -> None:
    from gshare.agent.data.split import split_rows

    assert spec.seed is not None
    try:
        split_rows(store, val_fraction=spec.val_fraction, seed=spec.seed)
    except UsageError as error:
        raise UsageError(f"adapter {spec.name}: {spec.data}: {error}") from None
