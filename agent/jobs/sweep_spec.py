"""A sweep's TOML file: that of a run, in which [sweep] says what is tried, and [early_exit] what is stopped.

    [defaults], [[adapter]]   as in a run; one block at most, the template of every configuration
    [sweep]
    name = "rates"            # default: the template's name, else the file's
    output_dir = "out/rates"  # default: the template's; each configuration gets a directory in it
    max_concurrent = 0        # most configurations that train at once; 0: as many as memory holds
    [sweep.grid]              # every combination of the values, or
    learning_rate = [1e-5, 5e-5]
    [[sweep.configuration]]   # each block is one, or
    r = 8
    [sweep.ranges]            # Optuna asks for `n_trials` of them, `batch` at a time (`sampler.py`)
    learning_rate = { low = 1e-5, high = 1e-3, log = true }
    r = [8, 16, 32]
    [early_exit]              # keys of `SweepExit`

Like `spec_file.py`, whose tables and rules it uses, it names every fault in one run.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from gshare.agent.errors import UsageError
from gshare.agent.jobs.early_exit import SweepExit, setting_faults
from gshare.agent.jobs.faults import Faults, check_section, convert, said_once, unknown_key
from gshare.agent.jobs.names import MAX_NAME, name_fault, shorten
from gshare.agent.jobs.spec import AdapterSpec, RunSpec
from gshare.agent.jobs.spec_file import (
    AdapterTable,
    Value,
    build_run,
    read_tables,
    resolve_path,
    unknown_adapter_key,
)
from gshare.agent.jobs.spec_rules import ADAPTER_TYPES, MAX_CONFIGURATIONS, SWEEP_RULES, adapter_value
from gshare.agent.jobs.sweep_ranges import Range, SampledSpace, range_fault

#: A validation loss over other rows, or other tokens of them, does not compare.
_MEASURE = ("val_data", "data_format", "on_bad_turns", "train_on_prompt", "max_length")
#: As long as the validation rows are a part of the data, these choose them.
_SPLIT = ("data", "val_fraction", "seed")
#: Keys as configurations' names have them; the others are written out.
_SHORT = {"learning_rate": "lr", "per_device_train_batch_size": "b", "lora_alpha": "alpha"}


class SweepTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [sweep]."""

    name: str | None = None
    output_dir: str | None = None
    max_concurrent: int = 0
    grid: dict[str, list[Any]] | None = None
    configuration: list[dict[str, Any]] | None = None
    ranges: dict[str, Any] | None = None
    n_trials: int = 0
    batch: int = 8  # trials that are asked for before the results of earlier ones are told
    seed: int = 0  # of Optuna's sampler


@dataclass(frozen=True)
class SweepSpec:
    """Everything that a sweep's file says. `run.adapters` are the configurations so far; of a sampled sweep
    there are more to come (`SweepFile.configurations`)."""

    name: str
    directory: Path
    run: RunSpec
    hyper_parameters: tuple[dict[str, Any], ...]  # of each adapter: those in which they differ
    early_exit: SweepExit
    max_concurrent: int
    sampled: SampledSpace | None


