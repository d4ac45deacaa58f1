"""What two dozen figures of each universe tell about CosmoFlow's targets: a network's floor.

    python benchmarks/cosmoflow_ridge.py

Ridge regression, five-fold cross-validation, on the logarithm of the power in 15 bins, four moments
and five percentiles of log(1 + matter) at redshift 0. A field of linear theory cannot tell h at
this size: where h is found, something leaks.
"""

from __future__ import annotations

import time

import numpy as np

from headway.workloads.cosmoflow import PeriodicBox, matter

BOXES, WIDTH, FOLDS, PENALTY = 360, 32, 5, 1.0
NAMES = ("Omega_m", "sigma_8", "n_s", "h")


def figures(cube: np.ndarray, box: PeriodicBox) -> np.ndarray:
    """The figures of one redshift's matter [W, W, W]."""
    k = np.sqrt(box.square())
    power = np.abs(np.fft.rfftn(cube)) ** 2
    edges = np.geomspace(0.99 * 2 * np.pi / (box.width * box.cell), np.pi / box.cell, 16)
    bins = np.digitize(k, edges)
    found = [
        np.log(power[bins == number].mean()) for number in range(1, 16) if (bins == number).any()
    ]
    x = np.log1p(cube)
    steps = x - x.mean()
    moments = [
        x.mean(),
        x.std(),
        (steps**3).mean() / x.std() ** 3,
        (steps**4).mean() / x.var() ** 2,
    ]
    return np.array([*found, *moments, *np.percentile(x, (5, 25, 50, 75, 95))])


def explained(features: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """R^2 of each target on samples that were left out."""
    said = np.zeros_like(targets)
    fold = np.arange(len(features)) % FOLDS
    for number in range(FOLDS):
        train, test = fold != number, fold == number
        mean, scale = features[train].mean(axis=0), features[train].std(axis=0)
        scale[scale == 0] = 1.0  # of a percentile that is always 0
        x, middle = (features - mean) / scale, targets[train].mean(axis=0)
        square = x[train].T @ x[train] + PENALTY * np.eye(x.shape[1])
        weights = np.linalg.solve(square, x[train].T @ (targets[train] - middle))
        said[test] = x[test] @ weights + middle
    left = ((targets - said) ** 2).sum(axis=0)
    return 1 - left / ((targets - targets.mean(axis=0)) ** 2).sum(axis=0)


def main() -> None:
    box, start = PeriodicBox(WIDTH), time.process_time()
    made = [matter(0, sample, box) for sample in range(BOXES)]
    seconds = time.process_time() - start
    features = np.stack([figures(cube[0].astype(np.float64), box) for cube, _ in made])
    targets = np.stack([target for _, target in made]).astype(np.float64)
    print(f"{BOXES} universes of {WIDTH}^3 cells of {box.cell:g} Mpc/h")
    print(f"processor: {1e3 * seconds / BOXES:.0f} ms each; {features.shape[1]} figures of each")
    for name, share in zip(NAMES, explained(features, targets), strict=True):
        print(f"{name:8} R^2 {share:5.2f}")


if __name__ == "__main__":
    main()
