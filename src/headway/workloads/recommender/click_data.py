"""Samples of recommenders: numbers, ids of several fields, a label of 0 or 1.

A batch is [dense [N, D] float32, ids [N, P] int64, labels [N] float32]. A field has one or several
of the P places; an empty place holds -1. Id 0 of a field is what training has never seen.

What is learned from a column (its vocabulary, mean, bins) is learned from the training samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.source import Source, TensorSource
from headway.data.stream import StreamSource

Array = NDArray[Any]


@dataclass(frozen=True)
class Field:
    """Ids of one kind.

    Attributes:
        rows: Ids are below it.
        places: Ids that a sample has at most.
    """

    name: str
    rows: int
    places: int = 1


@dataclass(frozen=True)
class ClickData:
    """A data set, divided.

    Attributes:
        source: What it is, for the record: "adult", "random numbers made from seed 0".
        numbers: Names of the D columns of `dense`.
        fields: In the order of their places.
    """

    source: str
    numbers: tuple[str, ...]
    fields: tuple[Field, ...]
    training: Source | StreamSource
    validation: Source | StreamSource


class ClickTable:
    """Makes `ClickData` of columns.

    Args:
        labels: [N], 0 or 1.
        trained: [N] bool; the others validate.
        bins: Each number is also a field of so many ids, one for each quantile; 0: none.
    """

    def __init__(self, labels: Array, trained: Array, *, bins: int) -> None:
        self._labels, self._trained, self._bins = labels, trained, bins
        self._fields: list[Field] = []
        self._ids: list[Array] = []
        self._numbers: list[str] = []
        self._dense: list[Array] = []

    def category(self, name: str, values: Array) -> None:
        """A field of one id: values [N] of any type that can be sorted."""
        known = np.unique(values[self._trained])
        places = np.minimum(np.searchsorted(known, values), len(known) - 1)
        self._field(name, len(known), np.where(known[places] == values, places + 1, 0)[:, None])

    def several(self, name: str, flags: Array) -> None:
        """A field of several ids: flags [N, K], which of K ids a sample has."""
        places = max(1, int(flags.sum(1).max()))
        # The numbers of the ids that are set first, -1 behind them.
        order = np.argsort(~flags.astype(bool), axis=1, kind="stable")[:, :places]
        ids = np.where(np.take_along_axis(flags, order, 1), order + 1, -1)
        self._field(name, flags.shape[1], ids)

    def number(self, name: str, values: Array, *, logarithm: bool = False) -> None:
        """A column of `dense`, and its bins as a field: values [N] float, NaN where missing.

        Args:
            logarithm: The column is log(1 + value), for values that differ by magnitudes.
        """
        seen = values[self._trained & ~np.isnan(values)]
        if self._bins:
            edges = np.unique(np.quantile(seen, np.linspace(0, 1, self._bins + 1)[1:-1]))
            bins = np.searchsorted(edges, values, side="right") + 1
            self._field(f"{name} bin", len(edges) + 1, np.where(np.isnan(values), 0, bins)[:, None])
        scaled, seen = (np.log1p(v) if logarithm else v for v in (values, seen))
        spread = float(seen.std()) or 1.0
        self._numbers.append(name)
        self._dense.append(np.nan_to_num((scaled - seen.mean()) / spread))

    def finish(self, source: str) -> ClickData:
        """The data set."""
        dense = torch.tensor(np.stack(self._dense, 1), dtype=torch.float32)
        ids = torch.tensor(np.concatenate(self._ids, 1), dtype=torch.int64)
        labels = torch.tensor(self._labels, dtype=torch.float32)
        chosen = [torch.from_numpy(np.flatnonzero(m)) for m in (self._trained, ~self._trained)]
        halves = [TensorSource(dense[rows], ids[rows], labels[rows]) for rows in chosen]
        return ClickData(source, tuple(self._numbers), tuple(self._fields), *halves)

    def _field(self, name: str, known: int, ids: Array) -> None:
        self._fields.append(Field(name, known + 1, ids.shape[1]))
        self._ids.append(ids)


def places_of(fields: Sequence[Field]) -> tuple[int, ...]:
    """How many columns of `ids` each field has."""
    return tuple(field.places for field in fields)
