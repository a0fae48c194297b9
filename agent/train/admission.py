"""Whether a job may run here, and where it goes on from: what is checked before it computes anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from gshare.agent.base.config import ModelConfig
from gshare.agent.errors import UsageError
from gshare.agent.jobs.spec import JobRequest, WarmStart
from gshare.agent.jobs.spec_rules import check_ranks
from gshare.agent.train.checkpoint import latest_checkpoint, load_checkpoint, load_start, truncate_metrics
from gshare.agent.train.files import remove_leftovers
from gshare.agent.train.fingerprint import fingerprint_changes
from gshare.agent.train.job import Job
from gshare.agent.train.job_data import JobData

#: (level, text, job).
Say = Callable[[Literal["info", "warning", "error"], str, str], None]


def check_spec(request: JobRequest, config: ModelConfig, most_rank: int) -> None:
    """UsageError when the model has no such layers or positions, or the engine takes no such rank."""
    spec = request.spec
    check_ranks([spec], most_rank)
    if spec.layers_to_transform is not None:
        beyond = [i for i in spec.layers_to_transform if i >= config.num_layers]
        if beyond:
            raise UsageError(
                f"adapter {spec.name}: layers_to_transform {beyond}: the model has layers 0 to "
                f"{config.num_layers - 1}"
            )
    if spec.max_length > config.max_position_embeddings:
        raise UsageError(
            f"adapter {spec.name}: max_length {spec.max_length} is beyond the model's "
            f"{config.max_position_embeddings} positions"
        )


def check_rows(request: JobRequest, data: JobData, config: ModelConfig) -> None:
    """UsageError when a row has a token that the model does not know."""
    for store in (data.train, data.val):
        if store.meta.vocab_size <= config.vocab_size:
            continue
        largest = max(int(store.row(i)[0].max()) for i in range(store.n_rows))
        if largest >= config.vocab_size:
            raise UsageError(
                f"adapter {request.spec.name}: {store.meta.source} has token {largest}, outside the "
                f"model's vocabulary of {config.vocab_size}; it was tokenised for another model"
            )


def restore(job: Job, fingerprint: dict[str, str], say: Say) -> bool:
    """Continue from the newest whole checkpoint; False when there is none yet.

    UsageError when it is of another base, other data or another shape; `say` is told what was skipped, and
    of numerics other than `fingerprint`.
    """
    remove_leftovers(job.output_dir)
    path = latest_checkpoint(job.output_dir)
    _tell_skipped(job, path, say)
    if path is None:
        return False
    snapshot = load_checkpoint(path)
    trained_on = snapshot.state["fingerprint"]["base"]
    if trained_on != fingerprint["base"]:
        raise UsageError(
            f"adapter {job.name}: {path} was trained on another base (weights {trained_on[:12]}, here "
            f"{fingerprint['base'][:12]}); resume with the same model, or choose another output_dir"
        )
    try:
        job.adapter.load(snapshot.adapter, snapshot.optimizer)
    except (KeyError, RuntimeError) as error:
        raise UsageError(
            f"adapter {job.name}: {path} does not fit this spec ({error}); "
            "resume with the r, target_modules and optim that it was trained with"
        ) from error
    job.restore(snapshot.state)
    truncate_metrics(job.output_dir / "metrics.jsonl", job.step)
    changes = fingerprint_changes(snapshot.state.get("fingerprint", {}), fingerprint)
    if changes:
        say("warning", f"resumed under other numerics, bits may differ: {'; '.join(changes)}", job.name)
        job.append_metrics({"type": "fingerprint", "step": job.step, "changes": changes})
    return True


def begin_warm(job: Job, start: WarmStart, fingerprint: dict[str, str]) -> None:
    """Give a new job the weights of another; its optimizer stays fresh. UsageError when they do not fit."""
    weights = load_start(start, fingerprint["base"])
    try:
        job.adapter.start_from(weights)
    except (KeyError, RuntimeError) as error:
        raise UsageError(
            f"adapter {job.name}: the weights of {start.parent} do not fit this spec ({error}); "
            "a warm start needs the same r, target_modules and layers_to_transform"
        ) from error


def _tell_skipped(job: Job, chosen: Path | None, say: Say) -> None:
    """Say when a resume does not start from the newest checkpoint there is."""
    steps = [
        int(path.name.removeprefix("checkpoint-"))
        for path in job.output_dir.glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdecimal()
    ]
    used = int(chosen.name.removeprefix("checkpoint-")) if chosen is not None else 0
    broken = sorted(step for step in steps if step > used)
    if broken:
        say(
            "warning",
            f"checkpoint-{broken[-1]} in {job.output_dir} is damaged; going on from step {used} instead",
            job.name,
        )
