"""A recipe whose samples are files of the folder `slabs`; all that is read of them is noted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from headway import Recipe
from headway.data import SlabSource, slabs_in
from headway.data.slabs.slab_source import write_sample

SAMPLES, SHAPE, CLASSES = 6, (2, 7, 6, 4), 3
"""A depth of 7 does not divide by 2."""


def write(folder, kind):
    """Images, labels and targets, in HDF5 or .npy."""
    draw = np.random.default_rng(0)
    arrays = {
        "image": draw.integers(-9, 10, (SAMPLES, *SHAPE)).astype(np.int16),
        "label": draw.integers(0, CLASSES, (SAMPLES, *SHAPE[1:])).astype(np.uint8),
        "weight": draw.uniform(0.5, 1.5, (SAMPLES, 2)),
    }
    folder.mkdir()
    if kind == "npy":
        for name, rows in arrays.items():
            np.save(folder / f"{name}.npy", rows)
        return
    for number in range(SAMPLES):
        sample = {name: rows[number] for name, rows in arrays.items()}
        write_sample(folder / f"{number}.hdf5", sample)


class Noted:
    """A reader that notes the process, the sample and the box of each read, in `reads`."""

    def __init__(self, reader):
        self._reader, self.shape, self.dtype = reader, reader.shape, reader.dtype

    def __len__(self):
        return len(self._reader)

    def read(self, sample, ranges):
        if len(ranges) == len(SHAPE):
            with Path("reads").open("a") as out:
                out.write(json.dumps([os.getpid(), sample, list(ranges)]) + "\n")
        return self._reader.read(sample, ranges)


def finish(parts):
    image, label, weight = parts
    return {"image": image.float() / 4, "label": label.long(), "weight": weight.float()}


def samples(folder="slabs"):
    readers = slabs_in(folder, "image", "label", "weight")
    return SlabSource(*map(Noted, readers), finish=finish)


class Labeller(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(2, 4, 3, padding=1),
            nn.ReLU(),
            nn.Dropout(0.25),
            nn.Conv3d(4, CLASSES, 3, padding=1),
        )

    def forward(self, x):
        return self.layers(x)


def loss(model, batch):
    scores = model(batch["image"])
    each = nn.functional.cross_entropy(scores, batch["label"], reduction="none").mean((1, 2, 3))
    return (each * batch["weight"].mean(1)).mean()


def labelling():
    return Recipe(
        name="labelling", model=Labeller, data=samples, validation=samples, loss=loss, batch=4,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        stop="6 steps", validate_every=3, seed=5, showcase=lambda model: str(samples().read([0])),
    )  # fmt: skip
