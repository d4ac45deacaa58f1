"""The pace of each kind of kernel from measured times:

    seconds = call + FLOPs / a + bytes / b + bytes of weights / c

All terms are at least nothing. A call costs more than its launch: libraries choose and set up a
kernel, and convolutions lay their operands out anew; weights are packed for every call and come
from memory, where activations often come from a cache. Which terms there are is decided by what is
to be expected of other shapes (final prediction error, Akaike 1970), so that two or three shapes do
not make four terms; without a term of their own weights are bytes like others. Relative errors
count, so that small kernels are as important as large ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from headway.cluster.device import Pace
from headway.cluster.readings import Timed

Point = tuple[float, float, float, float]
"""FLOPs, bytes without weights, bytes of weights, seconds."""
NOISE = 0.03
"""Relative error of a time, below which no fit is better than another."""


class Terms(NamedTuple):
    """FLOP/s, bytes/s, bytes/s of weights, seconds of a call; None where a term is nothing."""

    rate: float | None = None
    stream: float | None = None
    weights: float | None = None
    call: float | None = None


def paces_of(timed: Sequence[Timed], floor: float) -> tuple[dict[str, Pace], str]:
    """By kind; and the misses of all in words.

    Args:
        timed: In any order.
        floor: Seconds of a launch, of which a backward has one for each gradient.
    """
    found: dict[str, Pace] = {}
    misses: list[float] = []
    for kind in dict.fromkeys(one.kind for one in timed):
        same = [one for one in timed if one.kind == kind]
        ahead = fitted([_without(one.forward, one.weights[0], floor) for one in same], misses)
        back = fitted([_without(one.backward, one.weights[1], 2 * floor) for one in same], misses)
        found[kind] = Pace(
            forward=ahead.rate,
            forward_stream=ahead.stream,
            forward_weights=ahead.weights,
            forward_call=ahead.call,
            backward=back.rate,
            backward_stream=back.stream,
            backward_weights=back.weights,
            backward_call=back.call,
        )
    if not misses:
        return found, "none"
    return found, f"fit error {sum(misses) / len(misses):.0%} (largest {max(misses):.0%})"


def _without(timed: tuple[float, float, float], weights: float, floor: float) -> Point:
    """Without its launch; never less than a fifth of its time."""
    flops, moved, seconds = timed
    return flops, moved - weights, weights, max(seconds - floor, 0.2 * seconds)


def fitted(points: Sequence[Point], misses: list[float]) -> Terms:
    """The terms of one pass of a kind; `misses` grows by those of its points."""
    flops, moved, weights, seconds = np.array(points).T
    columns = {
        "rate": flops / seconds,
        "stream": moved / seconds,
        "weights": weights / seconds,
        "both": (moved + weights) / seconds,
        "call": 1.0 / seconds,
    }
    count = len(points)
    best: tuple[float, tuple[str, ...], np.ndarray] | None = None
    for names in _sets(count):
        table = np.stack([columns[name] for name in names], axis=1)
        if not table.any(axis=0).all() or np.linalg.matrix_rank(table) < len(names):
            continue
        inverse = np.linalg.lstsq(table, np.ones(count), rcond=None)[0]
        if (inverse <= 0).any():
            continue
        error = float(((table @ inverse - 1.0) ** 2).mean()) + NOISE**2
        expected = error * (count + len(names)) / max(count - len(names), 1)
        if best is None or expected < best[0] * (1 - 1e-9):
            best = expected, names, inverse
    if best is None:
        return Terms()
    _, names, inverse = best
    table = np.stack([columns[name] for name in names], axis=1)
    misses += np.abs(table @ inverse - 1.0).tolist()
    terms = dict(zip(names, (float(f"{one:.4g}") for one in inverse), strict=True))
    rates = {"stream" if k == "both" else k: 1.0 / v for k, v in terms.items() if k != "call"}
    rounded = {name: float(f"{rate:.4g}") for name, rate in rates.items()}
    return Terms(**rounded, call=terms.get("call"))


def _sets(count: int) -> Iterator[tuple[str, ...]]:
    """Terms that so many points can tell apart."""
    whole, apart = ("rate", "both", "call"), ("rate", "stream", "weights", "call")
    for every, needed in ((whole, ""), (apart, "weights")):
        for number in range(1, len(every) + 1):
            if number < max(count, 2):
                for names in combinations(every, number):
                    if (not needed or needed in names) and (count > 1 or names != ("call",)):
                        yield names
