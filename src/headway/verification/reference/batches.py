"""The batches of the reference, read by a path of their own: one sample after the other.

Nothing of the loader is used. The order of an epoch is the reference's own; that the run's is the
same, and visits every sample exactly once, is checked here, and that the shares of all copies
together are the global batch.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from headway.data import Cursor, MicroBatch, RankBatch, SampleOrder, Source
from headway.data.order import sample_seeds
from headway.data.stateful_source import absorber, begin_slots
from headway.errors import NotEqual
from headway.plans import BatchSplit
from headway.verification.reference.draws import seeds_of_samples, shuffled
from headway.verification.reference.epochs import ReferenceEpochs
from headway.verification.reference.sources import read_batch


def reference_batches(
    source: Source,
    split: BatchSplit,
    copies: int,
    start: Cursor,
    *,
    steps: int | None,
    drop_last: bool,
    in_order: int | None = None,
) -> Iterator[tuple[RankBatch, ...]]:
    """The batches of every copy, for so many steps from `start` on.

    Args:
        steps: None: until the end of the epoch.
        in_order: Of an epoch only so many samples, as they lie; None: all, in the epoch's order.

    Raises:
        NotEqual: An epoch does not visit every sample once, or the copies' shares do not make up
            the global batch.
    """
    begin_slots(source)
    epochs = ReferenceEpochs(source, start.seed, split.samples, drop_last)
    orders: dict[int, Sequence[int]] = {}
    at = start
    for _ in itertools.count() if steps is None else range(steps):
        epoch, place = at.epoch, at.position
        if epoch not in orders:
            orders = {epoch: _order(epochs, epoch, ordered=in_order is not None)}
        order = orders[epoch][:in_order]
        count = min(_count(epochs, at), len(order) - place)
        if steps is None and (epoch > start.epoch or count <= 0):
            return
        after = epochs.behind(at)
        yield tuple(
            RankBatch(
                micros=tuple(
                    MicroBatch(
                        data=_read(source, order, at, part),
                        positions=part,
                        absorb=absorber(source, part),
                    )
                    for part in parts
                ),
                samples=count,
                start=at,
                after=after,
                passes=len(parts),
            )
            for parts in _shares(split, copies, count, place)
        )
        at = after


def _count(epochs: ReferenceEpochs, at: Cursor) -> int:
    """Samples of the batch that begins at a cursor."""
    ends = [*accumulate(epochs.sizes_around(at))]
    return next(end for end in ends if end > at.position) - at.position


def _order(epochs: ReferenceEpochs, epoch: int, *, ordered: bool) -> Sequence[int]:
    """Which sample stands at each place of an epoch."""
    if epochs.drawn:
        return epochs.samples(epoch)
    if epochs.endless:
        return range(sys.maxsize)
    length = len(epochs.source)
    if ordered or not epochs.shuffled:
        return range(length)
    return epoch_order(length, epochs.seed, epoch)


MANY = 16
"""Samples from which on two orders are equal by chance once in 2e13."""


def epoch_order(length: int, seed: int, epoch: int) -> Sequence[int]:
    """Which sample stands at each place of an epoch.

    Raises:
        NotEqual: A sample is left out, or visited twice; the next epoch is like this one; or the
            order is another one than seed and epoch define.
    """
    order = SampleOrder(length, seed).indices(epoch, 0, length)
    missing = np.setdiff1d(np.arange(length), order)
    if missing.size or order.size != length:
        raise NotEqual(
            f"epoch {epoch} does not visit every sample exactly once",
            where=f"{missing.size} of {length} samples are left out, sample {missing[0]} first"
            if missing.size
            else f"{order.size} places for {length} samples",
        )
    if not np.array_equal(order, shuffled(length, seed, epoch)):
        following = SampleOrder(length, seed).indices(epoch + 1, 0, length)
        if length >= MANY and np.array_equal(order, following):
            raise NotEqual(f"epochs {epoch} and {epoch + 1} visit the samples in the same order")
        raise NotEqual(f"the order of epoch {epoch} is not the one that seed {seed} defines")
    seeds = sample_seeds(seed, epoch, 0, 2)
    if seeds == sample_seeds(seed, epoch + 1, 0, 2):
        raise NotEqual(f"samples draw the same random numbers in epochs {epoch} and {epoch + 1}")
    if seeds != seeds_of_samples(seed, epoch, range(2)):
        raise NotEqual(f"samples of epoch {epoch} draw other numbers than seed {seed} defines")
    found: list[int] = order.tolist()
    return found


def _shares(split: BatchSplit, copies: int, count: int, place: int) -> list[tuple[range, ...]]:
    """The micro-batches of each copy, as places of the epoch."""
    found = []
    for copy in range(copies):
        share = split.share(copy, copies, count)
        shifted = range(place + share.start, place + share.stop)
        found.append(split.microbatches(shifted))
    every = (part for parts in found for part in parts)
    whole = [place, *(end for part in every for end in (part.start, part.stop)), place + count]
    # Begin and end of each part in turn: between two parts nothing is left out or taken twice.
    gaps = list(pairwise(whole))[::2]
    if any(a != b for a, b in gaps):
        raise NotEqual(
            "the shares of the global batch are not the global batch",
            where=f"{count} samples over {copies} copies",
            why=f"Places {found} of {place} to {place + count - 1}.",
        )
    return found


def _read(source: Source, order: Sequence[int], at: Cursor, part: range) -> Any:
    """The samples at some places, each read by itself."""
    indices = [order[place] for place in part]
    return read_batch(source, indices, seeds_of_samples(at.seed, at.epoch, part), epoch=at.epoch)
