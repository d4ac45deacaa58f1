"""The 3-D U-Net on a real head: trained on the left half, Dice of each label on the right one.

    python benchmarks/unet3d_head.py FOLDER [steps [seconds [state]]]

FOLDER holds ch2, ch2bet and aal of Debian's mricron-data (see docs/workloads.md). Three pieces of
the same half are held against the atlas, over all of its voxels: what the network says, cube by
cube; what the brightness of a voxel in the two images says (the likeliest class of each pair of
brightnesses on the left: the same information without a neighbourhood); and the labels of the left
half, mirrored (the place alone, which no cube tells the network).
"""

from __future__ import annotations

import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import nn

from headway.workloads.unet3d import CLASSES, Patches, prepared, recipe
from learning import train

WIDTH, BINS = 32, 32


def starts(extent: int) -> list[int]:
    """Corners of cubes that cover so many voxels, a quarter of each in the next one."""
    last = extent - WIDTH
    return sorted({*range(0, last, 3 * WIDTH // 4), last})


@torch.no_grad()
def segmented(model: nn.Module, images: np.ndarray) -> np.ndarray:
    """Classes of a volume [2, X, Y, Z]: shares of overlapping cubes, weighed to their middles."""
    model.eval()
    shape = images.shape[1:]
    shares = torch.zeros(len(CLASSES), *shape)
    bump = torch.hann_window(WIDTH + 2, periodic=False)[1:-1]
    weight = bump[:, None, None] * bump[:, None] * bump
    for corner in product(*map(starts, shape)):
        inside = (slice(None), *(slice(start, start + WIDTH) for start in corner))
        cube = torch.from_numpy(np.ascontiguousarray(images[inside]))[None]
        if not cube[:, 1].any():  # no brain in it
            shares[inside][0] += weight
            continue
        x, _ = prepared((cube, torch.zeros(())))
        shares[inside] += weight * torch.softmax(model(x)[0], dim=0)
    return shares.argmax(dim=0).numpy()


def by_brightness(train_on: Patches, images: np.ndarray) -> np.ndarray:
    """The likeliest class of each pair of brightnesses."""

    def bins(pair: np.ndarray) -> np.ndarray:
        head, brain = pair.astype(int) * BINS // 256
        return head * BINS + brain

    place = bins(train_on.images).ravel() * len(CLASSES) + train_on.labels.ravel()
    counts = np.bincount(place, minlength=BINS**2 * len(CLASSES)).reshape(-1, len(CLASSES))
    return counts.argmax(axis=1)[bins(images)]


def dice_of(said: np.ndarray, labels: np.ndarray) -> list[float]:
    """Of each class, over the whole volume."""
    return [
        2
        * float(((said == c) & (labels == c)).sum())
        / float((said == c).sum() + (labels == c).sum())
        for c in range(len(CLASSES))
    ]


def main(folder: str, steps: int, seconds: float, state: Path) -> None:
    job = recipe(volumes=folder, steps=steps, samples=4000)
    model, done = train(job, job.data(), steps, state=state, seconds=seconds)
    if done < steps:
        return  # a further call goes on
    left, right = Patches(folder, "train", 1, WIDTH), Patches(folder, "validation", 1, WIDTH)
    start = time.perf_counter()
    found = {
        f"U-Net, {done} steps": segmented(model, right.images),
        "brightness": by_brightness(left, right.images),
        "left half, mirrored": left.labels[::-1],
    }
    print(f"right half, {right.labels.size} voxels, in {time.perf_counter() - start:.0f} s")
    print(f"{'':22}", *(f"{name:>10}" for name in CLASSES), "mean of the last three")
    for name, said in found.items():
        each = dice_of(said, right.labels)
        print(f"{name:22}", *(f"{score:10.3f}" for score in each), f"{np.mean(each[1:]):10.3f}")


if __name__ == "__main__":
    given = sys.argv[2:]
    with tempfile.TemporaryDirectory() as made:
        main(
            sys.argv[1],
            int(given[0]) if given else 400,
            float(given[1]) if len(given) > 1 else 500.0,
            Path(given[2]) if len(given) > 2 else Path(made) / "state.pt",
        )
