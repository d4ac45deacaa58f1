"""A stream of samples (`IterableDataset`, Hugging Face streaming, shards) as a source.

The law of order: batch k of an epoch is the samples kB to (k+1)B - 1 in the order in which one
process reads the stream. Every rank reads it and keeps its share; each epoch reads it anew. A run
that resumes skips what was used by counting. An epoch has `length` samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from headway.data.source import Collate, GlobalGenerators, explained, join_samples
from headway.errors import DataError


class StreamSource:
    """The samples of a stream by their places in it; asked for in rising order, read once.

    Args:
        length: Samples of an epoch, the first ones of the stream; None: its `len`.
        collate: Makes one batch of a list of samples; None: torch's `default_collate`.

    Raises:
        DataError: It has no length, or can be read only once.
    """

    def __init__(
        self, stream: Iterable[Any], length: int | None = None, collate: Collate | None = None
    ) -> None:
        self.stream, self.collate = stream, collate or default_collate
        self._kind = kind = type(stream).__name__
        if isinstance(stream, Iterator):
            raise DataError(
                f"this {kind} can be read only once",
                why="Each epoch, and each run that resumes, reads the stream from its beginning.",
                fix="Give an object whose __iter__ begins anew, for example an IterableDataset.",
            )
        try:
            self._length = len(stream) if length is None else length  # type: ignore[arg-type]
        except TypeError:
            raise DataError(
                f"this {kind} has no length",
                why="An epoch is a number of samples; a stream does not say where it ends.",
                fix="Write data=headway.data.StreamSource(stream, length=10_000), or give the "
                "stream a __len__.",
            ) from None
        self._reading: tuple[int, int, Iterator[Any]] | None = None

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Sequence[int]) -> Any:
        """The samples at these places as one batch.

        Raises:
            DataError: The stream ends before, fails, or draws from the global generators.
        """
        generators = GlobalGenerators()
        try:
            samples = [self._sample(index) for index in indices]
            drew = generators.used()
        finally:
            generators.restore()
        if drew:
            raise DataError(
                f"{self._kind} draws from the global random generators",
                why="What it gives would depend on how many samples were read before.",
                fix="Give it a generator of its own, seeded in __iter__.",
            )
        return join_samples(self.collate, indices, samples, self._kind)

    def beginning(self) -> str:
        """The first sample as text, by which ranks compare what they read."""
        return repr(tree_map(_plain, self._sample(0)))

    def _sample(self, index: int) -> Any:
        place, process, samples = self._reading or (0, 0, iter(()))
        # A forked process shares the offsets of open files with the one that opened them.
        if self._reading is None or place > index or process != os.getpid():
            with explained(f"{self._kind} cannot be read"):
                place, process, samples = 0, os.getpid(), iter(self.stream)
        for number in range(place, index + 1):
            self._reading = None
            with explained(f"sample {number} cannot be read", self._kind):
                try:
                    sample = next(samples)
                except StopIteration:
                    raise DataError(
                        f"{self._kind} ends after {number} of {self._length} samples",
                        fix=f"Write headway.data.StreamSource(stream, length={number}).",
                    ) from None
        self._reading = index + 1, process, samples
        return sample

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reading": None}


def _plain(value: Any) -> Any:
    """Numbers in place of tensors and arrays, whose text would leave some out."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value.tolist() if isinstance(value, np.ndarray) else value
