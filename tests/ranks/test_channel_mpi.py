"""ranks: the tests of every provider, over MPI windows; skipped where mpi4py is not installed."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_channel_ranks

from support.patience import patient

TESTS = Path(__file__).parent.parent
NAMES = [
    name
    for name, thing in vars(test_channel_ranks).items()
    if name.startswith("test_") and list(inspect.signature(thing).parameters) == ["provider"]
    and "of_many_channels" not in name  # it has three ranks
]  # fmt: skip


def launcher():
    """The mpiexec that belongs to this interpreter's mpi4py."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


@pytest.mark.slow
def test_the_provider_passes_what_all_providers_pass(tmp_path):
    if importlib.util.find_spec("mpi4py") is None or launcher() is None:
        pytest.skip("mpi4py with an mpiexec is not installed (pip install mpi4py mpich)")
    assert len(NAMES) >= 8
    command = [launcher(), "-n", "2", sys.executable, "-W", "error", "-m", "support.mpi_program"]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path), *NAMES], env=environment, capture_output=True, text=True,
        timeout=patient(150),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("\n")[: len(NAMES)] == [f"{name} passed" for name in NAMES]
