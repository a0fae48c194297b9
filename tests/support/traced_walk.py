"""Walks source code for input and output that no span or phase surrounds: for the tests of agent/vram.

By the syntax tree, so that code no test happens to run is seen too. From each *entry* (a public function of
an operations module, whatever another room imports, whatever the module itself calls) every use of another
function is followed until an I/O call is reached; on the way a `with tracer.span(…)` must have been passed,
and for I/O of the ledger's own files a `with tracer.phase(…)` as well.

A function that is mentioned counts as called there (a callback runs under whoever hands it on), and a
method is looked for by its name in every class: both err towards finding too much.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_OS = (
    *("open", "close", "read", "write", "fsync", "rename", "unlink", "mkdir", "listdir", "stat", "fstat"),
    *("fstatvfs", "access", "dup", "kill", "waitpid", "posix_spawnp", "fchmod", "replace"),
    *("chmod", "fchown", "link", "rmdir", "utime"),
)
#: `module.function` → I/O. `*`: everything of the module that is called.
IO: dict[str, tuple[str, ...]] = {
    "os": _OS,
    "fcntl": ("*",),
    "socket": ("*",),
    "psutil": ("*",),
    "pwd": ("*",),
    "time": ("sleep",),
    "signal": ("sigtimedwait",),
    "nvml": ("*",),
    "_nvml": ("*",),
}
#: Methods of paths and sockets, whatever they are called on.
IO_METHODS = (
    *("is_dir", "is_symlink", "exists", "read_text", "read_bytes", "write_text", "write_bytes"),
    *("connect", "getsockopt", "virtual_memory"),
)
#: Names that opened files have: their methods are not looked for in our classes.
FILES = ("file",)
#: What runs when a class is mentioned: its making, and the call of what was made.
CONSTRUCTION = ("__init__", "__call__")
NONE, SPAN, PHASE = frozenset[str](), "span", "phase"


class Use(NamedTuple):
    """One mention of a name: `name` alone, or an attribute of `base` (the last name before the dot)."""

    base: str | None
    name: str
    cover: frozenset[str]
    line: int
    called: bool


class Function(NamedTuple):
    module: str
    qualname: str
    uses: tuple[Use, ...]
    is_property: bool = False

    @property
    def key(self) -> str:
        return f"{self.module}.{self.qualname}"

    @property
    def name(self) -> str:
        return self.qualname.rpartition(".")[2]

    @property
    def is_public(self) -> bool:
        dunder = self.name.startswith("__") and self.name.endswith("__")
        return all(not part.startswith("_") for part in self.qualname.split(".")[:-1]) and (
            dunder or not self.name.startswith("_")
        )


class Fault(NamedTuple):
    """An I/O call that an entry reaches without what must surround it."""

    entry: str
    function: str
    call: str
    line: int
    lacks: str

    def __str__(self) -> str:
        return f"{self.function}:{self.line}: {self.call} lacks a {self.lacks} when {self.entry} is called"


class Package:
    """The functions of some modules. `sources`: module's name → source text."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.functions: dict[str, Function] = {}
        self._by_name: dict[str, list[Function]] = {}
        self._classes: dict[str, list[Function]] = {}
        self._imports: dict[str, set[str]] = {}
        for module, text in sources.items():
            tree = ast.parse(text)
            self._imports[module] = _imported_names(tree)
            for function in _functions(module, tree):
                self.functions[function.key] = function
                self._by_name.setdefault(function.name, []).append(function)
                owner = function.qualname.rpartition(".")[0]
                if owner and function.name in CONSTRUCTION:
                    self._classes.setdefault(owner, []).append(function)

    def entries(self, operations: Iterable[str], imported: Iterable[str]) -> list[Function]:
        """Public functions of the `operations` modules, what is `imported` elsewhere, and module bodies."""
        operations, imported = set(operations), set(imported)

        def is_entry(function: Function) -> bool:
            outer = function.qualname.split(".")[0]
            known = function.module in operations or f"{function.module}.{outer}" in imported
            return function.name == "<module>" or (
                known and function.is_public and not self._nested(function)
            )

        return [function for function in self.functions.values() if is_entry(function)]

    def faults(
        self, entries: Iterable[Function], *, exempt: Iterable[str] = (), phased: Iterable[str] = ()
    ) -> list[Fault]:
        """I/O without a span, or in the `phased` modules without a phase. `exempt` functions' own is left."""
        exempt, phased = set(exempt), set(phased)
        found: dict[tuple[str, int, str], Fault] = {}
        for entry in entries:
            todo, seen = [(entry, NONE)], {(entry.key, NONE)}
            while todo:
                function, outer = todo.pop()
                for use in function.uses:
                    cover = outer | use.cover
                    if is_io(use) and function.key not in exempt:
                        lacks = _lacks(cover, function.module in phased)
                        if lacks:
                            call = f"{use.base}.{use.name}" if use.base else use.name
                            fault = Fault(entry.key, function.key, call, use.line, lacks)
                            found.setdefault((function.key, use.line, lacks), fault)
                    for target in self._targets(function, use):
                        if (target.key, cover) not in seen:
                            seen.add((target.key, cover))
                            todo.append((target, cover))
        return sorted(found.values(), key=lambda fault: (fault.function, fault.line))

    def io_functions(self) -> set[str]:
        """Every function with I/O of its own."""
        return {key for key, function in self.functions.items() if any(map(is_io, function.uses))}

    def _targets(self, function: Function, use: Use) -> list[Function]:
        named = [*self._by_name.get(use.name, []), *self._classes.get(use.name, [])]
        if use.base is None:  # a function or class: of this module, nested in this function, or imported
            imported = use.name in self._imports[function.module]
            return [
                one
                for one in named
                if (imported or one.module == function.module) and self._is_in_scope(one, function)
            ]
        if use.base in IO or use.base in FILES:
            return []
        if use.base in ("self", "cls"):
            owner = function.qualname.split(".")[0]
            return [
                one for one in named if one.module == function.module and one.qualname.split(".")[0] == owner
            ]
        return [one for one in named if use.called or one.is_property]

    def _is_in_scope(self, one: Function, user: Function) -> bool:
        """Whether a bare name in `user` may mean `one`: no method is meant, a nested function only inside."""
        owner = one.qualname.rpartition(".")[0]
        if not owner or one.name in CONSTRUCTION:
            return True
        return self._nested(one) and f"{user.qualname}.".startswith(f"{owner}.")

    def _nested(self, function: Function) -> bool:
        """Whether it stands inside another function."""
        return f"{function.module}.{function.qualname.rpartition('.')[0]}" in self.functions


