"""From a TOML file or command-line flags to a validated `RunSpec`, all faults named in one run.

    [top level]  keys of the run            RunSpec
    [defaults]   keys for every adapter     overridden by
    [[adapter]]  one adapter each           overridden by
    flags        keys for every adapter, or of the run

Filled in here: `lora_alpha` (2 × r), `seed` (the run's), `name` (last component of `output_dir`).
Relative paths are relative to the file that names them, on the command line to the working directory.
Nothing is read but the file itself; of data files only their existence is checked.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.jobs.faults import Faults, TomlFile, check_section, unknown_key
from gshare.agent.jobs.names import shorten
from gshare.agent.jobs.spec import AdapterSpec, RunSpec
from gshare.agent.jobs.spec_rules import (
    ADAPTER_TYPES,
    MAX_ROWS_OF_STEP,
    RUN_TYPES,
    adapter_value,
    run_value,
)

#: Flags that people know under another name, without dashes in front → our key.
FLAG_ALIASES = {
    "rank": "r",
    "epochs": "num_train_epochs",
    "max-seq-len": "max_length",
    "lr": "learning_rate",
    "adapters": "adapters_config",
}
#: `--method` → `base_dtype`.
METHODS = {"qlora": "nf4", "lora": "bf16"}
TASKS = ("instruct",)

_ALIASES = {alias.replace("-", "_"): key for alias, key in FLAG_ALIASES.items()}
_SECTIONS = ("defaults", "adapter", "sweep", "early_exit")
#: Read by `sweep_spec.py`.
_OF_SWEEPS = ("sweep", "early_exit")
#: PATH_MAX is 4096 bytes; what is written inside an output directory adds its own names.
_LONGEST_PATH = 3800
#: Keys that only make sense for one adapter.
_OWN_KEYS = ("name", "output_dir")


@dataclass(frozen=True)
class Value:
    """A value as it was written, and where."""

    raw: object
    where: str
    base_dir: Path  # relative paths start here
    lax: bool = False


@dataclass
class AdapterTable:
    """The keys of one adapter as they were written, from wherever each comes."""

    where: str
    values: dict[str, Value] = field(default_factory=dict)

    def label(self, key: str) -> str:
        """The place of `key` for a message, or of the adapter when it does not have it."""
        return self.values[key].where if key in self.values else self.where


def load_run_spec(path: Path, overrides: Mapping[str, object] | None = None) -> RunSpec:
    """The run that `path` (TOML) describes.

    `overrides` are flags by key or alias (dashes or underscores; None means not given). They go over the
    file: a run's key replaces the run's, an adapter's key replaces every adapter's. `seed` is the run's.

    Raises UsageError with one line a fault, naming file, line and key (or flag).
    """
    faults = Faults()
    tables = read_tables(path, overrides, faults)
    for key in _OF_SWEEPS:
        if key in tables.file.table:
            faults.add(tables.file.where(section=key), f"[{key}]: is for gshare sweep")
    if tables.file.table.get("adapter", []) == []:
        faults.add(str(path), "no [[adapter]]: name at least one, with data and output_dir")
    return build_run(tables.run, tables.adapters, faults, source=str(path))


@dataclass
class Tables:
    """A file's keys with the flags over them: the run's, those for every adapter, and each adapter's (with
    those for every adapter in it)."""

    file: TomlFile
    run: dict[str, Value]
    defaults: dict[str, Value]
    adapters: list[AdapterTable]
    flags: dict[str, Value]  # for every adapter


def read_tables(path: Path, overrides: Mapping[str, object] | None, faults: Faults) -> Tables:
    """What `path` and the flags say; `faults` gets what is no key or no table, values are looked at later.

    UsageError when the file cannot be read.
    """
    file = TomlFile(path)
    base_dir = path.absolute().parent
    run: dict[str, Value] = {}
    for key, raw in file.table.items():
        if key in RUN_TYPES:
            run[key] = Value(raw, f"{file.where(key)}: key {key!r}", base_dir)
        elif key not in _SECTIONS:
            where = file.where(section=key) if isinstance(raw, (dict, list)) else file.where(key)
            if key in ADAPTER_TYPES:
                faults.add(where, f"{key!r} is a key of an adapter; put it under [defaults] or [[adapter]]")
            else:
                faults.add(where, unknown_key(key, [*RUN_TYPES, *_SECTIONS], _ALIASES))
    defaults = _file_defaults(file, base_dir, faults)
    adapters = _file_adapters(file, base_dir, defaults, faults)
    run_flags, adapter_flags = _flags(overrides or {}, faults)
    run |= run_flags
    for adapter in adapters:
        adapter.values |= adapter_flags
    if "model" not in run:
        faults.add(str(path), "missing key 'model': a directory, a hub id or a .gguf file")
    return Tables(file, run, defaults, adapters, adapter_flags)


def run_spec_from_flags(
    *,
    model: str,
    adapters: Sequence[str],
    options: Mapping[str, object] | None = None,
    base_dir: Path | None = None,
) -> RunSpec:
    """The run that flags alone describe.

    Args:
        model: directory, hub id or .gguf file.
        adapters: each "DATA:OUT" or "NAME=DATA:OUT".
        options: further flags, as `overrides` of `load_run_spec`.
        base_dir: where relative paths start; the working directory when left out.

    Raises UsageError with one line a fault, naming the flag.
    """
    faults = Faults()
    base_dir = Path.cwd() if base_dir is None else base_dir.absolute()
    run, common = _flags(options or {}, faults, base_dir)
    run["model"] = Value(model, "--model", base_dir, lax=True)
    parsed: list[AdapterTable] = []
    for text in adapters:
        where = f"--adapter {shorten(text)}"
        values = _split_adapter(text)
        if values is None:
            faults.add(where, "expected DATA:OUT or NAME=DATA:OUT, such as data/a.jsonl:out/a")
            continue
        own = {key: Value(raw, where, base_dir) for key, raw in values.items()}
        parsed.append(AdapterTable(where, {**common, **own}))
    if not adapters:
        faults.add(
            "--adapter", "none given; name at least one, as --adapter DATA:OUT, or --adapters-config FILE"
        )
    return build_run(run, parsed, faults, source="command line")


def _split_adapter(text: str) -> dict[str, str] | None:
    """ "NAME=DATA:OUT" → its parts. NAME ends at the first "=" that no "/" or ":" comes before."""
    values: dict[str, str] = {}
    head, equals, rest = text.partition("=")
    if equals and "/" not in head and ":" not in head:
        values["name"] = head
        text = rest
    data, colon, out = text.rpartition(":")
    if not colon or not data or not out:
        return None
    return values | {"data": data, "output_dir": out}


def _file_defaults(file: TomlFile, base_dir: Path, faults: Faults) -> dict[str, Value]:
    table = file.table.get("defaults", {})
    table = check_section(table, ADAPTER_TYPES, f"{file.where(section='defaults')}: [defaults]", faults) or {}
    values: dict[str, Value] = {}
    for key, raw in table.items():
        where = f"{file.where(key, 'defaults')}: [defaults], key {key!r}"
        if key in _OWN_KEYS:
            faults.add(where, "must differ between adapters; put it under each [[adapter]]")
        elif key not in ADAPTER_TYPES:
            faults.add(where, unknown_adapter_key(key))
        else:
            values[key] = Value(raw, where, base_dir)
            # Checked even when every adapter has its own.
            fault = adapter_value(key, raw)[1]
            if fault is not None:
                faults.add(where, fault)
    return values


def _file_adapters(
    file: TomlFile, base_dir: Path, defaults: dict[str, Value], faults: Faults
) -> list[AdapterTable]:
    tables = file.table.get("adapter", [])
    if not isinstance(tables, list):
        faults.add(
            file.where(section="adapter"), "write [[adapter]] with double brackets: one block an adapter"
        )
        return []
    adapters: list[AdapterTable] = []
    for index, entry in enumerate(tables):
        header = file.where(section="adapter", index=index)
        table = check_section(entry, ADAPTER_TYPES, f"{header}: [[adapter]] {index + 1}", faults)
        if table is None:
            continue
        name = table.get("name")
        label = f"adapter {shorten(name, 40)}" if isinstance(name, str) else f"adapter {index + 1}"
        values = dict(defaults)
        for key, raw in table.items():
            where = f"{file.where(key, 'adapter', index)}: {label}, key {key!r}"
            if key in ADAPTER_TYPES:
                values[key] = Value(raw, where, base_dir)
            else:
                faults.add(where, unknown_adapter_key(key))
        adapters.append(AdapterTable(f"{header}: {label}", values))
    return adapters


def unknown_adapter_key(key: str) -> str:
    """The message for a key that no adapter has."""
    if key in RUN_TYPES:
        return "is a key of the whole run; put it at the top of the file, above every [section]"
    return unknown_key(key, ADAPTER_TYPES, _ALIASES)


def _flags(
    options: Mapping[str, object], faults: Faults, base_dir: Path | None = None
) -> tuple[dict[str, Value], dict[str, Value]]:
    """Flags → (run's values, every adapter's values); aliases, `--method` and `--task` resolved."""
    base_dir = base_dir or Path.cwd()
    run: dict[str, Value] = {}
    adapter: dict[str, Value] = {}
    for option, raw in options.items():
        if raw is None:
            continue
        flag = f"--{option.replace('_', '-')}"
        key = option.replace("-", "_")
        key = _ALIASES.get(key, key)
        value = Value(list(raw) if isinstance(raw, tuple) else raw, flag, base_dir, lax=True)
        if key == "task":
            if raw not in TASKS:
                faults.add(flag, f"unknown task {shorten(raw)}; known: {', '.join(TASKS)}")
            continue
        if key == "method":
            if raw not in METHODS:
                faults.add(flag, f"unknown method {shorten(raw)}; known: {', '.join(METHODS)}")
                continue
            key, value = "base_dtype", Value(METHODS[str(raw)], f"{flag} {raw}", base_dir)
        if key in _OWN_KEYS or key == "data":
            faults.add(flag, "belongs to one adapter; say it as --adapter NAME=DATA:OUT")
            continue
        if key not in RUN_TYPES and key not in ADAPTER_TYPES:
            faults.add(flag, unknown_key(key, [*RUN_TYPES, *ADAPTER_TYPES]).replace("key", "option"))
            continue
        group = run if key in RUN_TYPES else adapter
        if key in group and group[key].raw != value.raw:
            faults.add(
                flag, f"says {shorten(value.raw)}, but {group[key].where} says {shorten(group[key].raw)}"
            )
        group[key] = value
    return run, adapter


def build_run(run: dict[str, Value], adapters: list[AdapterTable], faults: Faults, *, source: str) -> RunSpec:
    """The run with every value checked and filled in. UsageError with all of `faults`, if there is any."""
    values: dict[str, Any] = {}
    for key, given in run.items():
        value, fault = run_value(key, given.raw, lax=given.lax)
        if fault is None and key == "model":
            value, fault = _model(value, given.base_dir)
        if fault is not None:
            faults.add(given.where, fault)
        else:
            values[key] = value
    run_seed = values.get("seed", 0)
    built = [_adapter_values(adapter, faults) for adapter in adapters]
    _check_unique(list(zip(adapters, built, strict=True)), faults)
    faults.raise_if_any()
    specs = tuple(_adapter_spec(adapter_values, run_seed) for adapter_values in built)
    return RunSpec(**values, adapters=specs, source=source)


def _model(model: str, base_dir: Path) -> tuple[str | None, str | None]:
    """(model, None), or (None, why not): an absolute path when it names a file or directory, or can only be
    meant as one; else the hub id."""
    meant = model.startswith(("/", "./", "../", "~")) or model in (".", "..") or model.endswith(".gguf")
    try:
        path = _expanded(model, base_dir)
        return (str(path.absolute()) if meant or path.exists() else model), None
    except (OSError, RuntimeError, ValueError) as error:
        return None, path_fault(model, error)


def _adapter_values(adapter: AdapterTable, faults: Faults) -> dict[str, Any]:
    """The typed values of the keys that are right, `name` filled in; a fault for each other key."""
    values: dict[str, Any] = {}
    for key, given in adapter.values.items():
        value, fault = adapter_value(key, given.raw, lax=given.lax)
        if fault is None and key in ("data", "val_data", "output_dir") and value is not None:
            value, fault = resolve_path(key, value, given.base_dir)
        if fault is None:
            values[key] = value
        else:
            faults.add(given.where, fault)
    for key in ("data", "output_dir"):
        if key not in adapter.values:
            faults.add(adapter.where, f"missing key {key!r}")
    rows = values.get("per_device_train_batch_size", 1) * values.get("gradient_accumulation_steps", 1)
    if rows > MAX_ROWS_OF_STEP:
        faults.add(
            adapter.label("gradient_accumulation_steps"),
            f"per_device_train_batch_size × gradient_accumulation_steps is {rows} rows a step; "
            f"at most {MAX_ROWS_OF_STEP} are allowed",
        )
    if "name" not in adapter.values and "output_dir" in values:
        values["name"], fault = adapter_value("name", Path(values["output_dir"]).name)
        if fault is not None:
            faults.add(adapter.label("output_dir"), f"gives no valid name: {fault}; set name")
    return values


def _adapter_spec(values: dict[str, Any], run_seed: int) -> AdapterSpec:
    spec = AdapterSpec(**values)
    return msgspec.structs.replace(
        spec,
        lora_alpha=2.0 * spec.r if spec.lora_alpha is None else spec.lora_alpha,
        seed=run_seed if spec.seed is None else spec.seed,
    )


def resolve_path(key: str, text: str, base_dir: Path) -> tuple[str | None, str | None]:
    """(absolute path, None), or (None, why not): data must be a file, an output may not be one."""
    try:
        path = _expanded(text, base_dir).resolve()
        # A loop of links is still a link here on the newer Pythons, and a RuntimeError on the older.
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        exists, is_file, is_dir = path.exists(), path.is_file(), path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        return None, path_fault(text, error)
    if key == "output_dir":
        if exists and not is_dir:
            return None, f"{shorten(text)} is a file, not a directory"
        if path == path.parent:
            return None, f"{shorten(text)} is the root of the file system; name a directory below it"
        return str(path), None
    if not exists:
        return None, f"no such file: {path}"
    return (str(path), None) if is_file else (None, f"{path} is not a file")


def _expanded(text: str, base_dir: Path) -> Path:
    """`text` with ~ filled in, below `base_dir`; OSError when a file system could not hold such a name."""
    path = base_dir / Path(text).expanduser()
    if len(os.fsencode(path)) > _LONGEST_PATH or any(len(os.fsencode(part)) > 255 for part in path.parts):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    return path


def path_fault(text: str, error: Exception) -> str:
    """Why `text` is no path, in a line: a loop of links, an unknown user, a name too long."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error).rstrip(".")
    return f"{shorten(text)} cannot be used: {reason}"


