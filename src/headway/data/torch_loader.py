"""A torch `DataLoader` taken apart: data set, `collate_fn`, sampler, batch, workers, pinned memory.

torch's loader makes whole batches in one process. Here its parts serve every rank: the global batch
is exactly the loader's batch, of which each rank reads and collates its own samples.

- `shuffle=True` without a generator is headway's shuffle of (seed, epoch); without `shuffle` the
  samples stay in order; every other sampler is drawn (`SamplerOrder`).
- A sampler of batches decides which samples make a batch; batches may differ in size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from headway.data.sampler_order import SamplerOrder
from headway.data.source import Collate, DatasetSource, SeededSource, Source, as_source
from headway.data.stream import StreamSource
from headway.errors import DataError


class LoaderSource:
    """The samples of a map-style loader, which order they come in, and in which batches.

    Attributes:
        samples: Reads the samples by their numbers in the data set.
        drop_last: As the loader says.
        shuffle: Whether headway shuffles; with a drawn order it is not asked.
        workers: Processes that read ahead.
        pin: Whether batches are put into page-locked memory.
    """

    def __init__(self, loader: DataLoader[Any], collate: Collate | None = None) -> None:
        self.loader = loader
        self.samples = self._samples_of(loader, collate)
        self.workers, self.pin = int(loader.num_workers), bool(loader.pin_memory)
        batches: Any = loader.batch_sampler
        if batches is None:
            raise DataError(
                "the DataLoader has batch_size=None",
                why="headway cuts batches over ranks, so it reads samples and collates them.",
                fix="Give DataLoader(dataset, batch_size=64), with a data set of samples.",
            )
        self._own_batches = type(batches) is not BatchSampler
        self._stated: int | None = None if self._own_batches else int(batches.batch_size)
        self.drop_last = False if self._own_batches else bool(batches.drop_last)
        self._sampler: Any = batches if self._own_batches else batches.sampler
        _refuse_distributed(self._sampler, getattr(batches, "sampler", None))
        kind = type(self._sampler)
        whole = (
            kind is RandomSampler
            and not self._sampler.replacement
            and self._sampler.num_samples == len(self.samples)
            and self._sampler.generator is None
        )
        self.shuffle = whole
        in_order = isinstance(self.samples, StreamSource) or (
            kind is SequentialSampler and len(self._sampler) == len(self.samples)
        )
        self._drawn = not (whole or in_order)

    def __len__(self) -> int:
        """Places of an epoch; of a drawn order those of the first."""
        if not self._drawn:
            return len(self.samples)
        if self._own_batches:
            return sum(self._first.sizes(0, 0, drop_last=False))
        return len(self._first.indices(0, 0, 2**62))

    @property
    def batch(self) -> int:
        """Samples of a batch; of a sampler of batches the most in the first epoch."""
        if self._stated is not None:
            return self._stated
        return max(self._first.sizes(0, 0, drop_last=False))

    def order(self, seed: int) -> SamplerOrder | None:
        """The order that the sampler draws; None: headway's, or as the samples lie."""
        if not self._drawn:
            return None
        return SamplerOrder(
            self._sampler,
            seed,
            batches=self._own_batches,
            generator=self.loader.generator,
            shared=self.loader.dataset,
        )

    def read(self, indices: Sequence[int]) -> Any:
        return self.samples.read(indices)

    def read_seeded(self, indices: Sequence[int], seeds: Sequence[int]) -> Any:
        """As `read`, with a seed for what each sample draws."""
        if isinstance(self.samples, SeededSource):
            return self.samples.read_seeded(indices, seeds)
        return self.samples.read(indices)

    @cached_property
    def _first(self) -> SamplerOrder:
        # How many samples there are, and in which batches, must not depend on the seed.
        found = self.order(0)
        assert found is not None
        return found

    @staticmethod
    def _samples_of(loader: DataLoader[Any], collate: Collate | None) -> Source:
        given: Any = loader.collate_fn
        if collate is not None and given is not default_collate:
            raise DataError(
                "collate is given twice",
                why="The DataLoader has a collate_fn, and the recipe has collate.",
                fix="Leave one of them out.",
            )
        if is_stream(loader.dataset):
            stream: Any = loader.dataset
            return StreamSource(stream, collate=collate or given)
        joined = collate or (None if given is default_collate else given)
        return (
            as_source(loader.dataset) if joined is None else DatasetSource(loader.dataset, joined)
        )


def stream_of(source: Source) -> StreamSource | None:
    """The stream below what is read, if there is one."""
    samples = source.samples if isinstance(source, LoaderSource) else source
    return samples if isinstance(samples, StreamSource) else None


def known_length(source: Source) -> int | None:
    """Samples of an epoch; None: it ends where a stream ends."""
    stream = stream_of(source)
    return len(source) if stream is None else stream.length


def is_stream(given: Any) -> bool:
    """Whether samples have no numbers, and come one after the other."""
    if isinstance(given, IterableDataset):
        return True
    numbered = hasattr(given, "__getitem__") or hasattr(given, "read")
    return hasattr(given, "__iter__") and not numbered


def _refuse_distributed(*samplers: Any) -> None:
    if any(isinstance(one, DistributedSampler) for one in samplers):
        raise DataError(
            "the DataLoader has a DistributedSampler",
            why="headway splits every batch over the ranks itself.",
            fix="Leave it out: DataLoader(dataset, batch_size=..., shuffle=True), where batch_size "
            "is that of all ranks together.",
        )
