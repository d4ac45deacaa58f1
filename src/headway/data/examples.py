"""What users give as data, as what a loader reads: a `Source`, a `Stream`, a torch `DataLoader`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from headway.data.source import Collate, DatasetSource, Source, as_source
from headway.data.stateful_source import check_slots
from headway.data.stream import StreamSource
from headway.data.torch_loader import LoaderSource, is_stream, known_length
from headway.errors import DataError

EpochLength = int | None | Callable[[int], Sequence[int]]
"""Samples of an epoch; None: not known before it was read; a function: the samples of each batch of
an epoch, by its number."""


def as_examples(given: Any, collate: Collate | None = None) -> Source:
    """What was given as data, as what is read.

    Args:
        given: A `Source`, a map-style data set, a stream, or a torch `DataLoader`,
            which is taken apart.
        collate: Makes a batch of a list of samples.

    Raises:
        DataError: It is none of these, or makes its batches in two ways.
    """
    if isinstance(given, DataLoader):
        return LoaderSource(given, collate)
    if is_stream(given):
        return StreamSource(given, collate=collate)
    if collate is None:
        return as_source(given)
    if isinstance(given, Source):
        raise DataError(
            f"collate does not fit a {type(given).__name__}",
            why="A source joins its samples itself.",
            fix="Leave collate out, or give a map-style data set.",
        )
    as_source(given)  # says what is no data set
    return DatasetSource(given, collate)


def epoch_length(examples: Source, seed: int, batch: int, *, drop_last: bool) -> EpochLength:
    """How long the epochs of a run are."""
    order = examples.order(seed) if isinstance(examples, LoaderSource) else None
    if order is None:
        return known_length(examples)
    return lambda epoch: order.sizes(epoch, batch, drop_last=drop_last)


def check_batch(examples: Source, batch: int, *, drop_last: bool, where: str = "") -> None:
    """Compare a loader's batch, or the slots of a stateful source, with the batch of the run.

    Raises:
        DataError: They are not the same.
    """
    check_slots(examples, batch, where=where)
    if not isinstance(examples, LoaderSource):
        return
    if examples.batch != batch:
        raise DataError(
            f"the DataLoader's batch has {examples.batch} samples, that of the run {batch}",
            where=where,
            why="The loader's batch is the global batch, of all ranks together.",
            fix=f"Set batch={examples.batch} here, or batch_size={batch} in the DataLoader; a "
            "Recipe may leave batch out.",
        )
    if examples.drop_last and not drop_last:
        raise DataError(
            "the DataLoader leaves out the last batch of an epoch, the run does not",
            where=where,
            fix="Set drop_last=True here as well; a Recipe that leaves batch out takes it from "
            "the loader.",
        )