def _check_unique(built: list[tuple[AdapterTable, dict[str, Any]]], faults: Faults) -> None:
    """No two adapters of one name; no output directory that is another's or lies inside it."""
    names: set[str] = set()
    #: By place in the file: outputs at a path, and outputs somewhere below it.
    at: defaultdict[Path, list[tuple[int, Path, str]]] = defaultdict(list)
    below: defaultdict[Path, list[tuple[int, Path, str]]] = defaultdict(list)
    for index, (adapter, values) in enumerate(built, start=1):
        name: str | None = values.get("name")
        if name is not None and name in names:
            where = adapter.label("name" if "name" in adapter.values else "output_dir")
            faults.add(where, f"a second adapter named {name!r}; give each its own name")
        names |= {name} if name is not None else set()
        if "output_dir" not in values:
            continue
        path = Path(values["output_dir"])
        parents = path.parents
        above = [one for parent in parents if parent in at for one in at[parent]]
        for _, other, owner in sorted([*at[path], *above, *below.get(path, ())]):
            if path == other:
                faults.add(adapter.label("output_dir"), f"{path} is already the output of adapter {owner}")
            else:
                message = f"{path} and {other} (adapter {owner}) lie one inside the other"
                faults.add(adapter.label("output_dir"), message)
        here = (index, path, repr(name) if name is not None else str(index))
        at[path].append(here)
        for parent in parents:
            below[parent].append(here)
