"""The largest k of d values against torch.topk, on one thread.

python benchmarks/selection.py [pairs]

The peer gets the magnitudes for nothing: only `torch.topk` itself is in its time.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch

from headway.comm.compress.compressor import seeded_generator
from headway.comm.compress.topk_selection import ms_top_k, top_k

COUNT = int(sys.argv[1]) if len(sys.argv) > 1 else 5
TARGET = 8
SIZES = (6_553_600, 26_214_400)
DENSITIES = (0.01, 0.001, 0.0001)


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def compare(size: int, density: float) -> None:
    """Peer, exact selection and MSTopK in turn."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(0))
    magnitudes, k = values.abs(), round(density * size)
    draw = seeded_generator(0, "benchmark")
    assert torch.equal(top_k(values, k), magnitudes.topk(k).indices.sort().values)
    calls = {
        "torch.topk": lambda: torch.topk(magnitudes, k, sorted=False),
        "exact": lambda: top_k(values, k),
        "mstopk": lambda: ms_top_k(values, k, draw),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(COUNT):
        for name in sorted(calls, reverse=number % 2 == 0):
            times[name].append(timed(calls[name]))
    print(f"{size / 1e6:.1f} M values, density {density:g}   load {os.getloadavg()[0]:.1f}")
    peer = times["torch.topk"]
    for name in ("exact", "mstopk"):
        ratios = [a / b for a, b in zip(peer, times[name], strict=True)]
        print(
            f"  {name:6} {statistics.median(times[name]):6.1f} ms, torch.topk "
            f"{statistics.median(peer):6.1f} ms: {statistics.median(ratios):.1f}x "
            f"(target at least {TARGET}), best against best {min(peer) / min(times[name]):.1f}x",
            flush=True,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"selection, one thread, {COUNT} rounds, {time.strftime('%Y-%m-%d')}")
    for size in SIZES:
        for density in DENSITIES:
            compare(size, density)
