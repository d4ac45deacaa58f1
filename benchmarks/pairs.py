"""Runs peer and product in turn, and prints each pair and the median of the ratios.

Machines are noisy; a ratio of two runs that follow each other is less so. The order within a pair
alternates. Prints the load average, so that a disturbed run can be told.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = sys.executable


def run(*command: str, **options: object) -> None:
    """A command in this folder, on one thread per process; its output is shown if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        command, cwd=HERE, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")


def torchrun(script: str, *arguments: str, processes: int = 2) -> None:
    run(
        PYTHON, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(processes), script, *arguments,
    )  # fmt: skip


def headway(*arguments: str) -> None:
    run(PYTHON, "-m", "headway", *arguments)


def events(directory: Path, kind: str) -> list[dict[str, float]]:
    lines = (directory / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == kind]


def pairs(
    name: str,
    product: Callable[[Path], float],
    peer: Callable[[Path], float],
    *,
    count: int,
    unit: str = "s",
    target: float | None = None,
) -> None:
    """Print `count` pairs of (product, peer) and the median ratio product / peer."""
    print(f"{name}: product / peer, {count} pairs, {time.strftime('%Y-%m-%d')}")
    ratios = []
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            order = [product, peer] if number % 2 == 0 else [peer, product]
            values = {f: f(Path(folder)) for f in order}
        ratios.append(values[product] / values[peer])
        print(
            f"  {number + 1}: {values[product]:.4f} {unit} / {values[peer]:.4f} {unit} = "
            f"{ratios[-1]:.3f}   load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    goal = f" (target at most {target})" if target is not None else ""
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"  median {statistics.median(ratios):.3f}{goal}, range {spread}")
