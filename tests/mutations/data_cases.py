"""Recipes and plans that reach the planted bugs of sources, caches and slabs."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from headway import Recipe
from headway.data import ArraySource, MemmapSource, NpySlabs, SlabSource, cached
from headway.plans import LayerSplit
from mutations.cases import Augmented, case, mlp, tiny, volumes
from support import loader_recipes
from support.split_recipes import Segmenter, labelling
from support.tiny_models import FEATURES, HalfFrozen, Points, Tied, WithDropout


def folder() -> Path:
    """Of the files of a case, the same for all of its processes."""
    return Path(os.environ.get("MUTATION_DATA") or tempfile.mkdtemp())


def numbers_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def written(name: str, array: Any) -> Path:
    """A file with an array, written once."""
    path = folder() / name
    if not path.exists():
        aside = path.with_name(f"{name}-{np.random.default_rng().integers(2**60)}.npy")
        np.save(aside, array)
        aside.replace(path)
    return path


def tokens() -> MemmapSource:
    path = folder() / "tokens"
    if not path.exists():
        path.write_bytes(numbers_of(1).integers(0, 11, 40 * 5 + 4).astype("uint8").tobytes())
    return MemmapSource(path, window=5)


@case()
def mapped_tokens() -> Recipe:
    return tiny("tokens", Tied, tokens)


def rows() -> ArraySource:
    x = numbers_of(2).normal(size=(40, FEATURES)).astype("float32")
    y = numbers_of(3).integers(0, 4, 40)
    return ArraySource(written("x.npy", x), written("y.npy", y))


@case()
def array_rows() -> Recipe:
    return tiny("arrays", data=rows)


def tensors() -> TensorDataset:
    points = Points()
    return TensorDataset(points.x, points.y)


@case()
def tensor_rows() -> Recipe:
    return tiny("tensors", WithDropout, tensors)


@case()
def points() -> Recipe:
    return tiny("points")


class Noisy(Points):
    """Noise of torch and of numpy, drawn by the data set itself."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(FEATURES) + 0.1 * float(np.random.normal()), y


@case()
def noisy() -> Recipe:
    return tiny("noisy", data=Noisy)


@case()
def many_augmented() -> Recipe:
    return tiny("augmented", data=Augmented)


@case()
def dropping_last() -> Recipe:
    return replace(mlp(), data=lambda: Points(36), drop_last=True)


@case()
def one_left() -> Recipe:
    """The last batch of an epoch has one sample."""
    return replace(mlp(), data=lambda: Points(37))


@case(whole=True)
def trained_some_validated() -> Recipe:
    return replace(mlp(), validation=lambda: Points(16), validation_samples=10)


@case(whole=True)
def trained_workers() -> Recipe:
    return replace(mlp(), data=Noisy, workers=1, model=WithDropout)


@case(whole=True)
def trained_half_frozen() -> Recipe:
    """A module that the model itself keeps in eval mode."""
    return replace(mlp(), model=HalfFrozen)


@case(whole=True)
def trained_eval_dropping() -> Recipe:
    return replace(mlp(), model=WithDropout)


def shifted(sample: Any) -> Any:
    """A change that is made once, before a sample is kept."""
    x, y = sample
    return 2 * x + 1, y


def shaken(sample: Any) -> Any:
    x, y = sample
    return x + 0.1 * torch.randn(FEATURES), y


def _cached(name: str, **options: Any) -> Any:
    # The memory of a cache is found by its name: other trials must not find this one's.
    return cached(Points(), f"{name}-{folder().name}", **options)


@case()
def cached_prepared() -> Recipe:
    return tiny(
        "cached-prepared",
        data=lambda: _cached("prepared", memory="1 MiB", prepare=shifted),
    )


@case()
def cached_shaken() -> Recipe:
    return tiny("cached-shaken", data=lambda: _cached("shaken", memory="1 MiB", augment=shaken))


@case()
def cached_on_disk() -> Recipe:
    return tiny(
        "cached-on-disk",
        data=lambda: _cached("disk", disk=folder() / "cache", disk_limit="1 MiB"),
    )


class Transposed(Points):
    """Samples whose tensors are not laid out row by row."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return torch.stack([x, 2 * x, -x]).T, y


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3 * FEATURES, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x.flatten(1))
        return y


@case()
def cached_transposed() -> Recipe:
    def data() -> Any:
        return cached(Transposed(), f"transposed-{folder().name}", memory="1 MiB")

    return tiny("cached-transposed", Flat, data)


class DroppingSegmenter(Segmenter):
    """The same with dropout."""

    def forward(self, x: Any) -> Any:
        return super().forward(nn.functional.dropout(x, 0.2, self.training))


def slabs() -> SlabSource:
    """Volumes in one file for each sample, and all labels in another."""
    made = numbers_of(4)
    files = [
        written(f"volume-{n}.npy", made.normal(size=(2, 8, 6, 6)).astype("float32"))
        for n in range(24)
    ]
    labels = written("labels.npy", made.integers(0, 3, (24, 8, 6, 6)))
    return SlabSource(NpySlabs(files), NpySlabs(labels))


@case()
def slabs_whole() -> Recipe:
    """Files of samples, read whole."""
    return tiny("slabs", Segmenter, slabs, loss=labelling, batch=5, microbatch=2)


@case()
def slabs_in_parts() -> Recipe:
    """Each rank reads its part of a sample."""
    return replace(
        volumes(spatial=(2, 1, 1)), data=slabs, model=DroppingSegmenter, batch=5, microbatch=2
    )


@case(4)
def slabs_in_parts_copies() -> Recipe:
    """Slabs go from rank to rank."""
    return replace(slabs_in_parts(), split=LayerSplit(spatial=(2, 1, 1)))


@case()
def streamed() -> Recipe:
    """A stream without a length, in another order in each epoch."""
    return loader_recipes.unbounded()
