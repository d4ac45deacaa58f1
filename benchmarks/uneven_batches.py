"""One of two ranks computes half as fast: even shares of the batch against those of Algorithm 1.

    OMP_NUM_THREADS=1 python benchmarks/uneven_batches.py [rounds]

Real runs of `headway train` on gloo; rank 1 is stopped half of its time (`--fault "rank 1 2x
slower"`). Even and uneven runs take turns, so that what disturbs the machine disturbs both. Target:
uneven at least 1.25 times as fast (planning bar B9; limit without exchange 1.5).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headway.planner.whale.load_balance import DeviceShare, algorithm_1
from headway.plans.batch import largest_remainder_shares

BATCH, STEPS, WARM = 24, 14, 4
FAULT = "rank 1 2x slower"


def shares() -> tuple[int, ...]:
    """Of a rank of rate 2 and one of rate 1; memory does not matter."""
    devices = [DeviceShare(rate=rate, memory=1.0, scaled=0.0) for rate in (2.0, 1.0)]
    return largest_remainder_shares(BATCH, algorithm_1(devices).loads)


def steps(folder: Path, *changes: str) -> list[float]:
    """Seconds of the steps of one run, without the first ones."""
    words = ["--set", f"batch={BATCH}", "--set", f"arguments.steps={STEPS}", *changes]
    command = [sys.executable, "-m", "headway", "train", "language_model:recipe", "-n", "2"]
    subprocess.run(
        [*command, *words, "--fault", FAULT, "-d", str(folder)],
        cwd=Path(__file__).parent,
        check=True,
        capture_output=True,
    )
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line["seconds"] for line in lines if line["event"] == "step"][WARM:]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    uneven = shares()
    even_times, uneven_times = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            even = steps(Path(folder) / f"even-{number}")
            other = steps(Path(folder) / f"uneven-{number}", "--set", f"shares={list(uneven)}")
            even_times.append(statistics.median(even))
            uneven_times.append(statistics.median(other))
            print(
                f"round {number + 1}: even {even_times[-1] * 1e3:.0f} ms, {uneven[0]} and "
                f"{uneven[1]}: {uneven_times[-1] * 1e3:.0f} ms, "
                f"{even_times[-1] / uneven_times[-1]:.2f} times; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
    ratios = [a / b for a, b in zip(even_times, uneven_times, strict=True)]
    print(
        f"{time.strftime('%Y-%m-%d')}: uneven {statistics.median(ratios):.2f} times as fast (median"
        f" of {rounds}), best against best {min(even_times) / min(uneven_times):.2f}"
    )


if __name__ == "__main__":
    main()