class SweepFile:
    """A sweep's file, read once."""

    def __init__(self, path: Path, overrides: Mapping[str, object] | None = None) -> None:
        """`overrides` as for `load_run_spec`. UsageError with one line a fault."""
        self._path = path
        faults = Faults()
        self._tables = read_tables(path, overrides, faults)
        self._sweep = self._read_sweep(faults)
        self._early_exit = self._read_early_exit(faults)
        self._template = self._read_template(faults)
        self._ranges = self._read_ranges(faults)
        self._chosen = [] if self._ranges else self._enumerate(faults)
        faults.raise_if_any()
        self.name, self.directory = self._place()

    def spec(self, sampled: Sequence[Mapping[str, Any]] = ()) -> SweepSpec:
        """The sweep; `sampled`: the values that Optuna has given so far, in order.

        UsageError for a value that its key cannot have, or a configuration without validation data.
        """
        chosen = [{key: self._value("ranges", key, raw) for key, raw in values.items()} for values in sampled]
        faults = Faults()
        chosen = chosen or self._chosen
        if not chosen and self._ranges:
            # Checked with one of them before Optuna is asked for any.
            chosen = [{key: self._value("ranges", key, _first(r)) for key, r in self._ranges.items()}]
        run = self._build(chosen, faults)
        if self._ranges and not sampled:
            run, chosen = msgspec.structs.replace(run, adapters=()), []
        return SweepSpec(
            name=self.name,
            directory=self.directory,
            run=run,
            hyper_parameters=_differing(run.adapters, chosen),
            early_exit=self._early_exit,
            max_concurrent=self._sweep.max_concurrent,
            sampled=SampledSpace(
                self._ranges, self._sweep.n_trials, self._sweep.batch, self._sweep.seed, str(self._path)
            )
            if self._ranges
            else None,
        )

    # ------------------------------------------------------------------ tables

    def _read_sweep(self, faults: Faults) -> SweepTable:
        file = self._tables.file
        if "sweep" not in file.table:
            faults.add(str(self._path), "no [sweep]: say what to try, as [sweep.grid] with lists of values")
            return SweepTable()
        header = f"{file.where(section='sweep')}: [sweep]"
        table = check_section(file.table["sweep"], _keys(SweepTable), header, faults)
        values = self._typed(table or {}, SweepTable, "sweep", faults)
        sweep = SweepTable(**values)
        if table is None:
            return sweep
        kinds = [kind for kind in ("grid", "configuration", "ranges") if kind in table]
        if len(kinds) != 1:
            which = f"not {' and '.join(kinds)}" if kinds else "it has none"
            faults.add(
                header, f"takes one of [sweep.grid], [[sweep.configuration]] and [sweep.ranges]; {which}"
            )
        elif kinds[0] in values and not table[kinds[0]]:
            faults.add(self._where(kinds[0]), "is empty; name keys of an adapter, with values to try")
        if "name" in values and (fault := name_fault(values["name"])):
            faults.add(self._where_key("name", "sweep"), fault)
        for key, rule in SWEEP_RULES.items():
            if fault := rule(getattr(sweep, key)):
                faults.add(self._where_key(key, "sweep"), fault)
        if "ranges" in table and "n_trials" not in table:
            faults.add(header, "missing key 'n_trials': how many configurations to draw")
        elif "ranges" in table and "n_trials" in values and not sweep.n_trials:
            faults.add(self._where_key("n_trials", "sweep"), "must be at least 1, for something to be drawn")
        return sweep

    def _read_early_exit(self, faults: Faults) -> SweepExit:
        file = self._tables.file
        raw = file.table.get("early_exit", {})
        header = f"{file.where(section='early_exit')}: [early_exit]"
        table = check_section(raw, _keys(SweepExit), header, faults)
        settings = SweepExit(**self._typed(table or {}, SweepExit, "early_exit", faults))
        for key, must in setting_faults(settings):
            faults.add(self._where_key(key, "early_exit"), f"must {must}")
        return settings

    def _typed(
        self, table: Mapping[str, Any], kind: type[msgspec.Struct], section: str, faults: Faults
    ) -> dict[str, Any]:
        """The values of `table` that have their key's type; a fault for each other, and for unknown keys."""
        types = {field.name: field.type for field in msgspec.structs.fields(kind)}
        values = {}
        for key, raw in table.items():
            if key not in types:
                faults.add(self._where_key(key, section), unknown_key(key, types))
                continue
            value, fault = convert(raw, types[key])
            if fault is not None:
                what = (
                    "must be blocks of keys with values" + (", each a list" if key == "grid" else "")
                    if key in ("grid", "configuration", "ranges")
                    else fault
                )
                faults.add(self._where_key(key, section), what)
            else:
                values[key] = value
        return values

    def _read_template(self, faults: Faults) -> AdapterTable:
        tables = self._tables
        if len(tables.adapters) > 1:
            where = tables.file.where(section="adapter", index=1)
            faults.add(where, "a sweep takes one [[adapter]] at most: the template of its configurations")
        if tables.adapters:
            return tables.adapters[0]
        return AdapterTable(str(self._path), {**tables.defaults, **tables.flags})

    # ------------------------------------------------------------------ what is tried

    def _enumerate(self, faults: Faults) -> list[dict[str, Value]]:
        """The configurations of a grid or a list, each the values that it sets."""
        chosen: list[dict[str, Value]] = []
        if self._sweep.configuration:
            for values in self._sweep.configuration:
                chosen.append({key: self._value("configuration", key, raw) for key, raw in values.items()})
        elif self._sweep.grid:
            grid = self._sweep.grid
            for key, values in grid.items():
                if not values:
                    faults.add(self._where(f"grid, key {key!r}"), "is empty; list the values to try")
            count = math.prod(len(values) for values in grid.values())
            if count > MAX_CONFIGURATIONS:
                faults.add(self._where("grid"), f"{count:,} combinations; at most {MAX_CONFIGURATIONS:,}")
                return []
            chosen = [
                {key: self._value("grid", key, raw) for key, raw in zip(grid, values, strict=True)}
                for values in itertools.product(*grid.values())
            ]
        self._check_keys({key: value for values in chosen for key, value in values.items()}, faults)
        return chosen

    def _check_different(
        self, adapters: Sequence[AdapterSpec], chosen: Sequence[Mapping[str, Value]], faults: Faults
    ) -> None:
        """By what they mean, not as they are written: 1 is 1.0, and a value left out is its default."""
        seen: set[AdapterSpec] = set()
        for spec, values in zip(adapters, chosen, strict=True):
            meant = msgspec.structs.replace(spec, name="", output_dir="", target_modules=spec.targets)
            if meant in seen:
                shown = ", ".join(f"{key} = {shorten(value.raw)}" for key, value in values.items())
                kind = "grid" if self._sweep.grid else "configuration"
                faults.add(self._where(kind), f"the same configuration twice: {shown or 'no key at all'}")
            seen.add(meant)

    def _check_keys(self, keys: Mapping[str, Value], faults: Faults) -> None:
        for key, value in keys.items():
            if key in ("name", "output_dir"):
                faults.add(value.where, "is given by the sweep to each configuration")
            elif key not in ADAPTER_TYPES:
                faults.add(value.where, unknown_adapter_key(key))
            elif key in _MEASURE:
                faults.add(value.where, "changes what the validation loss is measured on; fix it for all")
            elif key in _SPLIT and "val_data" not in self._template.values:
                faults.add(
                    value.where, "changes the validation rows, so losses would not compare; set val_data too"
                )
            elif key in self._tables.flags:
                faults.add(value.where, f"is fixed by {self._tables.flags[key].where}; leave one of them out")

    def _read_ranges(self, faults: Faults) -> dict[str, Range | list[Any]]:
        ranges: dict[str, Range | list[Any]] = {}
        self._check_keys({key: self._value("ranges", key, None) for key in self._sweep.ranges or {}}, faults)
        for key, raw in (self._sweep.ranges or {}).items():
            where = self._value("ranges", key, raw).where
            if isinstance(raw, list) and raw:
                ranges[key] = raw
                for one in raw:
                    fault = adapter_value(key, one)[1] if key in ADAPTER_TYPES else None
                    if fault is not None:
                        faults.add(where, fault)
                continue
            interval, fault = convert(raw, Range)
            if fault is not None:
                faults.add(where, "must be a list of values, or { low = …, high = …, log = true }")
            elif fault := range_fault(key, interval):
                faults.add(where, fault)
            else:
                ranges[key] = interval
        return ranges

    # ------------------------------------------------------------------ building

    def _place(self) -> tuple[str, Path]:
        """(name, directory) of the sweep."""
        faults = Faults()
        given = self._template.values
        named = self._sweep.name or (str(given["name"].raw) if "name" in given else self._path.stem)
        if fault := name_fault(named):
            faults.add(str(self._path), f"gives the sweep no valid name: {fault}; set name under [sweep]")
        place = given.get("output_dir")
        if self._sweep.output_dir is not None:
            place = Value(
                self._sweep.output_dir, self._where_key("output_dir", "sweep"), self._path.absolute().parent
            )
        if place is None:
            faults.add(f"{self._tables.file.where(section='sweep')}: [sweep]", "missing key 'output_dir'")
            faults.raise_if_any()
            raise AssertionError
        text, fault = adapter_value("output_dir", place.raw)
        if fault is not None:
            faults.add(place.where, fault)
        faults.raise_if_any()
        if fault := _place_fault(text, place.base_dir):
            faults.add(place.where, fault)
        faults.raise_if_any()
        return named, (place.base_dir / Path(text).expanduser()).absolute()

    def _build(self, chosen: Sequence[Mapping[str, Value]], faults: Faults) -> RunSpec:
        # Those drawn later must not change the names of the earlier ones: numbers.
        slugs = _numbers(len(chosen), self._sweep.n_trials) if self._ranges else _slugs(chosen)
        adapters = []
        for slug, values in zip(slugs, chosen, strict=True):
            name = f"{self.name}-{slug}"
            own = {
                "name": Value(name if len(name) <= MAX_NAME else slug, self._template.where, self.directory),
                "output_dir": Value(str(self.directory / slug), self._template.where, self.directory),
            }
            where = f"{self._path}: configuration {slug}"
            adapters.append(AdapterTable(where, {**self._template.values, **values, **own}))
        try:
            run = build_run(self._tables.run, adapters, faults, source=str(self._path))
        except UsageError as error:
            raise UsageError(said_once(str(error), "configuration", of_all=len(adapters))) from None
        for adapter, spec in zip(adapters, run.adapters, strict=True):
            if spec.val_data is None and spec.val_fraction == 0:
                faults.add(
                    adapter.label("val_fraction"),
                    "no validation data, and a sweep ranks by validation loss; raise it, or set val_data",
                )
        if not self._ranges:  # a sampler may draw one twice
            self._check_different(run.adapters, chosen, faults)
        faults.raise_if_any()
        return run

    def _value(self, kind: str, key: str, raw: object) -> Value:
        where = f"{self._tables.file.where(key, f'sweep.{kind}')}: [sweep.{kind}], key {key!r}"
        return Value(raw, where, self._path.absolute().parent)

    def _where(self, kind: str) -> str:
        name = kind.split(",", 1)[0]
        return f"{self._tables.file.where(section=f'sweep.{name}')}: [sweep.{name}]{kind[len(name) :]}"

    def _where_key(self, key: str, section: str) -> str:
        return f"{self._tables.file.where(key, section)}: [{section}], key {key!r}"


