"""pure: `headway --help` is quick, and the pure plane starts without torch."""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
LIMIT = 0.3
ATTEMPTS = 15
"""The machine may be busy: the best of these counts, and a good one ends the test."""

HEAVY = ("torch", "matplotlib", "tensorboard", "scipy")


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


def pure_modules():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    return next(c["source_modules"] for c in contracts if "never imports torch" in c["name"])


def test_help_is_quick():
    best = float("inf")
    for _ in range(ATTEMPTS):
        start = time.perf_counter()
        done = run("-m", "headway", "--help")
        best = min(best, time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert "train" in done.stdout
        if best < LIMIT:
            break
    assert best < LIMIT, f"best of {ATTEMPTS}: {best:.3f} s"


IMPORT = """
import importlib, pkgutil, sys
for name in sys.argv[1].split(","):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        continue  # a folder of the plan that is still empty
    if sys.argv[2] == "deep" and hasattr(module, "__path__"):
        for found in pkgutil.walk_packages(module.__path__, name + "."):
            importlib.import_module(found.name)
print(*[name for name in sys.argv[3].split(",") if name in sys.modules])
"""


@pytest.mark.parametrize("modules", ["headway", "headway.cli.main"])
def test_the_command_starts_without_anything_heavy(modules):
    done = run("-c", IMPORT, modules, "flat", ",".join(HEAVY))
    assert (done.stdout.split(), done.stderr) == ([], "")


def test_the_pure_plane_starts_without_torch():
    done = run("-c", IMPORT, ",".join(pure_modules()), "deep", "torch")
    assert (done.stdout.split(), done.stderr) == ([], "")


def test_using_a_name_of_the_torch_plane_does_import_torch():
    """Shows that the tests above can fail."""
    done = run("-c", "import headway, sys; headway.Recipe; print('torch' in sys.modules)")
    assert done.stdout.strip() == "True", done.stderr
