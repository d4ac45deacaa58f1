"""Single samples of any source, and batches of them again.

A torch data set has samples, and a function that collates them. Any other source has batches, whose
rows are its samples; that they are is checked, because a source that pads to the longest row of a
batch, say, has rows that depend on their neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from headway.data.cache_format import encode
from headway.data.examples import DatasetSource
from headway.data.source import SeededSource, Source
from headway.errors import DataError, HeadwayError

Collate = Callable[[list[Any]], Any]


class Samples(Protocol):
    """Reads single samples, and makes batches of them."""

    def check(self) -> None:
        """Whether the source has single samples.

        Raises:
            DataError: It has not.
        """
        ...

    def read(self, indices: Sequence[int]) -> list[Any]:
        """The samples at `indices`.

        Raises:
            DataError: One cannot be read.
        """
        ...

    def join(self, indices: Sequence[int], samples: list[Any]) -> Any:
        """A batch of them.

        Raises:
            DataError: They do not fit together.
        """
        ...


def samples_of(source: Source, *, collate: Collate | None, prepared: bool) -> Samples:
    """The samples of a source.

    Args:
        source: Any that draws no random numbers.
        collate: Makes batches; None: as the source does, or as torch does if they are prepared.
        prepared: Whether the samples will be changed before they are joined.

    Raises:
        DataError: The source takes seeds of its own, so its samples are random.
    """
    if isinstance(source, DatasetSource):
        return _Items(source, collate or source.collate)
    if isinstance(source, SeededSource):
        raise DataError(
            f"a {type(source).__name__} cannot be cached",
            why="It takes a seed for each sample (read_seeded), so its samples are random.",
            fix="Cache the source below it, and give the random part as `augment`.",
        )
    return _Rows(source, collate or (default_collate if prepared else None))


class _Items:
    """The samples of a map-style data set."""

    def __init__(self, source: DatasetSource, collate: Collate) -> None:
        self._single = DatasetSource(source.dataset, collate=_as_they_are)
        self._collate = collate

    def check(self) -> None:
        """A data set has samples by its nature."""

    def read(self, indices: Sequence[int]) -> list[Any]:
        samples: list[Any] = self._single.read(indices)
        return samples

    def join(self, indices: Sequence[int], samples: list[Any]) -> Any:
        return _joined(self._collate, indices, samples)


class _Rows:
    """The rows of the batches of a source."""

    def __init__(self, source: Source, collate: Collate | None) -> None:
        self._source = source
        self._collate = collate

    def check(self) -> None:
        """Read some samples together and alone, and compare them bit for bit."""
        count = len(self._source)
        some = sorted({0, count // 2, count - 1}) if count else []
        if not some:
            return
        batch = self._batch(some)
        rows = _split(batch, len(some))
        for place in {0, len(some) // 2}:
            alone = self.read([some[place]])[0]
            if encode(alone).to_bytes() != encode(rows[place]).to_bytes():
                raise self._refusal(
                    f"Sample {some[place]} read alone is not its row of a batch of {len(some)}."
                )
        if self._collate is None and not _alike(_stacked(rows), batch):
            raise self._refusal("Its batches have strides other than those of stacked rows.")

    def read(self, indices: Sequence[int]) -> list[Any]:
        return _split(self._batch(indices), len(indices))

    def _batch(self, indices: Sequence[int]) -> Any:
        try:
            return self._source.read(indices)
        except HeadwayError:
            raise
        except Exception as error:
            raise DataError(
                f"{len(indices)} samples from number {indices[0]} on cannot be read",
                where=type(self._source).__name__,
                why=f"{type(error).__name__}: {error}",
            ) from error

    def join(self, indices: Sequence[int], samples: list[Any]) -> Any:
        return _joined(self._collate or _stacked, indices, samples)

    def _refusal(self, why: str) -> DataError:
        return DataError(
            f"the batches of {type(self._source).__name__} are no rows that belong to samples",
            why=why,
            fix="Cache a map-style data set, and give what makes batches of samples as `collate`.",
        )


def _as_they_are(samples: list[Any]) -> Any:
    return samples


def _joined(collate: Collate, indices: Sequence[int], samples: list[Any]) -> Any:
    try:
        return collate(samples)
    except HeadwayError:
        raise
    except Exception as error:
        shown = ", ".join(str(index) for index in indices[:5])
        raise DataError(
            f"samples {shown}{', ...' if len(indices) > 5 else ''} do not fit into one batch",
            why=f"{type(error).__name__}: {error}",
        ) from error


def _split(batch: Any, count: int) -> list[Any]:
    """The rows of a batch: nestings like it, with the entries of dimension 0."""
    if isinstance(batch, Tensor | np.ndarray):
        if not batch.ndim or len(batch) != count:
            raise DataError(
                f"a batch of {count} samples has a part of shape {tuple(batch.shape)}",
                fix="Dimension 0 of everything that `read` returns counts the samples.",
            )
        return [batch[row, ...] for row in range(count)]
    if type(batch) is dict:
        parts = {key: _split(value, count) for key, value in batch.items()}
        return [{key: rows[row] for key, rows in parts.items()} for row in range(count)]
    if type(batch) in (tuple, list):
        columns = [_split(value, count) for value in batch]
        return [type(batch)(rows[row] for rows in columns) for row in range(count)]
    raise DataError(
        f"a batch holds a {type(batch).__name__}",
        why="Rows can only be taken from tensors and arrays, in dict, list and tuple.",
        fix="Cache a map-style data set instead.",
    )


def _stacked(rows: list[Any]) -> Any:
    """The batch that has these rows."""
    first = rows[0]
    if isinstance(first, Tensor):
        return torch.stack(rows)
    if isinstance(first, np.ndarray):
        return np.stack(rows)
    if type(first) is dict:
        return {key: _stacked([row[key] for row in rows]) for key in first}
    return type(first)(_stacked(list(column)) for column in zip(*rows, strict=True))


def _alike(one: Any, other: Any) -> bool:
    """Bits, types and layout of two batches are the same."""
    return encode(one).to_bytes() == encode(other).to_bytes()
