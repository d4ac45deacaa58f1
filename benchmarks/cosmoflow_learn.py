"""CosmoFlow against ridge regression on the same universes: R^2 of each parameter.

    python benchmarks/cosmoflow_learn.py [universes [steps [seconds [folder]]]]

Both get the same training universes (32^3 cells of 2 Mpc/h), and are judged on 400 others: the
network of `headway train cosmoflow` (four redshifts, each universe turned and shifted anew), and
ridge regression on 23 figures of each (`cosmoflow_ridge.py`: power spectrum, moments, percentiles)
at redshift 0, as the floor is stated, and at all four redshifts. h cannot be told at this size:
where it is found, something leaks. With a folder, universes and the state of training are kept
there, and a further call goes on.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch

from cosmoflow_ridge import NAMES, PENALTY, WIDTH, figures
from headway.workloads.cosmoflow import PeriodicBox, RotatedUniverses, Universes, matter, recipe
from learning import train

JUDGED, FIRST = 400, 1 << 32


def made(numbers: range) -> list[tuple[np.ndarray, np.ndarray]]:
    """Universes of seed 0."""
    return [matter(0, number, PeriodicBox(WIDTH)) for number in numbers]


def universes(first: int, count: int, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Matter [N, 4, W, W, W] and parameters [N, 4]; made by all cores, or found in the folder."""
    file = folder / f"universes-{first}-{count}.npz"
    if not file.exists():
        chunks = [range(n, min(n + 50, first + count)) for n in range(first, first + count, 50)]
        with ProcessPoolExecutor(torch.get_num_threads()) as pool:
            found = [pair for part in pool.map(made, chunks) for pair in part]
        cubes, targets = (np.stack(arrays) for arrays in zip(*found, strict=True))
        np.savez(file, cubes=cubes, targets=targets)
    with np.load(file) as saved:
        return saved["cubes"], saved["targets"]


def known(cubes: np.ndarray, targets: np.ndarray, first: int) -> Universes:
    """A source that has made all of its universes already."""
    result = Universes(len(cubes), WIDTH, first=first)
    result._made = {n: (cubes[n], targets[n]) for n in range(len(cubes))}
    return result


def ridge(train_on: np.ndarray, targets: np.ndarray, judged: np.ndarray) -> np.ndarray:
    """What a ridge regression on figures says."""
    mean, scale = train_on.mean(axis=0), train_on.std(axis=0)
    scale[scale == 0] = 1.0
    x, middle = (train_on - mean) / scale, targets.mean(axis=0)
    weights = np.linalg.solve(x.T @ x + PENALTY * np.eye(x.shape[1]), x.T @ (targets - middle))
    return (judged - mean) / scale @ weights + middle


def explained(said: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """R^2."""
    left = ((targets - said) ** 2).sum(axis=0)
    return 1 - left / ((targets - targets.mean(axis=0)) ** 2).sum(axis=0)


def summary(cube: np.ndarray) -> np.ndarray:
    """Figures of each redshift of a universe [4, F]."""
    return np.stack([figures(matter.astype(np.float64), PeriodicBox(WIDTH)) for matter in cube])


def summaries(cubes: np.ndarray, first: int, folder: Path) -> np.ndarray:
    """Figures of all universes [N, 4, F]; made by all cores, or found in the folder."""
    file = folder / f"figures-{first}-{len(cubes)}.npy"
    if not file.exists():
        with ProcessPoolExecutor(torch.get_num_threads()) as pool:
            np.save(file, np.stack(list(pool.map(summary, cubes, chunksize=50))))
    return np.load(file)


@torch.no_grad()
def main(count: int, steps: int, seconds: float, folder: Path) -> None:
    start = time.perf_counter()
    cubes, targets = universes(0, count, folder)
    others, truth = universes(FIRST, JUDGED, folder)
    print(f"{count} + {JUDGED} universes of {WIDTH}^3, {time.perf_counter() - start:.0f} s")
    job = recipe(width=WIDTH, samples=count, steps=steps)
    with torch.enable_grad():
        turned = RotatedUniverses(known(cubes, targets, 0))
        model, done = train(job, turned, steps, state=folder / "state.pt", seconds=seconds)
    if done < steps:
        return  # a further call goes on
    model.eval()
    judged = known(others, truth, FIRST)
    said = torch.cat([model(judged.read([n])[0]) for n in range(JUDGED)]).numpy()
    found = {f"network, {done} steps": said}
    features, seen = summaries(cubes, 0, folder), summaries(others, FIRST, folder)
    for redshifts in (1, 4):
        x, y = (f[:, :redshifts].reshape(len(f), -1) for f in (features, seen))
        found[f"ridge, {x.shape[1]} figures"] = ridge(x, targets.astype(np.float64), y)
    print(f"{'R^2':22}", *(f"{name:>8}" for name in NAMES))
    for name, values in found.items():
        print(f"{name:22}", *(f"{share:8.3f}" for share in explained(values, truth)))
    print(f"{time.perf_counter() - start:.0f} s, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    given = sys.argv[1:]
    with tempfile.TemporaryDirectory() as aside:
        place = Path(given[3]) if len(given) > 3 else Path(aside)
        place.mkdir(parents=True, exist_ok=True)
        main(
            int(given[0]) if given else 2000,
            int(given[1]) if len(given) > 1 else 700,
            float(given[2]) if len(given) > 2 else 400.0,
            place,
        )
