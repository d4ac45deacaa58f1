"""Which lines a user has to write for a framework: what its adapter adds to the plain loop.

Counted are lines of the four methods that the plain loop's do not have, and imports of the
adapter's module. Docstrings, comments and the layout of the source do not count, nor does the
command that starts the processes. No code is run: an adapter's module may import a framework that
is not installed here.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

METHODS = ("start", "prepare", "step", "close")
_NOT_WRITTEN = ("__future__", "typing", "collections.abc", "headway.comparison", "headway.run")
"""Modules that only adapters import."""


def changed_lines(adapter: str, plain: str) -> tuple[str, ...]:
    """The lines in order: imports, then those of each method; two classes as "module:Class"."""
    module, _, _ = adapter.partition(":")
    before = set(_imports(plain.partition(":")[0]))
    found = [line for line in _imports(module) if line not in before]
    for method in METHODS:
        lines = difflib.ndiff(_lines(plain, method), _lines(adapter, method))
        found += [line[2:].strip() for line in lines if line.startswith("+ ")]
    return tuple(found)


def _imports(module: str) -> Iterator[str]:
    for statement in _tree(module).body:
        source = statement.module or "" if isinstance(statement, ast.ImportFrom) else ""
        written = isinstance(statement, ast.Import | ast.ImportFrom)
        if written and not source.startswith(_NOT_WRITTEN):
            yield ast.unparse(statement)


def _lines(adapter: str, method: str) -> list[str]:
    """The statements of a method, each line as Python itself would lay it out."""
    function = _find(adapter, method)
    if function is None:
        return []
    found: list[str] = []
    for number, statement in enumerate(function.body):
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not (number == 0 and docstring) and not isinstance(statement, ast.Pass):
            found += ast.unparse(statement).splitlines()
    return found


def _find(adapter: str, method: str) -> ast.FunctionDef | None:
    """A method of a class or of the first of its bases that has it."""
    module, _, name = adapter.partition(":")
    tree = _tree(module)
    homes = {
        alias.asname or alias.name: f"{statement.module}:{alias.name}"
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    for kind in tree.body:
        if isinstance(kind, ast.ClassDef) and kind.name == name:
            for statement in kind.body:
                if isinstance(statement, ast.FunctionDef) and statement.name == method:
                    return statement
            bases = [base.id for base in kind.bases if isinstance(base, ast.Name)]
            found = (_find(homes.get(base, f"{module}:{base}"), method) for base in bases)
            return next((one for one in found if one is not None), None)
    return None


def _tree(module: str) -> ast.Module:
    spec = find_spec(module)
    source = "" if spec is None or spec.origin is None else spec.origin
    return ast.parse(Path(source).read_bytes() if source.endswith(".py") else b"")
