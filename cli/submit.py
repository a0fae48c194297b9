"""`gshare submit`: the adapters of a job spec on a cluster.

    gshare submit --cluster cluster.toml --adapters-config adapters.toml [--model …] [--watch]

What is wrong with flags, files and names shows here, before anything is sent. Data and model files are read
from where they lie when a node needs them: leave them there until the jobs have ended.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from gshare.agent.errors import EXIT_OK, UsageError
from gshare.agent.service.output_dir import RunRecord, check_free_output_dir
from gshare.cli.cluster_flags import options_of
from gshare.cli.finetune_flags import AdapterFlags, RunFlags, given
from gshare.cli.prepare import read_spec

_NO_RUN_FLAGS = RunFlags()
_NO_ADAPTER_FLAGS = AdapterFlags()
#: The coordinator writes every job to its disk before it answers.
SUBMIT_SECONDS = 300.0


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
    from gshare.coordinator.api_protocol import ReloadCluster, Reloaded, Submitted, SubmitToCluster
    from gshare.coordinator.config import load_cluster
    from gshare.coordinator.main import connect_or_start
    from gshare.coordinator.submission import build_submission

    run = read_spec(model, adapter, adapters_config, given(run_flags, adapter_flags))
    if not run.adapters:
        raise UsageError(f"{run.source}: no adapter; add one with [[adapter]]")
    options = options_of(cluster, state_dir, accept_new=accept_new)
    load_cluster(options.cluster)
    for spec in run.adapters:
        record = RunRecord(model=run.model, base_dtype=run.base_dtype, spec=spec)
        go_on = f"`gshare jobs resume {spec.name} --cluster FILE` continues a stopped job"
        check_free_output_dir(record, resume=False, go_on=go_on)
    fields = build_submission(run, _say)
    client, started = connect_or_start(options, "gshare submit")
    with client:
        if started:
            _say(f"started coordinator {client.welcome.pid}; `gshare coordinator stop` ends it")
        else:
            client.ask(Reloaded, ReloadCluster)
        names = client.ask(Submitted, SubmitToCluster, timeout=SUBMIT_SECONDS, **fields).jobs
    if not watch:
        print("\n".join(names))
        _say("`gshare jobs --cluster FILE` lists them, `gshare jobs attach NAME --cluster FILE` follows one")
        return EXIT_OK
    from gshare.cli.cluster_live import watch_jobs

    outputs = [(spec.name, spec.output_dir) for spec in run.adapters]
    return watch_jobs(options.state_dir, outputs, json_lines=json)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
