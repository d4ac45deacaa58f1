"""The order in which an epoch visits its samples, and where a run stands in it.

The order is a permutation of 0..length-1 that depends on (seed, epoch) alone, never on ranks,
workers or batch sizes. It is computed, not stored: a Feistel network on a grid just larger than the
length, with cycle walking for the few places outside (Black and Rogaway 2002, "Ciphers with
arbitrary finite domains", section 4). Any part of an epoch can be asked for in constant memory, so
a run that resumes in the middle of an epoch skips nothing and replays nothing.

A batch is a range of places of one epoch. No batch crosses the end of an epoch: the last one is
ragged, or left out with `drop_last`. Arithmetic without torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.errors import DataError

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

# Each round stirs both halves of a place. Chi-squared over all 720 permutations of six samples is
# off by 10 standard deviations with 5 rounds, 4 with 6, and 1 with 8.
_ROUNDS = 8
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


@dataclass(frozen=True)
class SampleOrder:
    """The order of the samples of every epoch."""

    length: int
    seed: int
    shuffle: bool = field(default=True, kw_only=True)

    def indices(self, epoch: int, start: int, stop: int) -> Indices:
        """Which samples stand at the places start..stop-1 of an epoch; int64 [stop - start].

        Raises:
            IndexError: The places are not within 0..length.
        """
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"places {start}..{stop} of an epoch of {self.length} samples")
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        grid = _Grid(self.length, _keys("order", self.seed, epoch, 2 * _ROUNDS))
        return grid.permute(np.arange(start, stop, dtype=np.uint64)).astype(np.int64)


def sample_seeds(seed: int, epoch: int, start: int, stop: int) -> list[int]:
    """64-bit seeds for the random draws inside the samples at the places start..stop-1.

    They depend on (seed, epoch, place) alone: augmentation is the same for any ranks and workers.
    """
    first, second = _keys("sample", seed, epoch, 2)
    places = np.arange(start, stop, dtype=np.uint64)
    seeds: list[int] = _mix(_mix(places ^ first) ^ second).tolist()
    return seeds


def sampler_seed(seed: int, epoch: int) -> int:
    """64 bits: the seed of what a user's sampler draws from the global generators in an epoch."""
    return int(_keys("sampler", seed, epoch, 1)[0])


