"""The epochs of the reference: which samples, in which batches, worked out a second time.

Of a torch `DataLoader` torch's own loader says it, in one process: a loader with the same sampler
and generator, over a data set that gives the numbers of its samples.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from headway.data import Cursor, LoaderSource, Source, StatefulSource
from headway.data.torch_loader import known_length, stream_of
from headway.run.recipe.recipe import Recipe
from headway.verification.reference.draws import sampler_seed
from headway.verification.reference.recipes import batch_samples
from headway.verification.reference.sources import drawing, stream_pass

LOOKED_AT = 1024
"""Samples within which the end of a stream without a length is looked for."""


@dataclass(frozen=True)
class ReferenceEpochs:
    """The batches of every epoch of a source.

    Args:
        batch: Samples of a whole batch, where no sampler makes batches.
    """

    source: Source
    seed: int
    batch: int
    drop_last: bool

    @property
    def drawn(self) -> bool:
        """Whether a user's sampler decides."""
        return isinstance(self.source, LoaderSource) and not plain(self.source.loader)

    @property
    def _makes_batches(self) -> bool:
        own = isinstance(self.source, LoaderSource) and self.source.loader.batch_sampler
        return type(own) is not BatchSampler

    @property
    def shuffled(self) -> bool:
        """Whether it is headway's order that decides, not the samples' own."""
        if not isinstance(self.source, LoaderSource):
            return stream_of(self.source) is None and not isinstance(self.source, StatefulSource)
        return type(self.source.loader.sampler) is RandomSampler

    def samples(self, epoch: int) -> list[int]:
        """Of a drawn order the samples of an epoch."""
        return [index for batch in self._drawn(epoch) for index in batch]

    @property
    def endless(self) -> bool:
        """Whether only reading says where an epoch ends."""
        return not self.drawn and known_length(self.source) is None

    def sizes(self, epoch: int, *, within: int = LOOKED_AT) -> Sequence[int]:
        """Samples of each batch of an epoch.

        Args:
            within: Of a stream without a length so many samples are looked at, no more.
        """
        if self.drawn and self._makes_batches:
            return [len(batch) for batch in self._drawn(epoch)]
        length = len(self.samples(epoch)) if self.drawn else self._length(epoch, within)
        whole, rest = divmod(length, self.batch)
        return [self.batch] * whole + [rest] * (rest > 0 and not self.drop_last)

    def behind(self, at: Cursor) -> Cursor:
        """Where the batch behind the one that begins at a cursor begins."""
        place = 0
        for size in self.sizes_around(at)[:-1]:
            place += size
            if place > at.position:
                return Cursor(seed=at.seed, epoch=at.epoch, position=place)
        return Cursor(seed=at.seed, epoch=at.epoch + 1)

    def sizes_around(self, at: Cursor) -> Sequence[int]:
        """As `sizes`, as far as the batch that begins at a cursor and the next one."""
        return self.sizes(at.epoch, within=at.position + 2 * self.batch + 1)

    def sizes_to_the_end(self, epoch: int) -> Sequence[int]:
        """As `sizes`; nothing where the end of a stream is far."""
        if self.endless and self._length(epoch, LOOKED_AT + 1) > LOOKED_AT:
            return []
        return self.sizes(epoch)

    def counted_sizes(self, epoch: int) -> Sequence[int]:
        """As `sizes`, by which steps are counted: without a length all batches are whole."""
        return [self.batch] if self.endless else self.sizes(epoch)

    def _length(self, epoch: int, most: int) -> int:
        """Samples of an epoch; of a stream without a length at most so many."""
        stream = stream_of(self.source)
        if stream is None or stream.length is not None:
            return len(self.source)
        return stream_pass(stream, epoch).length(most)

    def _drawn(self, epoch: int) -> list[list[int]]:
        assert isinstance(self.source, LoaderSource)
        return _passes(self.source.loader, self.seed, epoch + 1)[epoch]


def reference_epochs(recipe: Recipe, source: Source) -> ReferenceEpochs:
    """The epochs of a recipe's training data."""
    return ReferenceEpochs(source, recipe.seed, batch_samples(recipe), recipe.drop_last)


def plain(loader: DataLoader[Any]) -> bool:
    """Whether a loader has no order but that of `shuffle`, without a generator of its own."""
    batches, sampler = loader.batch_sampler, loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return True
    if type(batches) is not BatchSampler:
        return False
    sampler = batches.sampler if loader.batch_size is None else sampler
    length = len(loader.dataset)  # type: ignore[arg-type]
    if isinstance(sampler, RandomSampler):
        alone = sampler.generator is None and not sampler.replacement
        return type(sampler) is RandomSampler and alone and sampler.num_samples == length
    return type(sampler) is SequentialSampler and len(sampler) == length


class _Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return int(index)


@lru_cache(maxsize=4)
def _passes(loader: DataLoader[Any], seed: int, passes: int) -> list[list[list[int]]]:
    """The batches of the first passes over a loader."""
    data = loader.dataset
    given = loader.batch_sampler, loader.generator
    batches, generator = copy.deepcopy(given, {id(data): data})
    if type(batches) is BatchSampler:  # all samples, also of a batch that training leaves out
        batches = BatchSampler(batches.sampler, batches.batch_size, drop_last=False)
    numbers: DataLoader[Any] = DataLoader(
        _Numbers(), batch_sampler=batches, generator=generator, collate_fn=list
    )
    found = []
    for epoch in range(passes):
        for one in (batches, getattr(batches, "sampler", None)):
            if one is not None and hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        with drawing(sampler_seed(seed, epoch)):
            found.append(list(numbers))
    return found
