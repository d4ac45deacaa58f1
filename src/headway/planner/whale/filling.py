"""Whole shares of unequal workers, for any times that grow with the share.

Discrete water filling: a worker of class c that takes b samples needs costs[c][b - 1]; the level is
raised until all samples are under it. Invariant: no other whole shares have a smaller longest time.
headway's; with times in proportion to shares it is `water_filling` in whole samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.cost.device import Array
from headway.errors import PlanError


def whole_filling(
    costs: Sequence[Array], copies: Sequence[int], samples: int
) -> tuple[tuple[int, ...], float]:
    """The samples of one worker of each class, and the longest time; each takes at least one.

    Args:
        costs: For each class the times of 1, 2, ... samples, not falling; infinite where they do
            not fit.
        copies: Workers of each class.
        samples: To be taken at least, by all workers together.

    Raises:
        PlanError: They cannot take so many.
    """
    costs = [cost[np.isfinite(cost)] for cost in costs]
    room = sum(n * len(cost) for n, cost in zip(copies, costs, strict=True))
    if room < samples or not all(len(cost) for cost in costs):
        raise PlanError(
            "the batch does not fit",
            problems=[f"{samples} samples for {sum(copies)} workers that take {room}"],
            fix="take a smaller batch, or more micro-batches",
        )
    least = max(float(cost[0]) for cost in costs)
    levels = np.unique(np.concatenate(list(costs)))
    levels = levels[np.searchsorted(levels, least) :]
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if _taken(costs, copies, float(levels[middle])) >= samples:
            high = middle
        else:
            low = middle + 1
    sizes = [int(np.searchsorted(cost, levels[low], side="right")) for cost in costs]
    for c in sorted(range(len(sizes)), key=lambda c: -float(costs[c][sizes[c] - 1])):
        over = sum(n * size for n, size in zip(copies, sizes, strict=True)) - samples
        sizes[c] -= min(sizes[c] - 1, max(over, 0) // copies[c])
    longest = max(float(cost[size - 1]) for cost, size in zip(costs, sizes, strict=True))
    return tuple(sizes), longest


def _taken(costs: Sequence[Array], copies: Sequence[int], level: float) -> int:
    """Samples that all take together within a time."""
    sizes = [int(np.searchsorted(cost, level, side="right")) for cost in costs]
    return sum(n * size for n, size in zip(copies, sizes, strict=True))


def slowest_stage(each: Array, counts: Array, numbers: Array) -> tuple[Array, Array]:
    """(n,): what the slowest stage of any cut takes at least, and all stages together.

    The mean over the stages, each weighted with 1 / time of the whole model on its type, units
    where they weigh least: evenly spread work if types differ by the same factor in all units. Of
    units that are alike each stage has a whole number.

    Args:
        each: (types, kinds of units, n): their times, in n cases.
        counts: (kinds of units,): how many there are.
        numbers: (types,): stages.
    """
    weights = 1.0 / np.tensordot(each, counts, (1, 0))[:, None]
    slowest = counts @ (each * weights).min(axis=0) / (numbers @ weights[:, 0])
    for unit, count in enumerate(counts.tolist()):
        if count > 1:
            slowest = np.maximum(slowest, _crowded(each[:, unit], numbers, count))
    return slowest, counts @ each.min(axis=0)


def _crowded(each: Array, numbers: Array, count: int) -> Array:
    """(n,): the least longest time of stages that take whole units; units, as `slowest_stage`."""
    least = np.full(each.shape[1], np.inf)
    safe = np.maximum(each, 1e-30)
    for own, number in zip(each, numbers.tolist(), strict=True):
        for taken in range(1, -(-count // number) + 1):
            room = numbers @ np.floor(taken * own / safe * (1 + 1e-9))
            least = np.minimum(least, np.where(room >= count, taken * own, np.inf))
    return np.where(np.isfinite(least), least, 0.0)
