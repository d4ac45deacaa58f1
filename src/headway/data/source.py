"""Where samples come from.

A source gives random access to samples and knows nothing about ranks, order or batches. `read` is a
function of its indices alone; what draws random numbers takes its seeds from the loader
(`SeededSource`), so that no number of ranks or workers changes a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, TensorDataset

from headway.data.examples import DatasetSource, TensorSource
from headway.data.mapped import ArraySource, MemmapSource
from headway.errors import DataError

__all__ = [
    "ArraySource",
    "DatasetSource",
    "MemmapSource",
    "SeededSource",
    "Source",
    "TensorSource",
    "as_source",
]


@runtime_checkable
class Source(Protocol):
    """Random access to samples; knows nothing about ranks, order or batches."""

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def read(self, indices: Sequence[int]) -> Any:
        """The samples at `indices` as one batch: tensors (or tuples, lists, dicts of tensors) whose
        dimension 0 has one entry per index."""
        ...


@runtime_checkable
class SeededSource(Source, Protocol):
    """A source whose samples may draw random numbers (augmentation)."""

    def read_seeded(self, indices: Sequence[int], seeds: Sequence[int]) -> Any:
        """As `read`; all that is drawn for sample `indices[i]` follows from `seeds[i]` (64 bits),
        and the global generators of the process are left as they were."""
        ...


def as_source(examples: Any) -> Source:
    """What a user gave as data, as a source: a `Source` itself, or any map-style torch `Dataset`.

    Raises:
        DataError: It is neither.
    """
    if isinstance(examples, Source):
        return examples
    # Exactly this class: a subclass may do anything in __getitem__.
    if type(examples) is TensorDataset:
        return TensorSource(*examples.tensors)
    kind = type(examples).__name__
    if isinstance(examples, IterableDataset):
        raise DataError(
            f"{kind} is an iterable data set",
            why="Its samples have no numbers, so they can be neither shuffled nor resumed.",
            fix="Give a map-style data set: __len__ and __getitem__.",
        )
    if not (hasattr(examples, "__len__") and hasattr(examples, "__getitem__")):
        raise DataError(
            f"{kind} is not a data set",
            why="A map-style data set has __len__ and __getitem__; a source has __len__ and read.",
            fix="Give one of these; for files see MemmapSource and ArraySource.",
        )
    if isinstance(examples, str | bytes | dict):
        raise DataError(
            f"a {kind} is not a data set",
            fix="Give a map-style data set; for files see MemmapSource and ArraySource.",
        )
    return DatasetSource(examples)
