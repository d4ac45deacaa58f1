"""Samples from torch data sets.

A data set may draw random numbers from the global generators of torch, numpy or random, as
augmentation does. Each sample then gets seeds of its own, so that it is the same in whichever
micro-batch, rank or worker it is read. Generators that a data set makes for itself, and those of an
accelerator, are its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from headway.data.generators import Generators
from headway.errors import DataError, HeadwayError

Collate = Callable[[list[Any]], Any]


class DatasetSource:
    """Any map-style torch data set.

    Seeding around every sample would cost a quick data set more than its samples do, and a data
    set's `__getitems__` reads a whole micro-batch at once. So a micro-batch is first read as torch
    reads it, with `__getitems__` if there is one. If that used a random generator, the result is
    thrown away and the samples are read one by one with `__getitem__`, each with its own seeds;
    from then on this source does so at once.

    Args:
        dataset: Has `__len__` and `__getitem__`.
        collate: Makes one batch of a list of samples; torch's `default_collate` if not given. It
            must treat every sample alike: what it draws at random depends on the micro-batch.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate | None = None) -> None:
        self.dataset: Any = dataset
        self.collate = collate or default_collate
        self._draws = False

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: Sequence[int]) -> Any:
        """The samples as one batch; what they draw comes from the global generators as they are.

        Raises:
            DataError: A sample cannot be read, or the samples do not fit into one batch.
        """
        try:
            samples = self._fetch(indices)
        except Exception as error:
            for index in indices:
                self._sample(index)
            raise self._failure(f"samples {_listed(indices)} cannot be read", error) from error
        return self._joined(indices, samples)

    def read_seeded(self, indices: Sequence[int], seeds: Sequence[int]) -> Any:
        """As `read`, with one 64-bit seed per sample; the global generators stay as they were.

        Raises:
            DataError: A sample cannot be read, or the samples do not fit into one batch.
        """
        generators = Generators()
        failure: Exception | None = None
        try:
            if not self._draws:
                try:
                    batch = self.collate(self._fetch(indices))
                except Exception as error:
                    failure = error
                self._draws = generators.used()
                if not self._draws and failure is None:
                    return batch
            batch = self._one_by_one(indices, seeds, generators)
        finally:
            generators.restore()
        if failure is not None and not self._draws:
            what = f"samples {_listed(indices)} cannot be read together"
            raise self._failure(what, failure) from failure
        return batch

    def _fetch(self, indices: Sequence[int]) -> list[Any]:
        together = getattr(self.dataset, "__getitems__", None)
        if together is None:
            return [self.dataset[index] for index in indices]
        samples: list[Any] = together(list(indices))
        if len(samples) != len(indices):
            raise ValueError(f"__getitems__ gave {len(samples)} of {len(indices)} samples")
        return samples

    def _one_by_one(
        self, indices: Sequence[int], seeds: Sequence[int], generators: Generators
    ) -> Any:
        samples = []
        for index, seed in zip(indices, seeds, strict=True):
            generators.seed(seed)
            samples.append(self._sample(index))
        generators.seed(seeds[0])
        return self._joined(indices, samples)

    def _sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            raise self._failure(f"sample {index} cannot be read", error) from error

    def _joined(self, indices: Sequence[int], samples: list[Any]) -> Any:
        try:
            return self.collate(samples)
        except Exception as error:
            what = f"samples {_listed(indices)} do not fit into one batch"
            raise self._failure(what, error) from error

    def _failure(self, what: str, error: Exception) -> HeadwayError:
        """The cause in the words of the data set; an error of headway's own passes as it is."""
        if isinstance(error, HeadwayError):
            return error
        kind = type(self.dataset).__name__
        return DataError(what, where=kind, why=f"{type(error).__name__}: {error}")


class TensorSource:
    """The rows of tensors of equal length; reads a batch at once.

    Gives a list with one tensor each, as torch's loader does for a `TensorDataset`.

    Raises:
        DataError: There is no tensor, or their lengths differ.
    """

    def __init__(self, *tensors: Tensor) -> None:
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1:
            raise DataError(
                "tensors of unequal length" if lengths else "no tensors",
                why=f"Their lengths are {sorted(lengths)}." if lengths else "",
                fix="Give tensors whose dimension 0 counts the same samples.",
            )
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def read(self, indices: Sequence[int]) -> list[Tensor]:
        """One tensor [len(indices), ...] for each of `tensors`."""
        rows = torch.tensor(indices)
        # Not `tensor[rows]`: that wakes torch's threads for 32 rows, 5 ms on busy cores.
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in self.tensors]


def _listed(indices: Sequence[int]) -> str:
    """At most five of them: "3, 1, 4, 1, 5, ... (32)"."""
    shown = ", ".join(str(index) for index in indices[:5])
    return shown if len(indices) <= 5 else f"{shown}, ... ({len(indices)})"
