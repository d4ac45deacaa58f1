"""The pace of each kind of kernel from measured times:

    seconds = calls * call + FLOPs / a + bytes / b + bytes of weights / c + bytes beyond NEAR / d

All terms are at least nothing. There is one call, but of a recurrent layer one for each place of
its sequence. A call costs more than its launch: libraries choose and set up a
kernel, and convolutions lay their operands out anew; weights are packed for every call and come
from memory, where activations often come from a cache. Which terms there are is decided by what is
to be expected of other shapes (final prediction error, Akaike 1970), so that two or three shapes do
not make four terms. Where nothing is computed, what a cache does not hold takes longer (d); where
something is, it is never faster than products at their best. Without a term of their own weights
are bytes like others. Relative errors count, so that small kernels are as important as large ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from headway.cluster.device import NEAR, Pace
from headway.cluster.readings import Timed

Point = tuple[float, float, float, float, float]
"""FLOPs, bytes without weights, bytes of weights, calls, seconds."""
NOISE = 0.03
"""Relative error of a time, below which no fit is better than another."""
_WHOLE = ("rate", "both", "call")
_APART = ("weights", "rate", "stream", "call")
_STREAMED = ("both", "far", "call")


class Terms(NamedTuple):
    """FLOP/s, bytes/s, bytes/s of weights, of what is beyond `NEAR`, seconds of a call; None where
    a term is nothing."""

    rate: float | None = None
    stream: float | None = None
    weights: float | None = None
    far: float | None = None
    call: float | None = None


def paces_of(
    timed: Sequence[Timed], floor: float, peak: float = np.inf
) -> tuple[dict[str, Pace], str]:
    """By kind; and the misses of all in words.

    Args:
        timed: In any order.
        floor: Seconds of a launch, of which a backward has one for each gradient.
        peak: FLOP/s of products at their best.
    """
    found: dict[str, Pace] = {}
    misses: list[float] = []
    for kind in dict.fromkeys(one.kind for one in timed):
        same = [one for one in timed if one.kind == kind]
        ahead = fitted([_point(one, 0) for one in same], misses, floor, peak)
        back = fitted([_point(one, 1) for one in same], misses, 2 * floor, peak)
        found[kind] = Pace(
            forward=ahead.rate,
            forward_stream=ahead.stream,
            forward_weights=ahead.weights,
            forward_far=ahead.far,
            forward_call=ahead.call,
            backward=back.rate,
            backward_stream=back.stream,
            backward_weights=back.weights,
            backward_far=back.far,
            backward_call=back.call,
        )
    if not misses:
        return found, "none"
    return found, f"fit error {sum(misses) / len(misses):.0%} (largest {max(misses):.0%})"


def _point(timed: Timed, number: int) -> Point:
    """Forward or backward."""
    flops, moved, seconds = (timed.forward, timed.backward)[number]
    weights = timed.weights[number]
    return flops, moved - weights, weights, timed.calls, seconds


def fitted(
    points: Sequence[Point], misses: list[float], floor: float = 0.0, peak: float = np.inf
) -> Terms:
    """The terms of one pass of a kind.

    Args:
        points: Of its shapes.
        misses: Grows by theirs.
        floor: Seconds of its launches, which the terms leave out; at most four fifths of a time.
        peak: As in `paces_of`.
    """
    flops, moved, weights, calls, seconds = np.array(points).T
    columns = {
        "rate": flops / seconds,
        "stream": moved / seconds,
        "weights": weights / seconds,
        "both": (moved + weights) / seconds,
        "call": calls / seconds,
        "rest": np.maximum(1.0 - floor / seconds, 0.2),
    }
    sets = (_WHOLE, _APART)
    if flops.any():  # what computes has a rate, if any fits: weights may grow like FLOPs by chance
        found = _chosen(columns, sets, "rate", 1.0 / peak) or _chosen(columns, sets)
    else:
        columns["far"] = np.maximum(moved + weights - NEAR, 0.0) / seconds
        found = _chosen(columns, (*sets, _STREAMED))
    if found is None:
        return Terms()
    names, inverse = found
    table = np.stack([columns[name] for name in names], axis=1)
    misses += np.abs(table @ inverse - columns["rest"]).tolist()
    terms = dict(zip(names, (float(f"{one:.4g}") for one in inverse), strict=True))
    rates = {"stream" if k == "both" else k: 1.0 / v for k, v in terms.items() if k != "call"}
    rounded = {name: float(f"{rate:.4g}") for name, rate in rates.items()}
    return Terms(**rounded, call=terms.get("call"))


def _chosen(
    columns: Mapping[str, np.ndarray],
    sets: Sequence[tuple[str, ...]],
    needed: str = "",
    least: float = 0.0,
) -> tuple[tuple[str, ...], np.ndarray] | None:
    """The terms that are expected to err least, and their factors; None: none fit.

    Args:
        columns: Of each term, over the times; "rest": what all terms should give.
        sets: Terms that go together.
        needed: One of them that must be there, with a factor of at least `least`.
        least: See there.
    """
    rest = columns["rest"]
    count = len(rest)
    best: tuple[float, tuple[str, ...], np.ndarray] | None = None
    for names in _sets(sets, count):
        if needed and needed not in names:
            continue
        table = np.stack([columns[name] for name in names], axis=1)
        if not table.any(axis=0).all() or np.linalg.matrix_rank(table) < len(names):
            continue
        inverse = np.linalg.lstsq(table, rest, rcond=None)[0]
        if (inverse <= 0).any() or (needed and inverse[names.index(needed)] < least):
            continue
        error = float(((table @ inverse - rest) ** 2).mean()) + NOISE**2
        expected = error * (count + len(names)) / max(count - len(names), 1)
        if best is None or expected < best[0] * (1 - 1e-9):
            best = expected, names, inverse
    return None if best is None else best[1:]


def _sets(sets: Sequence[tuple[str, ...]], count: int) -> Iterator[tuple[str, ...]]:
    """Terms that so many points can tell apart."""
    found = dict.fromkeys(
        names
        for every in sets
        for number in range(1, len(every) + 1)
        if number < max(count, 2)
        for names in combinations(every, number)
        if (count > 1 or names != ("call",)) and ("stream" not in names or "weights" in names)
    )
    yield from found
