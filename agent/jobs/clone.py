"""A changed copy of a job: from its spec and `KEY=VALUE` settings to the spec of the clone. Pure.

A cold clone is a job like any other. A warm one starts from its parent's weights, so what gives them their
shape stays as it is; the optimizer, the order of the rows and the count of steps begin anew.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.errors import UsageError
from gshare.agent.jobs.faults import Faults
from gshare.agent.jobs.names import MAX_NAME, check_name, shorten
from gshare.agent.jobs.spec import AdapterSpec
from gshare.agent.jobs.spec_file import FLAG_ALIASES, AdapterTable, Value, build_run, unknown_adapter_key
from gshare.agent.jobs.spec_rules import ADAPTER_TYPES, RUN_TYPES

_ALIASES = {alias.replace("-", "_"): key for alias, key in FLAG_ALIASES.items()}
#: What gives the matrices of an adapter their number and shape.
SHAPE_KEYS = ("r", "target_modules", "layers_to_transform")
#: What does not change what is learnt: a cold copy that differs in these alone trains the same bytes again.
_NO_CHANGE = frozenset(("name", "output_dir", "eval_steps", "save_steps", "save_total_limit", "weight"))


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """`["lr=1e-4"]` → `{"learning_rate": "1e-4"}`. UsageError names the setting and the nearest known key."""
    settings: dict[str, str] = {}
    for text in texts:
        word, equals, value = text.partition("=")
        shown = f"--set {shorten(text)}"
        if not equals or not word.strip():
            raise UsageError(f"{shown}: expected KEY=VALUE, such as learning_rate=1e-4")
        if word.strip() in RUN_TYPES and word.strip() != "seed":
            raise UsageError(
                f"{shown}: {word.strip()} is of the whole run; a clone has its parent's trainer and base"
            )
        key = word.strip().replace("-", "_")
        key = _ALIASES.get(key, key)
        if key not in ADAPTER_TYPES:
            raise UsageError(f"{shown}: {unknown_adapter_key(key)}")
        if key == "name":
            raise UsageError(f"{shown}: say it as --name {value.strip() or 'NEW'}")
        if key in settings:
            raise UsageError(f"{shown}: {key} is set twice")
        settings[key] = value.strip()
    return settings


def cloned_spec(
    parent: AdapterSpec, settings: Mapping[str, str], *, name: str, warm: bool, base_dir: Path
) -> AdapterSpec:
    """The spec of the clone `name`; its output_dir lies beside the parent's unless it is set.

    `lora_alpha` follows a changed `r` where the parent's was 2 × r, as in a spec that leaves it out.
    UsageError names the setting: a value that is wrong, one that a warm clone cannot have, or no change.
    """
    check_name(name, what="--name")
    changes: dict[str, object] = {
        "name": name,
        "output_dir": str(Path(parent.output_dir).parent / name),
        **settings,
    }
    where = {key: f"--set {key}={shorten(value)}" for key, value in settings.items()}
    where |= {"name": "--name"} | ({} if "output_dir" in settings else {"output_dir": f"--name {name}"})
    if "r" in settings and "lora_alpha" not in settings and parent.lora_alpha == 2.0 * parent.r:
        parent = msgspec.structs.replace(parent, lora_alpha=None)
    spec = _changed_spec(parent, changes, where=where, base_dir=base_dir)
    out, parents = Path(spec.output_dir), Path(parent.output_dir)
    if out == parents or out in parents.parents or parents in out.parents:
        raise UsageError(
            f"{where['output_dir']}: {out} and {parents} ({parent.name}) lie one inside the other"
        )
    changed = {key for key, value in msgspec.structs.asdict(spec).items() if value != getattr(parent, key)}
    fixed = [key for key in SHAPE_KEYS if key in changed]
    if warm and fixed:
        raise UsageError(
            f"{where[fixed[0]]}: a warm clone has the shapes of its parent's weights; leave it out, or leave "
            "--warm out"
        )
    if not warm and changed <= _NO_CHANGE:
        raise UsageError(
            f"nothing of {parent.name} is changed: a cold copy would train the same bytes again; "
            "add --set KEY=VALUE or --warm"
        )
    return spec


def free_name(parent: str, taken: Collection[str]) -> str:
    """`parent-clone`, with a number where that is taken; `parent` is cut where a name could not hold both.

    >>> free_name("a", {"a", "a-clone"})
    'a-clone-2'
    """
    number = 1
    while True:
        end = "-clone" if number == 1 else f"-clone-{number}"
        name = parent[: MAX_NAME - len(end)] + end
        if name not in taken:
            return name
        number += 1


def spec_toml(run: Mapping[str, Any], spec: AdapterSpec, comment: str) -> str:
    """A job spec's file with the one adapter, every key of it said; `run` are the keys of the whole run."""
    lines = [f"# {comment}", *(f"{key} = {_toml(value)}" for key, value in run.items()), "", "[[adapter]]"]
    for key, value in msgspec.structs.asdict(spec).items():
        if value is not None:
            lines.append(f"{key} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _changed_spec(
    parent: AdapterSpec, changes: Mapping[str, object], *, where: Mapping[str, str], base_dir: Path
) -> AdapterSpec:
    """`parent` with `changes` over it, by the rules of a spec's file. `where` names each change's place."""
    faults = Faults()
    table = AdapterTable(f"adapter {parent.name}")
    for key, raw in msgspec.structs.asdict(parent).items():
        if raw is not None:
            table.values[key] = Value(raw, f"adapter {parent.name}, key {key!r}", base_dir)
    for key, raw in changes.items():
        table.values[key] = Value(raw, where[key], base_dir, lax=True)
    # A run has to have a model; of this one only the adapter is looked at.
    run = build_run({"model": Value(".", "model", base_dir)}, [table], faults, source="")
    return run.adapters[0]


def _toml(value: object) -> str:
    """Of the types of a spec. A JSON text without escaped Unicode is a TOML text (control characters are
    refused by the spec's rules)."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