def is_io(use: Use) -> bool:
    if not use.called:
        return False
    if use.base is None:
        return use.name == "open"
    names = IO.get(use.base)
    if names is not None:
        return (names == ("*",) and use.name[0].islower()) or use.name in names
    return use.name in IO_METHODS or (use.name == "open" and use.base not in ("self", "cls"))


def _lacks(cover: frozenset[str], needs_phase: bool) -> str:
    if SPAN not in cover:
        return SPAN
    return PHASE if needs_phase and PHASE not in cover else ""


def _functions(module: str, tree: ast.Module) -> Iterator[Function]:
    """Every function, nested ones too, and the module's own body as `<module>`."""
    todo: list[tuple[str, ast.AST]] = [("", tree)]
    while todo:
        prefix, node = todo.pop()
        walker = _Uses()
        body = node.body if isinstance(node, (ast.Module, ast.ClassDef, *_DEFS)) else []
        for statement in body:
            walker.visit(statement)
        if not isinstance(node, ast.ClassDef):
            marks = [mark.id for mark in getattr(node, "decorator_list", []) if isinstance(mark, ast.Name)]
            yield Function(module, prefix or "<module>", tuple(walker.uses), "property" in marks)
        for inner in walker.inner:
            todo.append((f"{prefix}.{inner.name}" if prefix else inner.name, inner))


_DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)


class _Uses(ast.NodeVisitor):
    """Names that one function's body mentions, each with the spans and phases around it."""

    def __init__(self) -> None:
        self.uses: list[Use] = []
        self.inner: list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef] = []
        self._cover: frozenset[str] = NONE

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.inner.append(node)
        for decorator in node.decorator_list:
            self.visit(decorator)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.inner.append(node)

    def visit_With(self, node: ast.With) -> None:
        before = self._cover
        for item in node.items:
            self.visit(item.context_expr)
            call = item.context_expr
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr in (SPAN, PHASE)
            ):
                self._cover |= {call.func.attr}
        for statement in node.body:
            self.visit(statement)
        self._cover = before

    def visit_Call(self, node: ast.Call) -> None:
        self._mention(node.func, called=True)
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(part)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._mention(node, called=False)

    def visit_Name(self, node: ast.Name) -> None:
        self._mention(node, called=False)

    def _mention(self, node: ast.expr, *, called: bool) -> None:
        if isinstance(node, ast.Name):
            self.uses.append(Use(None, node.id, self._cover, node.lineno, called))
        elif isinstance(node, ast.Attribute):
            base = node.value
            if isinstance(base, (ast.Name, ast.Attribute)):
                name = base.id if isinstance(base, ast.Name) else base.attr
            else:
                name = "…"
            self.uses.append(Use(name, node.attr, self._cover, node.lineno, called))
            self.visit(base)
        else:
            self.visit(node)


def _imported_names(tree: ast.Module) -> set[str]:
    """The names under which a module knows what it has imported, aliases undone."""
    return {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname in (None, alias.name)
    }


def imported_from(package: str, files: Iterable[Path]) -> set[str]:
    """`module.name` of everything that `files` import from modules of `package`."""
    found: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
                module = (node.module or "").removeprefix(f"{package}.")
                found.update(f"{module}.{alias.name}" for alias in node.names)
    return found
