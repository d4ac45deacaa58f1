"""pure: each test file says in its first line what it needs, and tells the truth."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
NEEDS = ("pure", "single", "ranks", "emulated", "gpu")
FILES = sorted(TESTS.rglob("test_*.py"))


def relative(path):
    return str(path.relative_to(TESTS))


@cache
def parsed(path):
    """Once for all tests; they only read."""
    return ast.parse(path.read_text())


@cache
def imported(path):
    """Every module that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module}
    return found


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_the_first_line_says_what_the_file_needs(path):
    docstring = ast.get_docstring(parsed(path))
    assert docstring, "no docstring"
    need = docstring.partition(":")[0]
    assert need in NEEDS
    if path.parent.name in NEEDS:
        assert need == path.parent.name
    if need != "ranks":
        assert "support.ranks" not in imported(path)
    if need == "pure":
        assert not any(name.partition(".")[0] == "torch" for name in imported(path))


def test_file_names_are_unique():
    """pytest imports test files by their bare names."""
    names = [path.name for path in FILES]
    assert sorted(names) == sorted(set(names))


def test_every_test_file_holds_tests():
    for path in FILES:
        functions = [n.name for n in ast.walk(parsed(path)) if isinstance(n, ast.FunctionDef)]
        assert any(name.startswith("test_") for name in functions), relative(path)


COLLECT = """
import sys, pytest
from support.without_torch import without_torch
with without_torch():
    sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", sys.argv[1]]))
"""


def test_pure_test_files_import_with_torch_blocked():
    """While they run, conftest.py blocks it."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, str(TESTS / "pure")],
        # This tree's headway, also where another one is installed.
        env=os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}", "PYTEST_ADDOPTS": ""},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/pure/test_units.py" in done.stdout
