"""Step time of `headway train` against a minimal DDP loop: same model, batch and processes.

python benchmarks/step_time.py [pairs] [steps]
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from pairs import events, headway, pairs, torchrun

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 7
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 30
WARM = 5


def step_seconds(stamps: list[float]) -> float:
    """Median wall-clock time from one step's end to the next, after a few to warm up."""
    laps = [b - a for a, b in zip(stamps[WARM:], stamps[WARM + 1 :], strict=False)]
    return statistics.median(laps)


def product(folder: Path) -> float:
    target = folder / "run"
    headway(
        "train", "language_model:recipe", "-n", "2", "-d", str(target),
        "--set", f"arguments.steps={STEPS}", "--device", "cpu",
    )  # fmt: skip
    return step_seconds([event["time"] for event in events(target, "step")])


def peer(folder: Path) -> float:
    target = folder / "stamps"
    torchrun("ddp_loop.py", str(target), str(STEPS))
    return step_seconds([float(line) for line in target.read_text().split()])


if __name__ == "__main__":
    pairs("step time, 10 M parameters, 2 processes", product, peer, count=COUNT, target=1.03)
