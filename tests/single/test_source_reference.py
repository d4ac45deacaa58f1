"""single: samples read a second time below headway's sources, and sources that give others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from headway.data import (
    ArraySource,
    DatasetSource,
    Hdf5Slabs,
    MemmapSource,
    NpySlabs,
    SlabSource,
    TensorSource,
    cached,
)
from headway.data.slabs.slab_source import write_sample
from headway.data.source import GlobalGenerators
from headway.errors import NotEqual
from headway.verification.reference.sources import check_source, read_batch
from support.tiny_models import Points

SEEDS = [3, 2**40 + 5, 2**63 + 1]


class Shaken(Points):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn(6) + float(np.random.normal()), y


def double(sample):
    return 2 * sample[0], sample[1]


def shake(sample):
    return sample[0] + torch.randn(6), sample[1]


def tokens(tmp_path):
    (tmp_path / "tokens").write_bytes(np.arange(1, 95, dtype="uint16").tobytes())
    return MemmapSource(tmp_path / "tokens", window=5, dtype="uint16", offset=4)


def arrays(tmp_path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(9, 3)).astype(">f4"))
    np.save(tmp_path / "y.npy", np.arange(9))
    return ArraySource(tmp_path / "x.npy", tmp_path / "y.npy")


def slabs(tmp_path):
    values = np.random.default_rng(0).normal(size=(5, 2, 4, 3))
    for number, sample in enumerate(values):
        write_sample(tmp_path / f"{number}.hdf5", {"full": sample})
    np.save(tmp_path / "labels.npy", np.arange(5 * 12).reshape(5, 4, 3))
    files = [tmp_path / f"{number}.hdf5" for number in range(5)]
    return SlabSource(Hdf5Slabs(files, "full"), NpySlabs(tmp_path / "labels.npy"), finish=double)


SOURCES = {
    "tokens": tokens,
    "arrays": arrays,
    "slabs": slabs,
    "tensors": lambda _: TensorSource(torch.randn(7, 2), torch.arange(7)),
    "data set": lambda _: DatasetSource(Points(12)),
    "one that draws": lambda _: DatasetSource(Shaken(12)),
    "one sample": lambda _: DatasetSource(Points(1)),
    "not a number": lambda _: TensorSource(torch.full((4, 2), float("nan"))),
    "prepared": lambda _: cached(Points(12), "prepared", memory="1 MiB", prepare=double),
    "augmented on disk": lambda path: cached(Points(12), "disk", disk=path / "c", augment=shake),
    "cached rows": lambda _: cached(TensorDataset(torch.randn(8, 3)), "rows", memory="1 MiB"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_sound_source_gives_what_lies_below_it(tmp_path, name):
    check_source(SOURCES[name](tmp_path))


@pytest.mark.parametrize("name", ["tokens", "arrays", "slabs", "tensors", "data set"])
def test_a_source_that_takes_another_sample_is_named(tmp_path, monkeypatch, name):
    source = SOURCES[name](tmp_path)
    kind, last = type(source), len(source) - 1
    original = kind.read
    monkeypatch.setattr(kind, "read", lambda self, i: original(self, [min(n + 1, last) for n in i]))
    if name == "data set":
        monkeypatch.setattr(kind, "read_seeded", lambda self, i, _: self.read(i))
    with pytest.raises(NotEqual, match=f"samples .* of the {kind.__name__} are not"):
        check_source(source)


def test_a_wrong_count_is_named(monkeypatch):
    monkeypatch.setattr(TensorSource, "__len__", lambda self: 6)
    with pytest.raises(NotEqual, match="6 samples in place of the 7 below it"):
        check_source(TensorSource(torch.randn(7, 2)))


def test_draws_from_a_wrong_seed_are_found(monkeypatch):
    original = GlobalGenerators.seed
    monkeypatch.setattr(GlobalGenerators, "seed", lambda self, seed: original(self, seed % 2**32))
    with pytest.raises(NotEqual, match="DatasetSource"):
        check_source(DatasetSource(Shaken(12)))


def test_samples_that_do_not_fit_together_are_joined_as_the_data_set_says():
    def padded(samples):
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)

    source = DatasetSource([torch.ones(n + 1) for n in range(4)], padded)
    assert read_batch(source, [0, 3, 1], SEEDS).shape == (3, 4)
