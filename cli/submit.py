"""`gshare submit`: the adapters of a job spec on a cluster.

    gshare submit --cluster cluster.toml --adapters-config adapters.toml [--model …] [--watch]

What is wrong with flags, files and names shows here, before anything is sent. Data and model files are read
from where they lie when a node needs them: leave them there until the jobs have ended.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from gshare.agent.errors import EXIT_OK, UsageError
from gshare.agent.service.output_dir import RunRecord, check_free_output_dir
from gshare.cli.cluster_flags import options_of
from gshare.cli.finetune_flags import AdapterFlags, RunFlags, given
from gshare.cli.prepare import read_spec

if TYPE_CHECKING:
    from gshare.agent.jobs.spec import RunSpec
    from gshare.coordinator.api_protocol import Submitted
    from gshare.coordinator.main import Options

_NO_RUN_FLAGS = RunFlags()
_NO_ADAPTER_FLAGS = AdapterFlags()
#: The coordinator writes every job to its disk before it answers.
SUBMIT_SECONDS = 300.0
#: More would hide a coordinator that dies of this very submission.
SUBMIT_TRIES = 3


def submit(
    *,
    cluster: Path | None = None,
    model: str | None = None,
    adapter: Annotated[Sequence[str], Parameter(negative=())] = (),
    adapters_config: Annotated[Path | None, Parameter(name=["--adapters-config", "--adapters"])] = None,
    watch: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    state_dir: Path | None = None,
    accept_new: Annotated[bool, Parameter(negative=())] = False,
    run_flags: RunFlags = _NO_RUN_FLAGS,
    adapter_flags: AdapterFlags = _NO_ADAPTER_FLAGS,
) -> int:
    """Train adapters on the nodes of a cluster; the best of each comes home to its output_dir.

    Starts the coordinator in the background when none runs.

    Parameters
    ----------
    cluster
        The file that names the nodes; by default ~/.config/gshare/cluster.toml.
    model
        The base: a directory in Hugging Face format, a hub id, or a .gguf file.
    adapter
        DATA:OUT or NAME=DATA:OUT; once for every adapter.
    adapters_config
        A TOML file with the whole run; flags go over what it says.
    watch
        Follow the jobs until they have ended. Ctrl-C leaves them running.
    json
        With --watch one JSON line an event on stdout, the leaderboard last.
    state_dir
        The coordinator's; by default $XDG_STATE_HOME/gshare/coordinator.
    accept_new
        Trust host keys that are seen for the first time, if the coordinator has to be started.
    """
    run = read_spec(model, adapter, adapters_config, given(run_flags, adapter_flags))
    if not run.adapters:
        raise UsageError(f"{run.source}: no adapter; add one with [[adapter]]")
    options = options_of(cluster, state_dir, accept_new=accept_new)
    return submit_run(run, options, watch=watch, json_lines=json)


def submit_run(run: RunSpec, options: Options, *, watch: bool, json_lines: bool) -> int:
    """Hand `run` to the coordinator, which is started where none runs; with `watch` followed to its end."""
    from gshare.coordinator.config import load_cluster
    from gshare.coordinator.submission import build_submission, check_model

    check_model(run.model, load_cluster(options.cluster))
    for spec in run.adapters:
        record = RunRecord(model=run.model, base_dtype=run.base_dtype, spec=spec)
        go_on = f"`gshare jobs resume {spec.name} --cluster FILE` continues a stopped job"
        check_free_output_dir(record, resume=False, go_on=go_on)
    fields = build_submission(run, say)
    submitted = _send(options, fields)
    if not watch:
        print("\n".join(submitted.jobs))
        say("`gshare jobs --cluster FILE` lists them, `gshare jobs attach NAME --cluster FILE` follows one")
        return EXIT_OK
    from gshare.cli.cluster_live import watch_jobs

    outputs = [(spec.name, spec.output_dir) for spec in run.adapters]
    since = submitted.journal_id, submitted.after_seq
    return watch_jobs(options.state_dir, outputs, json_lines=json_lines, since=since)


def _send(options: Options, fields: dict[str, Any]) -> Submitted:
    """The answer: the jobs are accepted. Sent again when the coordinator goes before it has answered.

    What was sent carries its `submission`, so jobs that are in the store already are not taken twice.
    """
    from gshare.coordinator.api_client import CoordinatorGone
    from gshare.coordinator.api_protocol import ReloadCluster, Reloaded, Submitted, SubmitToCluster
    from gshare.coordinator.main import connect_or_start

    for left in reversed(range(SUBMIT_TRIES)):
        try:
            client, started = connect_or_start(options, "gshare submit")
            with client:
                if started:
                    say(f"started coordinator {client.welcome.pid}; `gshare coordinator stop` ends it")
                else:
                    client.ask(Reloaded, ReloadCluster)
                return client.ask(Submitted, SubmitToCluster, timeout=SUBMIT_SECONDS, **fields)
        except CoordinatorGone:
            if not left:
                raise
            say("the coordinator went before it had answered: the submission is sent again")
    raise AssertionError("the last try returns or raises")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
