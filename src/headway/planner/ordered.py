"""The strategies of stretches in the order of their times, so that what fits is found in one sweep.

A strategy fits into a memory up to some number of micro-batches under way; from the fastest one on,
each is the best for the numbers that it fits, and those before it do not. Invariant: `picked` gives
what looking at every strategy for every number would give, the first of equals.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.planner.operators import Floats
from headway.planner.pricing import Rows

FEW = 8
"""Numbers of micro-batches under way up to which each is looked up of its own."""


class Ordered(NamedTuple):
    """(classes, n) strategies, the fastest first, and (classes, n + 1): behind them one that takes
    for ever.

    Attributes:
        place: Number of each.
        seconds: Of a micro-batch, with the share in a step's end.
        state: Bytes.
        kept: Bytes of one micro-batch.
        more: Bytes for a moment.
        updated: Bytes while the update runs.
        all: How many are all micro-batches of a step.
        first: As `more`, with all of them under way; None: the same.
    """

    place: np.ndarray
    seconds: Floats
    state: Floats
    kept: Floats
    more: Floats
    updated: Floats
    all: int
    first: Floats | None = None

    def fitting(self, cap: float, most: int) -> np.ndarray:
        """(classes, n): how many micro-batches under way fit into so many bytes, at most `most`."""

        def fits(number: np.ndarray | int) -> np.ndarray:
            return self.state + number * self.kept + self.more <= cap

        room = cap - self.more - self.state
        with np.errstate(divide="ignore", invalid="ignore"):
            number = np.where(self.kept > 0, room / self.kept, most * fits(0))
        found = np.clip(number, 0, most).astype(np.int64)
        found += (found < most) & fits(found + 1)  # what rounding has taken
        found -= (found > 0) & ~fits(found)
        found[self.updated > cap] = 0
        return found

    def picked(self, cap: float, flights: np.ndarray) -> tuple[Floats, np.ndarray]:
        """(numbers, classes): the least seconds with so many micro-batches under way, infinite
        where nothing fits, and the strategy.

        Args:
            cap: Bytes of a device.
            flights: Numbers of micro-batches, ascending.
        """
        upto = np.maximum.accumulate(self.fitting(cap, int(flights[-1])), axis=1)
        ways = _first_above(upto, flights)
        if self.first is not None and flights[-1] == self.all:
            held = self.state + self.all * self.kept + self.first
            fits = (held <= cap) & (self.updated <= cap)
            ways[:, -1] = np.where(fits.any(axis=1), fits.argmax(axis=1), fits.shape[1])
        lines = np.arange(len(ways))[:, None]
        return self.seconds[lines, ways].T, self.place[lines, ways].T


def ordered(
    rows: Floats,
    microbatches: int,
    passing: float,
    first: Floats | None = None,
    waiting: Floats | float = 0.0,
) -> Ordered:
    """From rows (classes, ways, K, columns) as `Rows` says.

    Args:
        rows: Without recomputation, and with it where that may be.
        microbatches: Over which a step's end is spread.
        passing: Bytes that the update needs for a moment, per byte of state.
        first: (classes, ways, K) bytes for a moment with all micro-batches under way.
        waiting: (classes, 1) bytes above what the update needs, as `DeviceBytes.waiting`.
    """
    flat = (len(rows), -1)
    value = (rows[..., Rows.SECONDS] + rows[..., Rows.TAIL] / microbatches).reshape(flat)
    order = value.argsort(axis=1, kind="stable")
    state, kept, more = (
        np.take_along_axis(rows[..., column].reshape(flat), order, 1)
        for column in (Rows.STATE, Rows.KEPT, Rows.MORE)
    )
    none = ((0, 0), (0, 1))
    seconds = np.take_along_axis(value, order, 1)
    return Ordered(
        np.pad(order, none),
        np.pad(seconds, none, constant_values=np.inf),
        state,
        kept,
        more,
        state * (1.0 + passing) + waiting,
        microbatches,
        None if first is None else np.take_along_axis(first.reshape(flat), order, 1),
    )


def _first_above(upto: np.ndarray, flights: np.ndarray) -> np.ndarray:
    """(classes, flights): the first place at which a rising row (classes, n) is as high."""
    most = int(flights[-1])
    if len(flights) <= FEW:
        return np.stack([(upto < flight).sum(axis=1) for flight in flights], axis=1)
    steps = np.diff(upto, axis=1, prepend=0, append=most)
    places = np.tile(np.arange(steps.shape[1]), len(steps))
    whole = np.repeat(places, steps.ravel()).reshape(len(upto), most)
    return whole[:, flights - 1]