class _Grid:
    """A permutation of 0..length-1 within a grid of rows x columns places, rows an even number."""

    def __init__(self, length: int, keys: Words) -> None:
        # With an even number of rows both even and odd permutations are reached. The grid has fewer
        # than 3 * sqrt(length) + 4 places too many, so few places walk more than once.
        rows = math.isqrt(length - 1) + 1
        rows += rows % 2
        self.length = np.uint64(length)
        self.rows, self.columns = np.uint64(rows), np.uint64(-(-length // rows))
        self.keys = keys

    def permute(self, places: Words) -> Words:
        result = self._stir(places)
        # Cycle walking: what falls outside is stirred again until it is inside, and no two places
        # meet.
        while (outside := result >= self.length).any():
            result[outside] = self._stir(result[outside])
        return result

    def _stir(self, places: Words) -> Words:
        row, column = np.divmod(places, self.columns)
        for first, second in zip(self.keys[::2], self.keys[1::2], strict=True):
            # The reductions before the sums keep them below 2**64, where each round is invertible.
            row = (row + _mix(column ^ first) % self.rows) % self.rows
            column = (column + _mix(row ^ second) % self.columns) % self.columns
        stirred: Words = row * self.columns + column
        return stirred


def _keys(purpose: str, seed: int, epoch: int, count: int) -> Words:
    # A hash, because numpy may change the streams of its generators.
    digest = hashlib.shake_128(f"{purpose} {seed} {epoch}".encode()).digest(8 * count)
    # One byte order for all machines, or the order of the samples would depend on them.
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _mix(words: Words) -> Words:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the word."""
    words = (words ^ (words >> _S30)) * _FIRST
    words = (words ^ (words >> _S27)) * _SECOND
    mixed: Words = words ^ (words >> _S31)
    return mixed


@dataclass(frozen=True)
class Cursor:
    """The place of the next sample that no optimiser step has used.

    Attributes:
        position: Samples of the epoch already used.
        stream: The state of a stream at a place before, by which it can skip to this one; see
            `StreamSource.mark`.
    """

    seed: int
    epoch: int = 0
    position: int = 0
    stream: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        facts: dict[str, Any] = {name: getattr(self, name) for name in _COUNTS}
        return facts if self.stream is None else facts | {"stream": dict(self.stream)}

    @staticmethod
    def from_dict(facts: Mapping[str, Any]) -> Cursor:
        """The cursor that `to_dict` described.

        Raises:
            DataError: A key is missing or unknown, or a value is not a count.
        """
        if (
            set(facts) - {"stream"} != set(_COUNTS)
            or not all(type(facts[name]) is int for name in _COUNTS)  # True is no count
            or min(facts["epoch"], facts["position"]) < 0
        ):
            raise DataError(
                "not a cursor",
                why=f"It needs the whole numbers {', '.join(_COUNTS)} and is {dict(facts)}.",
            )
        return Cursor(**facts)


_COUNTS = ("seed", "epoch", "position")


@dataclass(frozen=True)
class GlobalBatch:
    """`count` places of an epoch from the cursor `start` on; the next one begins at `after`."""

    count: int
    start: Cursor
    after: Cursor


class BatchOrder(Protocol):
    """An order with batches of its own: that of a user's sampler."""

    def take(self, cursor: Cursor, batch: int, drop_last: bool) -> tuple[int, Cursor]: ...


@dataclass(frozen=True)
class GlobalBatches:
    """The global batches from a cursor on, up to epoch `epochs`; arguments as of `take`.

    Attributes:
        order: Says which batches there are; None: `take` does.

    Raises:
        DataError: The cursor lies outside an epoch, so it belongs to other data.
    """

    cursor: Cursor
    length: int
    batch: int
    drop_last: bool
    epochs: int | None
    order: BatchOrder | None = None

    def __post_init__(self) -> None:
        self._take(self.cursor)

    def __iter__(self) -> Iterator[GlobalBatch]:
        cursor = self.cursor
        while self.epochs is None or cursor.epoch < self.epochs:
            count, after = self._take(cursor)
            if count:  # 0 for a rest that is left out, when a run resumes with a larger batch
                yield GlobalBatch(count, cursor, after)
            cursor = after

    def _take(self, cursor: Cursor) -> tuple[int, Cursor]:
        if self.order is not None:
            return self.order.take(cursor, self.batch, self.drop_last)
        return take(cursor, self.length, self.batch, self.drop_last)


def take(cursor: Cursor, length: int, batch: int, drop_last: bool = False) -> tuple[int, Cursor]:
    """The batch that begins at a cursor.

    Args:
        drop_last: Whether the ragged last batch of an epoch is left out.

    Returns:
        How many samples it has, so that it is places [position, position + count) of the epoch, and
        the cursor after it. The count is 0 only for a rest that is left out (when a run resumes
        with a larger batch than before); the cursor after it begins the next epoch.

    Raises:
        DataError: The cursor lies outside an epoch, so it belongs to other data.
    """
    rest = length - cursor.position
    if rest <= 0:
        raise DataError(
            "the run stands outside its data",
            where=f"epoch {cursor.epoch}, position {cursor.position}",
            why=f"An epoch of this data has {length} samples.",
            fix="Give the data that the run was started with, or start a new run.",
        )
    count = batch if rest >= batch else 0 if drop_last else rest
    left = rest - count
    # The cursor never stands on a rest that will be left out: equal places have equal cursors.
    if count == 0 or left == 0 or (drop_last and left < batch):
        return count, Cursor(cursor.seed, cursor.epoch + 1, 0)
    return count, Cursor(cursor.seed, cursor.epoch, cursor.position + count)
