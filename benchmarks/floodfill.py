"""Inference of flood-filling networks: fields of view per second, and two processes against one.

    python benchmarks/floodfill.py fields                   # one call of the network
    python benchmarks/floodfill.py processes VOLUME WEIGHTS  # the whole, one thread each

`fields` compares with the plain port of the reference implementation to PyTorch: the module as it
is, float32, contiguous (N, C, z, y, x), one field of view at a time, the mask added by torch.
Contenders take turns in one process. Ratios are medians over rounds, with their quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from headway.floodfill.network import FloodFillingNetwork
from headway.floodfill.prediction import FovPredictor

SIZE = (33, 33, 33)


def plain(network: FloodFillingNetwork) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    @torch.inference_mode()
    def call(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
        given = (torch.from_numpy(array)[None, None] for array in (image, mask))
        return network(*given)[0, 0].numpy()

    return call


def ratios(name: str, base: list[float], other: list[float]) -> None:
    found = sorted(a / b for a, b in zip(base, other, strict=True))
    low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else 3 * found
    print(f"{name:22s} {middle:6.2f} ({low:.2f}, {high:.2f}) in {len(found)} rounds")


def fields(rounds: int, calls: int) -> None:
    torch.manual_seed(0)
    network = FloodFillingNetwork(12, fov=SIZE).eval()
    image, mask = np.random.default_rng(0).standard_normal((2, *SIZE)).astype(np.float32)
    contenders = {
        "plain": plain(network),
        "float32": FovPredictor(network),
        "bfloat16": FovPredictor(network, "bfloat16"),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, call in contenders.items():
            start = time.perf_counter()
            for _ in range(calls):
                call(image, mask)
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - start) / calls)
    print(f"{torch.get_num_threads()} threads")
    for name, found in times.items():
        middle = statistics.median(found)
        print(f"{name:22s} {middle * 1e3:7.1f} ms, {1 / middle:.1f} fields of view per second")
    for name in ("float32", "bfloat16"):
        ratios(f"{name} over plain", times["plain"], times[name])


def processes(volume: str, weights: str, rounds: int, more: list[str]) -> None:
    times: dict[int, list[float]] = {1: [], 2: []}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for number in range(rounds):
        made = {}
        for count in times:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "out.npy"
                command = [sys.executable, "-m", "headway", "segment", volume, "--weights", weights,
                           "--out", str(out), "-n", str(count), "--json", *more]  # fmt: skip
                start = time.perf_counter()
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=True
                )
                times[count].append(time.perf_counter() - start)
                made[count] = np.load(out)
                facts = json.loads(done.stdout)
            print(number, f"{count} processes: {times[count][-1]:.1f} s", facts, flush=True)
        assert (made[1] == made[2]).all()
    ratios("2 processes over 1", times[1], times[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("fields", "processes"))
    parser.add_argument("volume", nargs="?", default="")
    parser.add_argument("weights", nargs="?", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=5)
    options, more = parser.parse_known_args()
    if options.what == "fields":
        fields(options.rounds, options.calls)
    else:
        processes(options.volume, options.weights, options.rounds, more)


if __name__ == "__main__":
    main()
