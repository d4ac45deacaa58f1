"""ranks: the programs in examples/ run as they are written."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import headway
from support.patience import patient

PROGRAMS = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
LINES = 60


def needs(program: Path) -> str:
    """The package that a program cannot do without, and that is not installed."""
    text = program.read_text()
    missing = [
        name
        for name in ("transformers",)
        if f"from {name} import" in text and importlib.util.find_spec(name) is None
    ]
    return ", ".join(missing)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem == "own_loop" else pytest.mark.slow)
        for path in PROGRAMS
    ],
)
def test_the_program_runs(program, tmp_path):
    if missing := needs(program):
        pytest.skip(f"needs {missing}")
    source = str(Path(headway.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": source}, timeout=patient(120), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout


def test_programs_are_short():
    assert PROGRAMS
    for program in PROGRAMS:
        assert len(program.read_text().splitlines()) <= LINES, program.name
