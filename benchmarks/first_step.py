"""From the command to the end of the first optimiser step: `headway train` against torchrun + DDP.

python benchmarks/first_step.py [pairs]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pairs import events, headway, pairs, torchrun

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 7


def product(folder: Path) -> float:
    start, target = time.time(), folder / "run"
    headway(
        "train", "language_model:recipe", "-n", "2", "-d", str(target),
        "--set", "arguments.steps=1", "--device", "cpu",
    )  # fmt: skip
    return events(target, "step")[0]["time"] - start


def peer(folder: Path) -> float:
    start, target = time.time(), folder / "stamps"
    torchrun("ddp_loop.py", str(target), "1")
    return float(target.read_text()) - start


if __name__ == "__main__":
    pairs("first step, fresh 2-process run", product, peer, count=COUNT, target=1.05)