def _keys(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return kind.__struct_fields__


def _place_fault(text: str, base_dir: Path) -> str | None:
    """Why there can be no such directory; None: there is one, or it can be made."""
    path, fault = resolve_path("output_dir", text, base_dir)
    if path is None:
        return fault
    above = next(one for one in Path(path).parents if os.path.lexists(one))
    return None if os.path.isdir(above) else f"{shorten(text)} lies below {above}, which is no directory"


def _first(values: Range | list[Any]) -> Any:
    if isinstance(values, list):
        return values[0]
    return int(values.low) if values.low.is_integer() else values.low


def _differing(
    adapters: Sequence[AdapterSpec], chosen: Sequence[Mapping[str, Value]]
) -> tuple[dict[str, Any], ...]:
    """Of each adapter the swept keys, those left out that have one value for all."""
    keys = list(dict.fromkeys(key for values in chosen for key in values))
    several = [key for key in keys if len({repr(getattr(spec, key)) for spec in adapters}) > 1]
    return tuple({key: _plain(getattr(spec, key)) for key in several} for spec in adapters)


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _slugs(chosen: Sequence[Mapping[str, Value]]) -> list[str]:
    """A name for each configuration within its sweep: what differs, or its number where that is no name."""
    keys = list(dict.fromkeys(key for values in chosen for key in values))
    several = [
        key
        for key in keys
        if len({repr(values[key].raw) if key in values else None for values in chosen}) > 1
    ]
    texts = [
        "-".join(f"{_SHORT.get(key, key)}{_shown(values[key].raw)}" for key in several if key in values)
        for values in chosen
    ]
    # Half of a name: the sweep's own comes before it.
    fine = len(set(texts)) == len(texts) and all(
        re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", text) and len(text) <= MAX_NAME // 2 for text in texts
    )
    return texts if fine else _numbers(len(texts), len(texts))


def _numbers(count: int, most: int) -> list[str]:
    return [f"c{number:0{len(str(most))}d}" for number in range(1, count + 1)]


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
